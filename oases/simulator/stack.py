"""The costs of a stack of a model's blocks on given hardware."""

from __future__ import annotations

from collections.abc import Sequence

from oases.plans.shape import BlockKind, ModelShape
from oases.schedule import Schedule
from oases.simulator.cost import BlockBytes, StackCosts
from oases.simulator.hardware import Hardware


def stack_costs(
    hardware: Hardware, model: ModelShape, kinds: Sequence[BlockKind], tp: int, samples: float, schedule: Schedule
) -> StackCosts:
    """What each op of `schedule` costs on a stack of these blocks, cut over `tp` ranks, for `samples` samples."""
    part = samples / schedule.num_sub_batches
    times = {kind: hardware.block_times(model, kind, tp, part) for kind in set(kinds)}
    unit = model.unit_bytes(part)
    sizes = {kind: BlockBytes(unit, model.kept_bytes(kind, tp, part)) for kind in set(kinds)}
    link = hardware.link_of(tp)
    names = ("all_reduce", "reduce_scatter", "all_gather")
    return StackCosts(
        times=tuple(times[kind] for kind in kinds),
        collectives={name: hardware.collective_seconds(name, tp, unit) for name in names},
        sizes=tuple(sizes[kind] for kind in kinds),
        link=link,
        contention=hardware.link(link).contention,
        overhead=hardware.pass_overhead(model, tp, samples, schedule.num_sub_batches, len(kinds) / 2),
    )
