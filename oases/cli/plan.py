"""The command plan: the fastest way to train a model on a cluster, as a file that train executes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from oases.cli.graph import add_graph, require_no_graph, show_graph
from oases.cli.options import command, require_writable, write_json
from oases.cli.problem import add_cluster, add_limits, add_model, batch_of, cluster_of, model_of
from oases.errors import UsageError
from oases.planner.choose import rank_plans
from oases.planner.memory import usable_bytes
from oases.planner.predict import Predictor
from oases.planner.space import Space, require_runnable
from oases.planner.sweep import Problem, as_data, sweep
from oases.plans.plan import Plan
from oases.plans.shape import ModelShape
from oases.simulator.hardware import Hardware


def add(commands: Any) -> None:
    """Add it to the command line."""
    plan = command(
        commands, "plan", "find the fastest plan that fits: degrees, schedules, recomputation; no GPU needed"
    )
    add_model(plan)
    add_cluster(plan)
    add_limits(plan)
    add_graph(plan)
    plan.add_argument("--explain", action="store_true", help="show the best plans of other kinds and what they lose")
    plan.add_argument("--objective", help=argparse.SUPPRESS)  # of 0.1.0
    plan.add_argument(
        "--sweep", metavar="DIR",
        help="instead of one plan: step time against link speed, degree and model size, as pictures and JSON there",
    )  # fmt: skip
    plan.set_defaults(run=_plan)


def space_of(options: argparse.Namespace, **more: Any) -> Space:
    """What a search may choose from, as the options say."""
    if options.pipelines is not None:
        more["pipelines"] = options.pipelines
    return Space(
        degrees=options.degrees or (), micro_batches=options.micro_batches or (),
        zero=(False,) if options.no_zero else (False, True), recompute=not options.no_recompute, **more,
    )  # fmt: skip


def searched(
    model: ModelShape, hardware: Hardware, world: int, batch: int, memory: int | None, space: Space
) -> tuple[list[Plan], Predictor]:
    """Plans, the fastest first, with a progress bar while they are searched."""
    from oases.terminal import console, progress

    predictor = Predictor(hardware)
    with ExitStack() as stack:
        bars: list[Any] = []

        def advance(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(progress("searching", total, visible=console.is_terminal)))
            bars[0](done)

        plans = rank_plans(
            model, hardware, world, batch, budget=memory, space=space, predictor=predictor, on_setting=advance
        )
    return plans, predictor


def _plan(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.cli.strategy import figures, plan_table, rivals_table, title
    from oases.planner.explain import rivals
    from oases.terminal import console

    if options.objective not in (None, "simulated"):
        raise UsageError(
            f"--objective {options.objective}: plans by the paper's own formula are made by "
            "benchmarks/papers/oases_objective.py in the source tree; leave it out"
        )
    if options.graph is not None:
        show_graph(options)
        return
    require_no_graph(options)
    model, (hardware, world), batch = model_of(options), cluster_of(options), batch_of(options)
    require_runnable(model)
    space = space_of(options)
    if options.sweep is not None:
        _sweep(options, Problem(model, hardware, world, batch, options.memory, space))
        return
    plans, predictor = searched(model, hardware, world, batch, options.memory, space)
    best, capacity = plans[0], usable_bytes(hardware, options.memory)
    console.print(title(best), soft_wrap=True)
    console.print(plan_table(best, capacity))
    for line in figures(best, hardware, capacity):
        console.print(line, soft_wrap=True)
    if options.explain:
        console.print(rivals_table(rivals(plans, predictor, capacity), best))
    if options.json is not None:
        Path(options.json).write_text(best.to_json(), encoding="utf-8")
        console.print(
            f"written to {options.json}; execute it with: oases train --plan {options.json}", soft_wrap=True
        )


def _sweep(options: argparse.Namespace, problem: Problem) -> None:
    """Pictures and numbers of a sweep, in a folder that is made if it is not there."""
    from oases.planner.sweep import write_curves, write_png
    from oases.terminal import console, progress

    folder = Path(options.sweep)
    if options.explain:
        raise UsageError(f"--sweep {options.sweep} draws many plans; leave out --explain, or --sweep")
    if not options.sweep or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"--sweep {options.sweep!r} is no folder; give one, it need not exist")
    folder.mkdir(exist_ok=True)
    paths = {kind: folder / f"sweep.{kind}" for kind in ("png", "html", "json")}
    for path in paths.values():
        require_writable("--sweep", str(path))
    with ExitStack() as stack:
        bars: list[Any] = []

        def advance(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(progress("planning", total)))
            bars[0](done)

        panels = sweep(problem, advance)
    if all(point.step_seconds is None for panel in panels for each in panel.points.values() for point in each):
        raise UsageError(panels[0].points["planner"][0].plan)
    title = (
        f"{problem.model.name} on {problem.world} x {problem.hardware.name}, {problem.global_batch} samples a step"
    )
    write_png(paths["png"], f"{title}: predicted", panels)
    write_curves(paths["html"], title, "Predicted, not measured.", panels)
    data = as_data(problem, panels)
    write_json(str(paths["json"]), data)
    write_json(options.json, data)
    console.print("written to " + ", ".join(map(str, paths.values())), soft_wrap=True)
