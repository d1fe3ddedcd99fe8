"""Row bitmaps against numpy's packbits."""

import numpy as np
import pytest
import torch

from oases.kernels.sparse import bitmap_pack, bitmap_unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference_pack(x):
    return torch.from_numpy(np.packbits((x.float().cpu() != 0).any(1).numpy(), bitorder="little"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 64, 1000, 20_000])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 31, 64, 1100])
def test_pack_and_unpack(device, dtype, rows, n):
    if rows * n > 1 << 20:
        rows = 900
    x = torch.zeros(rows, n, device=device, dtype=dtype)
    if x.numel():
        used = torch.rand(rows, device=device) < 0.3
        x[used, torch.randint(0, n, (int(used.sum()),), device=device)] = 1
    bits = bitmap_pack(x)
    assert bits.dtype == torch.uint8
    assert torch.equal(bits.cpu(), reference_pack(x))
    assert torch.equal(bitmap_unpack(bits, rows), (x != 0).any(1).nonzero().flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 8, 300])
def test_what_counts_as_zero(device, dtype, n):
    tiny = torch.tensor(1, dtype=torch.int16).view(torch.bfloat16) if dtype == torch.bfloat16 else None
    values = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40 if dtype == torch.float32 else 1e-7, -1.0]
    x = torch.zeros(len(values), n, dtype=dtype)
    x[:, n - 1] = torch.tensor(values, dtype=dtype)
    if tiny is not None:
        x[5, n - 1] = tiny
    assert bitmap_unpack(bitmap_pack(x.to(device)), len(values)).tolist() == [2, 3, 4, 5, 6]
    assert bitmap_unpack(bitmap_pack(torch.full((9, n), -0.0, dtype=dtype, device=device)), 9).tolist() == []


def test_views_with_strides_and_odd_offsets(device):
    x = (torch.rand(50, 40, device=device) < 0.02).float()
    assert torch.equal(bitmap_pack(x.t()).cpu(), reference_pack(x.t()))
    assert torch.equal(bitmap_pack(x[:, 3:11]).cpu(), reference_pack(x[:, 3:11]))
    odd = x.flatten()[1:1985].view(62, 32).half()
    assert torch.equal(bitmap_pack(odd).cpu(), reference_pack(odd))
    shifted = torch.zeros(257, device=device)[1:].view(32, 8)
    assert not bitmap_pack(shifted).any()


def test_bits_past_the_last_row_do_not_count(device):
    bits = torch.full((2,), 255, dtype=torch.uint8, device=device)
    assert bitmap_unpack(bits, 11).tolist() == list(range(11))


def test_bad_input_is_refused(device):
    bits = torch.zeros(2, dtype=torch.uint8, device=device)
    for wrong, call in {
        "bitmap_pack: takes float32": lambda: bitmap_pack(torch.zeros(3, 3, device=device).double()),
        "x must be": lambda: bitmap_pack(torch.zeros(3, device=device)),
        "rows must not be negative, got -1": lambda: bitmap_unpack(bits, -1),
        r"the bits of 17 rows are uint8 \[3\]": lambda: bitmap_unpack(bits, 17),
        r"the bits of 8 rows are uint8 \[1\]": lambda: bitmap_unpack(bits, 8),
        "uint8": lambda: bitmap_unpack(bits.int(), 16),
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            call()


def test_opcheck(device):
    x = torch.randn(19, 4, device=device)
    torch.library.opcheck(torch.ops.oases.bitmap_pack, (x,))
    torch.library.opcheck(torch.ops.oases.bitmap_unpack, (bitmap_pack(x), 19))
