"""Blocks for tests of stacks, and their stacks compared with the unsplit model in double precision."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack
from oases.core.blocks.sharding import sharded_parameters
from oases.extension import OverlapScheduler
from oases.layers.linear import shard

WIDTH = 16


def reset_all_totals():
    """Forget what groups of earlier tests have sent, those that a forked rank inherited included."""
    for scheduler in OverlapScheduler.all().values():
        scheduler.reset_totals()


class Mlp(nn.Module):
    """Norm, column, GELU, row; bias and residual after the sum. Replicated parameters on both sides of it."""

    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, up, down

    def partial(self, x):
        return self.down.partial(F.gelu(self.up.partial(self.norm(x))))

    def combine(self, x, y):
        return x + y + self.down.bias


class PlainProducts(Mlp):
    """The same with torch's own matmul at the end, whose weight gradient is neither deferred nor skipped."""

    def partial(self, x):
        return F.linear(F.gelu(self.up.partial(self.norm(x))), self.down.weight)


class ScaledResult(Mlp):
    """The row-parallel matmul is read before its all-reduce, so recomputation must not skip it."""

    def partial(self, x):
        return 2 * self.down.partial(F.gelu(self.up.partial(self.norm(x)))).tanh().atanh() / 2


class Dropping(Mlp):
    """Dropout on this rank's features and again after the all-reduce."""

    def partial(self, x):
        return self.down.partial(F.dropout(F.gelu(self.up.partial(self.norm(x))), 0.5))

    def combine(self, x, y):
        return x + F.dropout(y + self.down.bias, 0.5)


class Passing(nn.Module):
    """A block whose partial(x) is `x` itself: nothing is computed before the sum."""

    def partial(self, x):
        return x

    def combine(self, x, y):
        return x + y


def plain_blocks(num_blocks, dtype=torch.float64):
    torch.manual_seed(3)
    blocks = []
    for _ in range(num_blocks):
        norm = nn.LayerNorm(WIDTH, dtype=dtype)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        blocks.append((norm, nn.Linear(WIDTH, 32, dtype=dtype), nn.Linear(32, WIDTH, dtype=dtype)))
    return blocks


def plain_forward(blocks, x):
    for norm, up, down in blocks:
        x = x + down(F.gelu(up(norm(x))))
    return x


def make_stack(blocks, group, kind=Mlp, **options):
    return OverlappedStack(
        [
            kind(
                copy.deepcopy(norm),
                OverlappedColumnLinear.from_linear(up, process_group=group),
                OverlappedRowLinear.from_linear(down, process_group=group),
            )
            for norm, up, down in blocks
        ],
        process_group=group,
        **options,
    )


def compare(stack, blocks, group, x, grad):
    reference = x.clone().requires_grad_()
    for layer in (layer for block in blocks for layer in block):
        layer.zero_grad()
    expected = plain_forward(blocks, reference)
    expected.backward(grad)
    stack.zero_grad()
    mine = x.clone().requires_grad_()
    y = stack(mine)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.backward(grad)
    torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-12, atol=1e-12)
    dims = {name: dim for name, _, dim in sharded_parameters(stack)}
    for index, block in enumerate(blocks):
        for layer, name in zip(block, ("norm", "up", "down"), strict=True):
            for key, parameter in layer.named_parameters():
                path = f"blocks.{index}.{name}.{key}"
                expected_grad = shard(parameter.grad, dims.get(path), group)
                torch.testing.assert_close(stack.get_parameter(path).grad, expected_grad, rtol=1e-12, atol=1e-12)


def check_exact(num_blocks, schedule, sub_batches, batch, recompute="none", kind=Mlp):
    group = dist.group.WORLD
    blocks = plain_blocks(num_blocks)
    stack = make_stack(blocks, group, kind, schedule=schedule, sub_batches=sub_batches, recompute=recompute)
    x, grad = torch.randn(2, batch, 3, WIDTH, dtype=torch.float64)
    compare(stack, blocks, group, x, grad)


def sums_per_layer(schedule):
    """All-reduces per layer of two blocks and sub-batch; a reduce-scatter and an all-gather count as one."""
    sums = [op for op in schedule.collectives if op.kind != "all_to_all"]
    halves = sum(2 if op.kind == "all_reduce" else 1 for op in sums)
    return halves / (schedule.num_blocks * schedule.num_sub_batches)
