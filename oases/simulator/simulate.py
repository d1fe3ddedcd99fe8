"""Simulation of a schedule under a cost model."""

from __future__ import annotations

from collections.abc import Mapping

from oases.core.schedule import Schedule
from oases.simulator.cost import ExpertCosts, StackCosts
from oases.simulator.engine import run
from oases.simulator.lowering import Costs, StagePasses, program_of
from oases.simulator.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | Mapping[str, float]) -> Timeline:
    """Simulate one step of `schedule`.

    The timeline shows one rank, as all ranks of a group do the same; of a pipeline one rank per stage. costs: a
    cost model (of a pipeline one per model part), or seconds by kind of op (F, C, R, B, W, all_reduce, send, D,
    ...), 0 for kinds not given. For a pipeline these are per stage; if it has W passes without given seconds, W
    takes half of B's. For experts the backward pass takes twice as long as the forward pass.
    """
    if isinstance(costs, Mapping):
        costs = costs_by_kind(schedule, costs)
    return run(program_of(schedule, costs))


def costs_by_kind(schedule: Schedule, seconds: Mapping[str, float]) -> Costs:
    """Costs of a schedule with equal blocks or stages, as `simulate` takes them."""
    if schedule.unit == "block":
        return StackCosts.by_kind(schedule, seconds)
    if schedule.unit == "experts":
        return ExpertCosts(seconds)
    if schedule.has_weight_passes and "W" not in seconds:
        half = seconds.get("B", 0.0) / 2
        seconds = {**seconds, "B": half, "W": half}
    share = {kind: value if kind == "send" else value / schedule.chunks for kind, value in seconds.items()}
    return [StagePasses.by_kind(part, share) for part in range(schedule.num_blocks)]
