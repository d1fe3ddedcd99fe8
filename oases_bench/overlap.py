"""Overlap benchmark: schedules against compute alone, communication alone, baselines and predictions."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.execution.group import ProcessGroup
from oases.parallel.expert_groups import EXPERT_MODES
from oases.plans.shape import KINDS, ModelShape
from oases.profile.config import OverlapConfig
from oases.profile.overlap import BuiltInLayers, Layers, OverlapBench, measure_together
from oases.schedule import Schedule
from oases.simulator import simulate
from oases.simulator.drawing import Section, draw_timelines, write_page
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.hardware_file import read_hardware
from oases.simulator.timeline import Timeline
from oases.terminal import percent, progress, table
from oases.testbed import set_rate
from oases.train.config import option
from oases_bench.baselines import make_baseline, parse_baselines, require_baseline
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    checked_settings,
    first_rank,
    max_over_ranks,
    milliseconds,
    signed_percent,
)
from oases_bench.unedited_layers import UneditedLayers, of_model


@dataclass(frozen=True)
class OverlapBenchConfig(OverlapConfig, BenchConfig):
    """One overlap benchmark: a stack of transformer layers, forward and backward."""

    model: str | None = option(
        None, "benchmark the layers of an unedited model: a config.json of transformers, or a folder with one"
    )
    beside_gpt: bool = option(False, "with --model: also run the built-in GPT of the same sizes")
    experts_mode: str = option(
        "sharded",
        "with --model: experts as in oases.parallelize(experts=); the all-to-all of balanced ones counts as compute, "
        "since their layer waits for it",
        EXPERT_MODES,
    )
    ratio: str = option(
        "",
        "comma-separated ratios of communication to compute, e.g. 2,1,0.5: measure at each, behind a link whose rate "
        "is set so that communication alone takes so many times compute alone on this machine",
    )
    peers: str = option("none", "baselines to run: all, none, or some of torch, megatron, domino, comma-separated")
    simulate: str | None = option(None, "hardware profile; also predict every step")
    html: str | None = option(None, "with --simulate: write a page with measured and predicted timelines")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_baselines(self.peers)  # names the unknown one
        for text in self.ratio.split(",") if self.ratio else ():
            if not re.fullmatch(r"\d+(\.\d+)?", text.strip()) or not 0.01 <= float(text) <= 100:
                raise UsageError(
                    f"--ratio {self.ratio!r}: {text!r} is not a ratio from 0.01 to 100; give numbers, e.g. 2,1,0.5"
                )
        if self.beside_gpt and self.model is None:
            raise UsageError("--beside-gpt runs the built-in GPT beside a model; give it with --model")
        if self.experts_mode != "sharded" and self.model is None:
            raise UsageError(f"--experts-mode {self.experts_mode} is of a model's experts; give it with --model")

    @property
    def ratios(self) -> list[float]:
        """The ratios of communication to compute asked for."""
        return [float(text) for text in self.ratio.split(",")] if self.ratio else []

    @property
    def least_link(self) -> str | None:
        """See `BenchConfig`."""
        return "1gbit" if self.ratio else None

    def described(self) -> str:
        """See `BenchConfig`."""
        return f"{{}} ranks over links set for ratios of {self.ratio}" if self.ratio else super().described()

    @property
    def baseline_names(self) -> tuple[str, ...]:
        """The peers asked for."""
        return parse_baselines(self.peers, self.batch, self.recompute)

    def prepared(self, ranks: Ranks) -> OverlapBenchConfig:
        """With the sizes of the model."""
        config = self
        if self.ratio and (ranks.link is not None or ranks.backend != "gloo" or ranks.nodes != 1):
            raise UsageError(f"--ratio {self.ratio} sets the rate of a link; leave out --link, --backend and --nodes")
        if self.ratio and self.simulate is not None:
            raise UsageError(f"--simulate {self.simulate} knows one link; leave it out, or --ratio {self.ratio}")
        if self.model is not None:
            if self.simulate is not None:
                raise UsageError(f"--simulate {self.simulate} knows the built-in GPT alone; leave it out, or --model")
            config = of_model(self, ranks.given, ranks.size)
        config.check(ranks.size)
        if self.simulate is not None:
            require_predictable(config, read_hardware(Path(self.simulate)), ranks.size)
        elif self.html is not None:
            raise UsageError(
                f"--html {self.html} draws measured steps beside predicted ones; give --simulate PROFILE"
            )
        return config

    def check(self, degree: int) -> None:
        """Raise UsageError for what cannot run on so many ranks."""
        if self.model is None or self.beside_gpt:
            self.require_ranks(degree)
        elif degree < 2:
            raise UsageError(f"--tp {degree} does not communicate, so there is nothing to overlap; give at least 2")
        for name in self.names:
            # Of how many blocks a model's layers are, the ranks will know.
            if name != "auto" and not (self.model is not None and Path(name).is_file()):
                self.require_divisible(name, degree)
        for name in self.baseline_names:
            require_baseline(name, self.batch, self.recompute)


@dataclass(frozen=True)
class StepComparison:
    """One step of a schedule as it was measured, over all ranks, and as it is predicted of any of them."""

    name: str
    measured: Timeline
    predicted: Timeline


def run_overlap_bench(config: OverlapBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, once or at each ratio. Called on every rank."""
    named = checked_settings(config)
    if not config.ratios:
        return _run_once(config, named, shows, None)
    return {"config": named, "ratios": [_run_once(config, named, shows, ratio) for ratio in config.ratios]}


def _run_once(config: OverlapBenchConfig, named: Result, shows: bool, ratio: float | None) -> Result:
    group = dist.group.WORLD
    assert group is not None
    benches = [bench_of(config, group)]
    rate = None if ratio is None else set_ratio(benches[0], ratio)
    if config.beside_gpt:
        benches.append(bench_of(replace(config, model=None, beside_gpt=False, experts_mode="sharded"), group))
    results = measured(benches, shows)
    for result in results:
        result["config"] |= {name: named[name] for name in ("model", "beside_gpt", "experts_mode", "peers")}
    found = results[0] if ratio is None else results[0] | {"ratio": ratio, "link": rate}
    if config.beside_gpt:
        found["gpt"] = results[1]
        for name, row in found["schedules"].items():
            row["speedup_over_gpt"] = row["speedup"] / results[1]["schedules"][name]["speedup"]
    if config.simulate is not None:
        hardware = read_hardware(Path(config.simulate))
        steps = compare_predictions(benches[0], found, hardware)
        found["config"]["profile"] = hardware.name
        if config.html is not None and first_rank():
            write_comparison(Path(config.html), found, steps, hardware)
    return found


def set_ratio(bench: OverlapBench, ratio: float) -> str:
    """Set the link's rate so that communication alone takes `ratio` times compute alone; return the rate.

    Called on every rank; within 3 %, by up to eight trials. UsageError where no rate gives it.
    """
    bits, rate, found = 1e9, [""], 0.0
    for trial in range(8):
        if dist.get_rank() == 0:
            rate = [set_rate(bits)]
        dist.broadcast_object_list(rate, group=bench.group)
        # The first trial's rounds also warm up allocator and caches: compute gets faster after them.
        found = _measured_ratio(bench, rounds=5 if trial else 3)
        if trial and abs(found / ratio - 1) < 0.03:
            return rate[0]
        bits = min(bits * found / ratio, 1e11)
    raise UsageError(
        f"--ratio {ratio:g} is not reached: communication took {found:.2f} of compute over a link of {rate[0]}; give "
        "a larger ratio, or a larger --hidden"
    )


def _measured_ratio(bench: OverlapBench, rounds: int) -> float:
    """Communication alone over compute alone, medians of interleaved rounds of the slowest rank."""
    names = ("compute alone", "compute alone, cut", "communication alone")
    runs = [bench.alone(name) for name in names]
    taken = [[sum(run()) for run in runs] for _ in range(rounds)]
    whole, cut, sent = max_over_ranks([statistics.median(each) for each in zip(*taken, strict=True)])
    return sent / min(whole, cut)


def bench_of(config: OverlapBenchConfig, group: ProcessGroup) -> OverlapBench:
    """The measurement of a configuration, with its layers and peers."""
    layers: Layers = (BuiltInLayers if config.model is None else UneditedLayers)(config, group)
    sizes, blocks = config.gpt(config.seed), list(layers.stack.blocks)
    peers = {name: make_baseline(name, sizes, blocks, group, config.recompute) for name in config.baseline_names}
    plain = OverlapConfig(**{item.name: getattr(config, item.name) for item in fields(OverlapConfig)})
    return OverlapBench(plain, group, layers, peers)


def measured(benches: Sequence[OverlapBench], shows: bool) -> list[Result]:
    """The results of benchmarks of one group, interleaved, with progress shown on the first rank."""
    visible = shows and first_rank()
    for bench in benches:
        if bench.tuning is not None and bench.tuning.choice is None:
            with progress("choosing", bench.tuning.num_steps, visible) as advance:
                bench.choose(advance)
    with progress("measuring", benches[0].config.iterations, visible) as advance:
        return measure_together(benches, advance)


def model_of(config: OverlapConfig) -> ModelShape:
    """The stack that is run."""
    return ModelShape(config.hidden, config.layers, config.heads, config.sequence, dtype=config.dtype)


def predicted(config: OverlapConfig, schedule: Schedule, hardware: Hardware, tp: int) -> Timeline:
    """One step of a schedule, as the simulator says."""
    model = model_of(config)
    kinds = [model.kind_of(block) for block in range(model.num_blocks)]
    return simulate(schedule, stack_costs(hardware, model, kinds, tp, config.batch, schedule))


def require_predictable(config: OverlapConfig, hardware: Hardware, tp: int) -> None:
    """Raise UsageError where nothing can be predicted, before any rank starts."""
    for name in config.names:
        if name != "auto" and config.contestant(name)[1] is not None:
            raise UsageError(
                f"schedule {name!r} sends another type than it computes in, which is not simulated; leave out its "
                "suffix, or --simulate"
            )
    for kind in KINDS:
        hardware.block_times(model_of(config), kind, tp, config.batch)


def compare_predictions(bench: OverlapBench, result: Result, hardware: Hardware) -> list[StepComparison]:
    """Add `predicted_seconds` to every schedule of a result; return the steps. Called on every rank."""
    steps = []
    for name, schedule in bench.schedules.items():
        found = predicted(bench.config, schedule, hardware, dist.get_world_size())
        row = result["schedules"][name]
        row["predicted_seconds"] = found.total_seconds
        row["prediction_error"] = found.total_seconds / row["step_seconds"] - 1
        spans = tuple(replace(span, lane="link") if span.lane != "compute" else span for span in found.spans)
        steps.append(StepComparison(name, bench.timeline(name), replace(found, spans=spans, held=())))
    return steps


PREDICTION_COLUMNS = ("schedule", "measured", "predicted", "error")


def prediction_rows(result: Result) -> list[tuple[str, ...]]:
    """A row for each schedule, of PREDICTION_COLUMNS."""
    return [
        (
            name,
            milliseconds(row["step_seconds"]),
            milliseconds(row["predicted_seconds"]),
            signed_percent(row["prediction_error"]),
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


def shown(result: Result) -> Iterator[RenderableType]:
    """The schedules, at each ratio, and predicted beside measured steps."""
    for each in result.get("ratios", ()):
        yield from shown(each)
    if "ratios" in result:
        return
    yield table(_COLUMNS, _rows(result), title=_TITLE, below=_below(result))
    if "profile" in result["config"]:
        yield table(PREDICTION_COLUMNS, prediction_rows(result), title="predicted beside measured")


_TITLE = "forward + backward of the stack, medians of one interleaved run"
_COLUMNS = (
    "schedule",
    "step",
    "against sync",
    "hidden",
    "of ideal",
    "ARs per layer",
    "gradient error",
    "kept",
    "peak",
)


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    for name, row in result["schedules"].items():
        formula = row["formula_units"]
        yield (
            name, milliseconds(row["step_seconds"]), f"{row['speedup']:.2f} x", percent(row["hidden"]),
            percent(row["of_ideal"]), f"{row['all_reduces_per_layer']:g}",
            f"{row['max_relative_gradient_error']:.1e}",
            f"{row['kept_units']:.2f}" + ("" if formula is None else f" ({formula})"),
            f"{row['peak_bytes'] / 1e6:.1f} MB",
        )  # fmt: skip
    for name, row in result.get("gpt", {}).get("schedules", {}).items():
        shares = percent(row["hidden"]), percent(row["of_ideal"])
        yield f"gpt {name}", milliseconds(row["step_seconds"]), f"{row['speedup']:.2f} x", *shares
    sync = result["schedules"]["sync"]["step_seconds"]
    for name, row in result["peers"].items():
        yield name, milliseconds(row["step_seconds"]), f"{sync / row['step_seconds']:.2f} x"


def _below(result: Result) -> str:
    alone, sent = milliseconds(result["compute_seconds"]), milliseconds(result["communication_seconds"])
    lines = [
        f"compute alone {alone}, communication alone {sent} ({milliseconds(result['communication_cpu_seconds'])} of "
        f"it on the CPU), ideal {milliseconds(result['ideal_seconds'])}",
        f"communication / compute {result['communication_over_compute']:.2f}"
        + (f" over a link of {result['link']}, set for {result['ratio']:g}" if "ratio" in result else ""),
        "kept: for the backward pass, in sequence x batch x hidden per layer; in brackets by the paper's formula",
    ]
    model: dict[str, Any] | None = result.get("model")
    if model is not None:
        lines.append(f"the {model['layers']} layers {model['list']} of an unedited {model['class']}")
    if "gpt" in result:
        shares = (f"{name} {row['speedup_over_gpt']:.3f}" for name, row in result["schedules"].items())
        lines.append(f"speed-up over the built-in GPT's of its sizes: {', '.join(shares)}")
    if "auto" in result["schedules"]:
        lines.append(f"auto chose {result['schedules']['auto']['chosen']}")
    return "\n".join(lines)


BENCHMARK = Benchmark(
    "overlap",
    "schedules beside compute alone and communication alone, interleaved",
    OverlapBenchConfig(),
    run_overlap_bench,
    shown,
)
