"""Calls of a stack of experts: gradients as autograd gives them, hooks, errors, compiled blocks, sharded weights."""

import re

import pytest
import torch
import torch.distributed as dist
from moe.expert_blocks import HIDDEN, Block, made
from moe.moe_layers import alone
from torch.nn.parallel import DistributedDataParallel

from oases.core.execution.executor import Context
from oases.core.execution.failure import FailedRankError
from oases.distributed.fsdp import FsdpUnit
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.moe.stack import ExpertStack


def sample(seed=0):
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randn(6, HIDDEN, dtype=torch.float64, requires_grad=True)


def gradients(stack, x, **options):
    stack.zero_grad()
    stack(x, **options).square().sum().backward()
    return [p.grad.clone() for p in stack.parameters()]


def assert_equal(found, expected):
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


class Fails(Block):
    """Fails on rank 1, behind its experts."""

    def after(self, x, y):
        if dist.get_rank() == 1 and self.training:
            raise ValueError("a value that is wrong")
        return super().after(x, y)


def check_error():
    blocks = made(placement="prophet")
    blocks[1].__class__ = Fails
    stack = ExpertStack(blocks)
    with pytest.raises(FailedRankError) as caught:
        stack(sample())
    return str(caught.value), stack.schedule


def test_an_error_names_op_and_line_on_all_ranks(two_ranks):
    for text, schedule in two_ranks.run(check_error):
        (line,) = [line for op, line in schedule.lines.items() if str(op) == "F 1.0"]
        where = rf"F 1\.0 \(expert stack \d+, line {line} of block_wise: block 1, sub-batch 0\)"
        assert re.search(f"rank 1 failed at {where}", text)
        assert "ValueError: a value that is wrong" in text


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("no such gradient")


class FailsLater(Block):
    def before(self, x):
        return super().before(FailsBackward.apply(x) if dist.get_rank() == 0 else x)


def check_error_of_the_backward_pass():
    blocks = made(placement="prophet")
    blocks[1].__class__ = FailsLater
    stack = ExpertStack(blocks)
    with pytest.raises(FailedRankError) as caught:
        stack(sample()).sum().backward()
    return str(caught.value)


def test_an_error_of_the_backward_pass_names_its_op(two_ranks):
    texts = two_ranks.run(check_error_of_the_backward_pass)
    assert all("rank 0 failed at B 1.0" in text and "no such gradient" in text for text in texts)


def check_autograd_grad(recompute):
    stack = ExpertStack(made(placement="prophet"), recompute=recompute)
    x = sample()
    expected = [*gradients(stack, x), x.grad]
    parameters = list(stack.parameters())
    assert_equal(torch.autograd.grad(stack(x).square().sum(), [*parameters, x]), expected)
    some = [parameters[0], parameters[-1]]
    assert_equal(torch.autograd.grad(stack(x).square().sum(), some), [expected[0], expected[len(parameters) - 1]])
    for parameter in parameters:
        parameter.requires_grad_(parameter is parameters[-1])
    (found,) = torch.autograd.grad(stack(x.detach()).square().sum(), [parameters[-1]])
    assert_equal([found], [expected[len(parameters) - 1]])


@pytest.mark.parametrize("recompute", [False, True])
def test_autograd_grad_finds_parameters(two_ranks, recompute):
    two_ranks.run(check_autograd_grad, recompute)


def check_ddp():
    stack = ExpertStack(made(placement="none", process_group=alone()), schedule="plain")
    mine = torch.stack([g.flatten().sum() for g in gradients(stack, sample())])
    everyone = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    wrapped, context, seen = DistributedDataParallel(stack), Context([]), []
    last = list(stack.blocks[-1].parameters())[-1]
    last.register_post_accumulate_grad_hook(lambda _: seen.append([name for name, _, _ in context.spans]))
    averaged = torch.stack([g.flatten().sum() for g in gradients(wrapped, sample(), context=context)])
    torch.testing.assert_close(averaged, sum(everyone) / 2, rtol=1e-12, atol=1e-12)
    assert "B 2.0" in seen[0]
    assert "B 0.0" not in seen[0], "gradients are handed over block by block"


def test_ddp_averages_as_blocks_are_done(two_ranks):
    two_ranks.run(check_ddp)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_give_the_same(recompute):
    stack = ExpertStack(made(placement="none"), schedule="plain", recompute=recompute)
    expected = gradients(stack, sample())
    stack.compile_blocks(backend="aot_eager")
    assert_equal(gradients(stack, sample()), expected)


def check_early():
    expected = gradients(ExpertStack(made(placement="prophet"), recompute=True), sample())
    stack, context = ExpertStack(made(placement="prophet"), recompute=True), Context([])
    y = stack(sample(), context=context)
    context.handles.recompute()
    context.handles.recompute()
    count = len([name for name, _, _ in context.spans if name.startswith("R")])
    y.square().sum().backward()
    found = [p.grad for p in stack.parameters()]
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    return count, len([name for name, _, _ in context.spans if name.startswith("R")])


def test_recomputing_early_changes_no_bit(two_ranks):
    assert two_ranks.run(check_early) == [(9, 9)] * 2


def check_sharded(recompute):
    """All but the experts in shards over the ranks; experts, whose group is of one rank, keep their own gradients."""
    stack = ExpertStack(made(placement="none", process_group=alone()), schedule="plain", recompute=recompute)
    expected = {}
    gradients(stack, sample())
    for name, parameter in stack.named_parameters():
        expected[name] = parameter.grad.clone()
        if ".experts.experts." not in name:
            dist.all_reduce(expected[name])
            expected[name] /= 2
    stack.zero_grad()
    units = []
    for number, block in enumerate(stack.blocks):
        own = list(block.experts.experts.parameters())
        units.append(FsdpUnit(block, dist.group.WORLD, dist.group.WORLD, f"block {number}", others=own))
    stack.shard(units)
    average = ShardedGradientAverager(units)
    loss = stack(sample()).square().sum()
    with average.overlapped():
        loss.backward()
    for name, parameter in stack.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)
    assert not any(unit.is_whole for unit in units)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_may_be_sharded(two_ranks, recompute):
    two_ranks.run(check_sharded, recompute)
