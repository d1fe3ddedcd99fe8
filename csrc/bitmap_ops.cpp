// torch.library ops of row bitmaps.
#include <torch/library.h>

#include "bitmap_kernels.h"
#include "dispatch.h"

namespace oases {
namespace {

using at::Tensor;

Tensor bitmap_pack(const Tensor& x) {
  const DType dtype = dtype_of("bitmap_pack", x);
  TORCH_CHECK(x.dim() == 2, "bitmap_pack: x must be [rows, n], got ", x.sizes());
  const int64_t rows = x.size(0), n = x.size(1);
  const Tensor bits = at::empty({bitmap_bytes(rows)}, x.options().dtype(at::kByte));
  if (rows == 0 || n == 0) return bits.zero_();
  const Tensor dense = x.contiguous();
  OASES_LAUNCH(dense, bitmap_pack, dense.const_data_ptr(), dtype, rows, n, bits.data_ptr<uint8_t>());
  return bits;
}

Tensor bitmap_unpack(const Tensor& bits, int64_t rows) {
  TORCH_CHECK(rows >= 0, "bitmap_unpack: rows must not be negative, got ", rows);
  TORCH_CHECK(bits.dim() == 1 && bits.scalar_type() == at::kByte && bits.size(0) == bitmap_bytes(rows),
              "bitmap_unpack: the bits of ", rows, " rows are uint8 [", bitmap_bytes(rows), "], got ",
              bits.scalar_type(), " ", bits.sizes());
  const auto options = bits.options().dtype(at::kLong);
  if (rows == 0) return at::empty({0}, options);
  const Tensor dense = bits.contiguous();
  const Tensor counts = at::empty({bitmap_tiles(rows)}, options);
  OASES_LAUNCH(dense, bitmap_count, dense.const_data_ptr<uint8_t>(), rows, counts.data_ptr<int64_t>());
  const Tensor ends = counts.cumsum(0);
  const Tensor indices = at::empty({ends[-1].item<int64_t>()}, options);
  OASES_LAUNCH(dense, bitmap_list, dense.const_data_ptr<uint8_t>(), rows, counts.const_data_ptr<int64_t>(),
               ends.const_data_ptr<int64_t>(), indices.data_ptr<int64_t>());
  return indices;
}

Tensor bitmap_pack_meta(const Tensor& x) {
  return at::empty_symint({(x.sym_size(0) + 7) / 8}, x.options().dtype(at::kByte));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  // The number of rows is data-dependent: oases.kernels.sparse registers the fake kernel.
  library.set_python_module("oases.kernels.sparse");
  library.def("bitmap_pack(Tensor x) -> Tensor");
  library.def("bitmap_unpack(Tensor bits, SymInt rows) -> Tensor", kNotCaptured);
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("bitmap_pack", bitmap_pack);
  library.impl("bitmap_unpack", bitmap_unpack);
}

TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("bitmap_pack", bitmap_pack);
  library.impl("bitmap_unpack", bitmap_unpack);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) { library.impl("bitmap_pack", bitmap_pack_meta); }

}  // namespace oases
