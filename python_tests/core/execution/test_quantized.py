"""Quantised collectives: bytes, error feedback, inputs that are hard to quantise; stacks and linears with them."""

import pytest
import torch
import torch.distributed as dist

import oases
from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack
from oases.core.execution.communication import add_wire, wire_type
from oases.core.execution.group import group_of, scheduler_of
from oases.errors import UsageError
from oases.layers import sharded_parameters
from oases.models.gpt import GPTConfig, transformer_blocks


def gathered(x):
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return torch.stack(found)


def reduced(x):
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    y = x.clone()
    scheduler.wait(scheduler.all_reduce(y, "quantised", wire="int8"))
    return y


def check_special():
    rank = dist.get_rank()
    x = torch.ones(400)
    x[130] = [float("nan"), 1.0][rank]
    x[300] = [1.0, float("inf")][rank]
    y = reduced(x)
    assert torch.equal(y[:128], torch.full((128,), 2.0))
    assert bool(y[128:256].isnan().all())
    assert bool(y[256:384].isnan().all())
    assert torch.equal(y[384:], torch.full((16,), 2.0))
    assert reduced(torch.empty(0)).shape == (0,)
    half = reduced(torch.full((300,), 1.5, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, torch.full((300,), 3.0, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="takes float32, float16 and bfloat16, got Double"):
        reduced(torch.ones(4, dtype=torch.float64))


def test_what_is_no_number_is_seen_and_other_types(two_ranks):
    two_ranks.run(check_special)


def check_bad_input():
    """Outliers, overflows, NaN, small and empty tensors, and other types: right, or an error with the type."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    huge = torch.zeros(200)
    huge[3] = 3e38 * (1 - 2 * rank)
    huge[150] = 1.0
    y = reduced(huge)  # the outliers cancel, within a step of them
    assert float(y[:128].abs().max()) <= 3e38 * 2 / 127
    assert torch.equal(y[128:], reduced(huge[128:]))
    assert bool(reduced(torch.full((130,), 3e38)).isnan().all())  # the sum is infinite
    half = reduced(torch.tensor([60000.0] * 128 + [1.5] * 10, dtype=torch.float16))
    assert bool(half[:128].isinf().all())  # beyond float16, as any sum of such numbers
    assert torch.equal(half[128:], torch.full((10,), 3.0, dtype=torch.float16))
    negative = torch.ones(128)
    negative[0] = -float("inf") if rank else 1.0
    assert bool(reduced(negative).isnan().all())
    for n in (1, 127, 129, 128 * size - 1):
        assert reduced(torch.full((n,), 2.0)).tolist() == [2.0 * size] * n

    def run(kind, x):
        rows = [len(x)] * size
        if kind == "reduce_scatter":
            found = torch.empty_like(x)
            ticket = scheduler.reduce_scatter(found, torch.stack([x] * size), kind, "int8")
        elif kind == "all_gather":
            found = x.new_empty(size, *x.shape)
            ticket = scheduler.all_gather(found, x, kind, "int8")
        else:
            found = x.new_empty(size * len(x), *x.shape[1:])
            ticket = scheduler.all_to_all(found, torch.cat([x] * size), rows, rows, kind, "int8")
        scheduler.wait(ticket)
        return found

    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert run(kind, torch.empty(0)).numel() == 0
        bad = torch.ones(300)
        bad[140] = float("nan")
        found = run(kind, bad).view(-1, 300)
        assert bool(found[:, 128:256].isnan().any(1).all())
        assert bool(found[:, :128].isfinite().all() and found[:, 256:].isfinite().all())
        with pytest.raises(ValueError, match="takes float32, float16 and bfloat16, got Double"):
            run(kind, torch.ones(4, dtype=torch.float64))
        with pytest.raises(ValueError, match="takes float32, float16 and bfloat16, got Long"):
            run(kind, torch.ones(4, dtype=torch.int64))


def test_bad_input(two_ranks):
    two_ranks.run(check_bad_input)


def check_others():
    rank, size = dist.get_rank(), dist.get_world_size()
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    tolerance = 1 / 127
    x = torch.randn(size, 60, 5)
    everyone = gathered(x)
    mine = torch.empty(60, 5)
    scheduler.wait(scheduler.reduce_scatter(mine, x, "parts", "int8"))
    most = float(everyone.abs().max())
    assert float((mine - everyone.sum(0)[rank]).abs().max()) <= size * most * tolerance
    all_parts = torch.empty(size, 60, 5)
    scheduler.wait(scheduler.all_gather(all_parts, x[0].contiguous(), "whole", "int8"))
    assert float((all_parts - everyone[:, 0]).abs().max()) <= most * tolerance
    same = gathered(all_parts)
    assert all(torch.equal(same[0], each) for each in same)
    sent, received = [3 + rank + other for other in range(size)], [3 + rank + other for other in range(size)]
    rows, found, exact = torch.randn(sum(sent), 7), torch.empty(sum(received), 7), torch.empty(sum(received), 7)
    scheduler.wait(scheduler.all_to_all(found, rows, sent, received, "rows", "int8"))
    dist.all_to_all_single(exact, rows, received, sent)
    assert float((found - exact).abs().max()) <= float(exact.abs().max()) * tolerance
    start = sum(received[:rank])
    assert torch.equal(found[start : start + received[rank]], exact[start : start + received[rank]])


def test_other_collectives(two_ranks):
    two_ranks.run(check_others)


def check_bytes():
    """Bytes of one sum, by the scheduler's count, and those that it saved; and samples of its error."""
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    scheduler.reset_totals()
    n = 128 * 64
    scheduler.wait(scheduler.all_reduce(torch.randn(n), "counted", wire="int8"))
    return scheduler.totals()["counted"].bytes, scheduler.totals()["counted"].saved_bytes, n


def test_bytes_are_those_of_codes_and_scales(two_ranks):
    for counted, saved, n in two_ranks.run(check_bytes):
        assert counted == n + n // 128 * 4
        assert saved == 4 * n - counted


def check_report():
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    for _ in range(62):
        scheduler.wait(scheduler.all_reduce(torch.randn(1280), "reported", wire="int8"))
    found = oases.report()
    row = next(row for row in found.others if row.where == "reported")
    assert row.saved_bytes == 62 * (4 * 1280 - 1320)
    assert row.error_samples >= 1
    assert 0.004 < row.relative_error < 0.01
    line = next(line for line in str(found).splitlines() if line.startswith("reported"))
    assert line.split()[-2:] == ["0.2", f"{row.relative_error:.1e}"]
    assert "saved MB" in str(found)
    assert found.json()["others"]


def test_the_report_has_saved_bytes_and_errors(two_ranks):
    two_ranks.run(check_report)


def check_samples():
    """Relative errors of sampled sums, by the ranks, beside those of the same kind of sums, measured exactly."""
    scheduler = scheduler_of(dist.group.WORLD)
    add_wire(dist.group.WORLD)
    exact, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(62):  # one in 61 is sampled
        x = torch.randn(4096, generator=generator)
        everyone = gathered(x).sum(0)
        scheduler.wait(scheduler.all_reduce(x, "sampled", wire="int8"))
        exact.append(float((x - everyone).norm() / everyone.norm()))
    return scheduler.errors()["sampled"], sum(exact) / len(exact)


def test_sampled_errors_are_equal_on_all_ranks_and_those_of_the_sums(two_ranks):
    (first, expected), (second, _) = two_ranks.run(check_samples)
    assert first == second
    samples, total = first
    assert samples >= 1
    assert 0.8 * expected < total / samples < 1.2 * expected


def check_residual():
    """Mean of sums of one tensor, with and without error feedback, beside the tensor's exact sum."""
    scheduler, steps = scheduler_of(dist.group.WORLD), 50
    add_wire(dist.group.WORLD)
    x = torch.randn(3000, generator=torch.Generator().manual_seed(300_000 + dist.get_rank())) * 1e-3
    x[::64] *= 1000
    expected = gathered(x).sum(0)
    residual, means = torch.zeros_like(x), torch.zeros(2, 3000)
    for _ in range(steps):
        for mean, kept in zip(means, (None, residual), strict=True):
            y = x.clone()
            scheduler.wait(scheduler.all_reduce(y, "feedback", wire="int8", residual=kept))
            mean += y / steps
    plain, fed = ((mean - expected).norm() / expected.norm() for mean in means)
    same = gathered(means[1])
    assert torch.equal(same[0], same[1])
    bad = x.clone()
    bad[5] = float("nan")
    scheduler.wait(scheduler.all_reduce(bad, "feedback", wire="int8", residual=residual))
    assert bool(bad[:128].isnan().all())
    assert bool(residual.isfinite().all())
    with pytest.raises(ValueError, match=r"residual must be float32 of the shape \[3000\], got Float of \[10\]"):
        scheduler.all_reduce(x, "feedback", wire="int8", residual=torch.zeros(10))
    with pytest.raises(ValueError, match="only a sum on a wire has a residual"):
        scheduler.all_reduce(x, "feedback", residual=residual)
    return float(plain), float(fed)


def test_what_rounding_loses_is_sent_later(two_ranks):
    for plain, fed in two_ranks.run(check_residual):
        assert fed < plain / 5


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def check_stack(sequence_parallel):
    """Outputs and gradients beside those of exact sums; equal on all ranks."""
    torch.manual_seed(0)
    blocks = transformer_blocks(GPTConfig(hidden=64, layers=2, heads=4, sequence=32), dist.group.WORLD)
    x = torch.randn(4, 32, 64)
    found = {}
    for wire in (None, "int8"):
        stack = OverlappedStack(blocks, schedule="oases", wire_dtype=wire, sequence_parallel=sequence_parallel)
        stack.zero_grad()
        inputs = x.clone().requires_grad_()
        output = stack(inputs)
        output.square().mean().backward()
        cut = {id(parameter) for _, parameter, _ in sharded_parameters(stack)}
        whole = [parameter.grad for parameter in stack.parameters() if id(parameter) not in cut]
        found[wire] = [output, inputs.grad, *(parameter.grad for parameter in stack.parameters())]
        for equal in (output, inputs.grad, *whole):
            same = gathered(equal.detach())
            assert all(torch.equal(same[0], each) for each in same)
    errors = [relative(ours, exact) for ours, exact in zip(found["int8"], found[None], strict=True)]
    assert 0 < max(errors) < 0.05
    with pytest.raises(UsageError, match="the wire_dtype differs"):
        OverlappedStack(blocks, wire_dtype=["int8", None][dist.get_rank()])(x)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_stacks(two_ranks, sequence_parallel):
    two_ranks.run(check_stack, sequence_parallel)


def check_linears(sequence_parallel):
    torch.manual_seed(0)
    up, down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    x = torch.randn(4, 32, 64)
    first = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16) if sequence_parallel else slice(None)
    exact = x.clone().requires_grad_()
    down(up(exact).tanh()).square().sum().backward()
    found = x[:, first].clone().requires_grad_()
    options = {"wire_dtype": "int8", "num_chunks": 2, "sequence_parallel": sequence_parallel}
    column = OverlappedColumnLinear.from_linear(up, **options)
    row = OverlappedRowLinear.from_linear(down, **options)
    y = row(column(found).tanh())
    assert relative(y, down(up(x).tanh())[:, first]) < 0.02
    assert not torch.equal(y, down(up(x).tanh())[:, first])
    y.square().sum().backward()
    assert relative(found.grad, exact.grad[:, first]) < 0.03
    assert relative(row.weight.grad, down.weight.grad.chunk(2, 1)[dist.get_rank()]) < 0.03
    scheduler_of(group_of(add_wire(dist.group.WORLD))).reset_totals()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linears(two_ranks, sequence_parallel):
    two_ranks.run(check_linears, sequence_parallel)


def test_linears_refuse_other_types():
    with pytest.raises(UsageError, match=r"linear must be 'int8' or None, got 'bfloat16'"):
        OverlappedRowLinear(4, 4, wire_dtype="bfloat16")


def test_names_of_wires():
    assert wire_type("bfloat16") is torch.bfloat16
    assert wire_type(None) is None
    assert wire_type("int8") == "int8"
    for wrong in ("int7", torch.int8, 8, "int8:", "fp8", "int4", "int8:rotated", "int8:stochastic"):
        with pytest.raises(UsageError, match=r"torch.bfloat16, 'bfloat16', 'float16', 'int8' or None, got "):
            wire_type(wrong)
