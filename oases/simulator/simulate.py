"""Replays a schedule under a cost model."""

from __future__ import annotations

from collections.abc import Mapping

from oases.schedule import Schedule
from oases.simulator.cost import StackCosts
from oases.simulator.engine import run
from oases.simulator.lowering import lower
from oases.simulator.program import Program
from oases.simulator.timeline import Timeline


def simulate(schedule: Schedule, costs: StackCosts | Mapping[str, float]) -> Timeline:
    """One step of `schedule`, on one rank, as all ranks of a tensor-parallel group do the same.

    costs: a cost model, or seconds by the kind of op (F, C, R, B, W, all_reduce, ...), 0 for what is not named.
    """
    if not isinstance(costs, StackCosts):
        costs = StackCosts.by_kind(schedule, costs)
    forward, backward = lower(schedule, costs)
    return run(Program(schedule.name, (tuple(forward + backward),), {costs.link: costs.contention}))
