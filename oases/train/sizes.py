"""Sizes of the model and of a batch, which trainings and benchmarks share, and how the batch is scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from oases.errors import UsageError
from oases.models.gpt import GPTConfig
from oases.schedule import GENERATORS, WHOLE, LayerOf, Recompute, Schedule, generate, read_schedule
from oases.train.tokenizer import BYTES


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
    sub_batches: int = option(
        0, "parts the batch is cut into by an overlapping schedule; 0 = 4, or 2 for a batch below 4"
    )
    recompute: str = option("none", "what the backward pass computes again: none, or full to keep block inputs alone")

    def __post_init__(self) -> None:
        if self.heads == 0:
            object.__setattr__(self, "heads", self.usual_heads)
        if self.sub_batches == 0:
            object.__setattr__(self, "sub_batches", self.usual_sub_batches)
        for name in ("hidden", "layers", "heads", "sequence", "batch", "sub_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.recompute not in ("none", "full"):
            raise UsageError(f"unknown recompute {self.recompute!r}; known are none and full")
        if self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} does not divide by {self.heads} heads; change one of them")

    @property
    def usual_heads(self) -> int:
        """Where none were given."""
        return max(1, self.hidden // 64)

    @property
    def usual_sub_batches(self) -> int:
        """Where none were given."""
        return 4 if self.batch >= 4 else 2

    @property
    def rows(self) -> int:
        """Rows of the table of tokens."""
        return BYTES

    @property
    def further_sizes(self) -> dict[str, Any]:
        """Sizes of what a dense GPT has not."""
        return {}

    def require_degree(self, degree: int) -> None:
        """Raise UsageError unless the model can be cut over `degree` ranks."""
        if degree < 1:
            raise UsageError(f"--tp must be at least 1, got {degree}")
        sizes = {"heads": self.heads, "hidden": self.hidden, "vocabulary": self.rows}
        for name, size in sizes.items():
            if size % degree:
                fits = ", ".join(str(t) for t in range(1, 65) if not any(other % t for other in sizes.values()))
                raise UsageError(f"{name} {size} does not divide by --tp {degree}; degrees that do: {fits}")

    def resolve_schedule(self, name: str, layer_of: LayerOf = None) -> Schedule:
        """The schedule called `name`, or the one whose text stands in the file `name`, for this model.

        NAME@N is the named schedule with N sub-batches in place of `sub_batches`. layer_of: each block's layer; None
        where a layer is two blocks.
        UsageError where there is neither or the batch is too small; ScheduleError for a bad list.
        """
        plain, _, count = name.partition("@")
        num_blocks = 2 * self.layers if layer_of is None else len(layer_of)
        if plain in GENERATORS and (not count or count.isdecimal()):
            sub_batches = int(count[:9]) if count else self.sub_batches
            recompute = cast(Recompute, self.recompute)
            if plain not in WHOLE:
                self._require_batch(sub_batches)
            schedule = generate(plain, num_blocks, sub_batches, recompute, layer_of)
        elif Path(name).is_file():
            schedule = read_schedule(name, "block", num_blocks=num_blocks)
            if schedule.along == "batch":
                self._require_batch(schedule.num_sub_batches)
        else:
            raise UsageError(
                f"unknown schedule {name!r}; known are {', '.join(sorted(GENERATORS))}, auto to choose by measuring, "
                "or give the path of a schedule's text"
            )
        return schedule

    def schedule_or_auto(self, name: str, layer_of: LayerOf = None) -> Schedule | Literal["auto"]:
        """Like `resolve_schedule`, but "auto" stands for itself: what it is, the first steps of a run decide."""
        if name.startswith("auto@") and not Path(name).is_file():
            raise UsageError(f"unknown schedule {name!r}; auto chooses the sub-batches too, so write auto alone")
        return "auto" if name == "auto" else self.resolve_schedule(name, layer_of)

    def _require_batch(self, num_sub_batches: int) -> None:
        if self.batch < num_sub_batches:
            raise UsageError(
                f"a batch of {self.batch} cannot be cut into {num_sub_batches} sub-batches; raise --batch, lower "
                "--sub-batches, or take --schedule auto, which can cut a single sample by its tokens"
            )

    def gpt(self, seed: int) -> GPTConfig:
        """The built-in GPT of these sizes."""
        return GPTConfig(
            vocabulary=self.rows, hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence,
            seed=seed,
        )  # fmt: skip


def sizes_of(options: ModelOptions) -> dict[str, Any]:
    """What a model must be built with to load another's weights."""
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "sequence")}
    return {"vocabulary": options.rows} | sizes | options.further_sizes
