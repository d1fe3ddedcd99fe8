"""Everything a training run is told, in one dataclass; the command line's options are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch

from oases.errors import UsageError
from oases.models.gpt import GPTConfig
from oases.schedule import GENERATORS, Recompute, Schedule, generate, parse_schedule, validate
from oases.train.data import TextCorpus


def option(default: Any, description: str) -> Any:
    """A field with the text its command-line option shows."""
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the model and of a batch, and how the batch is scheduled."""

    hidden: int = option(512, "width of the model, features")
    layers: int = option(4, "transformer layers")
    heads: int = option(0, "attention heads; 0 = hidden / 64")
    sequence: int = option(128, "tokens (bytes of text) per sample")
    batch: int = option(8, "samples per step")
    sub_batches: int = option(2, "parts the batch is cut into by an overlapping schedule")
    recompute: str = option("none", "what the backward pass computes again: none, or full to keep block inputs alone")

    def __post_init__(self) -> None:
        if self.heads == 0:
            object.__setattr__(self, "heads", max(1, self.hidden // 64))
        for name in ("hidden", "layers", "heads", "sequence", "batch", "sub_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.recompute not in ("none", "full"):
            raise UsageError(f"unknown recompute {self.recompute!r}; known are none and full")
        if self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} does not divide by {self.heads} heads; change one of them")

    def require_degree(self, degree: int) -> None:
        """Raise UsageError unless the model can be cut over `degree` ranks."""
        if degree < 1:
            raise UsageError(f"--tp must be at least 1, got {degree}")
        for name, size in (("heads", self.heads), ("hidden", self.hidden), ("vocabulary", 256)):
            if size % degree:
                fits = ", ".join(str(t) for t in range(1, size + 1) if self.heads % t == 0 and self.hidden % t == 0)
                raise UsageError(f"{name} {size} does not divide by --tp {degree}; degrees that do: {fits}")

    def resolve_schedule(self, name: str) -> Schedule:
        """The schedule called `name`, or the one whose text stands in the file `name`, for this model.

        UsageError where there is neither or the batch is too small; ScheduleError for a bad text.
        """
        if name in GENERATORS:
            schedule = generate(name, 2 * self.layers, self.sub_batches, cast(Recompute, self.recompute))
        elif Path(name).is_file():
            schedule = parse_schedule(Path(name).read_text())
            validate(schedule)
            if schedule.num_blocks != 2 * self.layers:
                raise UsageError(
                    f"schedule file {name!r} is for {schedule.num_blocks} blocks; {self.layers} layers have "
                    f"{2 * self.layers}"
                )
        else:
            raise UsageError(
                f"unknown schedule {name!r}; known are {', '.join(sorted(GENERATORS))}, or give the path of a "
                "schedule's text"
            )
        if self.batch < schedule.num_sub_batches:
            raise UsageError(
                f"a batch of {self.batch} cannot be cut into {schedule.num_sub_batches} sub-batches; raise "
                "--batch or lower --sub-batches"
            )
        return schedule

    def gpt(self, seed: int) -> GPTConfig:
        """The built-in GPT of these sizes."""
        return GPTConfig(hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence, seed=seed)


@dataclass(frozen=True)
class TrainConfig(ModelOptions):
    """A training run. All values are checked when it is made; UsageError names the one that cannot be."""

    data: str | None = option(None, "text file or folder of text files; default: Python's standard library")
    schedule: str = option("oases", "name of a schedule, such as oases or sync, or the path of one's text")
    steps: int = option(200, "optimizer steps")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup: int = option(10, "steps of linear warm-up before the cosine")
    weight_decay: float = option(0.1, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    validation_batches: int = option(8, "held-out batches in the final validation loss")
    seed: int = option(0, "seed of weights and batches")
    device: str = option("cpu", "cpu or cuda")
    checkpoint: str | None = option(None, "folder to save the final state to")
    resume: str | None = option(None, "checkpoint folder to go on from, of any tensor-parallel degree")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "validation_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "seed"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must be at least 0, got {getattr(self, name)}")
        require_device(self.device)

    def check(self, degree: int) -> TextCorpus:
        """Everything that can be known before any rank starts; returns the corpus."""
        self.require_degree(degree)
        self.resolve_schedule(self.schedule)
        if self.resume is not None and not (Path(self.resume) / ".metadata").is_file():
            raise UsageError(f"resume {self.resume!r} is no checkpoint folder; give one that --checkpoint wrote")
        corpus = TextCorpus(self.data)
        for split in ("train", "validation"):
            corpus.batch(split=split, step=0, batch=1, sequence=self.sequence, seed=self.seed)
        return corpus


def require_device(device: str) -> None:
    """Raise UsageError unless `device` is one that torch has here."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}; known are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, but this torch sees no GPU; use --device cpu")


def settings(config: Any) -> dict[str, Any]:
    """A dataclass's fields by name, as plain values."""
    return {item.name: getattr(config, item.name) for item in fields(config)}
