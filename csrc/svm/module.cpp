// `oases._svm`, the extension of oases_svm/vertex.py. It does not link to torch, which
// oases.svm does not need.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "walk.h"

namespace py = pybind11;

namespace {

using oases::svm::Status;
using oases::svm::Walk;
using Columns = py::array_t<double, py::array::f_style | py::array::forcecast>;
using Vector = py::array_t<double, py::array::c_style | py::array::forcecast>;

void require_size(const char* name, py::ssize_t size, int64_t expected) {
  if (size != expected) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) + " numbers, not " +
                                std::to_string(expected));
  }
}

Walk make(const Columns& columns, const Vector& weights, const Vector& targets) {
  require_size("weights", weights.size(), columns.shape(0));
  require_size("targets", targets.size(), columns.shape(0));
  return Walk(columns.data(), columns.shape(0), columns.shape(1), weights.data(), targets.data());
}

// [n, m] without a copy; keeps the memory alive.
py::array columns_of(const Walk& walk) {
  auto* owner = new std::shared_ptr<double[]>(walk.store());
  py::capsule free(owner, [](void* pointer) { delete static_cast<std::shared_ptr<double[]>*>(pointer); });
  const auto size = static_cast<py::ssize_t>(sizeof(double));
  return py::array_t<double>({walk.rows(), walk.columns()}, {size, size * walk.rows()}, owner->get(), free);
}

template <typename Entry>
py::array square_of(const Walk& walk, Entry entry) {
  py::array_t<double> found({walk.size(), walk.size()});
  auto values = found.mutable_unchecked<2>();
  for (int64_t i = 0; i < walk.size(); ++i) {
    for (int64_t j = 0; j < walk.size(); ++j) values(i, j) = entry(i, j);
  }
  return found;
}

template <typename T>
py::array vector_of(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::tuple<Status, int64_t, double> minimise(Walk& walk, const Vector& tau, int64_t limit, double allowed) {
  require_size("tau", tau.size(), walk.columns());
  const double* values = tau.data();
  int64_t pivots = 0;
  double work = 0;
  py::gil_scoped_release release;
  const Status status = walk.minimise(values, limit, allowed, &pivots, &work);
  return {status, pivots, work};
}

void refresh(Walk& walk, const Vector& inverse, bool reset) {
  require_size("inverse", inverse.size(), walk.size() * walk.size());
  walk.refresh(inverse.data(), reset);
}

void add(Walk& walk, const Columns& columns) {
  require_size("a column", columns.shape(0), walk.rows());
  walk.add(columns.data(), columns.shape(1));
}

}  // namespace

PYBIND11_MODULE(_svm, module) {
  py::enum_<Status>(module, "Status")
      .value("MINIMUM", Status::kMinimum)
      .value("LIMIT", Status::kLimit)
      .value("REFRESH", Status::kRefresh);
  py::class_<Walk>(module, "Walk")
      .def(py::init(&make), py::arg("columns"), py::arg("weights"), py::arg("targets"))
      .def("pair", &Walk::pair)
      .def("add", &add)
      .def("refresh", &refresh, py::arg("inverse"), py::arg("reset") = false)
      .def("begin", &Walk::begin)
      .def("minimise", &minimise)
      .def_property_readonly("columns", &columns_of)
      .def_property_readonly("basis", [](const Walk& walk) { return vector_of(walk.basis()); })
      .def_property_readonly("tight", [](const Walk& walk) { return vector_of(walk.tight()); })
      .def_property_readonly("multipliers", [](const Walk& walk) { return vector_of(walk.multipliers()); })
      .def_property_readonly("active",
                             [](const Walk& walk) { return vector_of(walk.active()).attr("astype")("bool"); })
      .def_property_readonly("inverse",
                             [](const Walk& walk) {
                               return square_of(walk,
                                                [&](int64_t i, int64_t j) { return walk.inverse(i, j); });
                             })
      .def_property_readonly("matrix", [](const Walk& walk) {
        return square_of(walk, [&](int64_t i, int64_t j) { return walk.matrix(i, j); });
      });
}
