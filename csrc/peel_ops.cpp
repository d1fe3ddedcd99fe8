// Peeling as ops: keys into a table that adds up, keys out of it, and the values that belong to them.
#include <torch/library.h>

#include "dispatch.h"
#include "peel_kernels.h"
#include "sketch_kernels.h"

namespace oases {
namespace {

using at::Tensor;

void check_integers(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK(x.dim() == 1 && x.scalar_type() == at::kLong, op, ": ", name, " must be int64 [keys], got ",
              x.scalar_type(), " ", x.sizes());
}

Tensor peel_encode(const Tensor& keys, int64_t cells, int64_t seed) {
  check_integers("peel_encode", "keys", keys);
  TORCH_CHECK(cells >= 3 && cells % 3 == 0, "peel_encode: cells must be a multiple of 3 and at least 3, got ",
              cells);
  const Tensor header = at::zeros({cells, 3}, keys.options());
  const int64_t m = keys.size(0);
  if (m == 0) return header;
  const Tensor k = keys.contiguous(), first_bad = at::full({1}, m, keys.options());
  OASES_LAUNCH(k, peel_encode, k.const_data_ptr<int64_t>(), m, cells / 3, seed, header.data_ptr<int64_t>(),
               first_bad.data_ptr<int64_t>());
  const int64_t bad = first_bad.item<int64_t>();
  TORCH_CHECK(bad == m, "peel_encode: key ", k[bad].item<int64_t>(), ", number ", bad,
              ", is not in [0, 2^48)");
  return header;
}

// Keys in ascending order, the cell and the round in which each was found, and whether those were all.
std::tuple<Tensor, Tensor, Tensor, Tensor> peel_keys(const Tensor& header, int64_t seed) {
  TORCH_CHECK(header.dim() == 2 && header.size(1) == 3 && header.size(0) >= 3 && header.size(0) % 3 == 0 &&
                  header.scalar_type() == at::kLong,
              "peel_keys: header must be int64 [a multiple of 3 cells, 3], got ", header.scalar_type(), " ",
              header.sizes());
  const int64_t cells = header.size(0);
  const Tensor rest = header.clone(at::MemoryFormat::Contiguous);
  const Tensor found = at::empty({cells}, rest.options()), rounds = at::full({cells}, -1, rest.options());
  const Tensor last_round = at::full({1}, -1, rest.options());
  // Ends: a cell whose count is positive becomes zero with every key and no count ever grows.
  for (int64_t round = 0; last_round.item<int64_t>() >= round - 3; round += 3) {
    for (int64_t third = 0; third < 3; ++third) {
      OASES_LAUNCH(rest, peel_third, rest.data_ptr<int64_t>(), cells / 3, seed, third, round + third,
                   found.data_ptr<int64_t>(), rounds.data_ptr<int64_t>(), last_round.data_ptr<int64_t>());
    }
  }
  const Tensor owners = (rounds >= 0).nonzero().view(-1);
  const auto [keys, order] = found.index_select(0, owners).sort(/*stable=*/true, 0, /*descending=*/false);
  const Tensor places = owners.index_select(0, order);
  return {keys, places, rounds.index_select(0, places), (rest == 0).all()};
}

Tensor peel_values(const Tensor& sums, const Tensor& keys, const Tensor& owners, const Tensor& rounds,
                   int64_t seed) {
  const char* op = "peel_values";
  TORCH_CHECK(
      sums.dim() == 2 && sums.scalar_type() == at::kFloat && sums.size(0) >= 3 && sums.size(0) % 3 == 0, op,
      ": sums must be float32 [a multiple of 3 cells, n], got ", sums.scalar_type(), " ", sums.sizes());
  const std::pair<const char*, Tensor> given[] = {{"keys", keys}, {"owners", owners}, {"rounds", rounds}};
  for (const auto& [name, x] : given) {
    check_integers(op, name, x);
    TORCH_CHECK(x.size(0) == keys.size(0), op, ": there are ", keys.size(0), " keys but ", x.size(0), " ",
                name);
    TORCH_CHECK(x.device() == sums.device(), op, ": ", name, " are on ", x.device(), " but sums are on ",
                sums.device(), "; move one of them");
  }
  const int64_t s = keys.size(0), n = sums.size(1), cells = sums.size(0);
  const Tensor values = at::empty({s, n}, sums.options());
  if (s == 0 || n == 0) return values;
  const int64_t least = owners.min().item<int64_t>(), greatest = owners.max().item<int64_t>();
  TORCH_CHECK(least >= 0 && greatest < cells, op, ": owners range from ", least, " to ", greatest,
              ", and there are ", cells, " cells");
  TORCH_CHECK(rounds.min().item<int64_t>() >= 0, op, ": rounds must not be negative, got ",
              rounds.min().item<int64_t>());
  const SketchShape shape{3, cells / 3, n, seed};
  const Tensor total = sums.contiguous(), k = keys.contiguous(), places = owners.contiguous();
  const Tensor key_cells = at::empty({3 * s}, keys.options());
  OASES_LAUNCH(total, sketch_cells, k.const_data_ptr<int64_t>(), s, shape, key_cells.data_ptr<int64_t>());
  const auto [sorted, entries] = key_cells.sort(/*stable=*/true, 0, /*descending=*/false);
  const Tensor starts = at::searchsorted(sorted, places);
  const Tensor ends = at::searchsorted(sorted, places, /*out_int32=*/false, /*right=*/true);
  const Tensor by_round = std::get<1>(rounds.sort(/*stable=*/true, 0, /*descending=*/false));
  const Tensor in_round = at::bincount(rounds).cpu();
  const PeelGraph graph{s,
                        n,
                        by_round.const_data_ptr<int64_t>(),
                        places.const_data_ptr<int64_t>(),
                        starts.const_data_ptr<int64_t>(),
                        ends.const_data_ptr<int64_t>(),
                        entries.const_data_ptr<int64_t>()};
  // The values of keys that were found in no earlier round count as NaN, not as whatever memory holds.
  values.fill_(std::numeric_limits<float>::quiet_NaN());
  int64_t from = 0;
  for (int64_t round = 0; round < in_round.size(0); ++round) {
    const int64_t to = from + in_round.const_data_ptr<int64_t>()[round];
    if (to > from) {
      OASES_LAUNCH(total, peel_values, total.const_data_ptr<float>(), graph, from, to,
                   values.data_ptr<float>());
    }
    from = to;
  }
  return values;
}

Tensor peel_encode_meta(const Tensor& keys, c10::SymInt cells, int64_t) {
  return keys.new_empty_symint({cells, 3});
}

Tensor peel_values_meta(const Tensor& sums, const Tensor& keys, const Tensor&, const Tensor&, int64_t) {
  return sums.new_empty_symint({keys.sym_size(0), sums.sym_size(1)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oases, library) {
  // The number of keys is known only when they are out: oases.kernels.peel says so to the tracer.
  library.set_python_module("oases.kernels.peel");
  library.def("peel_encode(Tensor keys, SymInt cells, int seed) -> Tensor");
  library.def("peel_keys(Tensor header, int seed) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("peel_values(Tensor sums, Tensor keys, Tensor owners, Tensor rounds, int seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(oases, CPU, library) {
  library.impl("peel_encode", peel_encode);
  library.impl("peel_keys", peel_keys);
  library.impl("peel_values", peel_values);
}

TORCH_LIBRARY_IMPL(oases, CUDA, library) {
  library.impl("peel_encode", peel_encode);
  library.impl("peel_keys", peel_keys);
  library.impl("peel_values", peel_values);
}

TORCH_LIBRARY_IMPL(oases, Meta, library) {
  library.impl("peel_encode", peel_encode_meta);
  library.impl("peel_values", peel_values_meta);
}

}  // namespace oases
