"""Metadata of a checkpoint: step, model sizes, data position, configuration and plan, as JSON beside the tensors."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import oases.records as records
from oases.errors import UsageError
from oases.files import MOST_BYTES, parse_json, read_json

FORMAT = 4
"""Version of the checkpoint format; increased when an older reader would misread it."""

RECORD = "checkpoint.json"
"""Metadata file; a folder with one is a checkpoint."""
Count = Annotated[int, records.Number(least=0)]


class FormatError(UsageError):
    """Checkpoint of a format that a later version of oases writes, or of one to be converted."""


@dataclass(frozen=True)
class Metadata:
    """State of a run when it was saved.

    step: steps done. updates: steps done without those skipped for a bad loss. sizes: model sizes that must match to
    load it. data: seed, sizes of batch and corpus, and the next step, which determine the next batch. ranks: their
    number. random: random states saved for every rank, "cpu" and "cuda"; random streams of the stacks' ops depend on
    the step only. choices: schedules that "auto" chose, see `choices_of`. backend: of torch.distributed that made the
    sums, "" where unknown. config, plan: for information only.

    Of a parallelized model, names: other names of tied tensors, with the name in the checkpoint. optimizer: "class",
    "groups" of options by names of parameters, and "numbers", types of state that is Python numbers. streams:
    calls and seed that random draws depend on, of the model ("") and of its stacks, by name. extra: what the
    user saved.
    """

    step: Count
    updates: Count
    sizes: dict[str, Any]
    learning_rate: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    ranks: Count = 1
    random: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, list[int | None]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    format: Count = FORMAT

    def write(self, folder: Path) -> None:
        """Write the metadata file into a checkpoint's folder. UsageError where it could not be read again."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        require_readable(text, f"{RECORD} of step {self.step}")
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
            given.pop("losses", None)  # of versions before 0.2
            record = records.read(cls, given, RECORD, "use another")
            if record.optimizer:
                records.read(_Optimizer, record.optimizer, "optimizer", "use another")
            name = Path(folder).name
            if name.startswith("step-") and name[5:].isdecimal() and int(name[5:]) != record.step:
                raise UsageError(f"step is {record.step} in {name}")
            return record
        except FormatError:
            raise
        except (UsageError, OSError, RecursionError, KeyError, TypeError) as error:
            raise UsageError(
                f"checkpoint {str(folder)!r} is corrupt: its {RECORD} cannot be read ({error!s:.300}); use another"
            ) from error


@dataclass(frozen=True)
class _Optimizer:
    """Content of `Metadata.optimizer`, where there is any."""

    kind: Annotated[str, records.Name("class")]
    groups: list[dict[str, Any]]
    numbers: dict[str, str] = field(default_factory=dict)


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


def require_readable(text: str, what: str, most_bytes: int = MOST_BYTES) -> Any:
    """Data of a JSON text. UsageError where `Metadata.read` could not read it."""
    if len(text) > most_bytes:
        raise UsageError(f"{what} has over {most_bytes} bytes as JSON; keep large data in a separate file")
    return parse_json(text, what, "keep large data in a separate file", strict=False)


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint, valid or corrupt."""
    return (Path(folder) / RECORD).is_file()


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
