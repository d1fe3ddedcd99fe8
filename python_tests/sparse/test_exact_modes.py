"""Packed and gathered gradients beside dense all-reduces, on random cases over 2 and 4 ranks; 712 cases are slow."""

import pytest
import torch
import torch.distributed as dist

from oases_sparse import S2Reducer

SHAPES = [(1, 1), (7, 3), (40, 2), (300, 5), (1000, 4), (2500, 8)]
KINDS = ["few", "empty", "one row", "all rows", "one rank", "repeated", "nan", "cancelling"]

PERIOD = len(SHAPES) * len(KINDS)


def case(number, rank):
    """This rank's gradient of a case, dense, and as ids and values that may come more than once."""
    rows, width = SHAPES[number % len(SHAPES)]
    kind = KINDS[number // len(SHAPES) % len(KINDS)]
    shared = torch.Generator().manual_seed(number)
    own = torch.Generator().manual_seed(7919 * number + rank + 1)
    count = int(torch.randint(0, max(1, rows // 8) + 1, (), generator=own))
    ids = torch.randint(rows, (count,), generator=own)
    if kind == "empty" or (kind == "one rank" and rank != number % 2):
        ids = ids[:0]
    elif kind == "one row":
        ids = torch.randint(rows, (1,), generator=shared)
    elif kind == "all rows":
        ids = torch.arange(rows)
    elif kind == "repeated":
        ids = ids.repeat(3)
    values = torch.randn(len(ids), width, generator=own)
    if kind == "nan" and len(ids):
        values[0, 0] = (float("nan"), float("inf"), -float("inf"))[int(torch.randint(3, (), generator=own))]
    if kind == "cancelling":
        ids = torch.randint(rows, (max(1, rows // 8),), generator=shared)
        values = torch.randn(len(ids), width, generator=shared) * (-1) ** rank
    listed = torch.sparse_coo_tensor(ids[None], values, (rows, width))
    return listed.to_dense(), listed


def check(first, count):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reducers = {mode: S2Reducer(mode=mode, seed=3) for mode in ("packed", "gather")}
    wrong = []
    for number in range(first, first + count):
        dense, listed = case(number, rank)
        exact, used = dense.clone(), (dense != 0).any(1).to(torch.int32)
        dist.all_reduce(exact)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        exact /= ranks
        scale = float(exact.nan_to_num(0, 0, 0).abs().max()) + 1
        for mode, reducer in reducers.items():
            if mode == "gather" and (number + number // PERIOD) % 3:
                continue
            gradient = (dense, listed)[number // 7 % 2]
            before = gradient.clone()
            mean = reducer.all_reduce(gradient, name=str(dense.shape))
            found = mean.to_dense() if mean.is_sparse else mean
            good = torch.allclose(found, exact, rtol=1e-6, atol=2e-7 * scale, equal_nan=True)
            good &= mean.is_sparse == gradient.is_sparse
            good &= bool(((found != 0).any(1) <= (used > 0)).all())
            if gradient is dense:
                good &= reducer.last.union in (None, int(used.sum()))
                good &= torch.equal(gradient.nan_to_num(), before.nan_to_num())
            if not good:
                wrong.append((number, mode, str(reducer.last)))
    tally = {mode: reducer.report().json()["tensors"] for mode, reducer in reducers.items()}
    return wrong, tally


# Each holds every shape with every kind, by both modes.
CASES = [("two_ranks", 0, 3 * PERIOD), ("four_ranks", 600, 3 * PERIOD)]
SLOW = [("two_ranks", 144, 456), ("four_ranks", 744, 256)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("pool", "first", "count"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_random_cases(request, pool, first, count):
    results = request.getfixturevalue(pool).run(check, first, count)
    assert all(wrong == [] for wrong, _ in results)
    kept = [
        {mode: [(row["modes"], row["fallbacks"]) for row in rows] for mode, rows in tally.items()}
        for _, tally in results
    ]
    assert all(other == kept[0] for other in kept)  # ranks took the same ways
    assert sum(row["modes"].get("gather", 0) for row in results[0][1]["gather"]) > count / 8


def grow(mode):
    """Rows that double from step to step: a table made for the last step's is too small."""
    reducer, taken = S2Reducer(mode=mode), []
    for step in range(8):
        gradient = torch.zeros(4000, 2)
        gradient[: 8 * 2**step] = step + 1.0
        assert torch.equal(reducer.all_reduce(gradient), gradient)
        taken.append((reducer.last.mode, reducer.last.phases, reducer.last.fallback))
    return taken


@pytest.mark.parametrize("mode", ["packed", "gather"])
def test_support_that_grows(two_ranks, mode):
    first, second = two_ranks.run(grow, mode)
    assert first == second
    assert first[0] == (mode, 2, "")  # nothing is known yet: the bitmap first
    assert {taken for taken, _, _ in first} == {mode}


def steady():
    reducer = S2Reducer(mode="gather", measure_error=True)
    for _ in range(6):
        torch.manual_seed(dist.get_rank())  # the same rows in every step
        gradient = torch.zeros(20_000, 4)
        gradient[torch.randint(20_000, (1000,))] = torch.randn(1000, 4)
        reducer.all_reduce(gradient)
        assert reducer.last.error < 1e-6
    return reducer.last


def test_a_steady_support_takes_one_phase(two_ranks):
    last = two_ranks.run(steady)[0]
    assert (last.mode, last.phases, last.fallback) == ("gather", 1, "")
    assert last.bytes < 4 * 4 * last.union + 2500  # of one rank's rows; two ranks share few of their own
    assert last.dense_bytes == 4 * 4 * 20_000
    assert min(last.encode_seconds, last.send_seconds, last.decode_seconds) > 0
    assert last.seconds >= last.encode_seconds + last.decode_seconds
