"""Plans by the objective that the Oases paper publishes, on any hardware, to compare with those of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from oases.errors import UsageError
from oases.planner.memory import head_bytes
from oases.planner.paper import USABLE, PublishedTimes, best_degrees, objective
from oases.plans.plan import Plan, Segment, Stage
from oases.plans.shape import KINDS, ModelShape
from oases.simulator.hardware import Hardware


@dataclass(frozen=True)
class PublishedChoice:
    """A plan and what the published objective says of it: seconds of a step, and of each degree throughout."""

    plan: Plan
    seconds: float
    uniform_seconds: dict[int, float]
    solve_seconds: float


def published_plan(
    model: ModelShape, hardware: Hardware, world: int, global_batch: int, *,
    budget: int | None = None, degrees: Sequence[int] = (), rows: Sequence[Mapping[str, Any]] = (),
) -> PublishedChoice:  # fmt: skip
    """The plan that the published objective likes best: every layer computed again, one micro-batch, two sub-batches.

    budget: bytes that a rank may fill; None takes the share of the device that the paper takes. degrees: to choose
    from; empty means all that fit. rows: of a file of published block times, whose all-reduces and memory of the
    runtime are then taken as they are. Raises UsageError where no degree fits.
    """
    wanted = degrees or [2**power for power in range(world.bit_length())]
    possible = [
        tp
        for tp in wanted
        if world % tp == 0 and model.fits_degree(tp) and hardware.has_block(model, tp)
        and global_batch * tp % world == 0 and global_batch * tp // world >= 2
    ]  # fmt: skip
    if not possible:
        raise UsageError(
            f"the published objective cuts a replica's batch in two; {global_batch} samples on {world} ranks leave "
            f"no degree of {', '.join(map(str, wanted))} with 2 of them; give a larger --global-batch"
        )
    if rows:
        times = PublishedTimes.from_rows([r for r in rows if r["tp"] in possible], model.hidden, world, global_batch)
    else:
        times = _times(model, hardware, world, global_batch, possible)
    found = best_degrees(times, model, hardware.device.memory_bytes if budget is None else budget / USABLE)
    runs = [(int(str(tp)), len(list(run))) for tp, run in groupby(found.states)]
    segments = tuple(Segment(count, tp, "oases", 2, (count + 1) // 2) for tp, count in runs)
    plan = Plan(model, world, hardware.ranks_per_node, global_batch, 1, (Stage(segments),))
    uniform = {tp: objective(times, [tp] * model.num_blocks) for tp in times.degrees}
    return PublishedChoice(plan, found.cost, uniform, found.seconds)


def _times(
    model: ModelShape, hardware: Hardware, world: int, global_batch: int, degrees: Sequence[int]
) -> PublishedTimes:
    """Of half a replica's batch. What the paper measures as its runtime's memory is here head and embedding."""
    forward, backward, all_reduce, runtime, samples = {}, {}, {}, {}, {}
    for tp in degrees:
        whole = global_batch * tp / world
        for kind in KINDS:
            times = hardware.block_times(model, kind, tp, whole / 2)
            forward[kind, tp] = times.forward_unkept + times.combine
            backward[kind, tp] = times.combine_backward + times.backward + times.weight_gradient
        all_reduce[tp] = hardware.collective_seconds("all_reduce", tp, model.unit_bytes(whole / 2))
        embedding = model.state_bytes(model.embedding_parameters(tp), world // tp, zero=False)
        runtime[tp] = float(head_bytes(model, tp, whole) + embedding)
        samples[tp] = whole
    return PublishedTimes(forward, backward, all_reduce, runtime, samples)
