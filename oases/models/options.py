"""Options shared by training and benchmarks: model and batch sizes, schedule, parallel degrees, and their checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch

import oases.records as records
from oases.core.schedule import GENERATORS, WHOLE, LayerOf, Recompute, Schedule, generate
from oases.errors import UsageError
from oases.models.gpt import GPTConfig
from oases.plans.schedule_files import read_schedule

BYTES = 256
"""Vocabulary of a model of bytes."""


def option(default: Any, description: str, choices: Iterable[Any] = (), metavar: str | None = None) -> Any:
    """Dataclass field with the help text, choices (() for any value) and metavar of its command-line option."""
    return field(default=default, metadata={"help": description, "choices": tuple(choices), "metavar": metavar})


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of model and batch, and recomputation."""

    hidden: int = option(512, "hidden size, features")
    layers: int = option(4, "transformer layers")
    heads: int = option(0, "attention heads; 0 = hidden / 64")
    sequence: int = option(128, "sequence length, tokens per sample")
    batch: int = option(8, "global batch size, samples per optimizer step")
    recompute: str = option(
        "none", "activation recomputation in the backward pass; full = keep only block inputs", ("none", "full")
    )

    def __post_init__(self) -> None:
        records.check(self)
        require_choices(self)
        if self.heads == 0:
            object.__setattr__(self, "heads", self.default_heads)
        if self.hidden % self.heads:
            raise UsageError(f"hidden {self.hidden} does not divide by {self.heads} heads; change one of them")

    @property
    def default_heads(self) -> int:
        """Default, used for 0."""
        return max(1, self.hidden // 64)

    @property
    def default_sub_batches(self) -> int:
        """Sub-batches of a schedule whose name has no number of them."""
        return 4 if self.batch >= 4 else 2

    @property
    def rows(self) -> int:
        """Vocabulary size."""
        return BYTES

    def require_degree(self, degree: int) -> None:
        """Raise UsageError unless the model can be sharded over `degree` tensor-parallel ranks."""
        if degree < 1:
            raise UsageError(f"--tp must be at least 1, got {degree}")
        sizes = {"heads": self.heads, "hidden": self.hidden, "vocabulary": self.rows}
        for name, size in sizes.items():
            if size % degree:
                fits = ", ".join(str(t) for t in range(1, 65) if not any(other % t for other in sizes.values()))
                change = "; or change --heads" if name == "heads" else ""
                raise UsageError(f"{name} {size} does not divide by --tp {degree}; degrees that do: {fits}{change}")

    def resolve_schedule(self, name: str, layer_of: LayerOf = None, num_blocks: int = 0) -> Schedule:
        """Resolve a schedule, by name or file, for this model.

        NAME@N is the named schedule with N sub-batches in place of the default. layer_of: layer of each block; None
        for two blocks per layer. num_blocks: of a model chunk; 0 for all blocks. UsageError for an unknown schedule
        and a batch with too few samples; ScheduleError for an invalid file.
        """
        plain, _, count = name.partition("@")
        num_blocks = num_blocks or (2 * self.layers if layer_of is None else len(layer_of))
        if plain in GENERATORS and (not count or count.isdecimal()):
            sub_batches = int(count[:9]) if count else self.default_sub_batches
            recompute = cast(Recompute, self.recompute)
            if plain not in WHOLE:
                self.require_batch(sub_batches, plain)
            schedule = generate(plain, num_blocks, sub_batches, recompute, layer_of)
        elif Path(name).is_file():
            schedule = read_schedule(name, "block", num_blocks=num_blocks)
            if schedule.along == "batch":
                self.require_batch(schedule.num_sub_batches, schedule.name)
        else:
            raise UsageError(
                f"unknown schedule {name!r}; known are {', '.join(sorted(GENERATORS))}, auto to choose by measuring, "
                "or give the path of an existing schedule file"
            )
        return schedule

    def schedule_or_auto(
        self, name: str, layer_of: LayerOf = None, num_blocks: int = 0
    ) -> Schedule | Literal["auto"]:
        """Like `resolve_schedule`, but returns "auto" unresolved: the first steps of a run choose the schedule."""
        if name.startswith("auto@") and not Path(name).is_file():
            raise UsageError(f"unknown schedule {name!r}; auto chooses the sub-batches too, so write auto alone")
        return "auto" if name == "auto" else self.resolve_schedule(name, layer_of, num_blocks)

    def require_batch(self, num_sub_batches: int, schedule: str) -> None:
        """Raise UsageError unless the batch has a sample per sub-batch. schedule: its name."""
        if self.batch < num_sub_batches:
            raise UsageError(
                f"a batch of {self.batch} cannot be split into {num_sub_batches} sub-batches; raise --batch, "
                "name a schedule with fewer (oases@2), or use --schedule auto, which can split a sample along its "
                "sequence"
            )

    def gpt(self, seed: int) -> GPTConfig:
        """Configuration of the built-in GPT."""
        return GPTConfig(
            vocabulary=self.rows, hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence,
            seed=seed,
        )  # fmt: skip


def sizes_of(options: ModelOptions) -> dict[str, Any]:
    """Model sizes that must match to load a checkpoint."""
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "sequence")}
    return {"vocabulary": options.rows} | sizes


@dataclass(frozen=True)
class Degrees:
    """Data-, pipeline- and tensor-parallel degrees; their product is the number of ranks.

    tensor: 0 = ranks / (data x pipeline). UsageError for an invalid degree.
    """

    data: Annotated[int, records.Number(least=1, most=2**16)] = 1
    pipeline: Annotated[int, records.Number(least=1, most=2**16)] = 1
    tensor: Annotated[int, records.Number(least=0, most=2**16)] = 0

    def __post_init__(self) -> None:
        records.check(self, "degrees: ")

    @classmethod
    def of(cls, given: Any) -> Degrees:
        """Degrees, given as such or as a mapping of names. UsageError for anything else."""
        return given if isinstance(given, cls) else records.read(cls, given, "degrees", "")

    def tensor_of(self, ranks: int) -> int:
        """Tensor-parallel degree for a number of ranks. UsageError where the product of degrees differs from it."""
        others = self.data * self.pipeline
        tensor = self.tensor or max(1, ranks // others)
        if others * tensor != ranks:
            raise UsageError(
                f"{self} make {others * tensor} ranks, the run has {ranks}; start that many, or change a degree"
            )
        return tensor

    def __str__(self) -> str:
        """Format as e.g. "degrees data 2 x pipeline 2 x tensor 2"."""
        return f"degrees data {self.data} x pipeline {self.pipeline} x tensor {self.tensor or 'the rest'}"


def require_choices(config: Any) -> None:
    """Raise UsageError, naming field and value, unless every field with choices holds one of them."""
    require_known(
        config, {item.name: item.metadata["choices"] for item in fields(config) if item.metadata.get("choices")}
    )


def require_known(config: Any, known: Mapping[str, Iterable[Any]], *, or_file: bool = False) -> None:
    """Raise UsageError unless each field named in `known` holds one of its values, or, with or_file, a path."""
    for name, among in known.items():
        value = getattr(config, name)
        if value not in among and not (or_file and Path(value).is_file()):
            more = "; or give the path of a schedule file" if or_file else ""
            raise UsageError(f"unknown {name} {value!r}; known are {', '.join(map(str, among))}{more}")


def require_device(device: str) -> None:
    """Raise UsageError for cuda where torch finds no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' is not available: this torch finds no GPU; use --device cpu")


def require_memory(options: ModelOptions, degree: int) -> None:
    """Raise UsageError where a stack of layers, with the inputs of its blocks, exceeds this machine's memory.

    Weights count four times: with gradients and AdamW's state. Inputs are those of one rank, of two-byte elements.
    """
    size = options.batch * options.sequence * options.hidden
    parts = {
        "blocks (--hidden, --layers)": 4 * 4 * 12 * options.hidden**2 * options.layers,  # 12 h^2 weights a layer
        "activations (--batch, --sequence)": 2 * 2 * options.layers * size,
    }
    require_bytes(parts, f"{options.layers} layers of hidden {options.hidden} over {degree} ranks")


def require_bytes(parts: Mapping[str, int], what: str) -> None:
    """Raise UsageError where the bytes of `parts` together exceed this machine's memory.

    parts: bytes by what for, each with the remedy in brackets.
    """
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    have, need = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), sum(parts.values())
    if need > have:
        each = ", ".join(f"{size / 1e9:.3g} GB for {name}" for name, size in parts.items() if size > need // 100)
        raise UsageError(
            f"{what} needs at least {need / 1e9:.3g} GB, this machine has {have / 1e9:.3g} GB: {each}; lower what is "
            "largest"
        )
