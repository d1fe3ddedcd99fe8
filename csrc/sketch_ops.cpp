// torch.library ops of the count sketch.
#include <torch/library.h>

#include "dispatch.h"
#include "sketch_kernels.h"

namespace oases {
namespace {

using at::Tensor;

void check_keys(const char* op, const Tensor& keys) {
  TORCH_CHECK(keys.dim() == 1 && keys.scalar_type() == at::kLong, op, ": keys must be int64 [m], got ",
              keys.scalar_type(), " ", keys.sizes());
}

void check_floats(const char* op, const char* name, const Tensor& x, int64_t dims, const Tensor& keys) {
  TORCH_CHECK(x.dim() == dims && x.scalar_type() == at::kFloat, op, ": ", name, " must be float32 of ", dims,
              " dimensions, got ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK(x.device() == keys.device(), op, ": ", name, " are on ", x.device(), " but keys are on ",
              keys.device(), "; move one of them");
}

Tensor sketch_encode(const Tensor& keys, const Tensor& values, int64_t rows, int64_t columns, int64_t seed,
                     bool with_signs) {
  const char* op = "sketch_encode";
  check_keys(op, keys);
  check_floats(op, "values", values, 2, keys);
  TORCH_CHECK(values.size(0) == keys.size(0), op, ": there are ", keys.size(0), " keys but ", values.size(0),
              " values");
  TORCH_CHECK(rows == 1 || rows == 3 || rows == 5, op, ": rows must be 1, 3 or 5, got ", rows);
  TORCH_CHECK(columns >= 1, op, ": columns must be at least 1, got ", columns);
  const int64_t m = keys.size(0), n = values.size(1);
  const Tensor table = at::zeros({rows, columns, n}, values.options());
  if (m == 0 || n == 0) return table;
  const SketchShape shape{rows, columns, n, seed};
  const Tensor k = keys.contiguous(), v = values.contiguous();
  Tensor sorted, order;
  if (keys.is_cuda()) {
    const Tensor cells = at::empty({rows * m}, keys.options());
    OASES_LAUNCH(k, sketch_cells, k.const_data_ptr<int64_t>(), m, shape, cells.data_ptr<int64_t>());
    std::tie(sorted, order) = cells.sort(/*stable=*/true, 0, /*descending=*/false);
  }
  OASES_LAUNCH(k, sketch_encode, k.const_data_ptr<int64_t>(), v.const_data_ptr<float>(), m, shape, with_signs,
               sorted.defined() ? sorted.const_data_ptr<int64_t>() : nullptr,
               order.defined() ? order.const_data_ptr<int64_t>() : nullptr, table.data_ptr<float>());
  return table;
}

Tensor sketch_decode(const Tensor& table, const Tensor& keys, int64_t seed) {
  const char* op = "sketch_decode";
  check_keys(op, keys);
  check_floats(op, "table", table, 3, keys);
  const SketchShape shape{table.size(0), table.size(1), table.size(2), seed};
  TORCH_CHECK((shape.rows == 1 || shape.rows == 3 || shape.rows == 5) && shape.columns >= 1, op,
              ": table must be [1, 3 or 5 rows, at least 1 column, n], got ", table.sizes());
  const Tensor values = at::empty({keys.size(0), shape.n}, table.options());
  if (values.numel() == 0) return values;
  const Tensor t = table.contiguous(), k = keys.contiguous();
  OASES_LAUNCH(k, sketch_decode, t.const_data_ptr<float>(), k.const_data_ptr<int64_t>(), k.size(0), shape,
               values.data_ptr<float>());
  return values;
}

Tensor sketch_encode_meta(const Tensor&, const Tensor& values, c10::SymInt rows, c10::SymInt columns, int64_t,
                          bool) {
  return values.new_empty_symint({rows, columns, values.sym_size(1)});
}

Tensor sketch_decode_meta(const Tensor& table, const Tensor& keys, int64_t) {
  return table.new_empty_symint({keys.sym_size(0), table.sym_size(2)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  library.def(
      "sketch_encode(Tensor keys, Tensor values, SymInt rows, SymInt columns, int seed, bool with_signs) "
      "-> Tensor");
  library.def("sketch_decode(Tensor table, Tensor keys, int seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("sketch_encode", sketch_encode);
  library.impl("sketch_decode", sketch_decode);
}

TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("sketch_encode", sketch_encode);
  library.impl("sketch_decode", sketch_decode);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("sketch_encode", sketch_encode_meta);
  library.impl("sketch_decode", sketch_decode_meta);
}

}  // namespace oases
