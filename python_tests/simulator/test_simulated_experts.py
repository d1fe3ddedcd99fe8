"""Steps of schedules of experts against the equations (6) and (8) of Pro-Prophet."""

import pytest

from oases.schedule import generate_experts
from oases.simulator.engine import run
from oases.simulator.experts import ExpertSeconds, lower_experts


def seconds(name, block, blocks=12, recompute=False):
    schedule = generate_experts(name, blocks, recompute)
    return run(lower_experts(schedule, [block] * blocks, behind=block.non_expert)).total_seconds


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.5, 6.0])
def test_steps_are_those_of_the_equations(transfer):
    """share as long as join, each under its own half: then (8) is exact, but for the ends of the stack."""
    block = ExpertSeconds(non_expert=1.0, experts=1.0, all_to_all=0.7, share=transfer, join=transfer)
    layer = 4 * 0.7 + 3 * 1.0 + 3 * 1.0
    moved = 2 * transfer
    assert seconds("plain", block) == pytest.approx(12 * layer + 3.0)
    assert seconds("blocking", block) == pytest.approx(12 * (layer + 2 * moved) + 3.0)
    expected = layer + max(0.0, moved - 2.0) + max(0.0, moved - 4.0)
    inside = seconds("block_wise", block, 13) - seconds("block_wise", block, 12)
    assert inside == pytest.approx(expected)


def test_the_search_is_hidden_and_recomputation_hides_ways():
    block = ExpertSeconds(1.0, 1.0, 0.7, search=0.5)
    assert seconds("plain", block) == pytest.approx(seconds("plain", ExpertSeconds(1.0, 1.0, 0.7)))
    again = seconds("plain", block, recompute=True) - seconds("plain", block)
    assert again == pytest.approx(12 * (2.0 - 2 * 0.7) + 1.0), "what is computed again, less the ways under it"


def test_wrong_sizes_and_times():
    with pytest.raises(ValueError, match="has 2 blocks of experts, got seconds of 1"):
        lower_experts(generate_experts("plain", 2), [ExpertSeconds(1.0, 1.0, 1.0)])
    with pytest.raises(ValueError, match="all_to_all must be at least 0 seconds, got -1"):
        ExpertSeconds(1.0, 1.0, -1.0)
