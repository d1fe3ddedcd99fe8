"""The executor against the unsplit model: outputs, gradients, hooks, for every schedule, degree and split."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from block_examples import (
    WIDTH,
    PlainProducts,
    ScaledResult,
    check_exact,
    compare,
    make_stack,
    plain_blocks,
    plain_forward,
    reset_all_totals,
)
from covering import covered
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oases
from oases import OverlappedStack
from oases.core.execution.executor import Context
from oases.core.schedule import GENERATORS, WHOLE, ScheduleError, generate, parse_schedule
from oases.core.schedule import sequence_parallel as make_sequence_parallel
from oases.errors import OverlapError, UsageError
from oases.layers.linear import shard

SPLITS = {
    f"{sub_batches} of {batch}": (sub_batches, batch)
    for sub_batches, batch in [(1, 4), (2, 4), (3, 4), (4, 4), (2, 5)]
}
"""Numbers of sub-batches and of samples."""
FACTORS = {
    "schedule": sorted(GENERATORS), "recompute": ["none", "full"], "blocks": ["1 block", "4 blocks"],
    "split": list(SPLITS),
}  # fmt: skip


@pytest.mark.few(14, 100)
@pytest.mark.parametrize(("schedule", "recompute", "blocks", "split"), covered(FACTORS))
def test_gradients_equal_the_unsplit_model(two_ranks, schedule, recompute, blocks, split):
    two_ranks.run(check_exact, int(blocks[0]), schedule, *SPLITS[split], recompute)


@pytest.mark.parametrize("kind", [PlainProducts, ScaledResult])
@pytest.mark.parametrize("schedule", ["sync", "oases"])
def test_blocks_of_other_kinds(two_ranks, kind, schedule):
    two_ranks.run(check_exact, 3, schedule, 2, 4, "full", kind)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_four_ranks(four_ranks, recompute):
    for schedule in sorted(GENERATORS):
        four_ranks.run(check_exact, 4, schedule, 2, 4, recompute)


@pytest.mark.parametrize("schedule", ["sync", "oases"])
def test_group_of_one(schedule):
    blocks = plain_blocks(3)
    stack = make_stack(blocks, None, schedule=schedule)
    x, grad = torch.randn(2, 4, 3, WIDTH, dtype=torch.float64)
    compare(stack, blocks, None, x, grad)


def check_schedule_from_text():
    """A hand-written list, unlike any generator's, runs exactly too: the list is the program."""
    ops = [str(op) for op in generate("sync", 2, 1)]
    text = "schedule mine blocks=2 sub_batches=1\n" + "\n".join(ops)
    blocks = plain_blocks(2)
    group = dist.group.WORLD
    stack = make_stack(blocks, group, schedule=parse_schedule(text))
    x, grad = torch.randn(2, 2, 3, WIDTH, dtype=torch.float64)
    compare(stack, blocks, group, x, grad)


def test_schedule_from_text(two_ranks):
    two_ranks.run(check_schedule_from_text)


def check_hooks_and_accumulation():
    """Hooks fire once per backward; two calls before two backwards keep apart; gradients accumulate."""
    group = dist.group.WORLD
    blocks = plain_blocks(2)
    stack = make_stack(blocks, group)
    fired = []
    for name, parameter in stack.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append("post " + name))
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    first, second = stack(x), stack(2 * x)
    second.sum().backward()
    assert sorted(fired) == sorted(
        [n for n, _ in stack.named_parameters()] + [f"post {n}" for n, _ in stack.named_parameters()]
    )
    first.sum().backward()
    both = [p.grad.clone() for p in stack.parameters()]
    stack.zero_grad()
    (stack(x).sum() + stack(2 * x).sum()).backward()
    for parameter, expected in zip(stack.parameters(), both, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_hooks_fire_once(two_ranks):
    two_ranks.run(check_hooks_and_accumulation)


def check_order_of_delivery():
    """The last block's sharded gradients are handed over before the first block's backward has run."""
    stack = make_stack(plain_blocks(3), dist.group.WORLD)
    seen = []
    context = Context([])
    stack.blocks[2].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(len(context.spans)))
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64), context=context).sum().backward()
    first_block = [i for i, (op, _, _) in enumerate(context.spans) if op.startswith("B 0.")]
    assert seen[0] < first_block[0]


def test_gradients_are_handed_over_early(two_ranks):
    two_ranks.run(check_order_of_delivery)


def check_ddp():
    """Two replicas of a stack of one rank each, under DDP, against one process on the whole batch."""
    blocks = plain_blocks(2)
    alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    model = DistributedDataParallel(make_stack(blocks, alone))
    x = torch.randn(8, 3, WIDTH, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        model(x.chunk(2)[dist.get_rank()]).square().mean().backward()
    plain_forward(blocks, x).square().mean().backward()
    torch.testing.assert_close(model.module.blocks[0].up.weight.grad, blocks[0][1].weight.grad)
    torch.testing.assert_close(model.module.blocks[1].norm.weight.grad, blocks[1][0].weight.grad)


def test_under_ddp(two_ranks):
    two_ranks.run(check_ddp)


def check_tp_under_ddp():
    """2 x 2: data parallel over tensor parallel."""
    rank = dist.get_rank()
    tensor = [dist.new_group(r) for r in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(r) for r in ([0, 2], [1, 3])][rank % 2]
    blocks = plain_blocks(2)
    model = DistributedDataParallel(make_stack(blocks, tensor), process_group=data)
    x = torch.randn(8, 3, WIDTH, dtype=torch.float64)
    model(x.chunk(2)[rank // 2]).square().mean().backward()
    plain_forward(blocks, x).square().mean().backward()
    torch.testing.assert_close(model.module.blocks[0].up.weight.grad, shard(blocks[0][1].weight.grad, 0, tensor))
    torch.testing.assert_close(model.module.blocks[0].norm.bias.grad, blocks[0][0].bias.grad)


def test_tensor_parallel_under_ddp(four_ranks):
    four_ranks.run(check_tp_under_ddp)


def test_no_grad_keeps_nothing():
    blocks = plain_blocks(2)
    stack = make_stack(blocks, None)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        y = stack(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, plain_forward(blocks, x))
    with torch.inference_mode():
        torch.testing.assert_close(stack(x), y)


def test_frozen_parameters_and_inputs():
    blocks = plain_blocks(2)
    stack = make_stack(blocks, None)
    stack.blocks[0].requires_grad_(False)
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64)).sum().backward()
    assert all(p.grad is None for p in stack.blocks[0].parameters())
    assert all(p.grad is not None for p in stack.blocks[1].parameters())


def test_second_backward_is_refused():
    y = make_stack(plain_blocks(1), None)(torch.randn(2, 3, WIDTH, dtype=torch.float64)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run already"):
        y.backward()


class SavesItsOutput(nn.Module):
    """partial() ends in an op whose backward needs its own output, which the all-reduce overwrites."""

    def partial(self, x):
        return x.tanh()

    def combine(self, x, y):
        return x + y


def test_overwritten_output_is_never_used_silently():
    stack = OverlappedStack([SavesItsOutput()], schedule="sync")
    y = stack(torch.randn(2, 3, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_bad_arguments():
    blocks = plain_blocks(2)
    with pytest.raises(ValueError, match="batch of 1 cannot be cut into 2 sub-batches"):
        make_stack(blocks, None)(torch.randn(1, 3, WIDTH, dtype=torch.float64))
    with pytest.raises(ScheduleError, match="unknown schedule 'nosuch'; known are cross_pass, fine_grained, oases"):
        make_stack(blocks, None, schedule="nosuch")
    with pytest.raises(ValueError, match="is for 3 blocks, the stack has 2"):
        make_stack(blocks, None, schedule=generate("oases", 3, 2))
    blocks[0][0].register_module("bad", nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"'0.norm.bad' \(BatchNorm1d\) mixes the samples"):
        make_stack(blocks, None)
    for attribute, reason in (
        ("capacity_factor", "drops tokens beyond a capacity"),
        ("mixes_samples", "has mixes_samples"),
    ):
        blocks = plain_blocks(2)
        setattr(blocks[1][0], attribute, 1.25)
        with pytest.raises(ValueError, match=rf"'1.norm' \(LayerNorm\) {reason}"):
            make_stack(blocks, None)
    blocks = plain_blocks(2)
    with pytest.raises(ValueError, match="small_batch must be 'refuse' or 'whole', got 'pad'"):
        make_stack(blocks, None, small_batch="pad")
    with pytest.raises(ValueError, match="sub_batches must be at least 1"):
        make_stack(blocks, None, sub_batches=0)
    with pytest.raises(ValueError, match=r"Linear\) has no method partial"):
        OverlappedStack([nn.Linear(2, 2)])


def check_other_schedules():
    schedule = ["oases", "sync"][dist.get_rank()]
    stack = make_stack(plain_blocks(2), dist.group.WORLD, schedule=schedule)
    with pytest.raises(UsageError, match=r"the schedule differs .*: oases on rank 0, sync on rank 1; make the same"):
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))


def test_ranks_with_other_schedules_are_named(two_ranks):
    two_ranks.run(check_other_schedules)


def test_a_schedule_without_backward_pass_cannot_train():
    base = generate("oases", 2, 2)
    forward_only = type(base)("forward_only", 2, 2, base.forward)
    stack = make_stack(plain_blocks(2), None, schedule=forward_only)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        stack(x)
    with pytest.raises(ScheduleError, match="'forward_only' has no backward pass"):
        stack(x)


def check_whole(schedule, recompute, sequence_parallel):
    """A batch that is large enough is cut as ever; a smaller one runs whole, and the report tells."""
    group = dist.group.WORLD
    reset_all_totals()
    blocks = plain_blocks(4)
    options = {"schedule": schedule, "sub_batches": 3, "recompute": recompute}
    stack = make_stack(blocks, group, small_batch="whole", sequence_parallel=sequence_parallel, **options)
    for batch in (1, 3, 2):
        x, grad = torch.randn(2, batch, 4, WIDTH, dtype=torch.float64)
        compare(stack, blocks, group, x, grad)
    with pytest.raises(ValueError, match="batch of 0 cannot be cut into 3 sub-batches"):
        stack(torch.randn(0, 4, WIDTH, dtype=torch.float64))
    rows = {row.where: row.collectives for row in oases.report().stacks}
    assert set(rows) == {f"stack {stack.number}", f"stack {stack.number}, whole batch"}
    alike = generate("sync", 4, 1, recompute)
    each = len((make_sequence_parallel(alike) if sequence_parallel else alike).collectives)
    assert rows[f"stack {stack.number}, whole batch"] == 2 * each
    assert len(oases.report().layers) == 2


def check_layers(schedule):
    """Layers of one block and of three, the first two of them recomputed; also for a small batch."""
    group = dist.group.WORLD
    blocks = plain_blocks(5)
    options = {"schedule": schedule, "recompute": 2, "layer_of": (0, 1, 1, 1, 2), "small_batch": "whole"}
    stack = make_stack(blocks, group, **options)
    for batch in (4, 1):
        x, grad = torch.randn(2, batch, 3, WIDTH, dtype=torch.float64)
        compare(stack, blocks, group, x, grad)
    return [sorted(each.recomputed_blocks) for each in (stack.schedule, *stack.chooser._whole.values())]


@pytest.mark.parametrize("schedule", sorted(GENERATORS))
def test_recomputation_goes_by_layers(two_ranks, schedule):
    for ran in two_ranks.run(check_layers, schedule):
        assert all(again == [0, 1, 2, 3] for again in ran)
        assert len(ran) == (1 if schedule in WHOLE else 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", 1])
@pytest.mark.parametrize("schedule", ["oases", "cross_pass"])
def test_small_batches_may_run_whole(two_ranks, schedule, recompute, sequence_parallel):
    two_ranks.run(check_whole, schedule, recompute, sequence_parallel)


def check_whole_overlaps_nothing():
    stack = make_stack(plain_blocks(2), dist.group.WORLD, small_batch="whole", require_overlap=True)
    stack(torch.randn(2, 4, WIDTH, dtype=torch.float64))
    with pytest.raises(
        OverlapError, match=r"schedule 'sync' .* overlaps nothing; the batch has fewer samples than the 2"
    ):
        stack(torch.randn(1, 4, WIDTH, dtype=torch.float64))


def test_a_batch_run_whole_is_no_overlap(two_ranks):
    two_ranks.run(check_whole_overlaps_nothing)


def test_a_stack_that_ran_can_be_copied():
    stack = make_stack(plain_blocks(2), None)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    expected = stack(x)
    copied, loaded = copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))
    for other in (copied, loaded):
        torch.testing.assert_close(other(x), expected)
        other(x).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in stack.parameters())


def test_a_trained_module_of_two_blocks_is_refused():
    """Each would put its own stand-ins there; parameters may be shared."""
    blocks = plain_blocks(2)
    stack = make_stack(blocks, None)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    stack.blocks[1].up = stack.blocks[0].up
    with pytest.raises(ValueError, match=r"blocks 0 and 1 of a stack share a module, that of the trained up\.weight"):
        stack(x)
    stack.blocks[0].up.requires_grad_(False)
    stack(x).sum().backward()
    apart = make_stack(blocks, None)
    apart.blocks[1].up.weight = apart.blocks[0].up.weight
    apart(x).square().sum().backward()
    blocks[1][1].weight = blocks[0][1].weight
    plain_forward(blocks, x).square().sum().backward()
    torch.testing.assert_close(apart.blocks[0].up.weight.grad, blocks[0][1].weight.grad)


def test_a_copy_has_rows_of_its_own():
    stack = make_stack(plain_blocks(1), None)
    assert len({each.label for each in (stack, copy.deepcopy(stack), pickle.loads(pickle.dumps(stack)))}) == 3
