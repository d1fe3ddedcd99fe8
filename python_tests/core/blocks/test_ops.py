"""The torch.library face: opcheck, and torch.compile without graph breaks."""

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, make_stack, plain_blocks
from torch._dynamo.testing import CompileCounterWithBackend

from oases import OverlappedColumnLinear, OverlappedRowLinear
from oases.core.execution.group import group_name


def check_opcheck():
    name = group_name(dist.group.WORLD)
    x = torch.randn(6, 4, requires_grad=True)
    weight, bias = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    for op in (torch.ops.oases.column_linear, torch.ops.oases.row_linear):
        for sequence_parallel in (False, True):
            for b in (bias, None):
                torch.library.opcheck(op, (x, weight, b, name, 2, sequence_parallel))


@pytest.mark.long
def test_opcheck(two_ranks):
    two_ranks.run(check_opcheck)


def check_compile():
    torch.manual_seed(0)
    model = torch.nn.Sequential(OverlappedColumnLinear(8, 16), torch.nn.GELU(), OverlappedRowLinear(16, 8))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 8)
    results = []
    for run in (model, compiled):
        mine = x.clone().requires_grad_()
        model.zero_grad()
        y = run(mine)
        y.square().sum().backward()
        results.append([y, mine.grad, *(p.grad.clone() for p in model.parameters())])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.long
def test_compile_fullgraph(two_ranks):
    two_ranks.run(check_compile)


def check_compiled_blocks(schedule, recompute):
    """Blocks of a stack compiled one by one: the same gradients, and one graph per method however often it runs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    plain = plain_blocks(3)
    eager = make_stack(plain, dist.group.WORLD, schedule=schedule, recompute=recompute)
    traced = make_stack(plain, dist.group.WORLD, schedule=schedule, recompute=recompute)
    for b, block in enumerate(traced.blocks):
        traced.blocks[b] = torch.compile(block, backend=counter, fullgraph=True)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    frames = []
    for _ in range(3):
        results = []
        for stack in (eager, traced):
            mine = x.clone().requires_grad_()
            stack.zero_grad()
            y = stack(mine)
            y.square().sum().backward()
            results.append([y, mine.grad, *(p.grad for p in stack.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)
        frames.append(counter.frame_count)
    assert frames[0] >= 2
    assert frames[1] == frames[2], "a later step compiles nothing anew"


@pytest.mark.few(1, 2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["sync", "oases"])
def test_compiled_blocks_in_a_stack(two_ranks, schedule, recompute):
    two_ranks.run(check_compiled_blocks, schedule, recompute)


def test_blocks_compiled_in_place_are_refused():
    stack = make_stack(plain_blocks(2), None)
    stack.blocks[1].compile(backend="aot_eager")
    with pytest.raises(ValueError, match=r"compiled by .compile\(\), which compiles forward\(\) alone"):
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))
