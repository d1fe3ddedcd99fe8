"""Steps of schedules of experts against the equations (6) and (8) of Pro-Prophet."""

import pytest

from oases.core.schedule import generate
from oases.plans.expert_schedules import generate_experts
from oases.simulator import simulate
from oases.simulator.cost import ExpertCosts


def seconds(name, costs, blocks=12, recompute=False):
    return simulate(generate_experts(name, blocks, recompute), costs).total_seconds


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.5, 6.0])
def test_steps_are_those_of_the_equations(transfer):
    """share as long as join, each under its own half: then (8) is exact, but for the ends of the stack."""
    costs = {"D": 1.0, "E": 1.0, "all_to_all": 0.7, "share": transfer, "join": transfer}
    layer = 4 * 0.7 + 3 * 1.0 + 3 * 1.0
    moved = 2 * transfer
    assert seconds("plain", costs) == pytest.approx(12 * layer)
    assert seconds("blocking", costs) == pytest.approx(12 * (layer + 2 * moved))
    expected = layer + max(0.0, moved - 2.0) + max(0.0, moved - 4.0)
    inside = seconds("block_wise", costs, 13) - seconds("block_wise", costs, 12)
    assert inside == pytest.approx(expected)


def test_the_search_is_hidden_and_recomputation_hides_ways():
    costs = {"D": 1.0, "E": 1.0, "all_to_all": 0.7}
    assert seconds("plain", costs | {"P": 0.5}) == pytest.approx(seconds("plain", costs))
    again = seconds("plain", costs, recompute=True) - seconds("plain", costs)
    assert again == pytest.approx(12 * (2.0 - 2 * 0.7)), "what is computed again, less the ways under it"
    behind = seconds("plain", costs | {"F": 0.3}) - seconds("plain", costs)
    assert behind == pytest.approx(12 * 3 * 0.3)


def test_wrong_sorts_and_times():
    with pytest.raises(ValueError, match="has 1 blocks of sort 'block', got costs of 1 of sort 'experts'"):
        simulate(generate("sync", 1, 1), ExpertCosts({"D": 1.0}))
    with pytest.raises(ValueError, match="all_to_all must be at least 0 seconds, got -1"):
        ExpertCosts({"all_to_all": -1.0})


def test_it_is_drawn():
    found = simulate(generate_experts("block_wise", 4, True), {"D": 1.0, "E": 2.0, "all_to_all": 0.7, "share": 0.5})
    assert {span.lane for span in found.spans} == {"compute", "link"}
    text = found.text(80)
    assert "rank 0 compute" in text
    assert "E" in text
