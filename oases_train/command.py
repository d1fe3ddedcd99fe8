"""Commands `demo`, `train` and `export`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oases.cli.options import (
    add_options,
    add_ranks,
    command,
    config_from,
    enter_link,
    is_first_rank,
    make_rank_options,
    prepare_ranks,
    require_writable,
    resolve_backend,
    values,
    write_json,
)
from oases.errors import UsageError, make_folder
from oases.testbed import Backend

if TYPE_CHECKING:
    from oases_train.config import TrainConfig
    from oases_train.metrics import StepReport
    from oases_train.plan import Run

_FOR_MODELS = ("transformers.modeling_utils", "torch.export._trace", "oases.autotp.parallelization")
"""Modules that ranks of --model import besides: 2 s of CPU time on each, where the fork server has not."""
_MOST_REPLICAS = 4096
_NOT_OF_DEMO = (
    "schedule", "checkpoint", "checkpoint_every", "keep", "resume", "step_log", "evaluate_every", "degrees",
    "pipeline_schedule", "micro_batches", "zero", "fsdp", "plan", "tensorboard", "experts", "top_k", "expert_hidden",
    "balance_weight", "placement", "record_loads",
)  # fmt: skip


def add(commands: Any) -> None:
    """Add the commands."""
    from oases_train.config import TrainConfig

    demo = command(commands, "demo")
    add_options(demo, TrainConfig(steps=40, validation_batches=4), skip=_NOT_OF_DEMO)
    add_ranks(demo, link="1gbit")
    demo.add_argument(
        "--out", default=".", metavar="DIR", help="folder for report and trace, created if missing (default: .)"
    )
    demo.set_defaults(run=_demo)

    train = command(commands, "train")
    train.add_argument(
        "--config", metavar="FILE",
        help="YAML with the options below by name, _ for -, and degrees: {data, pipeline, tensor}; or Python that "
        "defines config = TrainConfig(...). Options on the command line take precedence",
    )  # fmt: skip
    train.add_argument(
        "--write-config",
        action="store_true",
        help="print a YAML configuration with all fields, their values and help, and exit",
    )
    add_options(train, TrainConfig(), skip=("degrees",), only_given=True)
    add_ranks(train, link=None, tp=None, backend="auto")
    train.add_argument(
        "--dp", "--data-parallel", type=_replicas, metavar="N|MIN:MAX",
        help="data-parallel degree; MIN:MAX: elastic, restart with fewer replicas (default: 1; under "
        "torchrun with --tp, what its ranks make)",
    )  # fmt: skip
    train.add_argument(
        "--pp", "--pipeline", type=int, metavar="N", help="pipeline-parallel degree, stages (default: 1)"
    )
    train.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="restart all ranks after a failure, up to N times, from the newest checkpoint in --checkpoint "
        "(default: 0)",
    )  # fmt: skip
    train.set_defaults(run=_train)

    export = command(commands, "export")
    export.add_argument("checkpoint", help="checkpoint, or a folder of checkpoints for the newest")
    export.add_argument(
        "file",
        help="file to write, e.g. model.safetensors; with LoRA a folder that peft loads; with --convert a folder for "
        "the checkpoint",
    )
    export.add_argument("--convert", action="store_true", help="write a checkpoint of oases 0.1 in today's format")
    export.set_defaults(run=_export)


def _demo(options: argparse.Namespace, given: Sequence[str]) -> None:
    prepare_ranks(options, "oases_train.demo_command")
    from oases.launch.ranks import run_ranks
    from oases.terminal import console
    from oases_train import demo_command as demo
    from oases_train.config import TrainConfig
    from oases_train.plan import Run

    config = config_from(TrainConfig, options)
    runs = [Run.of(dataclasses.replace(config, schedule=name), options.tp) for name in demo.SCHEDULES]
    corpus = runs[0].corpus(single_process=Backend.parse(options.backend).single_process)
    if options.tp < 2:
        raise UsageError(f"--tp {options.tp} does not communicate, so there is nothing to overlap; give at least 2")
    folder = make_folder(options.out, "--out")
    for name in ("oases-report.html", "oases-trace.json"):
        require_writable("--out", str(folder / name))
    link = enter_link(options, given, or_simulate=True)
    console.print(
        f"A GPT of {config.layers} layers, width {config.hidden}, on {corpus.description}\n"
        f"{options.tp} ranks {link}; every step once per "
        "schedule: " + ", ".join(demo.SCHEDULES), soft_wrap=True,
    )  # fmt: skip
    result = run_ranks(demo.run_demo, (config,), make_rank_options(options, config.device))
    if not is_first_rank():
        return
    demo.show(result, link, folder)
    result.pop("timelines")
    write_json(options.json, result)


def _train(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.checkpoint.lock import FolderLock
    from oases.launch.ranks import run_ranks, under_torchrun
    from oases.terminal import console
    from oases_train.resume import resumed_backend

    if options.write_config:
        _write_config(options)
        return
    prepare_ranks(options, "oases_train.trainer", *(_FOR_MODELS if getattr(options, "model", None) else ()))
    run, *fewer = _runs_of(options)
    config, plan = run.config, run.plan
    resumed = resumed_backend(config.checkpoint, config.resume, config.resumes_newest)
    resolve_backend(options, config.device, plan.world, resumed)
    _require_restarts(options, fewer)
    ranks = dataclasses.replace(
        make_rank_options(options, config.device, plan.world), max_restarts=options.max_restarts,
        fewer=tuple((each.plan.world, (each, options.timeout)) for each in fewer),
    )  # fmt: skip
    corpus = run.corpus(single_process=ranks.backend.single_process)
    if ranks.backend.single_process and not (config.checkpoint is config.resume is None):
        raise UsageError(
            "checkpoints need all ranks, and this backend runs a single process; leave out --checkpoint and "
            "--resume, or use gloo or nccl"
        )
    one_group = plan.uniform_tp == plan.world and plan.micro_batches == 1
    if config.plan is not None or not (one_group or config.experts):
        asked = str(config.degrees) if config.plan is None else f"the plan {config.plan!r}"
        ranks = dataclasses.replace(ranks, asked=asked)
        if ranks.backend.single_process and plan.world > 1:
            raise UsageError("a plan needs all its ranks, and this backend runs a single process; use gloo or nccl")
    link = enter_link(options, given, ranks=plan.world)
    if config.checkpoint is not None and not under_torchrun():
        FolderLock(config.checkpoint).release()  # now rather than in the ranks
    console.print(plan.text(), soft_wrap=True)
    console.print(f"{corpus.description}; starting {plan.world} rank{'s' * (plan.world > 1)} {link}", soft_wrap=True)
    result = run_ranks(_train_on_rank, (run, options.timeout), ranks)
    if is_first_rank():
        _show(result, config)
        write_json(options.json, result)


def _train_on_rank(run: Run, timeout_seconds: float) -> dict[str, Any]:
    """Check that ranks agree, train with a progress bar, and return the result. Called on every rank.

    timeout_seconds: of a collective in the plan's groups.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from oases.distributed.mesh import Mesh
    from oases.launch.ranks import report_progress, require_agreement
    from oases.terminal import console, progress, working
    from oases_train.trainer import Trainer

    config, plan = run.config, run.plan
    written = plan.to_json()
    require_agreement(dataclasses.asdict(config) | {"plan": written})
    with working("building the model", dist.get_rank() == 0):
        mesh = Mesh.of(plan, process_group=dist.group.WORLD, timeout=timedelta(seconds=timeout_seconds))
        trainer = Trainer(run, process_group=dist.group.WORLD, mesh=mesh)
    if trainer.resumed is not None and dist.get_rank() == 0:
        console.print(f"resumed from {trainer.resumed} at step {trainer.steps_done}", soft_wrap=True)
    with progress(
        "training", config.steps, dist.get_rank() == 0,
        done_before=trainer.steps_done, log=True,
    ) as advance:  # fmt: skip

        def show(report: StepReport) -> None:
            report_progress()
            advance(report.step, report.text())

        result = trainer.train(show)
    return {"config": dataclasses.asdict(config) | {"tp": plan.uniform_tp}, "plan": json.loads(written), **result}


def _show(result: dict[str, Any], config: TrainConfig) -> None:
    """Print the result of a training run."""
    from oases.terminal import console, percent
    from oases_train.metrics import comparison_table

    unit = "byte" if config.tokenizer is None else "token"
    console.print(
        f"validation loss {result['validation_loss']:.4f} nats per {unit}; step "
        f"{1e3 * result['step_seconds']:.0f} ms, {result['tokens_per_second']:.0f} tokens/s"
    )
    console.print(
        f"{result['flops_per_second'] / 1e9:.4g} GFLOP/s of the model, {percent(result['utilisation'])} of the peak: "
        f"{result['peak_flops']['source']}", soft_wrap=True,
    )  # fmt: skip
    if result["balance"]:
        console.print(_balance_text(result["balance"]), soft_wrap=True)
    if config.record_loads is not None:
        show = f"oases bench loads --trace {config.record_loads}"
        console.print(f"expert loads in {config.record_loads}; show them with {show}", soft_wrap=True)
    if result["prediction"] is not None:
        console.print(comparison_table(result["prediction"]))
    elif config.plan is not None:
        console.print(
            "the plan has no prediction to compare with the measured step; oases plan --json writes plans with one"
        )
    others = [row for row in result["overlap"]["others"] if row["where"].startswith(("reshard", "gradients over"))]
    for row in result["overlap"]["stacks"] + others:
        console.print(
            f"{row['where']}: {row['collectives']} collectives, {row['bytes'] / 1e6:.0f} MB, link busy "
            f"{row['link_seconds']:.1f} s, compute waited {row['blocked_seconds']:.1f} s: {percent(row['hidden'])} "
            "hidden under compute", soft_wrap=True,
        )  # fmt: skip


def _balance_text(found: dict[str, float]) -> str:
    dropped = f", {found['dropped']:.3g} (token, expert) pairs dropped" if found["dropped"] else ""
    return (
        f"balance degree {found['balance_before']:.3g} without expert replicas, {found['balance_after']:.3g} with "
        f"{found['copies']:.3g} per step: ratio {found['rb']:.2f}, modelled saving "
        f"{1e3 * found['saved_seconds']:.3g} ms per step{dropped}"
    )


def _export(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.checkpoint.files import export, newest_of
    from oases.checkpoint.metadata import Metadata
    from oases.terminal import console
    from oases_train.adapters import export_adapter

    if options.convert:
        from oases_train.convert import convert

        shapes = convert(options.checkpoint, options.file)
    elif Metadata.read(newest_of(options.checkpoint)).config.get("lora_rank"):
        shapes = export_adapter(options.checkpoint, options.file)
    else:
        require_writable("file", options.file)
        shapes = export(options.checkpoint, options.file)
    console.print(f"{len(shapes)} tensors in {options.file}", soft_wrap=True)
    write_json(options.json, {"tensors": shapes})


def _values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Merge the configuration file and the options; options take precedence."""
    from oases.models.options import Degrees
    from oases_train.config import TrainConfig
    from oases_train.config_file import read_values

    in_file = {} if options.config is None else read_values(options.config, TrainConfig)
    given = values(TrainConfig, options)
    named = {"data": options.dp and options.dp[-1], "pipeline": options.pp, "tensor": options.tp}
    degrees = {name: degree for name, degree in named.items() if degree is not None}
    if degrees:
        given["degrees"] = dataclasses.replace(Degrees.of(in_file.get("degrees", {})), **degrees)
    found = TrainConfig.merged(in_file, given)
    file_degrees = in_file.get("degrees", {})
    if options.dp is None and isinstance(file_degrees, dict) and "data" not in file_degrees:
        _fill_replicas(found)
    return found


def _replicas(text: str) -> range:
    """Data-parallel degrees of `N` or `MIN:MAX`, at least one."""
    least, colon, most = text.partition(":")
    found = range(0)
    if least.isdecimal() and (most.isdecimal() or not colon) and len(text) < 20:
        found = range(int(least), int(most or least) + 1)
    if not found or not 1 <= found[0] <= found[-1] <= _MOST_REPLICAS:
        raise argparse.ArgumentTypeError(
            f"must be a degree from 1 to {_MOST_REPLICAS}, or two as MIN:MAX, e.g. 1:2, got {text!r}"
        )
    return found


def _fill_replicas(found: dict[str, Any]) -> None:
    """Let the ranks of a launcher be replicas of the given tensor-parallel degree. Runs with experts do so anyway."""
    from oases.models.options import Degrees

    launched, degrees = _launched(), Degrees.of(found.get("degrees", {}))
    of_one = degrees.pipeline * degrees.tensor
    if launched and degrees.tensor and launched % of_one == 0 and not (found.get("experts") or found.get("plan")):
        found["degrees"] = dataclasses.replace(degrees, data=launched // of_one)


def _launched() -> int | None:
    """Number of ranks that a launcher has started; None without one."""
    import os

    from oases.launch.ranks import under_torchrun

    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def _write_config(options: argparse.Namespace) -> None:
    from oases_train.config import TrainConfig
    from oases_train.config_file import config_text

    found = _values_of(options)
    if found.get("plan") is None:
        TrainConfig(**found)  # raises UsageError for an invalid value
    print(config_text(found, dataclasses.fields(TrainConfig)), end="")


def _runs_of(options: argparse.Namespace) -> list[Run]:
    """Validated runs of the options: the one to start with, then those with fewer replicas that --dp allows."""
    from oases_train.config import TrainConfig, values_for
    from oases_train.plan import Run, num_ranks, read_plan, resolve_degrees

    found = _values_of(options)
    if found.get("plan") is not None:
        for option, degree in (("--tp", options.tp), ("--pp", options.pp), ("--dp", options.dp and options.dp[-1])):
            if degree is not None:
                raise UsageError(f"the plan sets the degrees of every stage; leave out {option} {degree}")
        plan = read_plan(found["plan"])
        return [Run(TrainConfig(**values_for(plan, found)), plan)]
    config = TrainConfig(**found)
    replicas = options.dp or range(0)
    if len(replicas) < 2:
        ranks = num_ranks(config, _launched(), one_replica=replicas == range(1, 2))
        return [Run.of(dataclasses.replace(config, degrees=resolve_degrees(config, ranks)), ranks)]
    degrees = resolve_degrees(config, num_ranks(config))  # at the most replicas; the other degrees stay
    runs = []
    for data in reversed(replicas):
        each = dataclasses.replace(degrees, data=data)
        try:
            made = Run.of(dataclasses.replace(config, degrees=each), data * degrees.pipeline * degrees.tensor)
        except UsageError as error:
            raise UsageError(f"--dp {replicas[0]}:{replicas[-1]} with {data} replicas: {error}") from error
        runs.append(made)
    launched = _launched()
    if launched is None:
        return runs
    fitting = [run for run in runs if run.plan.world == launched]
    if not fitting:
        raise UsageError(
            f"--dp {replicas[0]}:{replicas[-1]} needs {runs[-1].plan.world} to {runs[0].plan.world} ranks, "
            f"{degrees.pipeline * degrees.tensor} for each replica, but the launcher gives {launched}; start others, "
            "or change --dp"
        )
    return fitting


def _require_restarts(options: argparse.Namespace, fewer: Sequence[Run]) -> None:
    """Raise UsageError for restarts that are not ours, and for `fewer` replicas that would never be started."""
    from oases.launch.ranks import under_torchrun

    if options.max_restarts and under_torchrun():
        raise UsageError(
            f"--max-restarts {options.max_restarts} is for ranks that oases starts; give it to torchrun, before -m"
        )
    if fewer and not options.max_restarts:
        raise UsageError(
            f"--dp {options.dp[0]}:{options.dp[-1]} lowers the replicas at a restart; give --max-restarts N, or one "
            "degree"
        )
    if fewer and options.nodes != 1:
        raise UsageError(
            f"--nodes {options.nodes} emulates nodes that are never lost; leave it out, or give --dp one degree"
        )
