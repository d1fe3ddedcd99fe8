"""Training with large embeddings over a slow link: what each way of averaging gradients sends, takes and learns.

Steps are timed with all modes in turns, each round beginning with another mode, after a barrier; a step is as long as
its slowest rank's. Losses are those of trainings from the same weights on the same batches, one after another.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oases.bench.sparse_config import SparseBenchConfig
from oases.bench.sparse_kernels import nonzeros_per_second
from oases.bench.sparse_modes import Contestant, parse_modes
from oases.bench.words import write_words
from oases.bench.workloads import Batch, ClickWorkload, LanguageWorkload, Workload
from oases.terminal import progress

WARM_UP = 4
"""Steps before those that count: buckets are built anew after the first, and PowerSGD starts with the third."""


class SparseBench:
    """One benchmark on one rank."""

    def __init__(self, config: SparseBenchConfig, workload: Workload, show_progress: bool) -> None:
        self.config, self.workload, self.shows = config, workload, show_progress
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
        with progress("rounds", rounds, self.shows and self.rank == 0) as advance:
            for step in range(rounds):
                batch = self.workload.batch(self.config.seed, step, self.rank)
                first = step % len(found)  # what came before may have left a link's burst or a cache behind
                for contestant, optimizer in found[first:] + found[:first]:
                    if step == WARM_UP:
                        contestant.reset()
                    dist.barrier()
                    before, start = _loopback_bytes(), time.perf_counter()
                    _step(contestant, optimizer, batch)
                    taken = torch.tensor(time.perf_counter() - start)
                    contestant.count()
                    dist.barrier()
                    sent = _loopback_bytes() - before
                    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                    if step >= WARM_UP:
                        seconds[contestant.name].append(float(taken))
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
        with progress("trainings", total, self.shows and self.rank == 0) as advance:
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
    """What this network namespace's loopback has carried so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)


def run_sparse_bench(config: SparseBenchConfig, shaped: bool, show_progress: bool) -> dict[str, Any]:
    """On every rank. shaped: the loopback carries nothing but these ranks' traffic."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(folder) / "words.npy"), ""]
        if config.workload == "lstm":
            if dist.get_rank() == 0:
                words[1] = write_words(config.data, config.vocabulary, Path(words[0]))
            dist.broadcast_object_list(words)
        workload: Workload = (
            LanguageWorkload(config, Path(words[0])) if config.workload == "lstm" else ClickWorkload(config)
        )
        bench = SparseBench(config, workload, show_progress)
        modes: dict[str, dict[str, Any]] = {
            name: {"bytes_per_step": None, "step_seconds": None, "validation_loss": None} for name in bench.names
        }
        for part in (bench.timed() if config.steps else {}, bench.learnt() if config.train_steps else {}):
            for name, row in part.items():
                modes[name] |= row
        if not shaped:
            for row in modes.values():
                row.pop("loopback_bytes_per_step", None)
        dist.barrier()
        speeds = nonzeros_per_second(cells=config.cells) if config.kernels and bench.rank == 0 else None
        described = asdict(config) | {"ranks": bench.ranks, "words": words[1]}
        return {"config": described, "modes": modes, "nonzeros_per_second": speeds}
