"""Layers under checkpoints: recomputation routes to the same experts and gives the same gradients."""

import pytest
import torch
import torch.distributed as dist
from moe.expert_blocks import HIDDEN as STACK_HIDDEN
from moe.expert_blocks import made
from moe.moe_layers import COSTS, EXACT, HIDDEN, alone, inputs_of, part_of, targets_of, whole_layer
from torch.utils.checkpoint import checkpoint

from oases.core.schedule.pipeline import PIPELINES, generate_pipeline
from oases.moe.dispatch import RoutingError
from oases.moe.stack import ExpertStack
from oases.moe.state import OpenPasses


def check_checkpoint(experts, tokens, reentrant, together, biased):
    """Recomputation takes the routing and the placement of the forward pass, and nothing is noted twice."""
    options = dict(bias_update_rate=0.3) if biased else {}
    whole = whole_layer(experts, process_group=alone(), **options)
    plain = part_of(whole, costs=COSTS)
    saved = part_of(whole, costs=COSTS)

    def again(x):
        return checkpoint(saved, x, use_reentrant=reentrant)

    expected, moved = micro_batches(plain, plain, tokens, together)
    found, _ = micro_batches(saved, again, tokens, together)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, **EXACT)
    assert plain._placement_state.number == saved._placement_state.number == 12
    assert plain._placement_state._planner.changes == saved._placement_state._planner.changes >= 1
    assert moved
    if biased:
        assert torch.equal(plain.router.bias, saved.router.bias)
        assert plain.router.bias.any()


def micro_batches(layer, run, tokens, together):
    """Outputs and gradients of four steps of three micro-batches; whether any expert was copied."""
    rank, found, moved = dist.get_rank(), [], False
    for step in range(4):
        layer.zero_grad()
        xs = [(inputs_of(rank, tokens) + 0.4 * m - 0.3 * step).requires_grad_() for m in range(3)]
        ys = []
        for x in xs:
            ys.append(run(x))
            moved = moved or bool(layer.last.placement.moved)
            if not together:
                (ys[-1] * targets_of(rank, tokens)).sum().backward()
        for y in ys if together else ():  # forward passes of all micro-batches, then their backward passes
            (y * targets_of(rank, tokens)).sum().backward()
        found.append([*ys, *(x.grad for x in xs), *(p.grad.clone() for p in layer.parameters())])
    return found, moved


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_checkpoints_compute_the_same_again(two_ranks, reentrant, together, biased):
    two_ranks.run(check_checkpoint, 4, [15, 8], reentrant, together, biased)


def check_recomputation_that_differs():
    layer = part_of(whole_layer(4, process_group=alone()), costs=COSTS)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(30, HIDDEN, dtype=torch.float64, requires_grad=True)

    def noisy(x):
        return layer(x + torch.randn_like(x))

    y = checkpoint(noisy, x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RoutingError, match="preserve_rng_state"):
        y.sum().backward()
    another = part_of(whole_layer(4, process_group=alone()))
    y = x * 2
    y.register_hook(lambda _: another(x))
    with pytest.raises(RoutingError, match="no open training pass to recompute"):
        y.sum().backward()


def test_a_recomputation_that_differs_is_an_error(two_ranks):
    two_ranks.run(check_recomputation_that_differs)


def opened_in(passes):
    """Whether the state changed before the pass that is opened, and the pass."""
    changed = passes.all_closed()
    opened = passes.open(None)
    opened.done = True
    return changed, opened


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("warm_up", [True, False])
def test_the_state_changes_exactly_when_a_stage_has_no_pass_in_flight(name, warm_up):
    """After a warm-up without a backward pass, from the first backward pass on."""
    pipeline = generate_pipeline(name, 4, 8)
    for stage in range(pipeline.num_blocks):
        passes, waits = OpenPasses(), warm_up
        if warm_up:
            opened_in(passes)
        for _ in range(3):
            flights = {}
            for op in pipeline.ops:
                if op.block == stage and op.kind == "F":
                    idle = not flights and not waits
                    changed, flights[op.sub_batch] = opened_in(passes)
                    assert changed == idle
                if op.block == stage and op.kind == "B":
                    flights.pop(op.sub_batch).closed, waits = True, False


def check_without_backward(gradients):
    """Bias and placement after a forward pass to warm up, or one of a step that was skipped, then four steps."""
    layer = part_of(whole_layer(4, process_group=alone(), bias_update_rate=0.3), costs=COSTS)
    with torch.set_grad_enabled(gradients):
        layer(inputs_of(dist.get_rank(), [15, 8]))
    micro_batches(layer, layer, [15, 8], True)
    assert layer._placement_state._planner.changes >= 1
    return layer.router.bias.tolist(), bool(layer.last.placement.moved)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_forward_pass_without_a_backward_pass_does_not_freeze_the_state(two_ranks, gradients):
    (bias, moved), other = two_ranks.run(check_without_backward, gradients)
    assert (bias, moved) == other
    assert any(bias)
    assert moved


def check_stack():
    """A stack that a reentrant checkpoint recomputes, with two micro-batches in flight, beside one without."""
    plain, saved = (ExpertStack(made(bias_update_rate=0.1)) for _ in range(2))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        xs = [torch.randn(7, STACK_HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2)]
        for stack, run in ((plain, plain), (saved, lambda x: checkpoint(saved, x, use_reentrant=True))):
            stack.zero_grad()
            sum(run(x.clone().requires_grad_()).square().sum() for x in xs).backward()
        for one, other in zip(saved.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, **EXACT)
    for one, other in zip(saved.blocks, plain.blocks, strict=True):
        assert one.experts._placement_state.number == other.experts._placement_state.number == 8
        assert torch.equal(one.experts.router.bias, other.experts.router.bias)
        assert other.experts.router.bias.any()


@pytest.mark.long
def test_a_checkpointed_stack_keeps_its_state_for_the_recomputation(two_ranks):
    two_ranks.run(check_stack)
