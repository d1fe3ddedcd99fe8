"""The command `oases`: demo, train, bench. Every command takes --json FILE; mistakes exit with 2."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from oases import __version__, testbed
from oases.errors import UsageError
from oases.schedule import ScheduleError
from oases.testbed import Backend


class _Version(argparse.Action):
    """Prints what was built, which only the extension knows, when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from oases.build import described

        print(f"oases {__version__} ({described()})")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; see '{self.prog} --help'")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (a rank failed) or 2 (a mistake in what was given)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_args(given)
        _require_writable("--json", options.json)
        options.run(options, given)
    except (UsageError, ScheduleError) as error:
        _fail(str(error))
    except OSError as error:  # a path that cannot be: too long, behind a locked folder, on a full disk
        _fail(f"{error.filename!r}: {error.strerror}" if error.filename else str(error))


def _fail(message: str) -> NoReturn:
    if _speaks():
        print(f"oases: error: {message}", file=sys.stderr)
    sys.exit(2)


def _speaks() -> bool:
    """Under torchrun every rank runs the command; the first one prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def _parser() -> argparse.ArgumentParser:
    # Deferred: everything below needs torch.
    from oases.bench.overlap import OverlapConfig
    from oases.train.config import TrainConfig

    parser = _Parser(prog="oases", description="Overlapped tensor parallelism for PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and what was built, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    demo = _command(commands, "demo", "train a GPT over a slow link, synchronous and overlapped, and show why")
    _add_options(demo, TrainConfig(steps=40, validation_batches=4), skip=("schedule", "checkpoint", "resume"))
    _add_ranks(demo, link="1gbit")
    demo.add_argument("--out", default=".", metavar="DIR", help="where report and trace go (default: .)")
    demo.set_defaults(run=_demo)

    train = _command(commands, "train", "train a GPT on text over tensor-parallel ranks, or as a plan says")
    _add_options(train, TrainConfig(), only_given=True)
    _add_ranks(train, link=None, tp=None)
    train.add_argument(
        "--plan", metavar="FILE",
        help="execute this plan: it says the model, the batch, the ranks, their degrees and schedules",
    )  # fmt: skip
    train.set_defaults(run=_train)

    bench = _command(commands, "bench", "measure what is hidden on this machine")
    benches = bench.add_subparsers(required=True, metavar="BENCHMARK", parser_class=_Parser)
    overlap = _command(benches, "overlap", "schedules beside compute alone and communication alone, interleaved")
    _add_options(overlap, OverlapConfig())
    _add_ranks(overlap, link=None)
    overlap.set_defaults(run=_bench_overlap)
    gpu = _command(
        benches, "gpu", "one GPU: kernels beside its copy bandwidth, and what a simulated link leaves exposed"
    )
    gpu.add_argument("--report", metavar="FILE", help="write a dated Markdown report there")
    gpu.set_defaults(run=_bench_gpu)
    return parser


def _command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, description=description + ".")
    parser.add_argument("--json", metavar="FILE", help="write the result there as JSON")
    return parser


def _add_options(
    parser: argparse.ArgumentParser, defaults: Any, skip: Sequence[str] = (), *, only_given: bool = False
) -> None:
    """One option per field of a configuration, with its own description, default and type.

    only_given: options that are not given are absent from what is parsed.
    """
    for item in dataclasses.fields(defaults):
        if item.name in skip:
            continue
        # Those that follow from others unless they are given say so themselves.
        follows = item.name in ("heads", "sub_batches")
        default = item.default if follows else getattr(defaults, item.name)
        kind = str if default is None else type(default)
        shown = "" if default is None or follows else f" (default: {default})"
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS if only_given else default,
            metavar={int: "N", float: "X"}.get(kind, "TEXT"), help=item.metadata["help"] + shown,
        )  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser, link: str | None, tp: int | None = 2) -> None:
    parser.add_argument("--tp", type=int, default=tp, metavar="N", help="tensor-parallel ranks (default: 2)")
    parser.add_argument(
        "--link", default=link, metavar="RATE",
        help="shape the link between the ranks, e.g. 500mbit, 1gbit; needs Linux, not root "
        f"(default: {link or 'the machine as it is'})",
    )  # fmt: skip
    parser.add_argument(
        "--backend", default="gloo", metavar="NAME",
        help="gloo, nccl, or sim:alpha=TIME,bandwidth=RATE for a simulated link; with ,alone at its end, and always "
        "on a GPU, one process stands for all ranks (default: gloo)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="X",
        help="seconds until a collective that does not end stops the run (default: 300)",
    )  # fmt: skip


def _values(cls: type[Any], options: argparse.Namespace) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(cls)}
    return {name: value for name, value in vars(options).items() if name in names}


def _configured(cls: type[Any], options: argparse.Namespace, **fixed: Any) -> Any:
    return cls(**_values(cls, options) | fixed)


def _behind_link(options: argparse.Namespace, given: Sequence[str], *, or_simulate: bool = False) -> str:
    """Go behind the link asked for; returns how the ranks are joined, in words."""
    if options.link is None:
        return f"over {options.backend}"
    testbed.link_bytes_per_second(options.link)
    if testbed.inside(options.link):
        return f"over a link of {options.link}"
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            f"--link {options.link} cannot shape the link between ranks that a launcher has started; leave out "
            "torchrun, and oases starts its own, or leave out --link"
        )
    reason = testbed.why_impossible(options.link)
    if reason is None:
        testbed.relaunch(options.link, given)
    if not or_simulate:
        raise UsageError(f"--link {options.link} cannot be had here: {reason}; or leave out --link")
    print(f"oases: no shaped link here: {reason}. Going on over a simulated link.", file=sys.stderr)
    options.backend = f"sim:alpha=50us,bandwidth={options.link}"
    return f"over a simulated link of {options.link}"


def _rank_options(options: argparse.Namespace, device: str, size: int) -> Any:
    from oases.ranks import RankOptions

    if not 0 < options.timeout <= 1e6:
        raise UsageError(f"--timeout must be above 0 and at most 1e6 seconds, got {options.timeout}")
    backend = Backend.parse(options.backend)
    if backend.name == "nccl" and device != "cuda":
        raise UsageError(f"backend nccl needs --device cuda, got --device {device}; use gloo on the CPU")
    if backend.name == "sim" and device == "cuda" and "WORLD_SIZE" not in os.environ:
        backend = dataclasses.replace(backend, alone=True)  # several ranks on one GPU would share its compute
    return RankOptions(size, backend, options.timeout)


def _require_writable(name: str, path: str | None) -> None:
    """Raise UsageError, before any work is done, unless a file can be written there."""
    if path is None:
        return
    target = Path(path)
    if not path or target.is_dir():
        raise UsageError(f"{name} {path!r} is a folder; give the path of a file")
    if not target.resolve().parent.is_dir():
        raise UsageError(f"{name} {path!r}: its folder does not exist")
    if not os.access(target if target.exists() else target.resolve().parent, os.W_OK):
        raise UsageError(f"{name} {path!r} cannot be written: permission denied")


def _write_json(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(_plain(result), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON knows no NaN: null in its place."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _demo(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.ranks import run_ranks
    from oases.terminal import console
    from oases.train import demo
    from oases.train.config import TrainConfig

    config = _configured(TrainConfig, options)
    corpus = config.check(options.tp)
    for name in demo.SCHEDULES:
        config.resolve_schedule(name)
    if options.tp < 2:
        raise UsageError(f"--tp {options.tp} communicates nothing, so there is nothing to show; give at least 2")
    folder = Path(options.out)
    if not folder.is_dir():
        raise UsageError(f"--out {options.out!r} is no folder")
    for name in ("oases-report.html", "oases-trace.json"):
        _require_writable("--out", str(folder / name))
    link = _behind_link(options, given, or_simulate=True)
    console.print(
        f"A GPT of {config.layers} layers, width {config.hidden}, on {corpus.num_files} text files "
        f"({corpus.num_bytes / 1e6:.1f} MB) from {corpus.path}\n{options.tp} ranks {link}; every step once per "
        "schedule: " + ", ".join(demo.SCHEDULES), soft_wrap=True,
    )  # fmt: skip
    result = run_ranks(demo.run_demo, (config,), _rank_options(options, config.device, options.tp))
    if not _speaks():
        return
    demo.show(result, link, folder)
    result.pop("timelines")
    _write_json(options.json, result)


def _train(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.ranks import run_ranks
    from oases.terminal import console, percent
    from oases.train.config import TrainConfig
    from oases.train.run import run_training

    plan = None
    if options.plan is not None:
        from oases.train import plan as plans

        if options.tp is not None:
            raise UsageError(f"the plan says every segment's tensor-parallel degree; leave out --tp {options.tp}")
        plan = plans.read_plan(options.plan)
        config = plans.config_for(plan, _values(TrainConfig, options))
        corpus, size = plans.check(config, plan), plan.world
    else:
        config, size = _configured(TrainConfig, options), 2 if options.tp is None else options.tp
        corpus = config.check(size)
    ranks = _rank_options(options, config.device, size)
    if plan is not None:
        ranks = dataclasses.replace(ranks, asked=f"the plan {options.plan!r}")
        if ranks.backend.alone and size > 1:
            raise UsageError(
                "a plan needs its ranks, and this backend has one process stand for all; use gloo or nccl"
            )
    link = _behind_link(options, given)
    if plan is not None:
        console.print(plan.text(), soft_wrap=True)
    console.print(
        f"{corpus.num_files} text files, {corpus.num_bytes / 1e6:.1f} MB, from {corpus.path}; {size} ranks "
        f"{link}", soft_wrap=True,
    )  # fmt: skip
    result = run_ranks(run_training, (config, plan, options.timeout), ranks)
    if not _speaks():
        return
    console.print(
        f"validation loss {result['validation_loss']:.4f} nats per byte; step "
        f"{1e3 * result['step_seconds']:.0f} ms, {result['tokens_per_second']:.0f} tokens/s"
    )
    others = [row for row in result["overlap"]["others"] if row["where"].startswith(("reshard", "gradients over"))]
    for row in result["overlap"]["stacks"] + others:
        console.print(
            f"{row['where']}: {row['collectives']} collectives, {row['bytes'] / 1e6:.0f} MB, link busy "
            f"{row['link_seconds']:.1f} s, compute waited {row['blocked_seconds']:.1f} s: {percent(row['hidden'])} "
            "hidden under compute", soft_wrap=True,
        )  # fmt: skip
    _write_json(options.json, result)


def _bench_overlap(options: argparse.Namespace, given: Sequence[str]) -> None:
    from oases.bench.overlap import OverlapConfig, run_overlap_bench
    from oases.ranks import run_ranks
    from oases.terminal import console, overlap_table

    config = _configured(OverlapConfig, options)
    config.check(options.tp)
    link = _behind_link(options, given)
    console.print(f"{options.tp} ranks {link}")
    result = run_ranks(run_overlap_bench, (config, True), _rank_options(options, config.device, options.tp))
    if not _speaks():
        return
    result["config"]["link"] = options.link
    console.print(overlap_table(result))
    _write_json(options.json, result)


def _bench_gpu(options: argparse.Namespace, given: Sequence[str]) -> None:
    import datetime

    from oases.bench.gpu import markdown, run_gpu_bench
    from oases.terminal import console

    _require_writable("--report", options.report)
    result = run_gpu_bench(console.print)
    report = markdown(result, datetime.date.today().isoformat())
    if options.report is not None:
        Path(options.report).write_text(report)
    console.print(report)
    _write_json(options.json, result)
