"""Plans as a terminal shows them: the table of stages, the figures, the rivals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from oases.planner.explain import Rival
from oases.planner.throughput import Throughput, throughput
from oases.plans.plan import Plan, Segment
from oases.schedule.pipeline import name_of
from oases.simulator.hardware import Hardware
from oases.simulator.quantities import bytes_text, count_text, rate_text, seconds_text

MOST_ROWS = 12
"""Stages beyond which neighbours that run alike share a row."""


def plan_table(plan: Plan, capacity: int) -> Table:
    """A row for every segment: which blocks, cut and scheduled how, and what each stage holds."""
    table = Table()
    for name in ("stage", "blocks", "tp x dp", "schedule", "sub-batches", "recomputed layers", "memory"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for numbers in _alike(plan):
        for at, (block, segment) in enumerate(_placed(plan, numbers[0])):
            first, one = at == 0, len(numbers) == 1
            named = f"{numbers[0]}" if one else f"{numbers[0]}-{numbers[-1]}"
            degrees = f"{segment.tp} x {plan.stage_ranks // segment.tp}"
            table.add_row(
                named if first else "", _blocks(segment, block, one), degrees,
                segment.schedule, str(segment.generated().num_sub_batches), _again(segment),
                _memory(plan, numbers, capacity) if first else "",
            )  # fmt: skip
    return table


def _placed(plan: Plan, number: int) -> Iterator[tuple[int, Segment]]:
    """The segments of a stage, each with its first block."""
    for part in plan.parts_of(number):
        block = part.first_block
        for segment in part.segments:
            yield block, segment
            block += segment.num_blocks


def title(plan: Plan) -> str:
    """The model, the devices and how the batch is cut."""
    stages = f"{len(plan.stages)} pipeline stages ({name_of(plan.pipeline)}), " if len(plan.stages) > 1 else ""
    micro = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
    return (
        f"{plan.model.name} ({count_text(plan.model.num_parameters)} parameters, {plan.model.dtype}) on "
        f"{plan.world} devices: {stages}{micro} of {plan.global_batch // plan.micro_batches} samples"
        f"{', optimizer sharded' if plan.zero else ''}"
    )


def _blocks(segment: Segment, first: int, one: bool) -> str:
    return f"{first}-{first + segment.num_blocks - 1}" if one else f"{segment.num_blocks} each"


def _again(segment: Segment) -> str:
    layers = (segment.num_blocks + 1) // 2
    return f"{segment.recomputed_layers} of {layers}" if segment.recomputed_layers else "none"


def _alike(plan: Plan) -> Iterator[list[int]]:
    """Stages of one row: each alone, or neighbours with the same segments where there are many."""
    stages = range(len(plan.stages))
    if len(plan.stages) <= MOST_ROWS:
        yield from ([number] for number in stages)
        return
    yield from (list(run) for _, run in groupby(stages, key=lambda number: plan.stages[number]))


def _memory(plan: Plan, numbers: Sequence[int], capacity: int) -> str:
    if plan.prediction is None:
        return "-"
    most = max(plan.prediction.memory_bytes[number] for number in numbers)
    return bytes_text(most) + ("" if most <= capacity else " !")


def figures(plan: Plan, hardware: Hardware, capacity: int) -> Iterator[str]:
    """What is predicted, a line each."""
    found = plan.prediction
    assert found is not None
    rates = throughput(plan, hardware)
    yield f"step {seconds_text(found.step_seconds)}, {rate_text(rates.tokens_per_second)} tokens/s, " + (
        f"{rate_text(rates.samples_per_second)} samples/s"
    )
    yield f"exposed communication {_share(rates.exposed)}, pipeline bubbles {_share(rates.bubble)}" + _utilised(rates)
    most = max(found.memory_bytes)
    share = most / capacity
    verdict = "" if share <= 1 else ": it does not fit"
    yield f"memory {bytes_text(most)} of {bytes_text(capacity)} that may be filled ({100 * share:.0f} %){verdict}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _utilised(rates: Throughput) -> str:
    return "" if rates.utilisation is None else f", model FLOPs utilisation {_share(rates.utilisation)}"


def rivals_table(rivals: Sequence[Rival], chosen: Plan) -> Table:
    """The best of the other plans, and where each loses."""
    assert chosen.prediction is not None
    table = Table(title="why: the best plans of other kinds", title_justify="left", show_lines=True)
    for name in ("kind", "plan", "step", "what it loses"):
        table.add_column(name, justify="right" if name == "step" else "left", overflow="fold")
    for rival in rivals:
        assert rival.plan.prediction is not None
        slower = rival.plan.prediction.step_seconds / chosen.prediction.step_seconds
        step = f"{seconds_text(rival.plan.prediction.step_seconds)} ({slower:.2f} x)"
        table.add_row(rival.kind, rival.plan.text(), step, rival.loses(chosen))
    return table
