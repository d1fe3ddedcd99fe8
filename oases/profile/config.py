"""Configurations of a profile, and of measurements of schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from oases.core.execution.communication import WIRE_DTYPES, WireType
from oases.core.schedule import LayerOf, Schedule, sequence_parallel
from oases.errors import UsageError
from oases.models.options import ModelOptions, option, require_device, require_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StackOptions(ModelOptions):
    """Sizes of a stack of transformer layers to time, and its device."""

    hidden: int = option(768, "width of the model, features")
    layers: int = option(3, "transformer layers")
    sequence: int = option(256, "tokens per sample")
    iterations: int = option(5, "repetitions; medians are reported")
    seed: int = option(0, "random seed of weights and inputs")
    device: str = option("cpu", "device of the ranks", ("cpu", "cuda"))
    dtype: str = option("float32", "dtype of weights and activations", DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise UsageError(f"iterations must be at least 1, got {self.iterations}")
        require_device(self.device)


@dataclass(frozen=True)
class ProfileConfig(StackOptions):
    """Block shapes and sub-batch sizes to profile. `layers` are those of the measured stack, not of a model."""

    layers: int = option(3, "transformer layers of the measured stack; with 3, the middle one is timed")
    batch: int = option(8, "largest sub-batch in samples; 1, 2, 4, ... up to it are measured")
    model: str | None = option(
        None, "config.json of a transformers model, or a folder with one: measure its own blocks, not a GPT's"
    )
    degrees: str = option("", "comma-separated tensor-parallel degrees of the blocks, e.g. 1,2,4 (default: --tp)")

    def tensor_parallel(self, ranks: int) -> tuple[int, ...]:
        """Requested degrees, sorted. Raises UsageError for one that does not divide `ranks`."""
        if not self.degrees.strip():
            return (ranks,)
        found = set()
        for text in self.degrees.split(","):
            if not text.strip().isdecimal() or not 1 <= int(text) <= 1 << 20:
                raise UsageError(f"--degrees {self.degrees!r}: {text!r} is not a degree; give numbers, e.g. 1,2,4")
            degree = int(text)
            if ranks % degree:
                raise UsageError(
                    f"--degrees {self.degrees!r}: {ranks} ranks do not form groups of {degree}; give degrees that "
                    f"divide --tp {ranks}, or raise it with --backend "
                    "sim:alpha=0us,bandwidth=1gbit,single_process, where one process represents all ranks"
                )
            found.add(degree)
        return tuple(sorted(found))

    @property
    def sub_batch_sizes(self) -> tuple[int, ...]:
        """Sub-batch sizes to measure, in samples."""
        return tuple(sorted({1 << power for power in range(self.batch.bit_length())} | {self.batch}))

    def beside(self, degree: int) -> ProfileConfig:
        """Sizes of the built-in GPT's blocks that compute while the links of `degree` ranks are busy."""
        heads = -(-self.heads // degree) * degree
        return replace(self, heads=heads, hidden=self.hidden // self.heads * heads)

    def check(self, ranks: int) -> None:
        """Validate everything that can be checked before ranks start."""
        if ranks < 2:
            raise UsageError(
                f"--tp {ranks} has no link to measure; give at least 2, with --degrees 1 for unsharded blocks"
            )
        for degree in self.tensor_parallel(ranks):
            if self.model is None:  # of a model, the ranks that cut it will know
                self.require_degree(degree)
        if self.device == "cpu":
            require_memory(self, ranks)


@dataclass(frozen=True)
class OverlapConfig(StackOptions):
    """Schedules of a stack of transformer layers to compare, forward and backward."""

    batch: int = option(4, "samples per step")
    schedules: str = option(
        "sync,oases",
        "comma-separated schedules to compare, by name (oases@4: four sub-batches; oases:bfloat16: all-reduces in "
        "bfloat16, or float16, int8; oases:sequence: sequence-parallel; auto: chosen by measuring) or path",
    )
    iterations: int = option(7, "interleaved repetitions; medians are reported")

    @property
    def names(self) -> list[str]:
        """Requested schedules, with the baseline `sync`."""
        names = [name.strip() for name in self.schedules.split(",") if name.strip()]
        return names if "sync" in names else ["sync", *names]

    def contestant(self, name: str, layer_of: LayerOf = None) -> tuple[Schedule, WireType | None]:
        """Schedule named NAME[@N][:sequence][:TYPE] or by path, and the type of its all-reduces.

        layer_of: each block's layer; None if a layer is two blocks.
        """
        plain, *suffixes = [name] if Path(name).is_file() else name.split(":")
        dtype: WireType | None = None
        resolved = self.schedule_or_auto(plain, layer_of)
        if resolved == "auto":
            raise UsageError(f"unknown schedule {name!r}; auto takes no suffix")
        schedule = resolved
        wire = ":".join(suffix for suffix in suffixes if suffix != "sequence")
        if "sequence" in suffixes:
            schedule = sequence_parallel(schedule)
        if wire:
            dtype = WIRE_DTYPES.get(wire)
            if dtype is None:
                known = ", ".join(["sequence", *(key for key, value in WIRE_DTYPES.items() if value is not None)])
                raise UsageError(f"schedule {name!r}: unknown suffix {wire!r}; valid suffixes: {known}")
        return schedule, dtype

    def require_batch(self, num_sub_batches: int, schedule: str) -> None:
        """The same, but `oases` cuts small batches along the sequence."""
        if schedule != "oases" or self.sequence < num_sub_batches:
            super().require_batch(num_sub_batches, schedule)

    def require_ranks(self, degree: int) -> None:
        """Raise UsageError unless so many ranks can run every schedule of the built-in GPT."""
        if degree < 2:
            raise UsageError(f"--tp {degree} communicates nothing, so there is nothing to hide; give at least 2")
        self.require_degree(degree)
        if self.device == "cpu":
            require_memory(self, degree)
        for name in self.names:
            if name != "auto":
                self.require_divisible(name, degree)

    def require_divisible(self, name: str, degree: int) -> None:
        """Raise UsageError if a schedule splits the sequence over the ranks and its length does not divide."""
        if self.contestant(name)[0].sequence_parallel and self.sequence % degree:
            raise UsageError(
                f"schedule {name!r} splits the sequence over the ranks, but {self.sequence} tokens do not divide "
                f"by --tp {degree}; give a --sequence that does"
            )
