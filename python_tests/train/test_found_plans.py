"""Plans of several stages that the planner finds, for every pipeline it tries, executed as it writes them."""

import pytest
from plan_runs import BATCH, DEEP, check_plan

from oases.cli import main
from oases.planner.choose import rank_plans
from oases.planner.space import BEST_PIPELINES, Space
from oases.plans.check import check
from oases.plans.plan import read_plan
from oases.simulator.hardware import Device, Hardware
from oases.simulator.hardware_file import write
from oases.simulator.links import LinkModel

SLOW = LinkModel(1e-5, 7e5)
HARDWARE = Hardware("slow links", Device("d", 8 << 30, {"float32": 1e8}, 1e8), 4, SLOW, SLOW)
"""Sums of gradients take longer here than all of the compute, so stages win."""
SIZES = {name: getattr(DEEP, name) for name in ("hidden", "layers", "heads", "sequence", "vocabulary")}


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", BEST_PIPELINES)
def test_what_is_planned_trains_like_one_process(four_ranks, corpus, deep_plain_run, name, tmp_path):
    profile, path = tmp_path / "profile.json", tmp_path / "plan.json"
    write(HARDWARE, str(profile))
    sizes = [part for key, value in SIZES.items() for part in (f"--{key}", str(value))]
    given = ["--profile", str(profile), "--world", "4", "--global-batch", str(BATCH), "--pipelines", name]
    main(["plan", *sizes, *given, "--json", str(path)])
    plan = read_plan(path)
    assert plan.pipeline == name
    assert len(plan.stages) > 1
    four_ranks.run(check_plan, path.read_text(), corpus, deep_plain_run)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_every_plan_of_a_search_can_be_executed(share):
    """share: of the memory that the fastest plan without a budget needs."""
    fastest = rank_plans(DEEP, HARDWARE, 4, BATCH)[0]
    budget = int(share * max(fastest.prediction.memory_bytes))
    plans = rank_plans(DEEP, HARDWARE, 4, BATCH, budget=budget, space=Space(degrees=(1, 2)))
    assert max(len(plan.stages) for plan in plans) > 1
    for plan in plans:
        check(plan)
