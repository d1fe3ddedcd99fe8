"""Everything a training run is told, in one dataclass; the command line's options are made from it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch

from oases.errors import UsageError
from oases.models.gpt import GPTConfig
from oases.ranks import restart_count
from oases.schedule import GENERATORS, WHOLE, LayerOf, Recompute, Schedule, generate, parse_schedule, validate
from oases.train.data import VOCABULARY, TextCorpus
from oases.train.guard import POLICIES
from oases.train.log import steps_in
from oases.train.retention import require_folder

AUTO = "auto"
"""As `resume`: the newest checkpoint in `checkpoint`, or the start."""


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
            object.__setattr__(self, "heads", max(1, self.hidden // 64))
        if self.sub_batches == 0:
            object.__setattr__(self, "sub_batches", 4 if self.batch >= 4 else 2)
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
        sizes = {"heads": self.heads, "hidden": self.hidden, "vocabulary": VOCABULARY}
        for name, size in sizes.items():
            if size % degree:
                fits = ", ".join(str(t) for t in range(1, 65) if not any(other % t for other in sizes.values()))
                raise UsageError(f"{name} {size} does not divide by --tp {degree}; degrees that do: {fits}")

    def resolve_schedule(self, name: str, layer_of: LayerOf = None) -> Schedule:
        """The schedule called `name`, or the one whose text stands in the file `name`, for this model.

        NAME@N is the named schedule with N sub-batches in place of `sub_batches`. layer_of: each block's layer; None
        where a layer is two blocks.
        UsageError where there is neither or the batch is too small; ScheduleError for a bad text.
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
            try:
                schedule = parse_schedule(Path(name).read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise UsageError(f"schedule file {name!r} is not UTF-8 text: {error.reason}") from error
            if schedule.num_blocks != num_blocks:
                raise UsageError(
                    f"schedule file {name!r} is for {schedule.num_blocks} blocks; {self.layers} layers have "
                    f"{num_blocks}"
                )
            if schedule.along == "batch":
                self._require_batch(schedule.num_sub_batches)
            validate(schedule)
            if not schedule.backward:
                raise UsageError(f"schedule file {name!r} has no backward pass, which training needs")
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
        return GPTConfig(hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence, seed=seed)


WIRE_DTYPES: dict[str, torch.dtype | None] = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainConfig(ModelOptions):
    """A training run. All values are checked when it is made; UsageError names the one that cannot be."""

    data: str | None = option(None, "text file or folder of text files; default: Python's standard library")
    schedule: str = option(
        "oases", "oases, sync, oases@4 or another by name, auto to choose by measuring, or the path of one's text"
    )
    wire_dtype: str = option("none", "type that activations are summed in: none (their own), bfloat16 or float16")
    sequence_parallel: bool = option(False, "between blocks each tensor-parallel rank holds its part of the sequence")
    compile: str = option(
        "none", "what torch.compile compiles the methods of each block with: none, or a backend such as inductor"
    )
    steps: int = option(200, "optimizer steps")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    warmup: int = option(10, "steps of linear warm-up before the cosine")
    weight_decay: float = option(0.1, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    validation_batches: int = option(8, "held-out batches in the final validation loss")
    seed: int = option(0, "seed of weights and batches")
    device: str = option("cpu", "cpu or cuda")
    checkpoint: str | None = option(
        None, "folder for checkpoints, one per step that is saved, the last step among them"
    )
    checkpoint_every: int = option(0, "steps from one checkpoint to the next; 0 = the last step alone")
    keep: int = option(3, "newest checkpoints that are kept; 0 = all")
    save_error: str = option("warn", "when a checkpoint cannot be written, a full disk: warn and go on, or stop")
    resume: str | None = option(
        None,
        "checkpoint to go on from, of any degrees or plan, or a folder of them for the newest whole one; auto: the "
        "newest in --checkpoint, or the start if there is none",
    )
    step_log: str | None = option(None, "file for a line of JSON per step; a run that goes on continues it")
    bad_loss: str = option("stop", "what a loss or gradient that is not finite does: stop, skip the step, or off")
    spike: float = option(0.0, "a loss above so many times the median of the last 32 is bad too; 0 = never")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire_dtype not in WIRE_DTYPES:
            raise UsageError(f"unknown wire_dtype {self.wire_dtype!r}; known are {', '.join(WIRE_DTYPES)}")
        for name in ("steps", "validation_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "checkpoint_every", "keep", "spike"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        require_seed(self.seed)
        require_device(self.device)
        require_compiler(self.compile)
        self._require_survival()

    def _require_survival(self) -> None:
        """What of checkpoints, restarts and bad losses can be known from the values alone."""
        for name, known in (("save_error", ("warn", "stop")), ("bad_loss", POLICIES)):
            if getattr(self, name) not in known:
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(known)}")
        if 0 < self.spike <= 1:
            raise UsageError(f"spike must be above 1, or 0 for never, got {self.spike}")
        if self.checkpoint is None and (self.checkpoint_every or self.resume == AUTO):
            what = f"checkpoint_every {self.checkpoint_every}" if self.checkpoint_every else f"resume {self.resume!r}"
            raise UsageError(f"{what} needs a folder; give --checkpoint DIR")

    @property
    def goes_on(self) -> bool:
        """Whether the run begins with the newest of its own checkpoints, where there is one."""
        return self.checkpoint is not None and (self.resume == AUTO or restart_count() > 0)

    def check(self, degree: int) -> TextCorpus:
        """Everything that can be known before any rank starts; returns the corpus."""
        self.require_degree(degree)
        self.schedule_or_auto(self.schedule)
        if self.sequence_parallel and (degree == 1 or self.sequence % degree):
            raise UsageError(
                f"a sequence of {self.sequence} cannot be cut over --tp {degree}; leave out --sequence-parallel, or "
                "change --sequence"
            )
        if self.device == "cpu":
            require_memory(self, degree)
        return self.check_files(sizes_of(self))

    def check_files(self, sizes: dict[str, Any]) -> TextCorpus:
        """What is read and written, for a model of these sizes; returns the corpus."""
        from oases.train.resumption import require_resumable  # which reads this configuration

        if self.checkpoint is not None:
            require_folder(self.checkpoint)
        require_resumable(self, sizes)
        self._require_step_log()
        corpus = TextCorpus(self.data)
        for split in ("train", "validation"):
            corpus.batch(split=split, step=0, batch=1, sequence=self.sequence, seed=self.seed)
        return corpus

    def _require_step_log(self) -> None:
        """Raise UsageError for a log of another run, which this one would overwrite, and for what is no log."""
        if self.step_log is None:
            return
        if not Path(self.step_log).resolve().parent.is_dir():
            raise UsageError(f"step log {self.step_log!r}: its folder does not exist")
        if Path(self.step_log).is_dir():
            raise UsageError(f"step log {self.step_log!r} is a folder; give the path of a file")
        if steps_in(self.step_log) and self.resume is None and not self.goes_on:
            raise UsageError(f"step log {self.step_log!r} holds the steps of another run; give a new file")


def sizes_of(options: ModelOptions) -> dict[str, Any]:
    """What a model must be built with to load another's weights."""
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "heads", "sequence")}
    return {"vocabulary": VOCABULARY} | sizes


def require_seed(seed: int) -> None:
    """Raise UsageError unless torch and numpy both take the seed."""
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be at least 0 and below 2 ** 63, got {seed}")


def require_memory(options: ModelOptions, degree: int) -> None:
    """Raise UsageError where weights, gradients and AdamW's moments alone exceed this machine's memory."""
    need = 4 * 4 * 12 * options.hidden**2 * options.layers  # 12 h^2 weights a layer, fp32, four of each
    what = f"hidden {options.hidden} with {options.layers} layers over its {degree} ranks"
    require_bytes(need, what, "lower --hidden or --layers")


def require_bytes(need: int, what: str, remedy: str) -> None:
    """Raise UsageError where `need` bytes of weights and optimizer are more than this machine has."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise UsageError(
            f"{what} needs {need / 1e9:.0f} GB for weights and optimizer, this machine has {have / 1e9:.0f} GB; "
            f"{remedy}"
        )


def require_compiler(name: str) -> None:
    """Raise UsageError unless `name` is none or a backend that torch.compile knows."""
    if name != "none" and name not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UsageError(f"unknown compile {name!r}; known are none, {known}, and torch's for debugging")


def require_device(device: str) -> None:
    """Raise UsageError unless `device` is one that torch has here."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}; known are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, but this torch sees no GPU; use --device cpu")


def settings(config: Any) -> dict[str, Any]:
    """A dataclass's fields by name, as plain values."""
    return {item.name: getattr(config, item.name) for item in fields(config)}
