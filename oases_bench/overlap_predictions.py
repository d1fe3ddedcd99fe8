"""Predicted steps beside measured ones, by the simulator and a hardware profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from oases.autotp.configuration import configured_model, read_configuration, with_layers
from oases.autotp.costs import trace_layers
from oases.core.execution.communication import WIRE_DTYPES
from oases.core.schedule import Schedule
from oases.errors import UsageError
from oases.plans.expert_schedules import exchanging
from oases.plans.gpt import gpt
from oases.plans.layered import Model
from oases.profile.config import OverlapConfig
from oases.profile.overlap import OverlapBench
from oases.simulator import simulate
from oases.simulator.cost import StackCosts
from oases.simulator.drawing import Section, draw_timelines, write_page
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.timeline import Timeline
from oases_bench.harness import Result, milliseconds, signed_percent


@dataclass(frozen=True)
class StepComparison:
    """One step of a schedule as it was measured, over all ranks, and as it is predicted of any of them."""

    name: str
    measured: Timeline
    predicted: Timeline


def model_of(config: OverlapConfig, path: str | None = None, expert_parallel: int = 0) -> Model:
    """The stack that is run. path: of the configuration of an unedited model, which is traced.

    expert_parallel: ranks that its experts are balanced over; 0 for experts that are sharded.
    """
    if path is None:
        return gpt(config.hidden, config.layers, config.heads, config.sequence, dtype=config.dtype)
    data = with_layers(read_configuration(Path(path), "--model"), config.layers)
    traced = trace_layers(configured_model(data, config.dtype), sequence=config.sequence)
    return traced.with_expert_parallel(expert_parallel) if expert_parallel else traced


def _listed(schedule: Schedule, model: Model) -> Schedule:
    """The schedule with the all-to-alls of balanced experts, as stacks run it."""
    kinds = (model.kind_of(block) for block in range(model.num_blocks))
    return exchanging(schedule, [block for block, kind in enumerate(kinds) if model.expert_parameters(kind)])


def costs_of(
    model: Model,
    batch: int,
    schedule: Schedule,
    hardware: Hardware,
    tp: int,
    wire: str = "none",
    slower: float = 1.0,
) -> StackCosts:
    """Costs of one step of a schedule. wire: name of the type in which sums are sent. slower: factor of compute."""
    kinds = [model.kind_of(block) for block in range(model.num_blocks)]
    costs = stack_costs(hardware, model, kinds, tp, batch, schedule, wire)
    forward, backward = costs.overhead
    return replace(
        costs,
        times=tuple(each.scaled(slower) for each in costs.times),
        overhead=(slower * forward, slower * backward),
    )


def slowdown(bench: OverlapBench, result: Result, hardware: Hardware, tp: int, model: Model) -> float:
    """Compute alone as it was measured in this run over that of the profile, which another hour's machine gave.

    All-to-alls of experts run in compute alone, too, and are left out on both sides.
    """

    def alone(slower: float) -> float:
        found = []
        for schedule in (_listed(each, model) for each in bench.compute_alone.values()):
            costs = costs_of(model, bench.config.batch, schedule, hardware, tp, slower=slower)
            found.append(simulate(schedule, replace(costs, collectives={})).total_seconds)
        return min(found)

    sent = alone(0.0)
    return (float(result["compute_seconds"]) - sent) / (alone(1.0) - sent)


def require_predictable(model: Model, hardware: Hardware, tp: int, batch: int) -> None:
    """Raise UsageError where nothing can be predicted, before any rank starts."""
    for kind in dict.fromkeys(model.kind_of(block) for block in range(model.num_blocks)):
        if not model.is_gpt and not hardware.measured(model, kind, tp):
            raise UsageError(
                f"profile {hardware.name!r} holds no {model.block_name(kind)} of hidden {model.hidden}, sequence "
                f"{model.sequence}, {model.dtype}, tp {tp}; measure it with oases profile --model"
            )
        hardware.block_times(model, kind, tp, batch)


def compare_predictions(
    bench: OverlapBench, result: Result, hardware: Hardware, model: Model
) -> list[StepComparison]:
    """Add predictions to every schedule of a result; return the steps. Called on every rank.

    predicted_seconds: by the profile. predicted_at_speed_seconds: with its compute scaled to compute alone in this
    run, since a shared machine is faster in one hour than in another; what is left is the simulator's own error.
    """
    steps, tp, batch = [], dist.get_world_size(), bench.config.batch
    result["compute_over_profile"] = slower = slowdown(bench, result, hardware, tp, model)
    names = {wire: name for name, wire in WIRE_DTYPES.items()}
    for name, run in bench.schedules.items():
        wire, schedule = names[bench.wire_dtypes.get(name)], _listed(run, model)
        found = simulate(schedule, costs_of(model, batch, schedule, hardware, tp, wire))
        at_speed = simulate(schedule, costs_of(model, batch, schedule, hardware, tp, wire, slower)).total_seconds
        row = result["schedules"][name]
        row["predicted_seconds"] = found.total_seconds
        row["prediction_error"] = found.total_seconds / row["step_seconds"] - 1
        row["predicted_at_speed_seconds"] = at_speed
        row["prediction_error_at_speed"] = at_speed / row["step_seconds"] - 1
        spans = tuple(replace(span, lane="link") if span.lane != "compute" else span for span in found.spans)
        steps.append(StepComparison(name, bench.timeline(name), replace(found, spans=spans, held=())))
    return steps


PREDICTION_COLUMNS = ("schedule", "measured", "predicted", "error", "at this run's speed", "error")


def prediction_rows(result: Result) -> list[tuple[str, ...]]:
    """A row for each schedule, of PREDICTION_COLUMNS."""
    return [
        (
            name,
            milliseconds(row["step_seconds"]),
            milliseconds(row["predicted_seconds"]),
            signed_percent(row["prediction_error"]),
            milliseconds(row["predicted_at_speed_seconds"]),
            signed_percent(row["prediction_error_at_speed"]),
        )
        for name, row in result["schedules"].items()
    ]


def write_comparison(path: Path, result: Result, steps: Sequence[StepComparison], hardware: Hardware) -> None:
    """A page with a row and two timelines for every schedule, all to one time scale."""
    config = result["config"]
    timelines = []
    for step in steps:
        timelines += [
            replace(step.measured, name=f"{step.name}, measured"),
            replace(step.predicted, name=f"{step.name}, predicted", who="predicted rank"),
        ]
    write_page(
        path,
        title="Measured and predicted steps",
        subtitle=f"{config['layers']} layers of width {config['hidden']}, batch {config['batch']} x "
        f"{config['sequence']}, {config['tp']} ranks; predicted from the profile {hardware.name}",
        header=PREDICTION_COLUMNS,
        rows=prediction_rows(result),
        sections=[
            Section(
                "Where the time goes",
                "One measured step, which need not be the median one, and below it the predicted one. Orange: an "
                "all-reduce is on the link. Pale: compute waits for it. Names are BLOCK.SUB-BATCH. Drag "
                "to zoom, hover for names and times.",
                draw_timelines(timelines),
            )
        ],
    )
