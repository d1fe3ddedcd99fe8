"""Validation loss of the same training by wire dtype of its sums, and the rate of the quantising kernels.

Each training starts from the same weights and sees the same batches; seeds change both, but not the weights in a
saved model's folder, which is fine-tuned. The spread of the seeds at full precision is the scale by which differences
are read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor, nn

from oases.core.dtypes import WIRES
from oases.core.execution.group import scheduler_of
from oases.errors import UsageError
from oases.kernels.quantized import dequantize, dequantize_sum, quantize
from oases.layers import sharded_parameters
from oases.models.options import Degrees, option
from oases.terminal import progress, table
from oases_bench.harness import BenchConfig, Benchmark, Ranks, Result, checked_settings, first_rank, gather_objects
from oases_train.config import TrainConfig
from oases_train.plan import Run
from oases_train.trainer import Trainer

NUMBERS = 1 << 22
"""Numbers that the kernels are timed with: 16 MiB, more than fits a core's own cache."""


@dataclass(frozen=True)
class LossBenchConfig(BenchConfig):
    """Trainings to compare."""

    wires: str = option(",".join(WIRES), "wire dtypes to compare, joined by commas")
    seeds: int = option(3, "trainings of each, with weights and batches of their own")
    steps: int = option(600, "optimizer steps of each training")
    model: str | None = option(
        None,
        "train an unedited model of transformers through parallelize: its config.json, or a folder with one, whose "
        "safetensors are fine-tuned if it has any",
    )
    data: str | None = option(None, "text file or folder to train on; default: Python's standard library")
    hidden: int = option(128, "width of the model, features")
    layers: int = option(4, "transformer layers")
    heads: int = option(0, "attention heads; 0 = hidden / 64, at least one on each rank")
    sequence: int = option(64, "tokens per sample")
    batch: int = option(16, "samples per step")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    kernels: bool = option(False, "time the kernels of quantised numbers on one core instead")

    def __post_init__(self) -> None:
        self.names()
        self.require_least(1, "seeds", "steps")

    def names(self) -> list[str]:
        """The wire dtypes asked for. UsageError for an unknown one."""
        return self.parse_list("wires", WIRES)

    def prepared(self, ranks: Ranks) -> LossBenchConfig:
        """Validate the sizes of the model, or read the model."""
        sizes = [name for name in ("hidden", "layers", "heads") if name in ranks.given]
        if self.model is not None and sizes:
            raise UsageError(
                f"--{sizes[0]} is for the built-in GPT; --model {self.model!r} has its own; leave it out"
            )
        if not self.kernels:
            Run.of(self.training("none", 0, ranks.size), ranks.size).corpus()
        return self

    def training(self, wire: str, seed: int, ranks: int) -> TrainConfig:
        """Configuration of one training."""
        heads = self.heads or max(ranks, self.hidden // 64)
        own: dict[str, Any] = {"hidden": self.hidden, "layers": self.layers, "heads": heads}
        sizes = own if self.model is None else {}
        return TrainConfig(
            **sizes, model=self.model, data=self.data, sequence=self.sequence, batch=self.batch, steps=self.steps,
            learning_rate=self.learning_rate, seed=seed, wire_dtype=wire, degrees=Degrees(tensor=ranks),
            schedule="oases",
        )  # fmt: skip


def run_loss_bench(config: LossBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Run on every rank."""
    found: Result = {"config": checked_settings(config) | {"tp": dist.get_world_size()}}
    if config.kernels:
        return found | {"kernels": _rates()}
    trainings = [(seed, wire) for seed in range(config.seeds) for wire in config.names()]
    rows: dict[str, list[Result]] = {wire: [] for wire in config.names()}
    with progress("training", len(trainings), shows and first_rank(), log=True) as advance:
        for done, (seed, wire) in enumerate(trainings, 1):
            row = _train(config.training(wire, seed, dist.get_world_size()))
            rows[wire].append(row)
            advance(done, f"{wire}, seed {seed}: validation loss {row['validation_loss']:.4f}")
    return found | {"wires": rows}


def _train(config: TrainConfig) -> Result:
    group = dist.group.WORLD
    assert group is not None
    scheduler = scheduler_of(group)
    scheduler.reset_totals()
    before = scheduler.errors()
    trainer = Trainer(config, process_group=group)
    losses = [trainer.step() for _ in range(config.steps)]
    totals = scheduler.totals().values()
    found: Result = {
        "seed": config.seed,
        "validation_loss": trainer.validate(),
        "training_loss": statistics.mean(losses[-20:]),
        "bytes": sum(each.bytes for each in totals),
        "saved_bytes": sum(each.saved_bytes for each in totals),
        "replicas_equal": _replicas_equal(trainer.model),
    }
    errors = {label: (count, total) for label, (count, total) in scheduler.errors().items()}
    samples = sum(count for count, _ in errors.values()) - sum(count for count, _ in before.values())
    if samples:
        total = sum(each for _, each in errors.values()) - sum(each for _, each in before.values())
        found |= {"error_samples": samples, "mean_relative_error": total / samples}
    trainer.close()
    return found


def _replicas_equal(model: nn.Module) -> bool:
    """Whether every parameter that is not sharded is equal on all ranks, to the bit."""
    cut = {id(parameter) for _, parameter, _ in sharded_parameters(model)}
    mine = [p.detach().clone() for p in model.parameters() if id(p) not in cut]
    everyone = gather_objects(mine)
    return all(torch.equal(a, b) for other in everyone for a, b in zip(mine, other, strict=True))


def kernels_of(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Kernels of quantised sums by name, on numbers x [N]: those of a rank with one other."""
    packed = quantize(x)
    return {
        "quantize": lambda: quantize(x),
        "dequantize": lambda: dequantize(packed, x.numel()),
        "dequantize and sum": lambda: dequantize_sum(x, packed[None]),
        "sum and requantize": lambda: quantize(x, packed[None]),
    }


def _rates() -> Result:
    """Bytes of fp32 per second that the kernels read or write, on one core. A sum reads x, and packed numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(NUMBERS)
    found = {name: x.nbytes / min(_seconds(run) for _ in range(9)) for name, run in kernels_of(x).items()}
    torch.set_num_threads(threads)
    return found


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def shown(result: Result) -> Iterator[RenderableType]:
    """Tables of a result."""
    if "kernels" in result:
        rates = [(kernel, f"{rate / 1e9:.1f}") for kernel, rate in result["kernels"].items()]
        yield table(("kernel, one core", "GB/s of fp32"), rates)
        return
    rows = []
    base = [row["validation_loss"] for row in result["wires"].get("none", [])]
    for wire, runs in result["wires"].items():
        losses = [run["validation_loss"] for run in runs]
        against = f"{100 * (statistics.mean(losses) / statistics.mean(base) - 1):+.2f} %" if base else "-"
        errors = [run["mean_relative_error"] for run in runs if "mean_relative_error" in run]
        rows.append(
            (
                wire, f"{statistics.mean(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}", against,
                f"{sum(run['bytes'] for run in runs) / 1e6:.0f} MB",
                f"{statistics.mean(errors):.4f}" if errors else "-",
                "yes" if all(run["replicas_equal"] for run in runs) else "NO",
            )
        )  # fmt: skip
    header = ("wire", "validation loss", "seeds", "against none", "sent", "error of sums", "replicas equal")
    yield table(header, rows)


BENCHMARK = Benchmark(
    "loss",
    "validation loss by the wire dtype of tensor-parallel sums; rate of the quantising kernels",
    LossBenchConfig(),
    run_loss_bench,
    shown,
)
