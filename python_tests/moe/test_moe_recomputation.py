"""Layers under checkpoints: recomputation routes to the same experts and gives the same gradients."""

import pytest
import torch
import torch.distributed as dist
from moe.moe_layers import COSTS, EXACT, HIDDEN, alone, inputs_of, targets_of, whole_layer
from torch.utils.checkpoint import checkpoint

from oases.moe.dispatch import RoutingError
from oases.moe.layer import OverlappedMoE


def check_checkpoint(experts, tokens, reentrant, together, biased):
    """Recomputation takes the routing and the placement of the forward pass, and nothing is noted twice."""
    options = dict(bias_update_rate=0.3) if biased else {}
    whole = whole_layer(experts, process_group=alone(), **options)
    plain = OverlappedMoE.from_whole(whole, costs=COSTS)
    saved = OverlappedMoE.from_whole(whole, costs=COSTS)

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
    layer = OverlappedMoE.from_whole(whole_layer(4, process_group=alone()), costs=COSTS)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(30, HIDDEN, dtype=torch.float64, requires_grad=True)

    def noisy(x):
        return layer(x + torch.randn_like(x))

    y = checkpoint(noisy, x, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(RoutingError, match="preserve_rng_state"):
        y.sum().backward()
    another = OverlappedMoE.from_whole(whole_layer(4, process_group=alone()))
    y = x * 2
    y.register_hook(lambda _: another(x))
    with pytest.raises(RoutingError, match="no open training pass to recompute"):
        y.sum().backward()


def test_a_recomputation_that_differs_is_an_error(two_ranks):
    two_ranks.run(check_recomputation_that_differs)
