"""Column and row layers against nn.Linear on two ranks: outputs, all gradients, shapes, dtypes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear
from oases.core.execution.group import scheduler_of
from oases.layers.linear import shard

IN, OUT = 12, 8


def small_integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values whose matmuls are exact in fp32 and bf16, so that order of summation cannot matter."""
    return torch.randint(-2, 3, shape).to(dtype)


def reference(bias: bool, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(small_integers(*parameter.shape))
    return linear


def check_column(shape, bias, dtype, num_chunks, sequence_parallel, gather_output):
    torch.manual_seed(1)
    group = dist.group.WORLD
    linear = reference(bias, dtype)
    layer = OverlappedColumnLinear.from_linear(
        linear, process_group=group, num_chunks=num_chunks,
        sequence_parallel=sequence_parallel, gather_output=gather_output,
    )  # fmt: skip
    whole = small_integers(*shape, IN, dtype=dtype).requires_grad_()
    grad = small_integers(*shape, OUT, dtype=dtype)
    expected = linear(whole)
    expected.backward(grad)

    mine = shard(whole.detach(), -2 if sequence_parallel else None, group).clone().requires_grad_()
    y = layer(mine)
    part = (lambda t: t) if gather_output else (lambda t: shard(t, -1, group))
    torch.testing.assert_close(y, part(expected), rtol=0, atol=0)
    y.backward(part(grad))
    torch.testing.assert_close(mine.grad, shard(whole.grad, -2 if sequence_parallel else None, group), rtol=0, atol=0)
    torch.testing.assert_close(layer.weight.grad, shard(linear.weight.grad, 0, group), rtol=0, atol=0)
    if bias:
        torch.testing.assert_close(layer.bias.grad, shard(linear.bias.grad, 0, group), rtol=0, atol=0)


def check_row(shape, bias, dtype, num_chunks, sequence_parallel, input_is_parallel):
    torch.manual_seed(1)
    group = dist.group.WORLD
    linear = reference(bias, dtype)
    layer = OverlappedRowLinear.from_linear(
        linear, process_group=group, num_chunks=num_chunks,
        sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel,
    )  # fmt: skip
    whole = small_integers(*shape, IN, dtype=dtype).requires_grad_()
    grad = small_integers(*shape, OUT, dtype=dtype)
    expected = linear(whole)
    expected.backward(grad)

    cut = -1 if input_is_parallel else None
    mine = shard(whole.detach(), cut, group).clone().requires_grad_()
    y = layer(mine)
    sequence = -2 if sequence_parallel else None
    torch.testing.assert_close(y, shard(expected, sequence, group), rtol=0, atol=0)
    y.backward(shard(grad, sequence, group))
    torch.testing.assert_close(mine.grad, shard(whole.grad, cut, group), rtol=0, atol=0)
    torch.testing.assert_close(layer.weight.grad, shard(linear.weight.grad, 1, group), rtol=0, atol=0)
    if bias:
        torch.testing.assert_close(layer.bias.grad, linear.bias.grad, rtol=0, atol=0)


CASES = [
    # leading shape, bias, dtype, chunks, sequence parallel
    ((5,), True, torch.float32, 1, False),
    ((5,), True, torch.float32, 2, False),
    ((7, 3), False, torch.float32, 4, False),
    ((), True, torch.float32, 2, False),
    ((0, 3), True, torch.float32, 2, False),
    ((2, 3, 4), True, torch.bfloat16, "auto", False),
    ((64, 4), True, torch.float32, "auto", False),
    ((3, 4), True, torch.float32, 2, True),
    ((4,), False, torch.float32, 1, True),
    ((2, 2, 6), True, torch.bfloat16, 3, True),
    # fewer batch entries than chunks: cut along the sequence
    ((14,), True, torch.float32, 3, True),
    ((1, 14), True, torch.float32, 4, True),
    ((2, 10), False, torch.bfloat16, 3, True),
    ((1, 4), True, torch.float32, 100, True),
    ((0, 4), True, torch.float32, 2, True),
    ((2, 0), True, torch.float32, 2, True),
]


@pytest.mark.few(16)
@pytest.mark.parametrize("option", [False, True], ids=["plain", "gather_or_scatter"])
@pytest.mark.parametrize(("shape", "bias", "dtype", "num_chunks", "sequence_parallel"), CASES)
def test_column_equals_linear(two_ranks, shape, bias, dtype, num_chunks, sequence_parallel, option):
    two_ranks.run(check_column, shape, bias, dtype, num_chunks, sequence_parallel, option)


@pytest.mark.parametrize("option", [False, True], ids=["scatter", "plain"])
@pytest.mark.parametrize(("shape", "bias", "dtype", "num_chunks", "sequence_parallel"), CASES)
def test_row_equals_linear(two_ranks, shape, bias, dtype, num_chunks, sequence_parallel, option):
    two_ranks.run(check_row, shape, bias, dtype, num_chunks, sequence_parallel, option)


def test_four_ranks(four_ranks):
    four_ranks.run(check_column, (6, 4), True, torch.float32, 3, False, True)
    four_ranks.run(check_row, (6, 4), True, torch.float32, 3, True, True)
    four_ranks.run(check_column, (1, 20), True, torch.float32, 3, True, False)
    four_ranks.run(check_row, (2, 20), True, torch.float32, 3, True, True)


def check_wire(cls, batch, sequence, num_chunks):
    layer = cls(IN, OUT, num_chunks=num_chunks, sequence_parallel=True)
    column = cls is OverlappedColumnLinear
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
    layer(torch.randn(batch, sequence // 2 if column else sequence, IN if column else IN // 2)).sum().backward()
    kind = "column" if column else "row"
    return [scheduler.totals()[f"{kind} {way}"].count for way in ("forward", "backward")]


@pytest.mark.parametrize("cls", [OverlappedColumnLinear, OverlappedRowLinear])
@pytest.mark.parametrize(
    ("batch", "sequence", "num_chunks", "collectives"),
    [(1, 14, 1, 1), (1, 14, 4, 4), (3, 20, 4, 4), (4, 20, 4, 4), (1, 6, 4, 3), (3, 4, 4, 3)],
)
def test_a_sequence_is_sent_in_num_chunks(two_ranks, cls, batch, sequence, num_chunks, collectives):
    for counts in two_ranks.run(check_wire, cls, batch, sequence, num_chunks):
        assert counts == [collectives] * 2


def check_pair_float():
    """Random floats through column -> GELU -> row: the pair as it is used, to rounding."""
    torch.manual_seed(2)
    up, down = nn.Linear(IN, 4 * IN), nn.Linear(4 * IN, IN)
    plain = nn.Sequential(up, nn.GELU(), down)
    parallel = nn.Sequential(
        OverlappedColumnLinear.from_linear(up, num_chunks=2),
        nn.GELU(),
        OverlappedRowLinear.from_linear(down, num_chunks=2),
    )
    x = torch.randn(6, 5, IN)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(a).square().sum().backward()
    parallel(b).square().sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(parallel[0].weight.grad, shard(up.weight.grad, 0, dist.group.WORLD))
    torch.testing.assert_close(parallel[2].bias.grad, down.bias.grad)


def test_column_row_pair(two_ranks):
    two_ranks.run(check_pair_float)


def check_autocast():
    layer = OverlappedRowLinear(IN, OUT, num_chunks=2)
    x = torch.randn(4, IN // 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    return y.dtype, x.grad.dtype, layer.weight.grad.dtype


def test_autocast(two_ranks):
    for dtypes in two_ranks.run(check_autocast):
        assert dtypes == (torch.bfloat16, torch.float32, torch.float32)


def check_same_whole_bias():
    torch.manual_seed(dist.get_rank())  # a user who did not seed the ranks alike
    return OverlappedRowLinear(IN, OUT).bias.tolist()


def test_whole_bias_is_drawn_once(two_ranks):
    first, second = two_ranks.run(check_same_whole_bias)
    assert first == second


@pytest.mark.parametrize("cls", [OverlappedColumnLinear, OverlappedRowLinear])
def test_group_of_one_is_nn_linear(cls):
    linear = nn.Linear(IN, OUT)
    layer = cls.from_linear(linear)
    x = torch.randn(3, IN)
    assert torch.equal(layer(x), linear(x))
    assert layer.state_dict().keys() == linear.state_dict().keys()
    assert torch.equal(layer.state_dict()["weight"], linear.weight)
    copy.deepcopy(layer).load_state_dict(linear.state_dict())
    assert "in_features=12, out_features=8, bias=True" in repr(layer)


def check_refusals():
    messages = []
    for make in (
        lambda: OverlappedColumnLinear(4, 7),
        lambda: OverlappedRowLinear(7, 4),
        lambda: OverlappedColumnLinear(4, 4, num_chunks=0),
        lambda: OverlappedColumnLinear(4, 4)(torch.randn(2, 5)),
        lambda: OverlappedColumnLinear(4, 4)(torch.randn(2, 4, dtype=torch.float64)),
        lambda: OverlappedRowLinear(4, 4, sequence_parallel=True)(torch.randn(1, 3, 2)),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def test_errors_name_the_value(two_ranks):
    column, row, chunks, features, dtype, sequence = two_ranks.run(check_refusals)[0]
    assert "out_features is 7" in column
    assert "degree 2" in column
    assert "1, 7" in column
    assert "in_features is 7" in row
    assert "num_chunks" in chunks
    assert "got 0" in chunks
    assert "last dimension is 5" in features
    assert "takes 4" in features
    assert "Double" in dtype
    assert "sequence of 3" in sequence
    assert "group size 2" in sequence


def test_from_linear_takes_dtype_and_device():
    layer = OverlappedColumnLinear.from_linear(nn.Linear(IN, OUT), dtype=torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert OverlappedRowLinear.from_linear(nn.Linear(IN, OUT), device="meta").weight.is_meta


def test_autocast_leaves_float64_as_it_is():
    layer = OverlappedColumnLinear(4, 6, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias), rtol=1e-12, atol=1e-12)


def check_frozen(sequence_parallel):
    """A frozen weight costs no matmul, and gradients of the input and the bias are those of one that trains."""
    for kind, width in ((OverlappedColumnLinear, 4), (OverlappedRowLinear, 4)):
        layer = kind(8, 8, dtype=torch.float64, sequence_parallel=sequence_parallel)
        found = []
        for trains in (True, False):
            layer.weight.requires_grad_(trains)
            layer.zero_grad()
            x = torch.arange(2 * 4 * (8 if kind is OverlappedColumnLinear else width), dtype=torch.float64)
            x = x.view(2, 4, -1).requires_grad_()
            y = layer(x)
            with torch.autograd.profiler.profile() as profile:
                y.square().sum().backward()
            matmuls = sum(each.name == "aten::mm" for each in profile.function_events)
            found.append((x.grad, layer.bias.grad, matmuls, layer.weight.grad is None))
        (input_grad, bias_grad, matmuls, _), (frozen_input, frozen_bias, fewer, none) = found
        torch.testing.assert_close(frozen_input, input_grad)
        torch.testing.assert_close(frozen_bias, bias_grad)
        assert none
        assert fewer == matmuls - 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_frozen_weight_costs_no_matmul(two_ranks, sequence_parallel):
    two_ranks.run(check_frozen, sequence_parallel)
