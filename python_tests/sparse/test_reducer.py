"""`S2Reducer` where input is bad or odd, and how auto chooses."""

import pytest
import torch
import torch.distributed as dist

import oases
from oases.errors import UsageError
from oases_sparse.costs import Costs, Task
from oases_sparse.reducer import S2Reducer
from oases_sparse.wire import Wire

MODES = ["dense", "packed", "gather", "sketch", "auto"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "zip"}, "mode must be one of auto, dense, packed, gather, sketch, got 'zip'"),
        ({"mode": "peel"}, "mode must be one of auto, dense, packed, gather, sketch, got 'peel'"),
        ({"rows": 2}, "rows must be 1, 3 or 5, got 2"),
        ({"cells_per_nonzero": 0}, "cells_per_nonzero must be above 0, got 0"),
        ({"cells_per_nonzero": -1.0}, "above 0, got -1.0"),
        ({"cells_per_nonzero": float("nan")}, "above 0, got nan"),
    ],
)
def test_bad_arguments_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        S2Reducer(**given)


@pytest.mark.parametrize("mode", MODES)
def test_one_process_alone(mode):
    reducer = oases.S2Reducer(mode=mode)
    for gradient in (torch.randn(9, 3), torch.randn(9, 3).relu().to_sparse(1), torch.randn(4), torch.tensor(2.0)):
        mean = reducer.all_reduce(gradient, name=str(gradient.shape))
        assert torch.equal(mean.to_dense(), gradient.to_dense())
        assert reducer.last.bytes == 0


def test_bad_gradients_are_named():
    reducer = S2Reducer()
    with pytest.raises(ValueError, match=r"must be of a float dtype, got torch\.int64"):
        reducer.all_reduce(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 sparse dimension, the rows, got 2"):
        reducer.all_reduce(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"got torch\.sparse_csr"):
        reducer.all_reduce(torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match="no gradient: give like="):
        reducer.all_reduce(None)


def odd(mode):
    """Shapes, dtypes, ranks with nothing: everything beside a dense all-reduce."""
    reducer, rank = S2Reducer(mode=mode, rows=1), dist.get_rank()
    torch.manual_seed(5 + rank)
    apart = {}
    for name, shape in {"vector": (50,), "cube": (2000, 3, 2), "none": (0, 4), "narrow": (30, 0), "one": ()}.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            gradient = torch.zeros(shape, dtype=dtype)
            if gradient.numel() > 1:
                gradient[::7] = torch.randn_like(gradient[::7])
            exact = gradient.double()
            dist.all_reduce(exact)
            exact /= 2
            mean = reducer.all_reduce(gradient, name=f"{name} {dtype}")
            assert mean.dtype == dtype
            assert mean.shape == gradient.shape
            if reducer.last.mode != "sketch":
                rounding = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
                torch.testing.assert_close(mean.double(), exact, atol=rounding, rtol=rounding)
            apart[f"{name} {dtype}"] = (reducer.last.mode, reducer.last.fallback)
    table = torch.nn.Parameter(torch.zeros(3000, 4))
    gradient = torch.zeros(3000, 4)
    gradient[3] = 2.0
    mean = reducer.all_reduce(None if rank else gradient, like=table, name="missing")
    if reducer.last.mode != "sketch":
        assert torch.equal(mean, gradient / 2)
    return apart


@pytest.mark.parametrize("mode", MODES)
def test_odd_gradients(two_ranks, mode):
    first, second = two_ranks.run(odd, mode)
    assert first == second
    assert first["vector torch.float32"] == ("dense", "" if mode in ("dense", "auto") else "not a matrix")
    if mode in ("packed", "sketch"):
        assert first["cube torch.float16"] == (mode, "")


def oversized():
    taken = []
    for cells in (1.0, 2.0, 100.0):
        reducer = S2Reducer(mode="sketch", cells_per_nonzero=cells)
        gradient = torch.zeros(600, 4)
        gradient[:60] = 1.0
        mean = reducer.all_reduce(gradient)
        taken.append((reducer.last.mode, reducer.last.fallback))
        assert reducer.last.mode == "sketch" or torch.equal(mean, gradient)
    few = S2Reducer(mode="sketch")
    gradient = torch.zeros(600, 4)
    gradient[:2] = 1.0
    assert torch.equal(few.all_reduce(gradient), gradient)
    return [*taken, (few.last.mode, few.last.fallback)]


def test_tables_that_save_nothing_are_not_sent(two_ranks):
    assert two_ranks.run(oversized)[0] == [
        ("sketch", ""),
        ("sketch", ""),
        ("dense", "the table would be no smaller than the dense gradient"),
        ("packed", "the table would be no smaller than the packed rows"),
    ]


def rename():
    reducer = S2Reducer(mode="sketch")
    reducer.all_reduce(torch.eye(600, 4).repeat(2, 1))
    with pytest.raises(
        UsageError, match=r"shape .* was .*\[1200, 4\]\) and is .*\[9, 4\]\) now; give every tensor a"
    ):
        reducer.all_reduce(torch.zeros(9, 4))


def test_two_tensors_of_one_name_are_refused(two_ranks):
    two_ranks.run(rename)


def of_other_sizes():
    reducer, rank = S2Reducer(mode="packed"), dist.get_rank()
    found = []
    rows = torch.ones(8, 2)
    for name, gradient in (("table", torch.ones(8 + rank, 2)), ("rows", rows.to_sparse(1) if rank else rows)):
        try:  # not by pytest.raises, whose frames would keep the reducer for the reports of other tests
            reducer.all_reduce(gradient, name=name)
        except UsageError as error:
            found.append(str(error))
    assert torch.equal(reducer.all_reduce(torch.ones(8, 2)), torch.ones(8, 2)), "the ranks go on"
    return found


def test_gradients_of_other_sizes_are_refused_on_all_ranks(two_ranks):
    for sizes, layouts in two_ranks.run(of_other_sizes):
        assert "S2Reducer.all_reduce('table')" in sizes
        assert "shape of the gradient" in sizes
        assert all(size in sizes for size in ("[8, 2]", "[9, 2]"))
        assert "layout of the gradient" in layouts


def unlike(mode, known, sparse):
    """Gradients of rank 1 that cannot be reduced with rank 0's, before or after the first of their name."""
    reducer, rank = S2Reducer(mode=mode), dist.get_rank()
    reducer.costs = Costs(1e-5, 1e-6, 0.0, 0.0, 0.0)
    good = torch.zeros(40, 5)
    good[7 + rank] = 2.0
    good, empty = (good.to_sparse(1), torch.ones(0, 5).to_sparse(1)) if sparse else (good, torch.ones(0, 5))
    cases = {
        "int64": (good, good.long()), "csr": (good, torch.eye(40, 5).to_sparse_csr()), "like=": (good, None),
        "got 2": (good, torch.eye(40, 5).to_sparse()), "float16": (good, good.half()),
        "[400, 5]": (good, torch.ones(400, 5).to_sparse(1) if sparse else torch.ones(400, 5)),
        "[7, 5]": (empty, None),
    }  # fmt: skip
    found = {}
    for text, (usual, odd) in cases.items():
        if known:
            reducer.all_reduce(usual, name=text)
        try:
            reducer.all_reduce(odd if rank else usual, like=torch.ones(7, 5) if text == "[7, 5]" else None, name=text)
        except UsageError as error:
            found[text] = str(error)
    mean = reducer.all_reduce(good).to_dense()
    assert mean[7:9].tolist() == [[1.0] * 5] * 2, "the ranks go on"
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_one_rank_cannot_reduce_is_refused_on_all(two_ranks, mode, known, sparse):
    first, second = two_ranks.run(unlike, mode, known, sparse)
    assert first == second
    assert len(first) == 7
    for text, message in first.items():
        assert f"S2Reducer.all_reduce({text!r})" in message
        assert text in message.partition(")")[2]
        assert "rank 1" in message


def chosen(costs, cells, few=10):
    reducer = S2Reducer(cells_per_nonzero=cells, rows=1)
    reducer.costs = Costs(*costs)
    taken = []
    for used in (few, few, 4000):
        gradient = torch.zeros(4000, 8)
        gradient[:used] = 1.0
        reducer.all_reduce(gradient)
        taken.append(reducer.last.mode)
    return taken


def apart(costs):
    """Ranks that use different rows."""
    reducer = S2Reducer()
    reducer.costs = Costs(*costs)
    taken = []
    for _ in range(2):
        gradient = torch.zeros(4000, 8)
        gradient[dist.get_rank() :: 40] = 1.0
        reducer.all_reduce(gradient)
        taken.append(reducer.last.mode)
    return taken


def test_auto_takes_what_costs_least(two_ranks, four_ranks):
    slow_link, far_away, slow_kernels = (1e-5, 1e-6), (1.0, 1e-9), (1e-5, 1e-9)
    fast = (0.0, 0.0, 0.0)
    # Ranks that use the same rows: to gather four ranks' is to send twice as much, and dense needs no bitmap.
    assert four_ranks.run(chosen, (*slow_link, *fast), None)[0] == ["packed", "packed", "dense"]
    assert two_ranks.run(apart, (*slow_link, *fast))[0] == ["gather"] * 2
    # One phase is all that counts, and of the modes that take one, gathering sends less than everything.
    assert two_ranks.run(chosen, (*far_away, *fast), None)[0][1] == "gather"
    assert four_ranks.run(chosen, (*far_away, *fast), None, 400)[0][1] == "gather"
    assert two_ranks.run(chosen, (*slow_kernels, 1.0, 1.0, 1.0), None)[0] == ["dense"] * 3
    assert two_ranks.run(chosen, (*slow_link, *fast), 0.2)[0] == [
        "sketch",
        "sketch",
        "sketch",
    ]  # its loss was asked for


def wild(mode, costs):
    """Supports that jump from step to step and from rank to rank, in all of which auto decides from the last step."""
    reducer, rank, ranks = S2Reducer(mode=mode), dist.get_rank(), dist.get_world_size()
    reducer.costs = Costs(*costs)
    own, taken = torch.Generator().manual_seed(31 + rank), []
    for step in range(30):
        wanted = float(torch.rand((), generator=own)) ** 6 * (step % 5 != 3)
        gradient = torch.zeros(1001, 3)
        used = torch.rand(1001, generator=own) < wanted
        gradient[used] = torch.randint(1, 9, (int(used.sum()), 3), generator=own).float()
        exact = gradient.clone()
        dist.all_reduce(exact)
        mean = reducer.all_reduce(gradient.to_sparse(1) if step % 2 else gradient)
        torch.testing.assert_close(mean.to_dense(), exact / ranks, atol=1e-5, rtol=0)
        assert 1 <= reducer.last.phases <= 2
        taken.append((reducer.last.mode, reducer.last.phases, reducer.last.bytes, reducer.last.fallback))
    return taken


@pytest.mark.few(2, 6)
@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("costs", [(1e-5, 1e-6), (1.0, 1e-9), (1e-4, 3e-9)])
def test_ranks_agree_without_a_message_whatever_their_supports_do(request, pool, costs):
    ranks = request.getfixturevalue(pool)
    for mode in ("auto", "gather"):
        taken = ranks.run(wild, mode, (*costs, 0.0, 0.0, 0.0))
        assert all(other == taken[0] for other in taken)
        if mode == "gather":
            assert {(found[0], found[1]) for found in taken[0]} == {("gather", 1), ("gather", 2)}


def early(sparse, dtype):
    """Rows that go with the bitmap: no second phase while no rank has more than in the last step."""
    reducer, phases = S2Reducer(mode="gather"), []
    for used in (9, 9, 5, 12, 12):
        gradient = torch.zeros(77, 3, dtype=dtype)
        gradient[dist.get_rank() :: 7][:used] = 2.0
        exact = gradient.clone().float()
        dist.all_reduce(exact)
        mean = reducer.all_reduce(gradient.to_sparse(1) if sparse else gradient)
        assert torch.equal(mean.to_dense().float(), exact / dist.get_world_size())
        phases.append(reducer.last.phases)
    return phases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_gathered_rows_go_with_the_bitmap(two_ranks, sparse, dtype):
    # 77 rows: 11 for each rank, so that 12 are 11.
    assert two_ranks.run(early, sparse, dtype) == [[2, 1, 1, 2, 1]] * 2


def measured():
    reducer = S2Reducer()
    reducer.all_reduce(torch.eye(2000, 4))
    return reducer.costs


def test_auto_measures_and_all_ranks_agree(four_ranks):
    costs = four_ranks.run(measured)
    assert all(other == costs[0] for other in costs)
    assert min(costs[0].latency, costs[0].packed_seconds, costs[0].sketch_seconds) > 0


def test_costs_are_bytes_and_work():
    wire = Wire(None)
    wire.world, wire._knows_or = 4, True
    costs = Costs(1.0, 1e-3, 0.0, 1e-2, 0.0)
    task = Task(rows=800, width=2, row_bytes=8, union=100)
    assert costs.seconds("dense", task, wire) == pytest.approx(1 + 1e-3 * 1.5 * 6400)
    assert costs.seconds("packed", task, wire) == pytest.approx(2 + 1e-3 * 1.5 * (100 + 800) + 2)
    wire._knows_or = False  # bitmaps are gathered
    assert costs.seconds("packed", task, wire) == pytest.approx(2 + 1e-3 * (3 * 100 + 1.5 * 800) + 2)


def gathered():
    reducer = S2Reducer(mode="packed")
    reducer.wire._knows_or = False  # as with NCCL
    gradient = torch.zeros(999, 3)
    gradient[dist.get_rank() * 100] = 4.0
    return reducer.all_reduce(gradient)[::100].sum(1).tolist()


def test_bitmaps_are_gathered_where_no_or_is_known(four_ranks):
    assert four_ranks.run(gathered)[3] == [3.0] * 4 + [0.0] * 6


def test_reports_add_up(two_ranks):
    text, saved = two_ranks.run(reported)[0]
    assert "rows" in text
    assert "packed 2" in text
    assert 0.9 < saved < 1


def reported():
    reducer = S2Reducer(mode="packed", measure_error=True)
    gradient = torch.zeros(3000, 8)
    gradient[:30] = 1.0
    for _ in range(2):
        reducer.all_reduce(gradient, name="rows")
    assert reducer.last.error == 0.0
    assert reducer.report().json()["tensors"][0]["worst_error"] == 0.0
    return str(reducer.report()), reducer.report().saved


def in_the_training_report():
    first = len(oases.report().sections)  # of reducers that other tests left
    reducer, other = S2Reducer(mode="sketch", cells_per_nonzero=0.5), S2Reducer(mode="dense")
    assert len(oases.report().sections) == first  # nothing to tell yet
    gradient = torch.zeros(3000, 8)
    gradient[:30] = 1.0
    for name in ("words", "words", "users"):
        reducer.all_reduce(gradient, name=name)
    gradient[5] = float("nan")
    reducer.all_reduce(gradient, name="users")
    other.all_reduce(gradient)
    text, data = str(oases.report()), oases.report().json()["sections"][first:]
    assert [one["title"] for one in data] == ["sparse gradients, mode sketch", "sparse gradients, mode dense"]
    words, users = data[0]["tensors"]
    assert (words["name"], words["modes"], words["fallbacks"]) == ("words", {"sketch": 2}, {})
    assert (users["modes"], users["fallbacks"]) == ({"sketch": 1, "packed": 1}, {"NaN or infinity": 1})
    assert min(words[key] for key in ("bytes", "encode_seconds", "send_seconds", "decode_seconds")) > 0
    del other
    assert len(oases.report().sections) == first + 1  # nothing holds a reducer
    return text


def test_the_training_report_shows_reducers(two_ranks):
    text = two_ranks.run(in_the_training_report)[0]
    assert "sparse gradients, mode sketch" in text
    assert "sketch 1, packed 1; fell back: NaN or infinity (1)" in text
    assert text.splitlines()[-1].startswith("built with ")


def check_ranks_in_other_groups():
    groups = [dist.new_group([rank]) for rank in (0, 0, 1)]  # rank 0 is in two of them, rank 1 in one, others in none
    mean = S2Reducer(mode="packed").all_reduce(torch.eye(4)[:, : dist.get_world_size()] * (dist.get_rank() + 1))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return mean


def test_ranks_may_be_in_different_numbers_of_groups(two_ranks, four_ranks):
    for ranks in (two_ranks, four_ranks):
        for mean in ranks.run(check_ranks_in_other_groups):
            size = ranks.size
            assert torch.equal(mean, torch.eye(4)[:, :size] * (size + 1) / 2)
