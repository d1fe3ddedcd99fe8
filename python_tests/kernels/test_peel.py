"""Peeling: exact keys, values within rounding, tables of several ranks, tables that are too full, and bad input."""

import pytest
import torch

from oases.kernels.peel import PeelTable, cells_for, pack_values, peel_decode, peel_encode

LARGEST = 2**48 - 1


def distinct_keys(count, device):
    return torch.unique(torch.randint(0, LARGEST, (2 * count,)))[torch.randperm(count)].to(device)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 100, 3000])
@pytest.mark.parametrize("n", [None, 1, 5, 0])
def test_keys_and_values_come_out(device, count, n):
    keys = distinct_keys(count, device)
    values = None if n is None else torch.randn(count, n, device=device)
    peeled = peel_decode(peel_encode(keys, values, cells_for(count), seed=count), seed=count)
    order = keys.argsort()
    assert peeled.success
    assert torch.equal(peeled.keys, keys[order])
    if values is None:
        assert peeled.values is None
    else:
        torch.testing.assert_close(peeled.values, values[order], atol=1e-4, rtol=1e-4)


def test_it_peels_at_the_recommended_size():
    failures = 0
    for seed in range(400):
        count = 1 + seed * 3
        keys = distinct_keys(count, "cpu")
        failures += not peel_decode(peel_encode(keys, None, cells_for(count), seed), seed).success
    assert failures <= 2
    assert cells_for(100_000) < 1.31 * 100_000
    for keys, failure in ((-1, 0.1), (5, 0.0), (5, 1.0)):
        with pytest.raises(ValueError, match=f"got {keys} and {failure}"):
            cells_for(keys, failure)


def test_keys_in_a_row_and_the_largest(device):
    keys = torch.cat([torch.arange(2000), torch.tensor([LARGEST])]).to(device)
    peeled = peel_decode(peel_encode(keys, None, cells_for(2001), 0), 0)
    assert peeled.success
    assert torch.equal(peeled.keys, keys)


def test_ranks_that_share_keys(device):
    """Integer values: whatever the order of sums, they are exact, so every bit of the result is known."""
    every = distinct_keys(600, device)
    dense = torch.zeros(600, 3, device=device)
    used = torch.zeros(600, dtype=torch.bool, device=device)
    header, sums = 0, 0
    for _ in range(4):
        mine = torch.randperm(600)[:300].to(device)
        mine = torch.cat([mine, mine[:5]])  # and some twice on one rank
        values = torch.randint(-9, 9, (305, 3), device=device).float()
        dense.index_add_(0, mine, values)
        table = peel_encode(every[mine], values, cells_for(600), 11)
        header, sums = header + table.header, sums + table.sums
        used[mine] = True
    peeled = peel_decode(PeelTable(header, sums), 11)
    support = every[used].sort().values
    assert peeled.success
    assert torch.equal(peeled.keys, support)
    places = {int(key): i for i, key in enumerate(every)}
    assert torch.equal(peeled.values, dense[[places[int(key)] for key in support]])


def test_same_bits_on_every_run(device):
    keys, values = distinct_keys(2000, device), torch.randn(2000, 2, device=device)
    first = peel_decode(peel_encode(keys, values, cells_for(2000), 0), 0)
    for _ in range(3):
        again = peel_decode(peel_encode(keys, values, cells_for(2000), 0), 0)
        assert torch.equal(first.values, again.values)


def test_cancelling_values_leave_their_key(device):
    keys = torch.tensor([9, 9], device=device)
    peeled = peel_decode(peel_encode(keys, torch.tensor([[2.0], [-2.0]], device=device), 9, 0), 0)
    assert peeled.keys.tolist() == [9]
    assert peeled.values.tolist() == [[0.0]]


def test_wide_ranges_of_magnitude_and_the_second_exchange(device):
    """Large neighbours cost small values their precision in one exchange; packed values lose nothing."""
    keys = distinct_keys(1000, device)
    values = torch.randn(1000, 1, device=device)
    values[::2] *= 1e6
    cells = cells_for(1000)
    peeled = peel_decode(peel_encode(keys, values, cells, 0), 0)
    order = keys.argsort()
    torch.testing.assert_close(peeled.values, values[order], atol=10, rtol=1e-5)
    assert torch.equal(pack_values(peeled.keys, keys, values), values[order])


def test_too_full_a_table_says_so(device):
    keys = distinct_keys(500, device)
    peeled = peel_decode(peel_encode(keys, torch.ones(500, 2, device=device), 300, 0), 0)
    assert not peeled.success
    assert peeled.keys.shape == (0,)
    assert peeled.values.shape == (0, 2)


def test_a_damaged_table_is_noticed(device):
    table = peel_encode(distinct_keys(50, device), None, cells_for(50), 0)
    for column in range(3):
        header = table.header.clone()
        header[7, column] += 1
        assert not peel_decode(PeelTable(header, None), 0).success
    assert not peel_decode(table, seed=1).success


@pytest.mark.parametrize("bits", [3, 63])
def test_garbage_ends(device, bits):
    for seed in range(20):
        header = torch.randint(-(2**bits), 2**bits - 1, (30, 3), device=device)
        assert not peel_decode(PeelTable(header, None), seed).success


@pytest.mark.parametrize("bad", [-1, 2**48, -(2**63)])
def test_a_key_out_of_range_is_named(device, bad):
    keys = torch.arange(100, device=device)
    keys[60] = bad
    with pytest.raises(RuntimeError, match=rf"peel_encode: key {bad}, number 60, is not in \[0, 2\^48\)"):
        peel_encode(keys, None, 300, 0)


def test_bad_input_is_refused(device):
    keys = torch.arange(4, device=device)
    table = peel_encode(keys, torch.zeros(4, 2, device=device), 12, 0)
    for wrong, call in {
        "cells must be a multiple of 3": lambda: peel_encode(keys, None, 10, 0),
        "at least 3, got 0": lambda: peel_encode(keys, None, 0, 0),
        "keys must be int64": lambda: peel_encode(keys.int(), None, 12, 0),
        "4 keys but 3 values": lambda: peel_encode(keys, torch.zeros(3, 2, device=device), 12, 0),
        "header must be int64": lambda: peel_decode(PeelTable(table.header.float(), None), 0),
        "sums must be float32": lambda: peel_decode(PeelTable(table.header, table.sums.half()), 0),
        "owners range from 0 to 12": lambda: torch.ops.oases.peel_values(
            table.sums, keys, torch.tensor([0, 1, 2, 12], device=device), keys, 0
        ),
        "rounds must not be negative": lambda: torch.ops.oases.peel_values(table.sums, keys, keys, keys - 1, 0),
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            call()
    with pytest.raises(ValueError, match="the header has 12 cells but the sums have 9"):
        peel_decode(PeelTable(table.header, table.sums[:9]), 0)


def test_packing_adds_up_and_refuses_strangers(device):
    support = torch.tensor([2, 5, 7], device=device)
    packed = pack_values(
        support, torch.tensor([5, 5, 2], device=device), torch.tensor([[1.0], [2.0], [4.0]], device=device)
    )
    assert packed.tolist() == [[4.0], [3.0], [0.0]]
    for stranger in (1, 6, 8):
        with pytest.raises(ValueError, match=f"key {stranger} is not in the support"):
            pack_values(support, torch.tensor([stranger], device=device), torch.ones(1, 1, device=device))
    with pytest.raises(ValueError, match="key 2 is not in the support"):
        pack_values(support[:0], support, torch.ones(3, 1, device=device))
    assert pack_values(support[:0], support[:0], torch.ones(0, 4, device=device)).shape == (0, 4)


def test_opcheck(device):
    keys = torch.arange(8, device=device)
    table = peel_encode(keys, torch.randn(8, 2, device=device), cells_for(8), 0)
    found = torch.ops.oases.peel_keys(table.header, 0)
    torch.library.opcheck(torch.ops.oases.peel_encode, (keys, 30, 0))
    torch.library.opcheck(torch.ops.oases.peel_keys, (table.header, 0))
    torch.library.opcheck(torch.ops.oases.peel_values, (table.sums, *found[:3], 0))
