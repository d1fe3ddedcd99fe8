"""Rows of gradients, their sketches and their peeling, on the CPU and, by `make test-gpu`, on a GPU."""

import pytest
import torch

from oases.kernels.bitmap import bitmap_unpack
from oases.sparse import peel
from oases.sparse.gradient import rows_of
from oases.sparse.sketch import Sketch


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


def test_peeling_with_a_known_support(device):
    union = torch.arange(0, 9000, 3, device=device)
    values = torch.randint(-9, 9, (3000, 4), device=device).float()
    cells = peel.table_cells(3000)
    assert cells < 1.31 * 3000 + 30
    table = peel.encode(union, values, cells, 5) + peel.encode(union[::2], values[::2], cells, 5)
    expected = values.clone()
    expected[::2] *= 2
    assert torch.equal(peel.decode(table, union, 5), expected)
    assert peel.decode(table[: 3 * 1000], union, 5) is None


@pytest.mark.parametrize("cells_each", [1.25, 1.3])
def test_peeling_from_one_and_a_quarter_cells_on(cells_each):
    failures = sum(
        peel.decode(torch.zeros(3 * round(cells_each * 20_000 / 3), 1), torch.arange(20_000), seed) is None
        for seed in range(10)
    )
    assert failures == 0


def test_peeling_fails_below(device):
    support = torch.arange(20_000, device=device)
    assert peel.decode(torch.zeros(3 * round(1.2 * 20_000 / 3), 1, device=device), support, 0) is None
