// The only file that names pybind11: the scheduler and the sim backend for Python. Ops go by torch.library.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string_view>

#include "experts.h"
#include "extension.h"
#include "kernels.h"
#include "pieces.h"
#include "quantize_kernels.h"
#include "quantized_backend.h"
#include "scheduler.h"
#include "sim_backend.h"
#include "single_process_backend.h"

namespace py = pybind11;
using oases::OverlapScheduler;
using oases::QuantizedBackend;

namespace {

constexpr std::string_view kPrefix = "oases was built against torch ";

py::dict build_info() {
  py::dict info;
  info["torch"] = oases::kBuilt + kPrefix.size();
#ifdef OASES_WITH_CUDA
  info["cuda"] = true;
  info["nvcc"] = oases::cuda::nvcc_version();
  info["architectures"] = oases::cuda::architectures();
#else
  info["cuda"] = false;
  info["nvcc"] = py::none();
  info["architectures"] = py::list();
#endif
  return info;
}

using oases::experts::Costs;
using oases::experts::Layer;

const int64_t* whole_numbers(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 2 && tensor.scalar_type() == at::kLong && tensor.is_contiguous(),
              "counts and routes are contiguous int64 of two dimensions");
  return tensor.const_data_ptr<int64_t>();
}

// (routes [E, D], device of each copy by expert, tokens by device, seconds)
auto described(const Layer& layer, int64_t experts, int64_t devices) {
  at::Tensor routes = at::empty({experts, devices}, at::kLong);
  std::vector<std::vector<int32_t>> copies;
  for (int64_t expert = 0; expert < experts; ++expert) {
    copies.push_back(layer.holders(expert));
    for (int64_t device = 0; device < devices; ++device)
      routes.mutable_data_ptr<int64_t>()[expert * devices + device] = layer.route(expert, device);
  }
  return std::make_tuple(routes, copies, layer.tokens(), layer.seconds());
}

auto search_experts(const at::Tensor& counts, const Costs& costs, int64_t slots, bool eplb) {
  const int64_t* data = whole_numbers(counts);
  const Layer found = oases::experts::search(data, counts.size(0), counts.size(1), costs, slots, eplb);
  return described(found, counts.size(0), counts.size(1));
}

auto place_experts(const at::Tensor& counts, const at::Tensor& routes,
                   const std::vector<std::vector<int32_t>>& copies, const Costs& costs) {
  const int64_t experts = counts.size(0), devices = counts.size(1);
  const int64_t* to = whole_numbers(routes);
  const auto check = [&](int64_t device) {
    TORCH_CHECK_VALUE(device >= 0 && device < devices, "device ", device, " of an expert is not among ",
                      devices);
  };
  TORCH_CHECK_VALUE(routes.sizes() == counts.sizes() && static_cast<int64_t>(copies.size()) == experts,
                    "counts are ", counts.sizes(), ", and routes ", routes.sizes(), " with copies of ",
                    copies.size(), " experts; give a row of each for every expert");
  for (int64_t i = 0; i < routes.numel(); ++i) check(to[i]);
  for (const auto& held : copies)
    for (const int32_t device : held) check(device);
  Layer layer(whole_numbers(counts), experts, devices, costs);
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (const int32_t device : copies.at(expert)) layer.copy(expert, device);
    for (int64_t device = 0; device < devices; ++device)
      layer.send(expert, device, to[expert * devices + device]);
  }
  return described(layer, experts, devices);
}

using oases::DeferredGradients;
using oases::Leaves;
using oases::Piece;

// A Python object that C++ may release in any thread.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

void register_pieces(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Leaves, std::shared_ptr<Leaves>>(
      module, "Leaves", "Stand-ins of tensors (detached, sharing memory), and sums of their gradients.")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("originals"))
      .def_property_readonly("stand_ins", &Leaves::stand_ins)
      .def("add", &Leaves::add, py::arg("stand_in"), py::arg("gradient"), py::arg("whole") = false, no_gil,
           "Add to the sum of a stand-in.")
      .def("take", &Leaves::take, py::arg("whole"), "Return the sums by stand-in and clear them.");

  py::class_<DeferredGradients, c10::intrusive_ptr<DeferredGradients>>(
      module, "DeferredGradients", "Weight gradients deferred by a backward pass, for an op W to compute.")
      .def(py::init<std::shared_ptr<Leaves>>(), py::arg("leaves"))
      .def("takes", &DeferredGradients::takes, py::arg("tensors"),
           "Whether all are stand-ins; autograd handles a weight computed from others.")
      .def("begin", &DeferredGradients::begin, py::arg("skip_last"),
           "Call before a forward pass. skip_last: its last matmul may be left out.")
      .def("end", &DeferredGradients::end, py::arg("result") = py::none(),
           "Call after it. result: its result, if its last matmul may be left out next time.")
      .def("linear", torch::wrap_pybind_function_no_gil(&DeferredGradients::linear), py::arg("x"),
           py::arg("weight"), py::arg("bias"), py::arg("transposed"),
           "F.linear with a deferred weight gradient; None if not possible.")
      .def(
          "note",
          [](DeferredGradients& deferred, const at::Tensor& grad, py::function work) {
            deferred.note(grad, [work = kept(std::move(work))](Leaves& leaves) {
              const py::gil_scoped_acquire gil;
              (*work)(py::cast(&leaves, py::return_value_policy::reference));
            });
          },
          py::arg("grad"), py::arg("work"), "Defer other work: work(leaves) runs in W.")
      .def("compute", torch::wrap_pybind_function_no_gil(&DeferredGradients::compute),
           "Compute the deferred gradients.")
      .def("clear", &DeferredGradients::clear, "Discard the deferred gradients.");

  py::class_<Piece, std::shared_ptr<Piece>>(
      module, "Piece",
      "One call of a function with a graph of its own, run backward when its gradients have arrived.")
      .def(py::init<std::vector<std::shared_ptr<Leaves>>, bool>(), py::arg("leaves"),
           py::arg("whole") = false)
      .def("input", torch::wrap_pybind_function_no_gil(&Piece::input), py::arg("data"),
           "The input to pass to the function.")
      .def("output", &Piece::output, py::arg("result"), py::arg("overwritten") = false,
           "The detached result. overwritten: its memory will be overwritten.")
      .def("backward", torch::wrap_pybind_function_no_gil(&Piece::backward), py::arg("gradients"),
           py::arg("fresh") = false,
           "Gradients of the inputs, None for those that no output depends on. Frees the graph.");

  module.def("generator_mark", &oases::generator_mark, py::arg("generator"),
             "Value that changes whenever the generator draws.");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of oases: the overlap scheduler, the sim backend and the torch.library ops.";
  oases::join_threads_without_lock();

  py::class_<oases::TicketRecord>(module, "TicketRecord",
                                  "Cost of one collective; times in monotonic seconds.")
      .def_readonly("collective", &oases::TicketRecord::collective)
      .def_readonly("label", &oases::TicketRecord::label)
      .def_readonly("bytes", &oases::TicketRecord::bytes)
      .def_readonly("issued", &oases::TicketRecord::issued)
      .def_readonly("finished", &oases::TicketRecord::finished)
      .def_readonly("waited_from", &oases::TicketRecord::waited_from)
      .def_readonly("blocked_for", &oases::TicketRecord::blocked_for);

  py::class_<oases::LabelTotals>(module, "LabelTotals", "Sums over the finished tickets of one label.")
      .def_readonly("collective", &oases::LabelTotals::collective)
      .def_readonly("count", &oases::LabelTotals::count)
      .def_readonly("bytes", &oases::LabelTotals::bytes)
      .def_readonly("saved_bytes", &oases::LabelTotals::saved_bytes)
      .def_readonly("link_seconds", &oases::LabelTotals::link_seconds)
      .def_readonly("blocked_seconds", &oases::LabelTotals::blocked_seconds);

  py::class_<oases::Ticket, std::shared_ptr<oases::Ticket>>(module, "Ticket", "A started collective.")
      .def_property_readonly("record", &oases::Ticket::record);

  py::class_<OverlapScheduler, std::shared_ptr<OverlapScheduler>>(
      module, "OverlapScheduler",
      "Starts the collectives of one process group early and waits for them late.")
      .def(py::init<const c10::intrusive_ptr<c10d::ProcessGroup>&>(), py::arg("process_group"))
      .def_static("of", &OverlapScheduler::of, py::arg("group_name"),
                  py::call_guard<py::gil_scoped_release>())
      .def_static("all", &OverlapScheduler::all, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rank", &OverlapScheduler::rank)
      .def_property_readonly("size", &OverlapScheduler::size)
      .def("add_wire", &OverlapScheduler::add_wire, py::arg("wire"), py::arg("group_name"),
           py::call_guard<py::gil_scoped_release>())
      .def("has_wire", &OverlapScheduler::has_wire, py::arg("wire"))
      .def("wire_group", &OverlapScheduler::wire_group, py::arg("wire"))
      .def(
          "errors",
          [](const OverlapScheduler& scheduler) {
            std::map<std::string, std::pair<int64_t, double>> found;
            for (const auto& [label, errors] : scheduler.errors())
              found[label] = {errors.samples, errors.sum};
            return found;
          },
          py::call_guard<py::gil_scoped_release>(),
          "Sampled sums of each label, and the sum of their relative errors.")
      .def("all_reduce", &OverlapScheduler::all_reduce, py::arg("tensor"), py::arg("label") = "",
           py::arg("largest") = false, py::arg("wire") = "", py::arg("residual") = py::none(),
           py::call_guard<py::gil_scoped_release>())
      .def("all_gather", &OverlapScheduler::all_gather, py::arg("output"), py::arg("input"),
           py::arg("label") = "", py::arg("wire") = "", py::call_guard<py::gil_scoped_release>())
      .def("reduce_scatter", &OverlapScheduler::reduce_scatter, py::arg("output"), py::arg("input"),
           py::arg("label") = "", py::arg("wire") = "", py::call_guard<py::gil_scoped_release>())
      .def("all_to_all", &OverlapScheduler::all_to_all, py::arg("output"), py::arg("input"), py::arg("sent"),
           py::arg("received"), py::arg("label") = "", py::arg("wire") = "",
           py::call_guard<py::gil_scoped_release>())
      .def("exempted", &OverlapScheduler::exempted, py::call_guard<py::gil_scoped_release>())
      // Wrapped, so that warnings are Python's.
      .def("wait", torch::wrap_pybind_function_no_gil(&OverlapScheduler::wait), py::arg("ticket"))
      .def("set_recording", &OverlapScheduler::set_recording, py::arg("on"))
      .def("set_counting", &OverlapScheduler::set_counting, py::arg("on"),
           py::call_guard<py::gil_scoped_release>())
      .def("take_records", &OverlapScheduler::take_records, py::call_guard<py::gil_scoped_release>())
      .def("totals", &OverlapScheduler::totals, py::call_guard<py::gil_scoped_release>())
      .def("reset_totals", &OverlapScheduler::reset_totals, py::call_guard<py::gil_scoped_release>())
      .def("waiting_for", &OverlapScheduler::waiting_for, py::call_guard<py::gil_scoped_release>())
      .def_static("halt", &OverlapScheduler::halt, py::arg("failure"), py::arg("out_of_memory") = false,
                  py::call_guard<py::gil_scoped_release>())
      .def_static("go_on", &OverlapScheduler::go_on)
      .def("renew", &OverlapScheduler::renew, py::call_guard<py::gil_scoped_release>());

  register_pieces(module);

  module.def(
      "single_process_backend",
      [](int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<oases::SingleProcessBackend>(rank, size);
      },
      py::arg("rank"), py::arg("size"),
      "A backend in which one process represents `size` ranks; it sends nothing.");

  module.def(
      "sim_backend",
      [](const c10::intrusive_ptr<c10d::Backend>& inner, double startup_seconds,
         double bandwidth) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<oases::SimBackend>(inner, startup_seconds, bandwidth);
      },
      py::arg("inner"), py::arg("startup_seconds"), py::arg("bandwidth"),
      "A backend that moves data through `inner` with the timing of a link: seconds and bytes per second.");

  py::class_<QuantizedBackend, c10d::Backend, c10::intrusive_ptr<QuantizedBackend>>(
      module, "QuantizedBackend",
      "A backend that sends quantised numbers through others, which nothing else may use.")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Backend>>(),
           py::arg("on_cpu"), py::arg("on_device") = nullptr)
      .def_readonly_static("largest_error", &oases::LayerErrors::kLargest)
      .def_property_readonly("bytes_sent", &QuantizedBackend::bytes_sent);

  module.attr("QUANTIZED_BLOCK") = oases::kQuantizedBlock;
  module.def("quantized_bytes", &oases::packed_bytes, py::arg("numel"), "Bytes of so many packed numbers.");

  py::class_<Costs>(module, "ExpertCosts", "Cost model of a layer of experts; see oases.moe.costs.")
      .def(py::init<>())
      .def_readwrite("token_seconds", &Costs::token_seconds)
      .def_readwrite("token_bytes", &Costs::token_bytes)
      .def_readwrite("expert_bytes", &Costs::expert_bytes)
      .def_readwrite("bandwidth", &Costs::bandwidth)
      .def_readwrite("both_ways", &Costs::both_ways)
      .def_readwrite("latency", &Costs::latency)
      .def_readwrite("non_expert_seconds", &Costs::non_expert_seconds)
      .def_readwrite("backward", &Costs::backward)
      .def_readwrite("handling_seconds", &Costs::handling_seconds)
      .def_readwrite("fixed_seconds", &Costs::fixed_seconds)
      .def_readwrite("scheduled", &Costs::scheduled)
      .def_readwrite("leading", &Costs::leading)
      .def_readwrite("mean_transfer", &Costs::mean_transfer)
      .def_readwrite("devices_per_node", &Costs::devices_per_node)
      .def_readwrite("node_bandwidth", &Costs::node_bandwidth);

  module.def("search_experts", search_experts, py::arg("counts"), py::arg("costs"), py::arg("slots"),
             py::arg("eplb") = false, "Pro-Prophet's search: (routes, copies, tokens by device, seconds).");
  module.def("place_experts", place_experts, py::arg("counts"), py::arg("routes"), py::arg("copies"),
             py::arg("costs"), "The same for a given placement.");

  module.def("build_info", build_info,
             "Build of this extension: cuda (bool), nvcc (its version or None), architectures (list of "
             "str), torch (its version).");
}
