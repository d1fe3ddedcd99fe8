"""Metadata of a checkpoint: step, model sizes, data position, configuration and plan, as JSON beside the tensors."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from oases.errors import UsageError
from oases.files import parse_json, read_json
from oases.limits import short

FORMAT = 4
"""Version of the checkpoint format; increased when an older reader would misread it."""

RECORD = "checkpoint.json"
"""Metadata file; a folder with one is a checkpoint."""


class FormatError(UsageError):
    """Checkpoint of a format that a later version of oases writes, or of one to be converted."""


@dataclass(frozen=True)
class Metadata:
    """State of a run when it was saved.

    step: steps done. updates: steps done without those skipped for a bad loss. sizes: model sizes that must match to
    load it. data: seed, sizes of batch and corpus, and the next step, which determine the next batch. ranks: their
    number. random: random states saved for every rank, "cpu" and "cuda"; random streams of the stacks' ops depend on
    the step only. losses: recent losses, nats per token, to detect spikes. choices: schedules that "auto" chose, see
    `choices_of`. backend: of torch.distributed that made the sums, "" where unknown. config, plan: for information
    only.

    Of a parallelized model, names: other names of tied tensors, with the name in the checkpoint. optimizer: "class",
    "groups" of options by names of parameters, and "numbers", types of state that is Python numbers. streams:
    calls and seed that random draws depend on, of the model ("") and of its stacks, by name. extra: what the
    user saved.
    """

    step: int
    updates: int
    sizes: dict[str, Any]
    learning_rate: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    random: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, list[int | None]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the metadata file into a checkpoint's folder. UsageError where it could not be read again."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        parse_json(text, f"{RECORD} of step {self.step}", "keep large data in files of its own", strict=False)
        write_synced(folder / RECORD, text)

    @classmethod
    def read(cls, folder: str | Path, *, older: bool = False) -> Metadata:
        """Read the metadata of a checkpoint. older: also of an older format.

        UsageError where it is missing or unreadable, FormatError where it is of another format.
        """
        if not is_checkpoint(folder):
            raise UsageError(f"{str(folder)!r} is not a checkpoint folder; give one that --checkpoint wrote")
        try:
            # Not strict: options of an optimizer and the user's values may be infinite, as ReduceLROnPlateau's are.
            given = read_json(Path(folder) / RECORD, "file", "use another", strict=False)
            _require_format(folder, given["format"], older)
            record = cls(**given)
            record._require_valid(Path(folder).name)
            return record
        except FormatError:
            raise
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise UsageError(
                f"checkpoint {str(folder)!r} is corrupt: its {RECORD} cannot be read ({error!s:.300}); use another"
            ) from error

    def _require_valid(self, folder: str) -> None:
        """Raise TypeError for a field of another type, ValueError for one out of range."""
        for name, kind in get_type_hints(Metadata).items():
            if not _fits(getattr(self, name), kind):
                raise TypeError(f"{name} is {short(getattr(self, name))}")
        for name in ("step", "updates", "ranks", "format"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if folder.startswith("step-") and folder[5:].isdecimal() and int(folder[5:]) != self.step:
            raise ValueError(f"step is {self.step} in {folder}")
        kinds = {"class": str, "groups": list[dict[str, Any]], "numbers": dict[str, str]}
        given = {"numbers": {}} | self.optimizer
        right = given.keys() == kinds.keys() and all(_fits(given[name], kind) for name, kind in kinds.items())
        if self.optimizer and not right:
            raise TypeError(f"optimizer is {short(self.optimizer)}")


def _require_format(folder: str | Path, version: Any, older: bool) -> None:
    if type(version) is int and version > FORMAT:
        raise FormatError(
            f"checkpoint {str(folder)!r} is of format {version}, this oases reads formats up to {FORMAT}; upgrade "
            "oases"
        )
    if type(version) is int and version < FORMAT and not older:
        raise FormatError(
            f"checkpoint {str(folder)!r} is of format {version}, and this oases reads format {FORMAT}; run `oases "
            f"export --convert {folder} NEW/{Path(folder).name}` and give that"
        )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of an annotated type. Integers have 64 bits."""
    of = get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_fits(value, each) for each in of)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, of[0]) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(each, of[1]) for each in value.values())
    if kind in (int, float) and type(value) is int:
        return abs(value) < 2**64
    return kind is Any or type(value) is kind


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint, valid or corrupt."""
    return (Path(folder) / RECORD).is_file()


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
