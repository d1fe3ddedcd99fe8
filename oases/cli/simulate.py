"""Command `simulate`: predict a step of a plan, of a given strategy, or of the best plan."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oases.cli import op_lists
from oases.cli.options import command, is_given, require_writable, write_json
from oases.cli.plan import searched, space_of
from oases.cli.plan_options import add_cluster, add_limits, add_model, batch_of, cluster_of, model_of, require_count
from oases.core.schedule import GENERATORS, WHOLE, ScheduleError
from oases.errors import UsageError
from oases.files import write_text
from oases.limits import flag_of
from oases.planner.balance import part_blocks
from oases.planner.explain import throughput
from oases.planner.memory import usable_bytes
from oases.planner.predict import Predictor
from oases.planner.recomputation import Recomputation
from oases.planner.search import SettingSearch
from oases.planner.space import Setting, Space
from oases.planner.timings import StackTimings
from oases.plans.check import require_micro_batches
from oases.plans.layered import Model
from oases.plans.plan import PLANNED, Plan, Segment, Stage, read_plan
from oases.plans.schedule_files import name_or_text
from oases.simulator.hardware import Hardware
from oases.simulator.quantities import bytes_text, seconds_text

PAGE_SPANS, TRACE_SPANS, TEXT_SPANS = 12_000, 200_000, 2_000
"""Maximum spans of a page, a trace and a text."""
TEXT_STAGES, TEXT_BLOCKS = 16, 24
"""Maximum stages and blocks of a readable text timeline."""
_READ = (
    "Pale red: compute waits for exposed communication. Grey: it waits for another stage (pipeline bubble). "
    "Ops are named BLOCK.SUB-BATCH, passes STAGE.MICRO-BATCH. Drag to zoom, hover for names and times."
)
_BY_HAND = ("tp", "stages", "schedule", "sub_batches", "recompute", "zero", "pipeline")
_FOR_SEARCH = (
    "degrees",
    "pipelines",
    "no_recompute",
    "no_zero",
    "no_fsdp",
    "no_sequence_parallel",
    "wire",
    "allow_lossy",
    "expert_parallel",
)
_OF_A_CLUSTER = ("plan", "cluster", "profile", "world", "ranks_per_node", "link", "memory")
_OF_A_PLAN = (
    "model",
    "hidden",
    "layers",
    "heads",
    "sequence",
    "vocabulary",
    "dtype",
    "global_batch",
    "micro_batches",
)


def add(commands: Any) -> None:
    """Add the command."""
    simulate = command(commands, "simulate")
    add_model(simulate)
    add_cluster(simulate)
    add_limits(simulate)
    simulate.add_argument("--plan", metavar="FILE", help="plan file to simulate; it sets model, batch and ranks")
    hand = simulate.add_argument_group("strategy", "Without these options and --plan, the best plan is searched.")
    hand.add_argument("--tp", type=int, metavar="N", help="tensor-parallel degree of all blocks (default: 1)")
    hand.add_argument("--stages", type=int, metavar="N", help="pipeline stages (default: 1)")
    hand.add_argument(
        "--schedule", metavar="NAME|FILE",
        help=f"block schedule: {', '.join(GENERATORS)} (default: oases), or one without a model",
    )  # fmt: skip
    hand.add_argument(
        "--sub-batches",
        type=int,
        metavar="N",
        help="sub-batches per micro-batch (default: 2, or 1 for a single sample)",
    )
    hand.add_argument(
        "--recompute",
        metavar="N",
        help="activation recomputation: none, full, a number of layers per stage, fits (what memory requires), or "
        "merak:SHARE (default: none)",
    )
    hand.add_argument(
        "--zero",
        action="store_true",
        default=None,
        help="shard gradients and optimizer state over data-parallel ranks (ZeRO-2)",
    )
    hand.add_argument(
        "--pipeline",
        metavar="NAME|FILE",
        help=f"pipeline schedule: {', '.join(PLANNED)} (default: one_f_one_b), or the path of a schedule file",
    )
    op_lists.add(simulate)
    simulate.add_argument("--html", metavar="FILE", help="write a page with the timeline")
    simulate.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.cli.plan import figures, plan_table, title
    from oases.terminal import console

    for name in ("html", "trace"):
        require_writable(f"--{name}", getattr(options, name))
    if op_lists.names_list(options.schedule):
        besides = (*_OF_A_PLAN, *_OF_A_CLUSTER, *_BY_HAND, *_FOR_SEARCH)
        rest = [name for name in besides if name not in ("schedule", "recompute")]
        _refuse(f"--schedule {options.schedule} is simulated without a model", options, rest)
        op_lists.simulate_list(options)
        return
    _refuse(
        "these are for a schedule without a model, --schedule FILE or an expert schedule",
        options,
        ("costs", "blocks"),
    )
    plan, predictor, hardware = _plan_to_simulate(options)
    capacity = usable_bytes(hardware, options.memory)
    console.print(title(plan), soft_wrap=True)
    console.print(plan_table(plan, capacity))
    for line in figures(plan, hardware, capacity):
        console.print(line, soft_wrap=True)
    _print_timeline(plan, predictor)
    for path, write in ((options.html, _write_page), (options.trace, _write_trace)):
        if path is not None:
            left_out = write(Path(path), plan, predictor, hardware, capacity)
            console.print(f"written to {path}{f': {left_out}' if left_out else ''}", soft_wrap=True)
    write_json(options.json, result_of(plan, predictor, hardware, capacity))


def result_of(plan: Plan, predictor: Predictor, hardware: Hardware, capacity: int) -> dict[str, Any]:
    """Prediction and plan as plain data: seconds, bytes and fractions, in all and by stage."""
    found = predictor.pipeline_times(plan)
    stages = zip(found.exposed, found.bubbles, found.peak_bytes, strict=True)
    return {
        **dataclasses.asdict(throughput(plan, hardware)),
        "exposed_seconds": found.exposed[found.busiest],
        "bubble_seconds": found.bubbles[found.busiest],
        "memory_bytes": max(found.peak_bytes),
        "capacity_bytes": capacity,
        "fits": max(found.peak_bytes) <= capacity,
        "stages": [
            {"exposed_seconds": exposed, "bubble_seconds": bubble, "memory_bytes": memory}
            for exposed, bubble, memory in stages
        ],
        "plan": plan.data(),
    }


def _plan_to_simulate(options: argparse.Namespace) -> tuple[Plan, Predictor, Hardware]:
    """The plan with its prediction, the predictor and the hardware."""
    by_hand = [name for name in _BY_HAND if getattr(options, name) is not None]
    if options.plan is not None:
        _refuse(f"--plan {options.plan} sets it", options, (*_OF_A_PLAN, *_BY_HAND, *_FOR_SEARCH))
        plan = read_plan(options.plan)
        hardware, world = cluster_of(options, plan.world)
        if world != plan.world:
            raise UsageError(f"--plan {options.plan} is for {plan.world} devices, the cluster has {world}")
        return *_predicted(plan, hardware), hardware
    (hardware, world), batch = cluster_of(options), batch_of(options)
    model = model_of(options)
    if by_hand:
        _refuse(f"{flag_of(by_hand[0])} sets the strategy, so nothing is searched", options, _FOR_SEARCH)
        plan = _by_hand(options, model, hardware, world, batch)
        return *_predicted(plan, hardware), hardware
    space = space_of(options)
    plans, predictor = searched(model, hardware, world, batch, options.memory, space)
    return plans[0], predictor, hardware


def _predicted(plan: Plan, hardware: Hardware) -> tuple[Plan, Predictor]:
    """The plan with its prediction, and the predictor."""
    from oases.terminal import working

    predictor = Predictor(hardware)
    with working("simulating"):
        return predictor.with_prediction(plan), predictor


def _refuse(why: str, options: argparse.Namespace, names: Sequence[str]) -> None:
    given = [flag_of(name) for name in names if is_given(options, name)]
    if given:
        raise UsageError(f"{why}; leave out {', '.join(given)}")


def _by_hand(options: argparse.Namespace, model: Model, hardware: Hardware, world: int, batch: int) -> Plan:
    tp = require_count("--tp", 1 if options.tp is None else options.tp)
    stages = require_count("--stages", 1 if options.stages is None else options.stages)
    micro = options.micro_batches or (stages,)
    if len(micro) > 1:
        raise UsageError(f"--micro-batches {','.join(map(str, micro))}: a strategy takes one number")
    if world % stages or stages > model.layers:
        raise UsageError(f"--stages {stages} does not divide {world} devices, or exceeds the {model.layers} layers")
    if (world // stages) % tp:
        raise UsageError(f"--tp {tp} does not divide the {world // stages} devices of a stage")
    schedule = "oases" if options.schedule is None else options.schedule
    samples = batch * tp / (world // stages * micro[0])
    if samples < 1 or samples != int(samples):
        raise UsageError(
            f"--global-batch {batch} in {micro[0]} micro-batches over {world // stages // tp} replicas gives each "
            f"{samples:g} samples at a time, which is not an integer; change one of the three"
        )
    sub_batches = _sub_batches(options.sub_batches, schedule, int(samples))
    again = Recomputation.parse("none" if options.recompute is None else options.recompute)
    pipeline = "one_f_one_b" if options.pipeline is None else options.pipeline
    try:
        pipeline = name_or_text(pipeline, PLANNED, "stage", num_stages=stages, num_sub_batches=micro[0])
    except ScheduleError as error:
        raise UsageError(f"--pipeline: {error}") from error
    require_micro_batches(f"--micro-batches {micro[0]}", pipeline, stages, micro[0])
    setting = Setting(world, batch, stages, micro[0], bool(options.zero), pipeline)
    if stages * setting.chunks > model.layers:
        raise UsageError(f"--stages {stages} of {setting.chunks} model chunks each exceed the {model.layers} layers")
    space = Space((tp,), (schedule,), (sub_batches,), recompute=again.kind != "none")
    predictor, capacity = Predictor(hardware), usable_bytes(hardware, options.memory)
    search = SettingSearch(setting, StackTimings(model, hardware, space), capacity, predictor)
    chunks, each = setting.chunks, len(model.layer_kinds[0])
    made = [
        Stage(tuple(Segment(count, tp, schedule, sub_batches) for count in part_blocks(blocks, chunks, each)))
        for blocks in search.stage_blocks((tp,), again.shares(stages, pipeline))
    ]
    plan = Plan(model, world, hardware.ranks_per_node, batch, micro[0], tuple(made), bool(options.zero), pipeline)
    return again.applied(plan, capacity, predictor.peak_bytes)


def _sub_batches(given: int | None, schedule: str, samples: int) -> int:
    if given is None:
        return 1 if schedule in WHOLE else min(2, samples)
    if schedule in WHOLE and given > 1:
        raise UsageError(f"--sub-batches {given}: the schedule {schedule} runs a micro-batch whole; leave it out")
    return require_count("--sub-batches", given)


def _print_timeline(plan: Plan, predictor: Predictor) -> None:
    from oases.planner.explain import excerpt
    from oases.terminal import console

    blocks = plan.model.num_blocks * plan.micro_batches
    if blocks > TEXT_BLOCKS and not 1 < len(plan.stages) <= TEXT_STAGES:
        return
    timeline, left_out = excerpt(predictor, plan, TEXT_SPANS)
    timeline = dataclasses.replace(timeline, name="one step" + (f" ({left_out})" if left_out else ""))
    console.print(timeline.text(max(20, console.width - 20), links=len(plan.stages) == 1), soft_wrap=True)
    console.print("F forward, C combine, R recompute, B backward, W weight gradients, . waits, = on the link")


def _write_page(path: Path, plan: Plan, predictor: Predictor, hardware: Hardware, capacity: int) -> str:
    from oases.cli.plan import title
    from oases.planner.explain import excerpt
    from oases.simulator.drawing import Section, draw_timelines, write_page

    timeline, left_out = excerpt(predictor, plan, PAGE_SPANS)
    found, rates = predictor.pipeline_times(plan), throughput(plan, hardware)
    each = enumerate(zip(found.exposed, found.bubbles, found.peak_bytes, strict=True))
    write_page(
        path,
        title=f"A predicted step of {plan.model.name}: {seconds_text(rates.step_seconds)}",
        subtitle=f"{title(plan)}. {plan.text()}. Predicted for {hardware.name}, not measured.",
        header=("stage", "exposed communication", "bubble", "memory"),
        rows=[
            (str(number), seconds_text(exposed), seconds_text(bubble), bytes_text(memory))
            for number, (exposed, bubble, memory) in each
        ],
        sections=[
            Section(
                "Where the time goes",
                _READ + (f" Omitted: {left_out}." if left_out else ""),
                draw_timelines([dataclasses.replace(timeline, name=plan.model.name)], capacity),
            )
        ],
    )
    return left_out


def _write_trace(path: Path, plan: Plan, predictor: Predictor, hardware: Hardware, capacity: int) -> str:
    from oases.planner.explain import excerpt
    from oases.simulator.timeline import trace_json

    timeline, left_out = excerpt(predictor, plan, TRACE_SPANS)
    write_text(path, trace_json([dataclasses.replace(timeline, name=plan.model.name)]), "--trace")
    return left_out
