"""Overlap benchmark: schedules against compute alone, communication alone, baselines and predictions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import RenderableType

from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.plans.layered import Model
from oases.profile.config import OverlapConfig
from oases.profile.overlap import BuiltInLayers, Layers, OverlapBench, measure_together
from oases.simulator.hardware_file import read_hardware
from oases.terminal import percent, progress, table
from oases_bench.baselines import make_baseline, parse_baselines, require_baseline
from oases_bench.emulation import EmulatedDevice, emulated_device
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    checked_settings,
    first_rank,
    milliseconds,
)
from oases_bench.overlap_predictions import (
    PREDICTION_COLUMNS,
    compare_predictions,
    model_of,
    prediction_rows,
    require_predictable,
    write_comparison,
)
from oases_bench.ratio import NEAR, TRIALS, RatioLink
from oases_bench.unedited_layers import ModelBenchConfig, UneditedLayers, of_model
from oases_train.config import option

MALLOCS = ("keep", "trim")
"""Memory that is freed stays with the process, or goes back to the system as by default: contestants that allocate a
whole batch's activations then pay tens of thousands of page faults a step."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, by malloc.h."""
_PAD_BYTES = 64 << 20


@dataclass(frozen=True)
class OverlapBenchConfig(ModelBenchConfig, BenchConfig):
    """One overlap benchmark: a stack of transformer layers, forward and backward."""

    beside_gpt: bool = option(False, "with --model: also run the built-in GPT of the same sizes")
    ratio: str = option(
        "",
        "comma-separated ratios of communication to compute, e.g. 2,1,0.5: measure at each, behind a link whose rate "
        "is set so that communication alone takes so many times compute alone on this machine",
    )
    peers: str = option("none", "baselines to run: all, none, or some of torch, megatron, domino, comma-separated")
    flops: float = option(
        0.0,
        "emulate matmuls and attention, the peers' too, as on a device of so many FLOP/s, for more ranks than cores",
    )
    malloc: str = option(
        "keep", "allocator of all contestants: keep freed memory, or trim it as glibc does by default", MALLOCS
    )
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

    def predicted_model(self, ranks: int) -> Model:
        """The model that --simulate predicts."""
        return model_of(self, self.model, ranks if self.experts_mode == "balanced" else 0)

    def prepared(self, ranks: Ranks) -> OverlapBenchConfig:
        """With the sizes of the model."""
        config = self
        if self.ratio and (ranks.link is not None or ranks.backend != "gloo" or ranks.nodes != 1):
            raise UsageError(f"--ratio {self.ratio} sets the rate of a link; leave out --link, --backend and --nodes")
        if self.ratio and self.simulate is not None:
            raise UsageError(f"--simulate {self.simulate} knows one link; leave it out, or --ratio {self.ratio}")
        if self.flops:
            self._require_emulation()
        if self.model is not None:
            if self.baseline_names:
                raise UsageError(f"--peers {self.peers} run the built-in GPT; leave it out, or --model")
            config = of_model(self, ranks.given, ranks.size)
        config.check(ranks.size)
        if self.simulate is not None:
            model = config.predicted_model(ranks.size)
            require_predictable(model, read_hardware(Path(self.simulate)), ranks.size, config.batch)
        elif self.html is not None:
            raise UsageError(
                f"--html {self.html} draws measured steps beside predicted ones; give --simulate PROFILE"
            )
        return config

    def _require_emulation(self) -> None:
        if not 1e6 <= self.flops <= 1e15:
            raise UsageError(f"--flops must be 0 or between 1e6 and 1e15, got {self.flops}")
        if self.device != "cpu":
            raise UsageError(f"--flops {self.flops:g} emulates on the CPU; leave it out, or --device {self.device}")
        if self.simulate is not None:
            raise UsageError(
                f"--simulate {self.simulate} knows this machine's compute; leave it out, or --flops {self.flops:g}"
            )

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


def set_malloc(name: str) -> None:
    """Set the allocator of this process for good. keep: nothing is mapped or trimmed; trim: glibc as it is.

    UsageError where the C library is not glibc.
    """
    if name == "trim":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    values = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: _PAD_BYTES}
    if mallopt is None or not all(mallopt(parameter, value) for parameter, value in values.items()):
        raise UsageError(f"--malloc {name} needs glibc, which this process does not run on; give --malloc trim")


def run_overlap_bench(config: OverlapBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, once or at each ratio. Called on every rank."""
    set_malloc(config.malloc)
    named = checked_settings(config)
    if not config.ratios:
        return _run_once(config, named, shows, None)
    return {"config": named, "ratios": [_run_once(config, named, shows, ratio) for ratio in config.ratios]}


def _run_once(config: OverlapBenchConfig, named: Result, shows: bool, ratio: float | None) -> Result:
    group = dist.group.WORLD
    assert group is not None
    benches = [bench_of(config, group)]
    if config.beside_gpt:
        benches.append(bench_of(replace(config, model=None, beside_gpt=False, experts_mode="sharded"), group))
    with emulated_device(config.flops) if config.flops else nullcontext() as device:
        link: Result = {}
        if ratio is None:
            results = measured(benches, shows)
        else:
            results, link = measured_at(RatioLink(group, ratio), benches, shows)
        if device is not None:
            results[0]["emulated_seconds"] = emulated_seconds(benches[0], device)
    for result in results:
        own = ("model", "beside_gpt", "experts_mode", "peers", "flops", "malloc")
        result["config"] |= {name: named[name] for name in own}
    found = results[0] | link
    if config.beside_gpt:
        found["gpt"] = results[1]
        for name, row in found["schedules"].items():
            row["speedup_over_gpt"] = row["speedup"] / results[1]["schedules"][name]["speedup"]
    if config.simulate is not None:
        hardware = read_hardware(Path(config.simulate))
        steps = compare_predictions(benches[0], found, hardware, config.predicted_model(group.size()))
        found["config"]["profile"] = hardware.name
        if config.html is not None and first_rank():
            write_comparison(Path(config.html), found, steps, hardware)
    return found


def measured_at(link: RatioLink, benches: Sequence[OverlapBench], shows: bool) -> tuple[list[Result], Result]:
    """Results over a link of the ratio asked for, and what was set and found.

    Up to two measurements: where the first finds another ratio by more than `NEAR`, the rate is corrected.
    """
    with progress("setting the link", TRIALS, shows and first_rank()) as advance:
        link.calibrate(benches, advance)
    tried = []
    while True:
        results = measured(benches, shows)
        found = results[0]["communication_over_compute"]
        tried.append({"link": link.rate, "found": found})
        if link.off(found) <= NEAR or len(tried) == 2:
            return results, {"ratio": link.asked, "link": link.rate, "measurements": tried}
        link.correct(found)
        for bench in benches:
            bench.forget_choice()


def emulated_seconds(bench: OverlapBench, device: EmulatedDevice) -> dict[str, float]:
    """Seconds that a step of sync and of each peer waits for emulated ops: equal where they compute alike."""
    found = {}
    for name in ("sync", *bench.peers):
        before = device.seconds
        bench.peer_step(name) if name in bench.peers else bench.step(name, bench.scheduler)
        found[name] = device.seconds - before
    return found


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
            steps = len(bench.tuning.candidates) * (bench.tuning.rounds + 1)
            with progress("choosing", steps, visible) as advance:
                bench.choose(advance)
    with progress("measuring", benches[0].config.iterations, visible) as advance:
        return measure_together(benches, advance)


def shown(result: Result) -> Iterator[RenderableType]:
    """The schedules, at each ratio, and predicted beside measured steps."""
    for each in result.get("ratios", ()):
        yield from shown(each)
    if "ratios" in result:
        return
    yield table(_COLUMNS, _rows(result), title=_TITLE, below=_below(result))
    if result["core_seconds"] is not None:
        yield table(_CORE_COLUMNS, _core_rows(result), title=_CORE_TITLE, below=_CORE_BELOW)
    if "profile" in result["config"]:
        yield table(PREDICTION_COLUMNS, prediction_rows(result), title="predicted beside measured")


_MALLOC = {"keep": "keeps freed memory, for all contestants", "trim": "glibc's default, for all contestants"}
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

_CORE_TITLE = "where the compute thread's time goes, means over ranks and iterations"
_CORE_COLUMNS = ("step", "all", "on its core", "displaced", "asleep")
_CORE_BELOW = (
    "displaced: ready while other threads had its core, such as those of collectives; asleep: waiting, as for sums\n"
    "on its core beyond compute alone: caches, interrupts and smaller matmuls"
)


def _core_rows(result: Result) -> Iterator[tuple[str, ...]]:
    for name, row in result["core_seconds"].items():
        yield name, *(milliseconds(seconds) for seconds in (sum(row.values()), *row.values()))


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
        f"it on the CPU), ideal {milliseconds(result['ideal_seconds'])}, side by side "
        f"{milliseconds(result['side_by_side_seconds'])}",
        f"communication / compute {result['communication_over_compute']:.2f}"
        + (f" over a link of {result['link']}, set for {result['ratio']:g}" if "ratio" in result else ""),
        f"malloc: {_MALLOC[result['config']['malloc']]}",
        "kept: for the backward pass, in sequence x batch x hidden per layer; in brackets by the paper's formula",
    ]
    emulated = result.get("emulated_seconds", {})
    if emulated:
        flops = result["config"]["flops"]
        waits = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in emulated.items())
        lines.append(f"matmuls and attention are emulated, {flops:.3g} FLOP/s; a step waits for them: {waits}")
    model: dict[str, Any] | None = result.get("model")
    if model is not None:
        lines.append(f"the {model['layers']} layers {model['list']} of an unedited {model['class']}")
    if "gpt" in result:
        shares = (f"{name} {row['speedup_over_gpt']:.3f}" for name, row in result["schedules"].items())
        lines.append(f"speed-up over the built-in GPT's of its sizes: {', '.join(shares)}")
    if result["core_seconds"] is None:
        lines.append("where the compute thread's time goes is not known: this kernel does not count it")
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
