"""Failures of a layer on one rank: raised on all ranks, with the layer's name, without a hang."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe.moe_layers import COSTS, HIDDEN, WIDTH, alone, inputs_of, part_of, random_placement, whole_layer

from oases.core.execution.failure import FailedRankError
from oases.errors import UsageError
from oases.moe.dispatch import RoutingError
from oases.moe.layer import OverlappedMoE
from oases.moe.placement import Placement


def check_not_finite(victim):
    layer = part_of(whole_layer(4, process_group=alone()), name="layers.3.moe", costs=COSTS)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    if dist.get_rank() == victim:
        x[2, 3] = float("nan")
    with pytest.raises(RoutingError, match=rf"layers.3.moe: .* not finite on rank {victim} of 2"):
        layer(x)
    return layer(torch.ones(5, HIDDEN, dtype=torch.float64)).isfinite().all().item()  # and it goes on


def test_gates_that_are_not_finite_raise_on_all_ranks(two_ranks):
    assert all(two_ranks.run(check_not_finite, 1))


def check_failure_is_told():
    layer = part_of(whole_layer(4, process_group=alone()), name="layers.3.moe", costs=COSTS)
    rank = dist.get_rank()
    x = torch.randn(5, HIDDEN + (rank == 1), dtype=torch.float64)
    with pytest.raises(UsageError if rank == 1 else FailedRankError, match="the input must be"):
        layer(x)


def test_a_bad_input_on_one_rank_is_told_to_all(two_ranks):
    two_ranks.run(check_failure_is_told)


class Fragile(torch.nn.Module):
    """In the place of a shared expert: fails while tokens are on their way."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x


def check_failure_under_way(victim, moved):
    """The other ranks have started an all-to-all with uneven rows that the one that failed never starts."""
    rank, tokens = dist.get_rank(), [11, 0, 23, 6]
    layer = part_of(whole_layer(8, process_group=alone()), name="layers.3.moe")
    layer.shared = Fragile()
    layer.place(random_placement(8, 4, 1) if moved else None)
    x = inputs_of(rank, tokens)
    layer(x)
    dist.barrier()
    layer.shared.fails = rank == victim
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=f"rank {victim} ran out of memory at layers.3.moe"):
            layer(x)


@pytest.mark.parametrize(("victim", "moved"), [(0, False), (2, True)])
def test_a_failure_while_tokens_travel_is_told_to_all(four_ranks, victim, moved):
    four_ranks.run(check_failure_under_way, victim, moved)


def check_gradient_of_the_input():
    layer = part_of(whole_layer(4, process_group=alone()), name="layers.9.moe", costs=COSTS)
    with pytest.raises(UsageError, match="gradient of the input differs between ranks"):
        layer(torch.ones(5, HIDDEN, dtype=torch.float64, requires_grad=dist.get_rank() == 0))
    with torch.no_grad():
        layer(torch.ones(5, HIDDEN, dtype=torch.float64, requires_grad=dist.get_rank() == 0))
    return True


def test_an_input_that_needs_a_gradient_on_one_rank_raises_on_all(two_ranks):
    assert all(two_ranks.run(check_gradient_of_the_input))


def check_disagreement():
    layer = part_of(whole_layer(4, process_group=alone()), costs=COSTS)
    layer.place(random_placement(4, 2, dist.get_rank()))
    with pytest.raises(RoutingError, match="rank 1 has another layer, forward pass, mode or placement"):
        layer(torch.ones(5, HIDDEN, dtype=torch.float64))


def test_ranks_that_disagree_raise(two_ranks):
    two_ranks.run(check_disagreement)


def check_order(training):
    """Two layers of the same name, called in another order on rank 1."""
    layers = [OverlappedMoE(HIDDEN, WIDTH, 4, costs=COSTS).train(training) for _ in range(2)]
    if dist.get_rank() == 1:
        layers.reverse()
    with pytest.raises(RoutingError, match="rank 1 has another layer"):
        layers[0](torch.ones(5, HIDDEN))
    return True


@pytest.mark.parametrize("training", [True, False])
def test_layers_called_in_another_order_raise(two_ranks, training):
    assert all(two_ranks.run(check_order, training))


def check_modes():
    """Digests of both modes, without the layer's own comparison of them."""
    layer = OverlappedMoE(HIDDEN, WIDTH, 4, costs=COSTS)
    settings = [layer._placement_state.setting(layer.router)]
    return [layer._placement_state.state(settings, training=training) for training in (True, False)]


def test_the_mode_is_compared(two_ranks):
    (first, second), again = two_ranks.run(check_modes)
    assert [first, second] == again
    assert first != second


def test_it_refuses_what_cannot_work(two_ranks):
    with pytest.raises(UsageError, match="unknown placement 'best'; known are none, prophet"):
        OverlappedMoE(HIDDEN, WIDTH, 4, placement="best")
    with pytest.raises(UsageError, match="memory_budget must be at least 0 bytes, got -1"):
        OverlappedMoE(HIDDEN, WIDTH, 4, memory_budget=-1)
    with pytest.raises(UsageError, match="shared_intermediate must be at least 0"):
        OverlappedMoE(HIDDEN, WIDTH, 4, shared_intermediate=-1)
    layer = OverlappedMoE(HIDDEN, WIDTH, 4)
    with pytest.raises(UsageError, match=r"floating-point numbers \[..., 12\], got torch.float32 \[3, 5\]"):
        layer(torch.zeros(3, 5))
    with pytest.raises(UsageError, match="int64"):
        layer(torch.zeros(3, HIDDEN, dtype=torch.int64))
    with pytest.raises(UsageError, match="does not fit 4 experts on 1 devices"):
        layer.place(random_placement(4, 2, 0))
    two_ranks.run(check_refusals)


def check_refusals():
    for experts in (1, 3):
        with pytest.raises(UsageError, match=f"{experts} experts do not divide over 2 devices"):
            OverlappedMoE(HIDDEN, WIDTH, experts, top_k=1)
    layer = OverlappedMoE(HIDDEN, WIDTH, 4)
    nowhere = np.array([[1, 0], [0, 0], [1, 1], [1, 1]])
    with pytest.raises(UsageError, match=r"tokens for expert 0 are routed to device 1, which does not hold it"):
        layer.place(Placement("mine", ((), (), (), ()), nowhere, np.zeros(2, dtype=np.int64), 0.0))
    with pytest.raises(UsageError, match=r"expert 0 has copies on \(0,\)"):
        layer.place(Placement("mine", ((0,), (), (), ()), nowhere, np.zeros(2, dtype=np.int64), 0.0))
