"""Replays a schedule under a cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oases.schedule import Schedule
from oases.simulator.cost import StackCosts
from oases.simulator.engine import run
from oases.simulator.lowering import StagePasses, lower, lower_pipeline
from oases.simulator.program import Program
from oases.simulator.timeline import Timeline


def simulate(schedule: Schedule, costs: StackCosts | Sequence[StagePasses] | Mapping[str, float]) -> Timeline:
    """One step of `schedule`.

    Of a tensor-parallel schedule one rank is shown, as all ranks of a group do the same; of a pipeline one rank a
    stage. costs: a cost model, for a pipeline one of each stage's passes; or seconds by the kind of op (F, C, R, B,
    W, all_reduce, send, ...), 0 for what is not named. Of a pipeline they are those of a whole stage; where it has
    passes W and no seconds of them are given, they are half of B's.
    """
    if schedule.unit == "stage":
        if isinstance(costs, Mapping):
            costs = _of_parts(schedule, costs)
        assert not isinstance(costs, StackCosts), "a pipeline costs what its stages' passes cost"
        return run(Program(schedule.name, lower_pipeline(schedule, costs)))
    assert not isinstance(costs, Sequence), "a tensor-parallel schedule has no stages"
    if not isinstance(costs, StackCosts):
        costs = StackCosts.by_kind(schedule, costs)
    forward, backward = lower(schedule, costs)
    return run(Program(schedule.name, (tuple(forward + backward),), {costs.link: costs.contention}))


def _of_parts(pipeline: Schedule, seconds: Mapping[str, float]) -> list[StagePasses]:
    if pipeline.has_weight_passes and "W" not in seconds:
        half = seconds.get("B", 0.0) / 2
        seconds = {**seconds, "B": half, "W": half}
    share = {kind: value if kind == "send" else value / pipeline.chunks for kind, value in seconds.items()}
    return [StagePasses.by_kind(part, share) for part in range(pipeline.num_blocks)]
