"""Permute and unpermute against indexing by a stable argsort, forward and backward, and what they refuse."""

import pytest
import torch

from oases.kernels.permute import histogram, permute, unpermute

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# tokens, k, n, experts: one row, odd widths, several tiles of 128 slots, more tiles than a warp has lanes, more
# experts than slots, k = 1, nothing.
SHAPES = [
    (1, 1, 1, 1), (5, 2, 7, 3), (64, 2, 16, 8), (100, 3, 33, 5), (1100, 4, 8, 60), (3, 2, 8, 6200), (40, 1, 8, 4),
    (0, 2, 8, 4), (6, 0, 8, 4), (6, 2, 0, 4),
]  # fmt: skip


def routing(tokens, k, experts, device):
    return torch.randint(0, experts, (tokens, k), device=device)


def reference_permute(x, expert_ids):
    source = torch.argsort(expert_ids.flatten(), stable=True)
    return x[source // max(expert_ids.shape[1], 1)], source


def reference_unpermute(rows, source, weights, tokens):
    if not tokens:
        return rows if weights is None else rows + 0 * weights.sum()
    k = len(source) // tokens
    slots = rows[torch.argsort(source)].view(tokens, k, rows.shape[1])
    return (slots if weights is None else slots * weights[..., None]).sum(1)


@pytest.mark.parametrize(("tokens", "k", "n", "experts"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=str)
def test_rows_are_grouped_in_token_order(device, tokens, k, n, experts, dtype, ids):
    x = torch.randn(tokens, n, device=device, dtype=dtype)
    expert_ids = routing(tokens, k, experts, device)
    rows, source, counts = permute(x, expert_ids.to(ids), experts)
    expected, expected_source = reference_permute(x, expert_ids)
    assert torch.equal(source, expected_source)
    assert torch.equal(rows, expected)
    assert torch.equal(counts, torch.bincount(expert_ids.flatten(), minlength=experts))
    assert torch.equal(histogram(expert_ids.to(ids), experts), counts)


@pytest.mark.parametrize(("tokens", "k", "n", "experts"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("weights_dtype", [None, "float32", "rows"])
def test_round_trip_and_gradients(device, tokens, k, n, experts, dtype, weights_dtype):
    expert_ids = routing(tokens, k, experts, device)
    x = torch.randn(tokens, n, device=device).to(dtype)
    weights = None
    if weights_dtype is not None:
        weights = torch.rand(tokens, k, device=device).to(torch.float32 if weights_dtype == "float32" else dtype)
    grad = torch.randn(tokens, n, device=device).to(dtype)

    def run(permute, unpermute, widen):
        inputs = [widen(t).detach().requires_grad_() for t in (x, weights) if t is not None]
        rows, source = permute(inputs[0])
        y = unpermute(rows.square(), source, inputs[1] if weights is not None else None, tokens)
        y.backward(widen(grad))
        return y, *(t.grad for t in inputs)

    got = run(lambda x: permute(x, expert_ids, experts)[:2], unpermute, lambda t: t)
    expected = run(lambda x: reference_permute(x, expert_ids), reference_unpermute, torch.Tensor.double)
    for mine, theirs in zip(got, expected, strict=True):
        scale = theirs.abs().max().item() if theirs.numel() else 1
        tolerance = TOLERANCES[dtype] * max(1, scale)
        torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=TOLERANCES[dtype])


def test_gradcheck_of_parts_in_fp32(device):
    expert_ids = torch.tensor([[0, 2], [2, 2], [1, 0]], device=device)
    x = torch.randn(3, 5, device=device, requires_grad=True)
    weights = torch.rand(3, 2, device=device, requires_grad=True)
    _, source, _ = permute(x, expert_ids, 3)
    rows = torch.randn(6, 5, device=device, requires_grad=True)
    y = unpermute(rows, source, weights, 3)
    expected = reference_unpermute(rows, source, weights, 3)
    grad = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad(y, (rows, weights), grad),
        torch.autograd.grad(expected, (rows, weights), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    (through_rows,) = torch.autograd.grad(permute(x, expert_ids, 3)[0], x, rows.detach())
    (expected_rows,) = torch.autograd.grad(reference_permute(x, expert_ids)[0], x, rows.detach())
    torch.testing.assert_close(through_rows, expected_rows)


def test_nan_stays_in_its_token(device):
    x = torch.ones(4, 3, device=device)
    x[1, 2], x[2, 0] = float("nan"), float("inf")
    expert_ids = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], device=device)
    rows, source, _ = permute(x, expert_ids, 2)
    y = unpermute(rows, source, torch.full((4, 2), 0.5, device=device), 4)
    torch.testing.assert_close(y, x, equal_nan=True)


def test_views_with_strides_and_odd_offsets(device):
    expert_ids = routing(4, 10, 5, device).t()
    x = torch.randn(10, 40, device=device)[:, 1:33]
    rows, source, _ = permute(x, expert_ids, 5)
    expected, _ = reference_permute(x, expert_ids)
    assert torch.equal(rows, expected)
    # Whole rows from an address that 16 does not divide.
    flat = torch.randn(40 * 8 + 1, device=device)[1:].view(40, 8)
    y = unpermute(flat, source, torch.ones(4, 10, device=device).t(), 10)
    torch.testing.assert_close(y, reference_unpermute(flat, source, None, 10))


def test_same_bits_on_every_run(device):
    expert_ids = routing(900, 4, 7, device)
    rows, source, _ = permute(torch.randn(900, 32, device=device), expert_ids, 7)
    weights = torch.rand(900, 4, device=device)
    first = unpermute(rows, source, weights, 900)
    assert all(torch.equal(first, unpermute(rows, source, weights, 900)) for _ in range(3))


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**62)])
def test_an_expert_out_of_range_is_named(device, bad):
    expert_ids = torch.zeros(600, 2, dtype=torch.int64, device=device)
    expert_ids[580, 1] = bad
    expert_ids[590, 0] = bad
    with pytest.raises(
        RuntimeError, match=rf"histogram: the expert id of slot 1161 is {bad}, which is not in \[0, 4\)"
    ):
        histogram(expert_ids, 4)
    with pytest.raises(RuntimeError, match=f"permute: the expert id of slot 1161 is {bad}"):
        permute(torch.zeros(600, 3, device=device), expert_ids, 4)


def test_without_a_check_an_id_out_of_range_counts_as_the_nearest(device):
    ids = torch.tensor([[0, 5], [-3, 1], [2**40, -(2**62)]], device=device)
    x = torch.randn(3, 4, device=device)
    assert histogram(ids, 4, check=False).tolist() == [3, 1, 0, 2]
    for found, expected in zip(permute(x, ids, 4, check=False), permute(x, ids.clamp(0, 3), 4), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match=r"which is not in \[0, 0\)"):
        histogram(ids, 0, check=False)


def test_bad_input_is_refused(device):
    x, ids = torch.zeros(4, 3, device=device), torch.zeros(4, 2, dtype=torch.int64, device=device)
    rows, source = torch.zeros(8, 3, device=device), torch.arange(8, device=device)
    for wrong, call in {
        "x must be": lambda: permute(x[0], ids, 2),
        "takes float32": lambda: permute(x.double(), ids, 2),
        "expert_ids must be int64 or int32": lambda: permute(x, ids.float(), 2),
        r"expert_ids must be \[tokens, k\]": lambda: histogram(ids[0], 2),
        "num_experts must be from 0": lambda: histogram(ids, -3),
        "x has 4 tokens but expert_ids has 3": lambda: permute(x, ids[:3], 2),
        "source must be int64": lambda: unpermute(rows, source[:7], None, 4),
        "8 rows cannot be k rows for each of 3 tokens": lambda: unpermute(rows, source, None, 3),
        "for each of -4 tokens": lambda: unpermute(rows, source, None, -4),
        r"weights must be \[4, 2\]": lambda: unpermute(rows, source, torch.ones(2, 4, device=device), 4),
        "weights must be float32": lambda: unpermute(rows, source, torch.ones(4, 2, device=device).double(), 4),
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            call()


@pytest.mark.parametrize("bad", [[0, 0, 1, 2], [0, 1, 2, 4], [-1, 1, 2, 3]])
def test_a_source_that_is_no_permutation(device, bad):
    rows, source = torch.ones(4, 3, device=device), torch.tensor(bad, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="source must name every slot from 0 to 3 once; it leaves out 1"):
            unpermute(rows, source, None, 2)
    else:
        assert unpermute(rows, source, None, 2).isnan().any()


@pytest.mark.long
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(device, weighted):
    ids = routing(6, 2, 3, device)
    x = torch.randn(6, 4, device=device, requires_grad=True)
    rows, source, _ = permute(x.detach(), ids, 3)
    weights = torch.rand(6, 2, device=device, requires_grad=True) if weighted else None
    torch.library.opcheck(torch.ops.oases.histogram, (ids, 3))
    torch.library.opcheck(torch.ops.oases.permute, (x, ids, 3))
    torch.library.opcheck(torch.ops.oases.unpermute, (rows.requires_grad_(), source, weights, 6))


def test_backward_refuses_rows_that_do_not_fit(device):
    grad, source = torch.ones(2, 3, device=device), torch.arange(4, device=device)
    weights, backward = torch.ones(2, 2, device=device), torch.ops.oases.unpermute_backward
    for wrong, call in {
        "rows and weights go together": lambda: backward(grad, None, source, weights),
        "rows must have the shape": lambda: backward(grad, grad, source, weights),
        "rows is torch.float16|rows is Half": lambda: backward(
            grad, torch.ones(4, 3).to(device).half(), source, weights
        ),
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            call()
