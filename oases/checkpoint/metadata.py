"""Metadata of a checkpoint: step, model sizes, data position, configuration and plan."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oases.errors import UsageError
from oases.files import parse_json, read_json
from oases.limits import short
from oases.models.options import BYTES

FORMAT = 3
"""Version of the checkpoint format; increased when an older reader would misread it."""

RECORD = "checkpoint.json"
"""Metadata file; a folder with one is a checkpoint."""


_KINDS = {
    "step": int, "updates": int, "ranks": int, "sizes": dict, "data": dict, "random": list, "losses": list,
    "names": dict, "optimizer": dict, "streams": dict, "choices": dict, "extra": dict,
    "backend": str, "config": dict, "format": int,
}  # fmt: skip
"""Types of the fields that a resumed run reads."""


class NewerFormatError(UsageError):
    """Checkpoint of a format that a later version of oases writes."""


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
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    random: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    backend: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    streams: dict[str, list[int | None]] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the metadata file into a checkpoint's folder. UsageError where it could not be read again."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        parse_json(text, f"{RECORD} of step {self.step}", "keep large data in files of its own", strict=False)
        write_synced(folder / RECORD, text)

    @classmethod
    def read(cls, folder: str | Path) -> Metadata:
        """Read the metadata of a checkpoint. UsageError where it is missing, unreadable, or of a newer format."""
        if not is_checkpoint(folder):
            raise UsageError(f"{str(folder)!r} is not a checkpoint folder; give one that --checkpoint wrote")
        try:
            # Not strict: options of an optimizer and the user's values may be infinite, as ReduceLROnPlateau's are.
            given = read_json(Path(folder) / RECORD, "file", "use another", strict=False)
            version = given["format"]
            if isinstance(version, int) and version > FORMAT:
                raise NewerFormatError(
                    f"checkpoint {str(folder)!r} is of format {version}, this oases reads formats up to {FORMAT}; "
                    "upgrade oases"
                )
            record = cls(**given)
            for name, kind in _KINDS.items():
                if not isinstance(getattr(record, name), kind):
                    raise TypeError(f"{name} is {short(getattr(record, name))}")
            record._require_valid(Path(folder).name)
            return record
        except NewerFormatError:
            raise
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"checkpoint {str(folder)!r} is corrupt: its {RECORD} cannot be read ({error!s:.300}); use another"
            ) from error

    def _require_valid(self, folder: str) -> None:
        """Raise TypeError for a field whose contents are of another type, ValueError for one out of range."""
        for name in ("step", "updates", "ranks", "format"):
            number = getattr(self, name)
            if isinstance(number, bool) or not 0 <= number < 2**63:
                raise ValueError(f"{name} is {short(number)}")
        if isinstance(self.learning_rate, bool) or not abs(self.learning_rate) < 1e300:
            raise ValueError(f"learning_rate is {short(self.learning_rate)}")
        if folder.startswith("step-") and folder[5:].isdecimal() and int(folder[5:]) != self.step:
            raise ValueError(f"step is {self.step} in {folder}")
        optimizer = {"class": str, "groups": list, "numbers": dict}
        texts = [*self.random, *self.names.values(), *self.choices.values()]
        streams = [each for pair in self.streams.values() for each in (pair if isinstance(pair, list) else [pair])]
        valid = {
            "optimizer": all(isinstance(self.optimizer.get(name, kind()), kind) for name, kind in optimizer.items())
            and all(isinstance(group, dict) for group in self.optimizer.get("groups", [])),
            "random, names or choices": all(isinstance(text, str) for text in texts),
            "losses": all(isinstance(loss, (int, float)) for loss in self.losses),
            "streams": all(isinstance(pair, list) for pair in self.streams.values())
            and all(each is None or (isinstance(each, int) and abs(each) < 2**64) for each in streams),
        }
        for name, right in valid.items():
            if not right:
                raise TypeError(f"{name} holds a value of a wrong type")

    def require_sizes(self, sizes: dict[str, Any], folder: str | Path) -> None:
        """Raise UsageError, naming what differs, unless the checkpoint in `folder` is of a model of these sizes."""
        saved = {"vocabulary": BYTES, "experts": 0} | self.sizes
        for name, size in ({"experts": 0} | sizes).items():
            if saved.get(name) != size:
                raise UsageError(
                    f"checkpoint {str(folder)!r} does not fit: {name} is {saved.get(name)} there and {size} here; "
                    "give the sizes of the model that was saved"
                )

    def backend_difference(self, backend: str) -> str:
        """Reason why sums over a backend may differ in the last bits from the saved run's; "" if they do not.

        `staged` adds numbers in the order of ranks; gloo and what is built on it (`sim`) in an order of its own.
        """
        saved = self.backend or "gloo"
        if not backend or (saved == "staged") == (backend == "staged"):
            return ""
        return f"its sums were made over {saved}, these are over {backend} and may differ in their last bits"

    def data_differences(self, data: dict[str, Any]) -> str:
        """Differences that change the coming batches, for a warning; empty if there are none."""
        names = {**data, **self.data} if self.data else {}
        found = {name: (self.data.get(name, "none"), data.get(name, "none")) for name in names if name != "next_step"}
        return ", ".join(
            f"{name} {there} there and {here} here" for name, (there, here) in found.items() if there != here
        )

    def rate_difference(self, rate: float) -> str:
        """Why the next step's learning rate is not the one that the saved run would have used; "" if it is."""
        if not self.learning_rate or math.isclose(self.learning_rate, rate, rel_tol=1e-6):
            return ""
        return f"its next step had the learning rate {self.learning_rate:.4g}, this run's has {rate:.4g}"


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint, valid or corrupt."""
    return (Path(folder) / RECORD).is_file()


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
