"""The degrees of 3D parallelism that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oases.errors import UsageError


@dataclass(frozen=True)
class Degrees:
    """Replicas (data), stages (pipeline) and ranks that share a layer (tensor); their product is the ranks of a run.

    tensor: 0 = the ranks that there are, divided by the others. UsageError for what is no such number.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name == "tensor" else 1
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**20:
                raise UsageError(f"degrees: {item.name} must be a whole number of at least {least}, got {value!r}")

    @classmethod
    def of(cls, given: Any) -> Degrees:
        """Degrees as they are, or from a mapping of their names. UsageError for anything else."""
        if isinstance(given, cls):
            return given
        known = [item.name for item in fields(cls)]
        if not isinstance(given, Mapping):
            raise UsageError(f"degrees must be a mapping with {', '.join(known)}, got {given!r}")
        for name in given:
            if name not in known:
                raise UsageError(f"degrees: unknown {name!r}; known are {', '.join(known)}")
        return cls(**given)

    def tensor_of(self, ranks: int) -> int:
        """The tensor-parallel degree in a run of so many ranks. UsageError where the degrees do not give so many."""
        others = self.data * self.pipeline
        tensor = self.tensor or max(1, ranks // others)
        if others * tensor != ranks:
            raise UsageError(
                f"{self} make {others * tensor} ranks, the run has {ranks}; start as many, or change one"
            )
        return tensor

    def __str__(self) -> str:
        """E.g. "degrees data 2 x pipeline 2 x tensor 2"."""
        return f"degrees data {self.data} x pipeline {self.pipeline} x tensor {self.tensor or 'the rest'}"
