"""The count sketch against one made with numpy, its estimates, and what it refuses."""

import numpy as np
import pytest
import torch

from oases.kernels.sparse import sketch_decode, sketch_encode


def mix(words):
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hashes(keys, row, columns, seed):
    with np.errstate(over="ignore"):
        salt = mix(np.array([seed], np.int64).view(np.uint64) + mix(np.array([row], np.uint64)))
    words = mix(keys.view(np.uint64) ^ salt)
    return np.array([int(word) * columns >> 64 for word in words], np.int64), 1 - 2 * (words & np.uint64(1)).astype(
        int
    )


def reference_encode(keys, values, rows, columns, seed):
    table = np.zeros((rows, columns, values.shape[1]), np.float32)
    for row in range(rows):
        cells, signs = hashes(keys, row, columns, seed)
        np.add.at(table[row], cells, signs.astype(np.float32)[:, None] * values)
    return table


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(
    ("m", "n", "columns"), [(1, 1, 1), (200, 1, 64), (300, 5, 40), (50, 130, 1000), (0, 3, 8), (4, 0, 8)]
)
def test_encode_and_decode(device, rows, m, n, columns):
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, m)
    keys[m // 2 :] = keys[: m - m // 2]  # repeated
    values = rng.standard_normal((m, n)).astype(np.float32)
    seed = -12345
    expected = reference_encode(keys, values, rows, columns, seed)
    torch_keys = torch.from_numpy(keys).to(device)
    table = sketch_encode(torch_keys, torch.from_numpy(values).to(device), rows, columns, seed)
    assert torch.equal(table.cpu(), torch.from_numpy(expected))  # the same order of sums: the same bits
    decoded = sketch_decode(table, torch_keys, seed)
    found = [
        expected[row][cells] * signs[:, None]
        for row in range(rows)
        for cells, signs in [hashes(keys, row, columns, seed)]
    ]
    assert torch.equal(decoded.cpu(), torch.from_numpy(np.median(found, axis=0).astype(np.float32).reshape(m, n)))


def test_a_few_heavy_entries_among_noise_are_found(device):
    keys = torch.arange(20_000, device=device)
    values = 0.01 * torch.randn(20_000, 1, device=device)
    heavy = torch.tensor([3, 77, 19_999], device=device)
    values[heavy] = torch.tensor([[10.0], [-20.0], [30.0]], device=device)
    table = sketch_encode(keys, values, 5, 2_000, seed=1)
    torch.testing.assert_close(sketch_decode(table, heavy, 1), values[heavy], atol=0.5, rtol=0)
    estimates = sketch_decode(table, keys, 1)
    assert set(estimates.abs().flatten().topk(3).indices.tolist()) == set(heavy.tolist())


def test_estimates_are_unbiased_over_seeds(device):
    keys = torch.arange(64, device=device)
    values = torch.ones(64, 1, device=device)
    mean = torch.stack([sketch_decode(sketch_encode(keys, values, 1, 16, s), keys, s) for s in range(400)]).mean()
    assert abs(mean.item() - 1) < 0.15


def test_tables_add_up_over_ranks(device):
    keys = torch.arange(100, device=device)
    a, b = torch.randint(-8, 8, (2, 100, 3), device=device).float()
    table = sketch_encode(keys, a, 3, 50, 7) + sketch_encode(keys, b, 3, 50, 7)
    assert torch.equal(table, sketch_encode(keys, a + b, 3, 50, 7))


def test_nan_is_not_hidden_by_the_median(device):
    keys = torch.tensor([5, 6], device=device)
    values = torch.tensor([[1.0], [float("nan")]], device=device)
    decoded = sketch_decode(sketch_encode(keys, values, 3, 1 << 20, 0), keys, 0)
    assert decoded[0].item() == 1
    assert decoded[1].isnan().item()


def test_seeds_and_rows_hash_differently(device):
    keys = torch.arange(1000, device=device)
    values = torch.ones(1000, 1, device=device)
    tables = [row for seed in (0, 1) for row in sketch_encode(keys, values, 3, 100, seed)]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_bad_input_is_refused(device):
    keys, values = torch.arange(4, device=device), torch.zeros(4, 2, device=device)
    for wrong, call in {
        "keys must be int64": lambda: sketch_encode(keys.int(), values, 1, 8, 0),
        "values must be float32": lambda: sketch_encode(keys, values.half(), 1, 8, 0),
        "4 keys but 3 values": lambda: sketch_encode(keys, values[:3], 1, 8, 0),
        "rows must be 1, 3 or 5, got 2": lambda: sketch_encode(keys, values, 2, 8, 0),
        "columns must be at least 1, got -8": lambda: sketch_encode(keys, values, 1, -8, 0),
        "table must be float32 of 3": lambda: sketch_decode(values, keys, 0),
        "table must be .1, 3 or 5 rows": lambda: sketch_decode(torch.zeros(4, 8, 2, device=device), keys, 0),
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            call()


def test_opcheck(device):
    keys, values = torch.arange(6, device=device), torch.randn(6, 2, device=device)
    torch.library.opcheck(torch.ops.oases.sketch_encode, (keys, values, 3, 16, 0, True))
    torch.library.opcheck(torch.ops.oases.sketch_decode, (torch.randn(3, 16, 2, device=device), keys, 0))
