// The Python module of the virtual device; see python_tests/virtual_device/device.py.
#include <torch/csrc/utils/pybind.h>

#include "autocast.h"
#include "backend.h"
#include "words.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using namespace virtual_device;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.attr("devices") = kDevices;
  module.def("backend",
             [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
               return c10::make_intrusive<Backend>(gloo);
             });
  module.def("stream_words", [] { return py::capsule(static_cast<oases::StreamWords*>(new Words())); });
  module.def("default_generator",
             [](int device) { return Generator::of(static_cast<c10::DeviceIndex>(device)); });
  module.def(
      "set_costs",
      [](double op_seconds, double link_seconds, double host_seconds) {
        settings.op_seconds = op_seconds;
        settings.link_seconds = link_seconds;
        settings.host_seconds = host_seconds;
      },
      py::arg("op_seconds") = 0.0, py::arg("link_seconds") = 0.0, py::arg("host_seconds") = 0.0);
  module.def("sleep", [](double seconds) {
    current_stream(current_device).put([seconds](double& clock) { clock += seconds; });
  });
  module.def(
      "set_delays",
      [](double longest_seconds, uint64_t seed) {
        settings.seed = seed;
        settings.longest_delay = longest_seconds;
      },
      py::arg("longest_seconds"), py::arg("seed") = 0);
  module.def("set_lazy", [](bool lazy) { settings.lazy = lazy; });
  module.def("set_broken", [](bool broken) { settings.broken = broken; });
  module.def("counts", [] {
    return std::map<std::string, int64_t>{{"events", counts.events},
                                          {"blocks", counts.blocks},
                                          {"bytes", counts.bytes},
                                          {"host_waits", counts.host_waits},
                                          {"pinned", static_cast<int64_t>(Pinned::instance().added())}};
  });
}
