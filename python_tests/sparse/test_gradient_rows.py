"""Rows and forms of gradients and their sketches, on the CPU and, by `make test-gpu`, on a GPU."""

import pytest
import torch
import torch.distributed as dist

from oases.kernels.sparse import bitmap_unpack
from oases_sparse.gradient import pack_values, rows_of
from oases_sparse.reducer import S2Reducer
from oases_sparse.sketch import Sketch

MODES = ["dense", "packed", "gather", "sketch", "auto"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["dense", "in place", "listed"])
def held(request, device):
    """Rows 5, 9 and 700 of 1000, the last of them listed twice."""
    ids = torch.tensor([700, 5, 9, 700], device=device)
    values = torch.arange(1.0, 13.0, device=device).view(4, 3)
    listed = torch.sparse_coo_tensor(ids[None], values, (1000, 3))
    if request.param == "listed":
        return rows_of(listed)
    return rows_of(listed.to_dense(), in_place=request.param == "in place")


def test_rows_out_and_back(held, device):
    assert bitmap_unpack(held.bits(), 1000).tolist() == [5, 9, 700]
    keys, values = held.own()
    assert keys.tolist() == [5, 9, 700]
    assert values.tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [11.0, 13.0, 15.0]]
    union = torch.tensor([5, 6, 9, 700], device=device)
    gathered = held.gather(union)
    assert gathered[1].tolist() == [0.0] * 3
    assert torch.equal(gathered[[0, 2, 3]], values)
    assert held.dense().sum() == values.sum()
    result = held.put(union, 2 * gathered)
    assert torch.equal(result.to_dense()[union], 2 * gathered)
    assert result.to_dense().sum() == 2 * gathered.sum()


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_sketch_of_few_keys_is_exact(rows, device):
    union = torch.tensor([3, 77], device=device)
    values = torch.randn(2, 5, device=device)
    sketch = Sketch(rows, 1 << 20, 4)
    table = sketch.encode(union, values)
    torch.testing.assert_close(sketch.decode(table, union), values)
    estimate = sketch.contract(table, table, union)
    torch.testing.assert_close(estimate.values, values)


def test_a_cell_is_shared_among_its_keys(device):
    """One cell for all: the projection gives each key its part of their signed mean."""
    union = torch.arange(4, device=device)
    sketch = Sketch(1, 1, 0)
    table = sketch.encode(union, torch.ones(4, 1, device=device))
    estimate = sketch.contract(table, table, union).values
    again = sketch.encode(union, estimate)
    torch.testing.assert_close(again, table)  # a projection: what is sent is sent whole


def test_values_are_laid_out_by_key(device):
    support, keys = torch.tensor([2, 5, 9, 11], device=device), torch.tensor([9, 2, 9], device=device)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]], device=device)
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [11.0, 22.0], [0.0, 0.0]], device=device)
    assert torch.equal(pack_values(support, keys, values), expected)
    for stranger in (1, 6, 12):
        with pytest.raises(ValueError, match=f"key {stranger} is not in the support"):
            pack_values(support, torch.tensor([stranger], device=device), torch.ones(1, 1, device=device))
    with pytest.raises(ValueError, match="not in the support"):
        pack_values(support[:0], support, torch.ones(4, 1, device=device))
    assert pack_values(support[:0], support[:0], torch.ones(0, 4, device=device)).shape == (0, 4)


def not_a_number(mode, sparse):
    """A first number that is NaN looks like a refusal, and is none; layouts may differ from call to call."""
    reducer, rank = S2Reducer(mode=mode), dist.get_rank()
    gradient = torch.ones(40, 5)
    reducer.all_reduce(gradient.to_sparse(1) if sparse else gradient)
    gradient[rank] = torch.nan
    mean = reducer.all_reduce(gradient.to_sparse(1) if rank == sparse else gradient)
    return mean.to_dense().isnan().sum(1)[:3].tolist()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_nan_is_no_refusal(two_ranks, mode, sparse):
    assert two_ranks.run(not_a_number, mode, sparse) == [[5, 5, 0]] * 2


def missing(mode):
    """Gradients of an embedding with sparse=True: of no rank, then of rank 0 alone, of both, and of rank 1 alone."""
    table, reducer, rank, found = torch.nn.Embedding(40, 5, sparse=True), S2Reducer(mode=mode), dist.get_rank(), []
    for users in ((), (0,), (0, 1), (1,)):
        table.weight.grad = None
        if rank in users:
            table(torch.tensor([1, 1, 3])).sum().backward()
        mean = reducer.all_reduce(table.weight.grad, like=table.weight)
        found.append((mean.is_sparse, mean.to_dense().sum(1)[[1, 3]].tolist()))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_gradient_is_stored_as_the_others(two_ranks, mode):
    half = (True, [5.0, 2.5])
    assert two_ranks.run(missing, mode) == [[(False, [0.0, 0.0]), half, (True, [10.0, 5.0]), half]] * 2
