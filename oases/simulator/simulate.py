"""Replays a schedule under a cost model."""

from __future__ import annotations

from collections.abc import Mapping

from oases.schedule import Schedule
from oases.simulator.cost import ExpertCosts, StackCosts
from oases.simulator.engine import run
from oases.simulator.lowering import Costs, StagePasses, program_of
from oases.simulator.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | Mapping[str, float]) -> Timeline:
    """One step of `schedule`.

    One rank is shown, as all ranks of a group do the same; of a pipeline one rank a stage. costs: a cost model, of a
    pipeline one of each part's passes; or seconds by the kind of op (F, C, R, B, W, all_reduce, send, N, ...), 0 for
    what is not named. Of a pipeline they are those of a whole stage; where it has passes W and no seconds of them are
    given, they are half of B's. Of experts the backward pass takes twice what the forward pass does.
    """
    if isinstance(costs, Mapping):
        costs = costs_by_kind(schedule, costs)
    return run(program_of(schedule, costs))


def costs_by_kind(schedule: Schedule, seconds: Mapping[str, float]) -> Costs:
    """The costs of a list whose blocks, or stages, are all alike, as `simulate` takes them."""
    if schedule.unit == "block":
        return StackCosts.by_kind(schedule, seconds)
    if schedule.unit == "experts":
        return ExpertCosts.by_kind(schedule, seconds)
    if schedule.has_weight_passes and "W" not in seconds:
        half = seconds.get("B", 0.0) / 2
        seconds = {**seconds, "B": half, "W": half}
    share = {kind: value if kind == "send" else value / schedule.chunks for kind, value in seconds.items()}
    return [StagePasses.by_kind(part, share) for part in range(schedule.num_blocks)]
