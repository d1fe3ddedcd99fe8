"""Training with large embeddings over a slow link: what each way of averaging gradients sends, takes and learns.

Steps are timed with all modes in turns, each round beginning with another mode, after a barrier; a step is as long as
its slowest rank's. Losses are those of trainings from the same weights on the same batches, one after another.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.kernels.sparse import bitmap_unpack
from oases.limits import flag_of
from oases.models.options import option, require_bytes, require_choices
from oases.terminal import percent, progress, table
from oases_bench.harness import Benchmark, Ranks, Result, first_rank, max_over_ranks, milliseconds
from oases_bench.sparse_modes import Contestant, parse_modes
from oases_bench.sparse_workloads import Batch, ClickWorkload, LanguageWorkload, Workload, WorkloadConfig, write_words
from oases_sparse.gradient import DenseRows
from oases_sparse.sketch import Sketch

WARM_UP = 4
"""Steps before those that count: buckets are built anew after the first, and PowerSGD starts with the third."""
ROWS, WIDTH = 32768, 128
"""Shape of the gradient that kernels are timed with."""


@dataclass(frozen=True)
class SparseBenchConfig(WorkloadConfig):
    """Workload, and methods of gradient averaging."""

    workload: str = option("lstm", "workload: word-level LSTM, or DLRM on clicks", ("lstm", "dlrm"))
    modes: str = option(
        "ddp,ddp_sparse,fp16,powersgd,packed,gather,sketch,sketch_without_feedback,auto,auto_lossy",
        "ways of averaging, joined by commas; also: dense",
    )
    data: str | None = option(None, "text whose words are learnt, a file or folder (default: Python's own source)")
    stored: str = option("sparse", "storage of embedding gradients in our modes", ("sparse", "dense"))
    cells: float = option(0.25, "cells of sketches for each non-zero")
    rows: int = option(1, "rows of sketches", (1, 3, 5))
    powersgd_rank: int = option(4, "of PowerSGD's matrices")
    bucket_mb: float = option(25.0, "largest size of DDP's buckets")
    steps: int = option(10, "timed steps of each mode; 0: none")
    train_steps: int = option(50, "steps that are trained before losses are compared; 0: none")
    kernels: bool = option(False, "time the kernels on one core too")
    learning_rate: float = option(0.1, "of Adagrad")
    seeds: int = option(1, "trainings of each mode")
    seed: int = option(0, "of the first training")

    def __post_init__(self) -> None:
        parse_modes(self.modes)
        require_choices(self)
        self.require_least(
            1, "vocabulary", "width", "tables", "batch", "sequence", "negatives", "powersgd_rank", "seeds"
        )
        self.require_least(0, "steps", "train_steps", "seed")
        for name in ("cells", "bucket_mb", "learning_rate"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{flag_of(name)} must be above 0, got {getattr(self, name)}")

    def prepared(self, ranks: Ranks) -> SparseBenchConfig:
        """See `BenchConfig`."""
        if ranks.size < 2:
            raise UsageError(f"--tp {ranks.size} averages nothing; give at least 2 data-parallel ranks")
        tables = self.tables if self.workload == "dlrm" else 1
        size = 4 * ranks.size * self.vocabulary * self.width * tables
        require_bytes({"embeddings (--vocabulary, --width, --tables)": size}, f"--workload {self.workload}")
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return "{} data-parallel ranks {}"


class SparseBench:
    """One benchmark on one rank."""

    def __init__(self, config: SparseBenchConfig, workload: Workload, shows: bool) -> None:
        self.config, self.workload, self.shows = config, workload, shows and first_rank()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.names = parse_modes(config.modes)

    def _contestant(self, name: str, seed: int) -> tuple[Contestant, torch.optim.Optimizer]:
        config = self.config
        contestant = Contestant(
            name, lambda sparse: self.workload.model(seed, sparse), stored=config.stored, cells=config.cells,
            rows=config.rows, bucket_mb=config.bucket_mb, powersgd_rank=config.powersgd_rank, seed=seed,
            tables=self.workload.tables,
        )  # fmt: skip
        return contestant, torch.optim.Adagrad(contestant.model.parameters(), lr=config.learning_rate)

    def timed(self) -> dict[str, dict[str, Any]]:
        """Seconds and bytes of steps, by mode."""
        found = [self._contestant(name, self.config.seed) for name in self.names]
        seconds: dict[str, list[float]] = {name: [] for name in self.names}
        wire: dict[str, list[int]] = {name: [] for name in self.names}
        rounds = WARM_UP + self.config.steps
        with progress("rounds", rounds, self.shows) as advance:
            for step in range(rounds):
                batch = self.workload.batch(self.config.seed, step, self.rank)
                first = step % len(found)  # what came before may have left a link's burst or a cache behind
                for contestant, optimizer in found[first:] + found[:first]:
                    if step == WARM_UP:
                        contestant.reset()
                    dist.barrier()
                    before, start = _loopback_bytes(), time.perf_counter()
                    _step(contestant, optimizer, batch)
                    taken = time.perf_counter() - start
                    contestant.count()
                    dist.barrier()
                    sent = _loopback_bytes() - before
                    (taken,) = max_over_ranks([taken])
                    if step >= WARM_UP:
                        seconds[contestant.name].append(taken)
                        wire[contestant.name].append(sent)
                advance(step + 1)
        result = {}
        for contestant, _ in found:
            every, tables = contestant.bytes_per_step()
            name = contestant.name
            result[name] = {
                "bytes_per_step": every, "table_bytes_per_step": tables,
                "loopback_bytes_per_step": statistics.median(wire[name]) / self.ranks,
                "step_seconds": statistics.median(seconds[name]),
                "all_step_seconds": seconds[name],
            }  # fmt: skip
            if contestant.reducer is not None:
                result[name]["accounts"] = contestant.reducer.report().json()
        return result

    def learnt(self) -> dict[str, dict[str, Any]]:
        """Validation losses after the training, by mode, one for each seed."""
        losses: dict[str, list[float]] = {name: [] for name in self.names}
        total, done = self.config.seeds * len(self.names), 0
        with progress("trainings", total, self.shows) as advance:
            for seed in range(self.config.seed, self.config.seed + self.config.seeds):
                for name in self.names:
                    contestant, optimizer = self._contestant(name, seed)
                    for step in range(self.config.train_steps):
                        _step(contestant, optimizer, self.workload.batch(seed, step, self.rank))
                    losses[name].append(self._validated(contestant))
                    done += 1
                    advance(done, f"{name} {losses[name][-1]:.4f}")
        return {
            name: {"validation_loss": statistics.fmean(found), "validation_losses": found}
            for name, found in losses.items()
        }

    def _validated(self, contestant: Contestant) -> float:
        with torch.no_grad():
            loss = torch.stack([contestant.plain(*batch) for batch in self.workload.validation(self.rank)]).mean()
        dist.all_reduce(loss)
        return float(loss) / self.ranks


def _step(contestant: Contestant, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    contestant.model(*batch).backward()
    optimizer.step()


def _loopback_bytes() -> int:
    """Bytes carried by this network namespace's loopback so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def run_sparse_bench(config: SparseBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group. Called on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(folder) / "words.npy"), ""]
        if config.workload == "lstm":
            if dist.get_rank() == 0:
                words[1] = write_words(config.data, config.vocabulary, Path(words[0]))
            dist.broadcast_object_list(words)
        workload: Workload = (
            LanguageWorkload(config, Path(words[0])) if config.workload == "lstm" else ClickWorkload(config)
        )
        bench = SparseBench(config, workload, shows)
        modes: dict[str, dict[str, Any]] = {
            name: {"bytes_per_step": None, "step_seconds": None, "validation_loss": None} for name in bench.names
        }
        for part in (bench.timed() if config.steps else {}, bench.learnt() if config.train_steps else {}):
            for name, row in part.items():
                modes[name] |= row
        if not ranks.shaped:  # the loopback carries more than these ranks' traffic
            for row in modes.values():
                row.pop("loopback_bytes_per_step", None)
        dist.barrier()
        speeds = nonzeros_per_second(cells=config.cells) if config.kernels and bench.rank == 0 else None
        described = asdict(config) | {"ranks": bench.ranks, "words": words[1]}
        return {"config": described, "modes": modes, "nonzeros_per_second": speeds}


def nonzeros_per_second(share: float = 0.25, cells: float = 0.25) -> dict[str, float]:
    """Speed of one core by mode, encoding and decoding together, the best of several runs.

    share: of the rows that are used, in a gradient of 32768 rows of 128 numbers. cells: of sketches, per non-zero.
    "scan": the bitmap of a dense-stored gradient alone, which reads every number; an embedding with sparse=True needs
    none.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradient = torch.zeros(ROWS, WIDTH)
    union = torch.randperm(ROWS)[: round(share * ROWS)].sort().values
    gradient[union] = torch.randn(len(union), WIDTH)
    held = DenseRows(gradient, in_place=True)
    bits = held.bits()
    values = held.gather(union)

    def sketched(rows: int) -> Callable[[], object]:
        sketch = Sketch.sized(len(union), rows, cells, 0)
        return lambda: held.put(union, sketch.decode(sketch.encode(union, values), union))

    works: dict[str, Callable[[], object]] = {
        "packed": lambda: held.put(union, held.gather(bitmap_unpack(bits, ROWS)).div_(2)),
        "scan": lambda: DenseRows(gradient, in_place=True).bits(),
        "sketch, 1 row": sketched(1),
        "sketch, 3 rows": sketched(3),
        "sketch, 5 rows": sketched(5),
    }
    found = {name: len(union) * WIDTH / min(_seconds(work) for _ in range(7)) for name, work in works.items()}
    torch.set_num_threads(threads)
    return found


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


_COLUMNS = ("mode", "MB/step", "of them tables", "tables less", "step", "faster", "validation loss")


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per way of averaging, the speed of kernels below."""
    modes = result["modes"]
    beside = modes.get("ddp", {})
    rows = []
    for mode, row in modes.items():
        cells = ["-"] * 5
        if row["step_seconds"] is not None:
            sent = row["table_bytes_per_step"]
            cells[:2] = f"{row['bytes_per_step'] / 1e6:.2f}", f"{sent / 1e6:.2f}"
            cells[3] = milliseconds(row["step_seconds"])
            if beside:
                cells[2] = percent(1 - sent / beside["table_bytes_per_step"])
                cells[4] = f"{beside['step_seconds'] / row['step_seconds']:.2f}x"
        loss = row["validation_loss"]
        rows.append((mode, *cells, "-" if loss is None else f"{loss:.4f}"))
    yield table(_COLUMNS, rows, title=result["config"]["words"] or "clicks of generated Zipf categories")
    for name, speed in (result["nonzeros_per_second"] or {}).items():
        yield f"{name}: {speed / 1e6:.0f} million non-zeros per second, encoded and decoded on one core"


BENCHMARK = Benchmark(
    "sparse",
    "training with large embeddings: what each way of averaging sends and learns",
    SparseBenchConfig(),
    run_sparse_bench,
    shown,
)
