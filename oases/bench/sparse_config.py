"""What a benchmark of sparse gradients is told."""

from __future__ import annotations

from dataclasses import dataclass

from oases.bench.sparse_modes import parse_modes
from oases.errors import UsageError
from oases.train.config import option


@dataclass(frozen=True)
class SparseBenchConfig:
    """What is trained, and how its gradients are averaged."""

    workload: str = option("lstm", "lstm (words) or dlrm (clicks)")
    modes: str = option(
        "ddp,ddp_sparse,fp16,powersgd,packed,gather,peel,sketch,sketch_without_feedback,auto,auto_lossy",
        "ways of averaging, joined by commas; also: dense",
    )
    data: str | None = option(None, "text whose words are learnt, a file or folder (default: Python's own source)")
    stored: str = option("sparse", "how embeddings store gradients for our modes: sparse or dense")
    vocabulary: int = option(32768, "words, or rows of each table")
    width: int = option(128, "of embeddings and hidden layers")
    tables: int = option(4, "of the recommender")
    batch: int = option(16, "samples per step and rank")
    sequence: int = option(20, "words per sample")
    negatives: int = option(512, "words that a target is told apart from")
    cells: float = option(0.25, "cells of sketches for each non-zero")
    rows: int = option(1, "of sketches: 1, 3 or 5")
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
        for name, allowed in (("workload", ("lstm", "dlrm")), ("stored", ("sparse", "dense")), ("rows", (1, 3, 5))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("vocabulary", "width", "tables", "batch", "sequence", "negatives", "powersgd_rank", "seeds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "train_steps", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}")
        for name in ("cells", "bucket_mb", "learning_rate"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
