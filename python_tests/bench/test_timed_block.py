"""Blocks of set times: their gradients are plain autograd's, and every op takes at least what was set."""

import pytest
import torch
import torch.distributed as dist

from oases import OverlappedStack
from oases.core.execution.executor import Context
from oases.core.schedule import GENERATORS
from oases_bench.timed_block import BlockSeconds, TimedBlock

BLOCKS, BATCH = 3, 4


def seconds(samples):
    return BlockSeconds(0.004 * samples, 0.001 * samples, 0.006 * samples, 0.002 * samples)


def no_time(samples):
    return BlockSeconds(0.0)


def weights_of(rank, block, size=4):
    """Small multiples of 1/8, whose means are exact."""
    return torch.arange(size, dtype=torch.float32).remainder(4) / 8 + rank / 4 - block / 8


def made(times, rank=0, size=4, **options):
    blocks = [TimedBlock(times, num_parameters=size, **options) for _ in range(BLOCKS)]
    for b, block in enumerate(blocks):
        block.weight.data.copy_(weights_of(rank, b, size))
    return blocks


def batch(shape=(BATCH, 3, 2)):
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randint(-4, 5, shape, generator=generator).float() for _ in range(2)]
    return draw[0], draw[1]


def reference(ranks, x, loss_weight, size=4):
    """Output, gradient of the input and of rank's weights by plain autograd."""
    weights = [[weights_of(r, b, size).requires_grad_() for b in range(BLOCKS)] for r in range(ranks)]
    x = x.clone().requires_grad_()
    out = x
    for b in range(BLOCKS):
        out = out + sum(out * weights[r][b][:4096].mean() for r in range(ranks))
    (out * loss_weight).sum().backward()
    return out.detach(), x.grad, [[weight.grad for weight in mine] for mine in weights]


def check(group=None, times=no_time, size=4, shape=(BATCH, 3, 2), tokens=None, **options):
    """Run a stack on this rank and compare with plain autograd, bit by bit; returns its spans."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    x, loss_weight = batch(shape)
    stack = OverlappedStack(made(times, rank, size, tokens=tokens), process_group=group, **options)
    spans = []
    given = x.clone().requires_grad_()
    out = stack(given, context=Context(spans))
    (out * loss_weight).sum().backward()
    expected, grad, weight_grads = reference(ranks, x, loss_weight, size)
    assert torch.equal(out, expected)
    assert torch.equal(given.grad, grad)
    for block, weight_grad in zip(stack.blocks, weight_grads[rank], strict=True):
        assert torch.equal(block.weight.grad, weight_grad)
    return stack.schedule, spans


def check_all_schedules():
    for name in GENERATORS:
        for recompute in ("none", "full"):
            check(dist.group.WORLD, schedule=name, recompute=recompute)
    check(dist.group.WORLD, size=5000)  # more than take part: the others' gradients are zeros
    check(dist.group.WORLD, shape=(1, 8, 2), tokens=8)  # cut along the sequence
    check(dist.group.WORLD, shape=(4, 8, 2), sequence_parallel=True)


def check_times(ranks):
    group = dist.group.WORLD if ranks > 1 else None
    for recompute in ("none", "full"):
        schedule, spans = check(group, seconds, schedule="oases", recompute=recompute)
        check_spans(schedule, spans, BATCH / 2)
    schedule, spans = check(group, seconds, schedule="sync", sub_batches=1)
    check_spans(schedule, spans, BATCH)


def check_spans(schedule, spans, samples):
    ops = {str(op): op for op in schedule}
    assert [op for op, _, _ in spans] == [name for name, op in ops.items() if not op.kind.startswith("all_")]
    puts_off = any(op.kind == "W" for op in schedule)
    asked = seconds(samples)
    least = {
        "F": asked.forward,
        "R": asked.forward,
        "C": asked.combine,
        "RC": asked.combine,
        "B": asked.backward + (0 if puts_off else asked.weight_gradient),
        "W": asked.weight_gradient,
    }
    end_of_last = 0.0
    for name, start, end in spans:
        assert start >= end_of_last
        assert end - start >= least.get(ops[name].kind, 0.0), (name, end - start)
        end_of_last = end


def test_gradients_and_times_alone():
    for name in GENERATORS:
        check(schedule=name)
    check_times(1)


@pytest.mark.long
def test_gradients_on_two_ranks(two_ranks):
    two_ranks.run(check_all_schedules)


def test_times_on_two_ranks(two_ranks):
    two_ranks.run(check_times, 2)


def test_outside_a_stack():
    """Autograd alone calls for both parts of the backward pass."""
    x, loss_weight = batch()
    given, out = x.clone().requires_grad_(), None
    blocks = made(no_time)
    out = given
    for block in blocks:
        out = block.combine(out, block.partial(out))
    (out * loss_weight).sum().backward()
    expected, grad, weight_grads = reference(1, x, loss_weight)
    assert torch.equal(out, expected)
    assert torch.equal(given.grad, grad)
    assert all(torch.equal(b.weight.grad, g) for b, g in zip(blocks, weight_grads[0], strict=True))


def test_a_frozen_weight_gets_no_gradient():
    blocks = made(no_time)
    blocks[1].weight.requires_grad_(False)
    OverlappedStack(blocks)(batch()[0]).sum().backward()
    assert [block.weight.grad is None for block in blocks] == [False, True, False]


def test_a_part_of_a_sequence_counts_as_a_part_of_its_samples():
    asked = []

    def noting(samples):
        asked.append(samples)
        return BlockSeconds(0.0)

    block = TimedBlock(noting, tokens=8)
    block.partial(torch.zeros(2, 2, 1))
    assert asked == [0.5]
    TimedBlock(noting).partial(torch.zeros(2, 2, 1))
    assert asked == [0.5, 2]


def test_mistakes():
    with pytest.raises(ValueError, match="num_parameters must be at least 1, got 0"):
        TimedBlock(seconds, num_parameters=0)
    with pytest.raises(ValueError, match="backward must be between 0 and 60 seconds, got -1"):
        BlockSeconds(0.0, backward=-1)
    with pytest.raises(ValueError, match="compute on the CPU, got an input on meta"):
        TimedBlock(seconds).partial(torch.zeros(2, device="meta"))
