"""Steps of schedules of experts against the equations (6) and (8) of Pro-Prophet."""

import pytest

from oases.core.schedule import generate, generate_experts
from oases.simulator import simulate
from oases.simulator.cost import ExpertCosts, ExpertSeconds


def seconds(name, block, blocks=12, recompute=False):
    schedule = generate_experts(name, blocks, recompute)
    return simulate(schedule, ExpertCosts((block,) * blocks)).total_seconds


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.5, 6.0])
def test_steps_are_those_of_the_equations(transfer):
    """share as long as join, each under its own half: then (8) is exact, but for the ends of the stack."""
    block = ExpertSeconds(non_expert=1.0, experts=1.0, all_to_all=0.7, share=transfer, join=transfer)
    layer = 4 * 0.7 + 3 * 1.0 + 3 * 1.0
    moved = 2 * transfer
    assert seconds("plain", block) == pytest.approx(12 * layer)
    assert seconds("blocking", block) == pytest.approx(12 * (layer + 2 * moved))
    expected = layer + max(0.0, moved - 2.0) + max(0.0, moved - 4.0)
    inside = seconds("block_wise", block, 13) - seconds("block_wise", block, 12)
    assert inside == pytest.approx(expected)


def test_the_search_is_hidden_and_recomputation_hides_ways():
    block = ExpertSeconds(1.0, 1.0, 0.7, search=0.5)
    assert seconds("plain", block) == pytest.approx(seconds("plain", ExpertSeconds(1.0, 1.0, 0.7)))
    again = seconds("plain", block, recompute=True) - seconds("plain", block)
    assert again == pytest.approx(12 * (2.0 - 2 * 0.7)), "what is computed again, less the ways under it"


def test_wrong_sizes_and_times():
    costs = ExpertCosts((ExpertSeconds(1.0, 1.0, 1.0),))
    with pytest.raises(ValueError, match="has 2 blocks of sort 'experts', got costs of 1 of sort 'experts'"):
        simulate(generate_experts("plain", 2), costs)
    with pytest.raises(ValueError, match="has 1 blocks of sort 'block', got costs of 1 of sort 'experts'"):
        simulate(generate("sync", 1, 1), costs)
    with pytest.raises(ValueError, match="all_to_all must be at least 0 seconds, got -1"):
        ExpertSeconds(1.0, 1.0, -1.0)


def test_seconds_by_kind_are_costs_of_equal_blocks():
    schedule = generate_experts("block_wise", 4, True)
    block = ExpertSeconds(1.0, 2.0, 0.7, share=0.5, join=0.8, search=0.1, behind=0.3)
    by_kind = {"D": 1.0, "E": 2.0, "F": 0.3, "all_to_all": 0.7, "share": 0.5, "join": 0.8, "P": 0.1}
    found = simulate(schedule, by_kind)
    assert found.spans == simulate(schedule, ExpertCosts((block,) * 4)).spans
    assert {span.lane for span in found.spans} == {"compute", "link"}
    text = found.text(80)
    assert "rank 0 compute" in text
    assert "E" in text
