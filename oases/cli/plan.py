"""Command `plan`: search the fastest training plan for a cluster; train executes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from oases.cli.options import STANDARD_OUTPUT, command, write_result
from oases.cli.plan_options import add_cluster, add_limits, add_model, batch_of, cluster_of, model_of
from oases.core.dtypes import LOSSY
from oases.planner.choose import rank_plans
from oases.planner.explain import Rival, Throughput, throughput
from oases.planner.memory import usable_bytes
from oases.planner.predict import Predictor
from oases.planner.space import Space
from oases.plans.check import require_trainable
from oases.plans.layered import Model
from oases.plans.pipelines import name_of
from oases.plans.plan import Plan, Segment
from oases.simulator.cluster import described
from oases.simulator.hardware import Hardware
from oases.simulator.quantities import bytes_text, count_text, rate_text, seconds_text

MOST_ROWS = 12
"""Number of stages beyond which equal neighbours share a row."""


def plan_table(plan: Plan, capacity: int) -> Table:
    """Table with a row per segment: blocks, degrees, schedule, recomputation, and memory per stage."""
    table = Table()
    for name in (
        "stage",
        "blocks" if plan.model.mixed else "layers",
        "tp x dp",
        "schedule",
        "sub-batches",
        "recomputed layers",
        "memory",
    ):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for numbers in _alike(plan):
        for at, (block, segment) in enumerate(plan.placed(numbers[0])):
            first, one = at == 0, len(numbers) == 1
            named = f"{numbers[0]}" if one else f"{numbers[0]}-{numbers[-1]}"
            degrees = f"{segment.tp} x {plan.stage_ranks // segment.tp}"
            table.add_row(
                named if first else "", _held(plan, segment, block, one), degrees,
                _schedule(segment), str(segment.parts), _again(plan, segment, block),
                _memory(plan, numbers, capacity) if first else "",
            )  # fmt: skip
    return table


def title(plan: Plan) -> str:
    """Title line: model, devices, stages and micro-batches."""
    stages = f"{len(plan.stages)} pipeline stages ({name_of(plan.pipeline)}), " if len(plan.stages) > 1 else ""
    micro = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
    ep = plan.model.expert_parallel
    return (
        f"{plan.model.name} ({count_text(plan.model.num_parameters)} parameters, {plan.model.dtype}) on "
        f"{plan.world} devices: {stages}{micro} of {plan.global_batch // plan.micro_batches} samples"
        f"{', optimizer sharded' if plan.zero else ''}{', weights sharded' if plan.fsdp else ''}"
        f"{f', sums sent in {plan.wire}' if plan.wire != 'none' else ''}"
        f"{f', experts over {ep} ranks' if ep else ''}"
    )


def _schedule(segment: Segment) -> str:
    return f"{segment.schedule}, sequence-parallel" if segment.sequence_parallel else segment.schedule


def _held(plan: Plan, segment: Segment, first: int, one: bool) -> str:
    """Blocks of a segment, or its layers where all are whole; their number for several stages."""
    model, count = plan.model, segment.num_blocks
    if not model.mixed:
        first, count = model.layer_at(first), model.num_layers(first, count)
    return f"{first}-{first + count - 1}" if one else f"{count} each"


def _again(plan: Plan, segment: Segment, first: int) -> str:
    layers = plan.model.num_layers(first, segment.num_blocks)
    return f"{segment.recomputed_layers} of {layers}" if segment.recomputed_layers else "none"


def _alike(plan: Plan) -> Iterator[list[int]]:
    """Stages per row: one, or equal neighbours if there are many stages."""
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
    """Prediction lines: step time, exposed communication and bubbles, memory."""
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
    yield f"memory {bytes_text(most)} of {bytes_text(capacity)} usable ({100 * share:.0f} %){verdict}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _utilised(rates: Throughput) -> str:
    return "" if rates.utilisation is None else f", model FLOPs utilisation {_share(rates.utilisation)}"


def rivals_table(rivals: Sequence[Rival], chosen: Plan) -> Table:
    """Table of the best plans of other kinds, and what each loses."""
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


def add(commands: Any) -> None:
    """Add the command."""
    plan = command(commands, "plan")
    add_model(plan)
    add_cluster(plan)
    add_limits(plan)
    plan.add_argument(
        "--explain", action="store_true", help="also show the best plans of other kinds and what they lose"
    )
    plan.set_defaults(run=_plan)


def space_of(options: argparse.Namespace, **more: Any) -> Space:
    """Search space of the options."""
    if options.pipelines is not None:
        more["pipelines"] = options.pipelines
    if options.allow_lossy:
        more["wire"] = ("none", *LOSSY)
    if options.wire is not None:
        more["wire"] = options.wire
    return Space(
        degrees=options.degrees or (), micro_batches=options.micro_batches or (),
        zero=(False,) if options.no_zero else (False, True), recompute=not options.no_recompute,
        fsdp=(False,) if options.no_fsdp else (False, True),
        sequence_parallel=(False,) if options.no_sequence_parallel else (False, True),
        expert_parallel=options.expert_parallel or (), **more,
    )  # fmt: skip


def searched(
    model: Model, hardware: Hardware, world: int, batch: int, memory: int | None, space: Space
) -> tuple[list[Plan], Predictor]:
    """Search plans and show progress; plans, fastest first, and their predictor."""
    from oases.terminal import working

    predictor = Predictor(hardware)
    with working("searching plans, setting") as update:
        plans = rank_plans(
            model, hardware, world, batch, budget=memory, space=space, predictor=predictor, on_setting=update
        )
    return plans, predictor


def _plan(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.planner.explain import rivals
    from oases.terminal import console, working

    (hardware, world), batch = cluster_of(options), batch_of(options)
    model = model_of(options)  # last: it may be traced
    require_trainable(model)
    space = space_of(options)
    plans, predictor = searched(model, hardware, world, batch, options.memory, space)
    best, capacity = plans[0], usable_bytes(hardware, options.memory)
    console.print(title(best), soft_wrap=True)
    console.print(described(hardware, world), soft_wrap=True)
    console.print(plan_table(best, capacity))
    for line in figures(best, hardware, capacity):
        console.print(line, soft_wrap=True)
    if options.explain:
        with working("explaining"):
            found = rivals(plans, predictor, capacity)
        console.print(rivals_table(found, best))
    if options.json is not None:
        write_result(options.json, best.to_json())
    if options.json not in (None, STANDARD_OUTPUT):
        nodes = max(1, world // hardware.ranks_per_node)
        start = f"torchrun --nnodes {nodes} --nproc-per-node {hardware.ranks_per_node} ... -m " if nodes > 1 else ""
        how = f"{start}oases train --plan {options.json}"
        if not best.model.mixed:
            how += f" --model {options.model}, or in a custom training loop by oases.parallelize(model, plan=...)"
        console.print(f"written to {options.json}; execute it with: {how}", soft_wrap=True)
