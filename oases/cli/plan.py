"""The command plan: the fastest way to train a model on a cluster, as a file that train executes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from oases.cli.options import command
from oases.cli.problem import add_cluster, add_limits, add_model, batch_of, cluster_of, model_of
from oases.planner.choose import rank_plans
from oases.planner.memory import usable_bytes
from oases.planner.plan import Plan
from oases.planner.predict import Predictor
from oases.planner.space import Space
from oases.simulator.hardware import Hardware
from oases.simulator.model import ModelShape


def add(commands: Any) -> None:
    """Add it to the command line."""
    plan = command(
        commands, "plan", "find the fastest plan that fits: degrees, schedules, recomputation; no GPU needed"
    )
    add_model(plan)
    add_cluster(plan)
    add_limits(plan)
    plan.add_argument("--explain", action="store_true", help="show the best plans of other kinds and what they lose")
    plan.set_defaults(run=_plan)


def space_of(options: argparse.Namespace, **more: Any) -> Space:
    """What a search may choose from, as the options say."""
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

    model, (hardware, world), batch = model_of(options), cluster_of(options), batch_of(options)
    plans, predictor = searched(model, hardware, world, batch, options.memory, space_of(options))
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
