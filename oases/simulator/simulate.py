"""Replays a schedule under a cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oases.schedule import Pipeline, Schedule
from oases.simulator.cost import StackCosts
from oases.simulator.engine import run
from oases.simulator.lowering import StagePasses, lower, lower_pipeline
from oases.simulator.program import Program
from oases.simulator.timeline import Timeline


def simulate(
    schedule: Schedule | Pipeline, costs: StackCosts | Sequence[StagePasses] | Mapping[str, float]
) -> Timeline:
    """One step of `schedule`.

    Of a tensor-parallel schedule one rank is shown, as all ranks of a group do the same; of a pipeline one rank a
    stage. costs: a cost model, for a pipeline one of each stage's passes; or seconds by the kind of op (F, C, R, B,
    W, all_reduce, send, ...), 0 for what is not named.
    """
    if isinstance(schedule, Pipeline):
        if isinstance(costs, Mapping):
            costs = [StagePasses.by_kind(stage, costs) for stage in range(schedule.num_stages)]
        assert not isinstance(costs, StackCosts), "a pipeline costs what its stages' passes cost"
        return run(Program(schedule.name, lower_pipeline(schedule, costs)))
    assert not isinstance(costs, Sequence), "a tensor-parallel schedule has no stages"
    if not isinstance(costs, StackCosts):
        costs = StackCosts.by_kind(schedule, costs)
    forward, backward = lower(schedule, costs)
    return run(Program(schedule.name, (tuple(forward + backward),), {costs.link: costs.contention}))
