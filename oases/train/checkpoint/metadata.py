"""What a checkpoint says of itself beside the tensors: where the run stood, and of what model, data and plan."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oases.errors import UsageError
from oases.train.tokenizer import BYTES

FORMAT = 2
"""Of the folder. One is raised where an older reader would misread it."""

RECORD = "checkpoint.json"
"""The record's file in a checkpoint's folder; a folder with one is a checkpoint."""


_KINDS = {"step": int, "updates": int, "ranks": int, "sizes": dict, "data": dict, "random": list, "losses": list}
"""Of the fields that a run goes on with."""


@dataclass(frozen=True)
class Metadata:
    """Where a run stood when it was saved.

    step: steps done, which is also the learning rate's position. updates: those of them that changed the weights;
    a step whose loss was bad may have been skipped. sizes: what a model must be built with to load it. data: seed,
    sizes of a batch and of the corpus, and the next step's number, which together tell the next batch. ranks: of the
    run. random: whose states the checkpoint has of every rank, "cpu" and "cuda"; the streams of the stacks' ops
    follow from the step. losses: recent ones, nats per byte, for what counts as a spike. config, plan: as given, for
    people.
    """

    step: int
    updates: int
    sizes: dict[str, Any]
    learning_rate: float = 0.0
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    random: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        write_synced(folder / RECORD, json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, folder: str | Path) -> Metadata:
        """The record of a checkpoint. UsageError where there is none, it cannot be read, or is of a newer format."""
        if not is_checkpoint(folder):
            raise UsageError(f"{str(folder)!r} is no checkpoint folder; give one that --checkpoint wrote")
        try:
            given = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
            version = given["format"]
            if isinstance(version, int) and version > FORMAT:
                raise UsageError(
                    f"checkpoint {str(folder)!r} is of format {version}, this oases reads formats up to {FORMAT}; "
                    "upgrade oases"
                )
            record = cls(**given)
            for name, kind in _KINDS.items():
                if not isinstance(getattr(record, name), kind):
                    raise TypeError(f"{name} is {getattr(record, name)!r}")
            return record
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f"checkpoint {str(folder)!r} is broken: its {RECORD} cannot be read ({error}); take another"
            ) from error

    def require_sizes(self, sizes: dict[str, Any], folder: str | Path) -> None:
        """Raise UsageError, naming what differs, unless the checkpoint in `folder` is of a model of these sizes."""
        saved = {"vocabulary": BYTES, "experts": 0} | self.sizes
        for name, size in ({"experts": 0} | sizes).items():
            if saved.get(name) != size:
                raise UsageError(
                    f"checkpoint {str(folder)!r} does not fit: {name} is {saved.get(name)} there and {size} here; "
                    "give the sizes of the model that was saved"
                )

    def data_differences(self, data: dict[str, Any]) -> str:
        """How the batches to come differ from those of the run that was saved, in words; empty if they do not."""
        return ", ".join(
            f"{name} {self.data[name]} there and {value} here"
            for name, value in data.items()
            if name in self.data and self.data[name] != value
        )


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder was written as a checkpoint, whole or not."""
    return (Path(folder) / RECORD).is_file()


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
