"""The torch.library face: opcheck, and torch.compile without graph breaks."""

import torch
import torch.distributed as dist

from oases import OverlappedColumnLinear, OverlappedRowLinear
from oases.parallel.group import group_name


def check_opcheck():
    name = group_name(dist.group.WORLD)
    x = torch.randn(6, 4, requires_grad=True)
    weight, bias = torch.randn(3, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    for op in (torch.ops.oases.column_linear, torch.ops.oases.row_linear):
        for sequence_parallel in (False, True):
            for b in (bias, None):
                torch.library.opcheck(op, (x, weight, b, name, 2, sequence_parallel))


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


def test_compile_fullgraph(two_ranks):
    two_ranks.run(check_compile)
