"""Collectives of a machine's ranks or of nodes, backend beside backend: time of a call, and bandwidth of the bus.

A bandwidth is that of nccl-tests: the bytes that a rank must send, whatever the algorithm, over the time of a call.
Calls of a size are made one after the other, several at a time, and backends take turns.
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
from torch import Tensor

from oases.errors import UsageError
from oases.models.options import option, require_bytes
from oases.terminal import table
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    checked_settings,
    interleave,
    max_over_ranks,
    times,
)

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
BACKENDS = ("gloo", "staged")
_BATCH_BYTES = 4 << 20
"""Calls are repeated, between two looks at the clock, up to so many bytes."""
_MOST_CALLS = 20


@dataclass(frozen=True)
class CollectivesBenchConfig(BenchConfig):
    """Operations, sizes and the number of rounds."""

    operations: str = option("all_reduce", f"operations, comma-separated; known are {', '.join(OPERATIONS)}")
    kilobytes: str = option("64,1024,4096,16384,65536", "sizes of the whole tensor, in 1024 bytes, comma-separated")
    iterations: int = option(15, "interleaved rounds; medians are reported")

    def __post_init__(self) -> None:
        self.require_least(1, "iterations")
        self.parse_list("operations", OPERATIONS)
        if not self.sizes:
            raise UsageError("--kilobytes names no size; give e.g. 64,4096")
        require_bytes({"tensors (--kilobytes)": 3 * max(self.sizes)}, "the largest size")

    def prepared(self, ranks: Ranks) -> CollectivesBenchConfig:
        """UsageError for a link within a node, where ranks share memory."""
        if ranks.link is not None and ranks.nodes == 1:
            raise UsageError("ranks of one machine share memory; leave out --link, or give --nodes as well")
        return self

    @property
    def sizes(self) -> list[int]:
        """Bytes of the tensors, each once. UsageError for what is not a positive number."""
        texts = [text.strip() for text in self.kilobytes.split(",") if text.strip()]
        if any(not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 24 for text in texts):
            raise UsageError(
                f"--kilobytes {self.kilobytes!r:.80} must be positive numbers, joined by commas, e.g. 64,4096"
            )
        return list(dict.fromkeys(int(text) << 10 for text in texts))


class _Case:
    """An operation on a size over a backend's group, timed."""

    def __init__(self, operation: str, size: int, backend: str, group: Any) -> None:
        self.operation, self.size, self.backend, self._group = operation, size, backend, group
        ranks, rank = dist.get_world_size(), dist.get_rank()
        numbers = -(-size // 4 // ranks) * ranks
        self._whole = torch.arange(numbers, dtype=torch.float32).remainder_(7).add_(rank)
        self._part, self._other = self._whole[: numbers // ranks].clone(), torch.empty_like(self._whole)
        self._calls = max(1, min(_MOST_CALLS, _BATCH_BYTES // size))
        self.seconds: list[float] = []

    def result(self) -> Tensor:
        """Result of one call, for comparison."""
        self._call()
        return {"all_reduce": self._whole, "reduce_scatter": self._part}.get(self.operation, self._other).clone()

    def step(self) -> None:
        """Time a batch of calls."""
        if self.operation == "all_reduce":
            self._whole.fill_(1.0)  # sums of sums would overflow
        self._call()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self._calls):
            self._call()
        self.seconds.append((time.perf_counter() - start) / self._calls)

    def _call(self) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(self._whole, group=self._group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(self._part, self._whole, group=self._group),
            "all_gather": lambda: dist.all_gather_into_tensor(self._other, self._part, group=self._group),
            "all_to_all": lambda: dist.all_to_all_single(self._other, self._whole, group=self._group),
        }
        calls[self.operation]()


def run_collectives_bench(config: CollectivesBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on this rank's group. RuntimeError where two backends give different results."""
    found = checked_settings(config)
    torch.set_num_threads(1)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows: list[dict[str, Any]] = []
    for operation in config.parse_list("operations", OPERATIONS):
        for size in config.sizes:
            cases = [_Case(operation, size, backend, group) for backend, group in groups.items()]
            results = [case.result() for case in cases]
            if not all(torch.equal(results[0], result) for result in results):
                raise RuntimeError(f"{operation} of {size} bytes: backends differ; their times cannot be compared")
            interleave(cases, config.iterations, f"{operation} of {size >> 10} KB", shows)
            slowest = [max_over_ranks(case.seconds) for case in cases]
            rows += [_row(case, statistics.median(seconds)) for case, seconds in zip(cases, slowest, strict=True)]
    return {"config": found | {"ranks": ranks.size}, "collectives": rows}


def _row(case: _Case, seconds: float) -> dict[str, Any]:
    ranks = dist.get_world_size()
    share = (ranks - 1) / ranks * (2 if case.operation == "all_reduce" else 1)
    return {
        "operation": case.operation, "bytes": case.size, "backend": case.backend, "seconds": seconds,
        "bus_bytes_per_second": share * case.size / seconds,
    }  # fmt: skip


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per operation and size: time and bandwidth of each backend, and the first one's time over the last's."""
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["collectives"]:
        cases.setdefault((row["operation"], row["bytes"]), []).append(row)
    columns = ["operation", "KB", *(f"{name} {unit}" for name in BACKENDS for unit in ("us", "GB/s")), "faster"]
    lines = []
    for (operation, size), rows in cases.items():
        cells = [operation, f"{size >> 10}"]
        for row in rows:
            cells += [f"{1e6 * row['seconds']:.0f}", f"{row['bus_bytes_per_second'] / 1e9:.2f}"]
        lines.append([*cells, times(rows[0]["seconds"] / rows[-1]["seconds"], 1)])
    yield table(columns, lines)


BENCHMARK = Benchmark(
    "collectives",
    "collectives within and between nodes: the backend staged, through shared memory, beside gloo",
    CollectivesBenchConfig(),
    run_collectives_bench,
    shown,
)
