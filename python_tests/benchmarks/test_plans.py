"""Every plan is listed, and steps of emulated plans run on real ranks."""

import itertools

import pytest
import torch.distributed as dist

from benchmarks.plans import PlansBench, PlansBenchConfig, emulated, every_plan
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.planner.predict import Predictor
from oases.simulator.links import Sample, fit_link
from oases.simulator.program import Contention

CONFIG = PlansBenchConfig(hidden=256, layers=1, sequence=8, global_batch=8, flops=1e10)
LINKS = {
    scope: fit_link(
        [
            Sample(kind, ranks, size, size * seconds)
            for kind in ("all_reduce", "all_gather")
            for size in (1000, 100000)
        ],
        Contention(),
    )
    for scope, ranks, seconds in (("node", 2, 1e-9), ("cluster", 4, 1e-8))
}


def test_every_mix_of_degrees_is_listed_once():
    plans = list(every_plan(emulated(CONFIG, LINKS, 2), CONFIG.model(), 4, 8))
    assert len(plans) == len(set(plans))
    mixes = {
        tuple(itertools.chain(*([segment.tp] * segment.num_blocks for segment in plan.stages[0].segments)))
        for plan in plans
    }
    assert mixes == set(itertools.product((1, 2, 4), repeat=2))


def steps():
    hardware = emulated(CONFIG, LINKS, 2)
    bench = PlansBench(CONFIG, hardware, Mesh((1, 2, 4)))
    predictor = Predictor(hardware, stack_only=True)
    plans = list(every_plan(hardware, CONFIG.model(), dist.get_world_size(), 8))
    return [(bench.median(plan, 1), predictor.predict(plan).step_seconds) for plan in plans[:: len(plans) // 6]]


@pytest.mark.long
def test_emulated_steps_take_no_less_than_their_compute(four_ranks):
    for seconds, predicted in four_ranks.run(steps)[0]:
        assert predicted > 0
        assert seconds > 0.5 * predicted  # sleeps are lower bounds; loopback is faster than the link assumed


@pytest.mark.parametrize(("field", "value"), [("memory_share", 0.0), ("memory_share", 1.5), ("flops", 1.0)])
def test_bad_values_are_named(field, value):
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} must be"):
        PlansBenchConfig(**{field: value}).model()
