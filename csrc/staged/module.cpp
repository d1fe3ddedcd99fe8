// The extension oases_staged._C: the backend `staged` for Python.
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "extension.h"
#include "nodes_backend.h"
#include "staged_backend.h"
#include "stream_words.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  using Staged = c10::intrusive_ptr<oases::StagedBackend>;
  module.doc() = "The c10d backend `staged`: collectives through shared memory.";
  oases::join_threads_without_lock();

  py::class_<oases::StagedBackend, c10d::Backend, Staged>(
      module, "StagedBackend", "A backend for the ranks of one machine, through shared memory.")
      .def_property_readonly("timeout", &oases::StagedBackend::timeout);
  module.def(
      "staged_backend",
      torch::wrap_pybind_function_no_gil([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout,
                                            std::vector<int64_t> names) -> Backend {
        return c10::make_intrusive<oases::StagedBackend>(store, rank, size, timeout, std::move(names));
      }),
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::arg("names") = std::vector<int64_t>{},
      "A backend for the ranks of one machine, through shared memory; all ranks make it together. names: by "
      "which errors call them.");
  module.def(
      "nodes_backend",
      [](const Backend& whole, const Staged& local, std::vector<std::vector<int64_t>> ranks) -> Backend {
        return c10::make_intrusive<oases::NodesBackend>(whole, local, std::move(ranks));
      },
      py::arg("whole"), py::arg("local"), py::arg("ranks"),
      "A backend over several machines: by `local` within each, and by messages of `whole` between them.");
  module.def(
      "register_stream_words",
      [](const std::string& type, const py::capsule& words) {
        oases::register_stream_words(c10::Device(type).type(), words.get_pointer<oases::StreamWords>());
      },
      py::arg("type"), py::arg("words"),
      "Let `staged` move tensors of a type of device, by an oases::StreamWords that lives as long as the "
      "process.");
}
