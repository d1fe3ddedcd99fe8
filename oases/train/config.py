"""Everything a training run is told, in one dataclass; the command line's options are made from it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from oases.errors import UsageError
from oases.launch.ranks import restart_count
from oases.plans.plan import Plan, read_plan
from oases.schedule import GENERATORS, PIPELINES, read_schedule
from oases.train.checkpoint.resume import AUTO, require_resumable
from oases.train.checkpoint.retention import require_folder
from oases.train.config_file import config_text, read_values
from oases.train.data import Corpus
from oases.train.expert_options import ExpertOptions
from oases.train.learning_rate import SCHEDULES, RateSchedule, rate_factor
from oases.train.load_balance import require_new_trace
from oases.train.logs import last_logged_step, require_tensorboard
from oases.train.master_weights import PRECISIONS
from oases.train.model_options import Degrees, ModelOptions, option, require_known, require_types
from oases.train.step_check import POLICIES
from oases.train.tokenizer import load_tokenizer
from oases.train.tokens import open_corpus

ROWS_MULTIPLE = 64
"""Rows of a tokenizer's table are rounded up to one, so that the degrees in use divide them."""
WIRE_DTYPES: dict[str, torch.dtype | None] = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KNOWN: dict[str, Iterable[str]] = {
    "wire_dtype": WIRE_DTYPES,
    "precision": PRECISIONS,
    "learning_rate_schedule": SCHEDULES,
    "save_error": ("warn", "stop"),
    "bad_loss": POLICIES,
}
_SAID = (
    "schedule", "sub_batches", "recompute", "sequence_parallel", "degrees", "pipeline_schedule", "micro_batches",
    "zero", "fsdp",
)  # fmt: skip
"""Options that are a plan's alone."""
_AT_LEAST_1 = ("steps", "validation_batches", "micro_batches")
_AT_LEAST_0 = (
    "warmup", "weight_decay", "checkpoint_every", "keep", "spike", "evaluate_every", "decay_steps", "vocabulary",
    "learning_rate_floor", "peak_flops", "print_every",
)  # fmt: skip


@dataclass(frozen=True)
class TrainConfig(ExpertOptions):
    """A training run. All values are checked when it is made; UsageError names the one that cannot be."""

    data: str | None = option(
        None,
        "text file, folder of text files, or folder that Hugging Face datasets saved; default: Python's standard "
        "library",
    )
    tokenizer: str | None = option(
        None, "tokenizer.json, folder with one, or name of one of Hugging Face; default: bytes are the tokens"
    )
    text_column: str = option("text", "column of a dataset that holds the text")
    vocabulary: int = option(
        0, "rows of the table of tokens; 0 = the tokenizer's tokens, rounded up to 64's multiple"
    )
    precision: str = option("float32", "type of weights and activations: float32, or bfloat16 with float32 masters")
    degrees: Degrees = field(
        default=Degrees(),
        metadata={"help": "replicas (data), stages (pipeline), ranks that share a layer (tensor; 0 = the rest)"},
    )
    pipeline_schedule: str = option(
        "one_f_one_b", f"order of passes on the stages: {', '.join(PIPELINES)}, or the path of one's text"
    )
    micro_batches: int = option(1, "parts of a batch whose gradients are added up before a step")
    zero: bool = option(False, "spread the optimizer's state over the replicas")
    fsdp: bool = option(False, "spread weights and gradients over the replicas, too, by FSDP2; in place of zero")
    plan: str | None = option(
        None, "execute the plan in this file: it says the model, the batch, the ranks, their degrees and schedules"
    )
    schedule: str = option(
        "oases",
        "oases, sync, oases@4 or another by name, auto to choose by measuring, or the path of a list",
    )
    wire_dtype: str = option("none", "type that activations are summed in: none (their own), bfloat16 or float16")
    sequence_parallel: bool = option(False, "between blocks each tensor-parallel rank holds its part of the sequence")
    compile: str = option(
        "none", "what torch.compile compiles the methods of each block with: none, or a backend such as inductor"
    )
    steps: int = option(200, "optimizer steps")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    learning_rate_schedule: str = option(
        "cosine", "what follows the warm-up: cosine, linear, constant, or wsd (the peak, and a line down at the end)"
    )
    learning_rate_floor: float = option(0.1, "share of the peak learning rate at the end")
    warmup: int = option(10, "steps of linear warm-up")
    decay_steps: int = option(0, "last steps, in which wsd goes down; 0 = a tenth of all")
    weight_decay: float = option(0.1, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    validation_batches: int = option(8, "held-out batches in a validation loss")
    evaluate_every: int = option(0, "steps from one validation loss to the next; 0 = after the last step alone")
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
    tensorboard: str | None = option(
        None, "folder for TensorBoard's curves of every step; a run that goes on continues them"
    )
    peak_flops: float = option(
        0.0,
        "FLOP/s of one rank at its best, for the utilisation; 0 = a known GPU's data sheet, or a measured product",
    )
    print_every: int = option(0, "steps from line to line where progress goes to no terminal; 0 = ten lines in all")
    bad_loss: str = option("stop", "what a loss or gradient that is not finite does: stop, skip the step, or off")
    spike: float = option(0.0, "a loss above so many times the median of the last 32 is bad too; 0 = never")

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", Degrees.of(self.degrees))
        require_types(self)
        self._sort_list()
        super().__post_init__()
        require_known(self, _KNOWN)
        require_known(self, {"pipeline_schedule": PIPELINES}, or_file=True)
        self.require_experts()
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in _AT_LEAST_0:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.learning_rate_floor > 1:
            raise UsageError(f"learning_rate_floor must be from 0 to 1, got {self.learning_rate_floor}")
        require_seed(self.seed)
        require_device(self.device)
        require_compiler(self.compile)
        self._require_survival()

    def _sort_list(self) -> None:
        """Move a list of stages or experts, given as `schedule`, to its own field. ScheduleError if it is bad."""
        if self.schedule.partition("@")[0] in GENERATORS or not Path(self.schedule).is_file():
            return
        unit = read_schedule(self.schedule, None).unit
        if unit != "block":
            own = "pipeline_schedule" if unit == "stage" else "expert_schedule"
            object.__setattr__(self, own, self.schedule)
            object.__setattr__(self, "schedule", TrainConfig.schedule)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """The configuration in a file, YAML or Python; of its plan's sizes where it names a plan.

        UsageError names file, line and field of what is wrong.
        """
        values = cls.merged(read_values(Path(path), fields(cls)), {})
        return cls(**values) if values.get("plan") is None else config_for(read_plan(values["plan"]), values)

    @classmethod
    def merged(cls, in_file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """A file's values, and before them those `given`; with a plan, a file's defaults are the plan's to say."""
        values = in_file | given
        if "degrees" in values:
            values["degrees"] = Degrees.of(values["degrees"])
        if values.get("plan") is None:
            return values
        usual = {item.name: item.default for item in fields(cls)}
        return {name: value for name, value in values.items() if name in given or value != usual[name]}

    def to_yaml(self) -> str:
        """A YAML of all fields with their help as comments, which `from_yaml` reads back."""
        return config_text(self.given(), fields(self))

    def given(self) -> dict[str, Any]:
        """The fields that are not as they are where nothing is given."""
        usual = {item.name: item.default for item in fields(self)}
        usual |= {"heads": self.default_heads, "sub_batches": self.default_sub_batches}
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @property
    def beyond_tensor_parallel(self) -> bool:
        """Whether it asks for more than one tensor-parallel group and one pass, without experts."""
        if self.experts:
            return False
        return self.degrees.data > 1 or self.degrees.pipeline > 1 or self.micro_batches > 1 or self.zero or self.fsdp

    @property
    def default_sub_batches(self) -> int:
        """Where none were given: by a replica's samples of a micro-batch; 1 without tensor parallelism."""
        if not self.beyond_tensor_parallel:
            return super().default_sub_batches
        samples = self.batch // (self.degrees.data * max(1, self.micro_batches))
        return 1 if self.degrees.tensor == 1 or samples < 2 else 4 if samples >= 4 else 2

    @property
    def rows(self) -> int:
        """Rows of the table of tokens. UsageError for a tokenizer that cannot be had, or has more tokens."""
        tokens = load_tokenizer(self.tokenizer).size
        if 0 < self.vocabulary < tokens:
            raise UsageError(
                f"vocabulary {self.vocabulary} is too small; {self.tokenizer or 'bytes'} has {tokens} tokens"
            )
        return self.vocabulary or -(-tokens // ROWS_MULTIPLE) * ROWS_MULTIPLE

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        schedule = RateSchedule(self.steps, self.warmup, self.learning_rate_floor, self.decay_steps)
        return self.learning_rate * rate_factor(self.learning_rate_schedule, schedule, step)

    def corpus(self) -> Corpus:
        """What it trains on. UsageError where it cannot be read."""
        return open_corpus(self.data, load_tokenizer(self.tokenizer), self.text_column)

    def _require_survival(self) -> None:
        """What of checkpoints, restarts and bad losses can be known from the values alone."""
        if 0 < self.spike <= 1:
            raise UsageError(f"spike must be above 1, or 0 for never, got {self.spike}")
        if self.checkpoint is None and (self.checkpoint_every or self.resume == AUTO):
            what = f"checkpoint_every {self.checkpoint_every}" if self.checkpoint_every else f"resume {self.resume!r}"
            raise UsageError(f"{what} needs a folder; give --checkpoint DIR")

    @property
    def resumes_newest(self) -> bool:
        """Whether the run begins with the newest of its own checkpoints, where there is one."""
        return self.checkpoint is not None and (self.resume == AUTO or restart_count() > 0)

    def check_files(self, sizes: dict[str, Any]) -> Corpus:
        """What is read and written, for a model of these sizes; returns the corpus."""
        if self.checkpoint is not None:
            require_folder(self.checkpoint)
        require_resumable(self.checkpoint, self.resume, self.resumes_newest, sizes)
        self._require_step_log()
        if self.record_loads is not None:
            require_new_trace(self.record_loads, new=self.resume is None and not self.resumes_newest)
        if self.tensorboard is not None:
            require_tensorboard(self.tensorboard, new=self.resume is None and not self.resumes_newest)
        corpus = self.corpus()
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
        if last_logged_step(self.step_log) and self.resume is None and not self.resumes_newest:
            raise UsageError(f"step log {self.step_log!r} holds the steps of another run; give a new file")


def config_for(plan: Plan, given: Mapping[str, Any]) -> TrainConfig:
    """A configuration of the plan's sizes with the values `given` for the rest.

    UsageError for a given value that the plan says otherwise, and for a schedule, which is the plan's alone.
    """
    config = TrainConfig(**values_for(plan, given))
    require_fit(config, plan)
    return config


def values_for(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values `given`, and the plan's for what it says. UsageError for one given that is the plan's alone."""
    for name in _SAID:
        if name in given:
            raise UsageError(
                "the plan says schedules, recomputation, what is sequence-parallel, degrees and micro-batches; leave "
                f"out {_option(name)}"
            )
    return {**_sizes(plan), "precision": plan.model.dtype, **given}


def require_fit(config: TrainConfig, plan: Plan) -> None:
    """Raise UsageError, naming the field, unless plan and configuration are of the same model and batch."""
    for name, size in ({"experts": 0} | _sizes(plan)).items():
        if getattr(config, name) != size and not (name == "vocabulary" and config.vocabulary == 0):
            raise UsageError(
                f"plan: {name} is {size} there and {getattr(config, name)} here; leave out {_option(name)}, or make "
                "a plan for it"
            )
    if not (plan.model.is_gpt and plan.model.tied):
        raise UsageError(f"plan: its model {plan.model.name!r} is no GPT, which is what this trains; plan for a GPT")
    if plan.model.dtype != config.precision:
        raise UsageError(
            f"plan: its model computes in {plan.model.dtype}, training here in {config.precision}; leave out "
            "--precision, or plan for that"
        )
    if plan.fsdp and config.precision != "float32":
        raise UsageError(
            f"fsdp does not support precision {config.precision}: its float32 masters are not sharded; take zero, "
            "which shards them, or float32"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    if plan.model.vocabulary < tokenizer.size:
        raise UsageError(
            f"plan: a vocabulary of {plan.model.vocabulary} is too small; {tokenizer.name} has {tokenizer.size} "
            "tokens"
        )


def _sizes(plan: Plan) -> dict[str, Any]:
    """The options whose values a plan has. How its experts' list goes, it says itself."""
    names = ("hidden", "layers", "heads", "sequence", "vocabulary")
    found: dict[str, Any] = {name: getattr(plan.model, name) for name in names} | {"batch": plan.global_batch}
    experts = {} if plan.experts is None else asdict(plan.experts)
    return found | {name: value for name, value in experts.items() if name != "expert_schedule"}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    return asdict(config)
