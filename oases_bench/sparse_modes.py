"""Ways of averaging gradients with few rows: ours by mode, and torch's own hooks beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from oases.errors import UsageError
from oases_sparse import S2Reducer, s2_hook

OURS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense"},
    "packed": {"mode": "packed"},
    "gather": {"mode": "gather"},
    "sketch": {"mode": "sketch"},
    "sketch_without_feedback": {"mode": "sketch", "error_feedback": False},
    "auto": {"mode": "auto"},
    "auto_lossy": {"mode": "auto"},
}
BASELINES = ("ddp", "ddp_sparse", "powersgd", "fp16")
LOSSY = ("sketch", "sketch_without_feedback", "auto_lossy")
"""They get the benchmark's cells and rows."""


def parse_modes(text: str) -> list[str]:
    """Names of modes, joined by commas. UsageError for one that is none."""
    names = text.split(",")
    for name in names:
        if name not in OURS and name not in BASELINES:
            raise UsageError(f"--modes has {name!r}; give some of {','.join([*OURS, *BASELINES])}, comma-separated")
    return names


class Contestant:
    """A model under DDP, with one way of averaging. stores_sparse: its embeddings make sparse tensors.

    modelled bytes are what this rank sends by the formulas of a ring (ddp_sparse: of a gather), over all steps since
    `reset`.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[bool], nn.Module],
        *,
        stored: str,
        cells: float,
        rows: int,
        bucket_mb: float,
        powersgd_rank: int,
        seed: int,
        tables: frozenset[str],
    ) -> None:
        self.name, self.tables = name, tables
        self.stores_sparse = name == "ddp_sparse" or (name in OURS and name != "dense" and stored == "sparse")
        self.plain = model(self.stores_sparse)
        self.model = DistributedDataParallel(self.plain, bucket_cap_mb=bucket_mb)
        self.reducer: S2Reducer | None = None
        self._power: Any = None
        self._steps = 0
        self._listed_bytes = 0
        if name in OURS:
            lossy: dict[str, Any] = {"cells_per_nonzero": cells, "rows": rows} if name in LOSSY else {}
            self.reducer = S2Reducer(seed=seed, **OURS[name], **lossy)
            self.reducer.name_parameters(self.plain)
            self.model.register_comm_hook(self.reducer, s2_hook)
        elif name == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "powersgd":
            self._power = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=2, random_seed=seed
            )
            self.model.register_comm_hook(self._power, powerSGD_hook.powerSGD_hook)
        elif name == "ddp_sparse":
            for name_of, parameter in self.plain.named_parameters():
                if name_of in tables:
                    parameter.register_hook(self._list)

    def reset(self) -> None:
        """Start counting."""
        self._steps = self._listed_bytes = 0
        if self.reducer is not None:
            self.reducer.reset_report()

    def count(self) -> None:
        """A step is over."""
        self._steps += 1

    def _list(self, gradient: Tensor) -> None:
        """Count the bytes that ddp_sparse receives, assuming that all ranks have as many rows as this one."""
        rows = gradient._indices()[0].unique().numel()
        self._listed_bytes += (dist.get_world_size() - 1) * rows * (4 * gradient.shape[1] + 8)

    def bytes_per_step(self) -> tuple[float, float]:
        """Modelled: of all tensors, and of the sparse ones."""
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        of = {name: parameter.numel() for name, parameter in self.plain.named_parameters()}
        tables = ring * 4 * sum(of[name] for name in self.tables)
        rest = ring * 4 * sum(of.values()) - tables
        if self.reducer is not None and self.name != "dense":
            report = self.reducer.report()
            sparse = sum(account.bytes for account in report.accounts if account.name in self.tables)
            return report.bytes / self._steps, sparse / self._steps
        if self.name == "fp16":
            return (tables + rest) / 2, tables / 2
        if self.name == "ddp_sparse":
            return self._listed_bytes / self._steps + rest, self._listed_bytes / self._steps
        if self._power is not None:
            rank = self._power.matrix_approximation_rank
            low = {n: rank * sum(p.shape) for n, p in self.plain.named_parameters() if p.dim() == 2}
            sent = {n: low[n] if n in low and 2 * low[n] < of[n] else of[n] for n in of}
            return ring * 4 * sum(sent.values()), ring * 4 * sum(sent[n] for n in self.tables)
        return tables + rest, tables
