"""Configuration of a training run: one dataclass, from which the command-line options are generated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

import oases.records as records
from oases.checkpoint.retention import require_folder
from oases.core.dtypes import AUTO_LOSSY, QUANTISED
from oases.core.execution.communication import WIRE_DTYPES
from oases.core.execution.piece import require_compiler
from oases.core.schedule import GENERATORS, PIPELINES
from oases.errors import UsageError, make_folder
from oases.launch.ranks import restart_count
from oases.limits import flag_of
from oases.models.options import Degrees, option, require_device, require_known
from oases.plans.expert_schedules import EXPERT_SCHEDULES
from oases.plans.plan import Plan, read_plan
from oases.plans.schedule_files import read_schedule
from oases_train.adapters import lora_config, require_adapters
from oases_train.config_file import config_text, read_values
from oases_train.data import Corpus
from oases_train.expert_options import ExpertOptions
from oases_train.instructions import Instructions
from oases_train.learning_rate import SCHEDULES, rate_factor
from oases_train.load_balance import require_new_trace
from oases_train.logs import last_logged_step, require_tensorboard
from oases_train.optimizer import PRECISIONS
from oases_train.resume import AUTO, require_resumable
from oases_train.step_check import POLICIES
from oases_train.tokenizer import load_tokenizer, require_rows
from oases_train.tokens import open_corpus

ROWS_MULTIPLE = 64
"""Padding of the vocabulary, so that common tensor-parallel degrees divide it."""
_SET_BY_PLAN = (
    "schedule", "recompute", "sequence_parallel", "degrees", "pipeline_schedule", "micro_batches", "zero", "fsdp",
)  # fmt: skip
"""Options that only the plan sets."""


@dataclass(frozen=True)
class TrainConfig(ExpertOptions):
    """Configuration of a training run, validated on construction; UsageError names the invalid value."""

    encoder_decoder: ClassVar[bool] = False  # whether an encoder reads the text before what the decoder predicts
    model_rows: ClassVar[int] = 0  # vocabulary of the transformers model

    model: str | None = option(
        None,
        "transformers model that predicts the next token, or a text from another: its config.json, or a folder with "
        "one, whose safetensors are loaded if it has any; default: the built-in GPT",
        metavar="PATH",
    )
    data: str | None = option(
        None,
        "training text: a text file, a folder of text files, or a dataset saved by Hugging Face datasets (column "
        "text); with --model also a .jsonl file of prompt and response, loss on responses only; default: Python's "
        "standard library",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None,
        "tokenizer.json, a folder with one, or a Hugging Face name; default: bytes are the tokens",
        metavar="NAME|PATH",
    )
    lora_rank: int = option(
        0, "with --model, LoRA rank; train adapters of all linears only (peft); 0 = full fine-tuning"
    )
    precision: str = option(
        "float32", "dtype of weights and activations; bfloat16 keeps float32 master weights", PRECISIONS
    )
    degrees: Degrees = field(
        default=Degrees(),
        metadata={"help": "parallel degrees: data, pipeline and tensor; tensor 0 = ranks / (data x pipeline)"},
    )
    pipeline_schedule: str = option(
        "one_f_one_b",
        f"pipeline schedule: {', '.join(PIPELINES)}, or the path of a schedule file",
        metavar="NAME|FILE",
    )
    micro_batches: int = option(1, "micro-batches per optimizer step (gradient accumulation)")
    zero: bool = option(False, "shard gradients and optimizer state over data-parallel ranks (ZeRO-2)")
    fsdp: bool = option(False, "shard weights, gradients and optimizer state over data-parallel ranks (FSDP2)")
    plan: str | None = option(
        None, "plan file of oases plan: sets model, batch, ranks, parallel degrees and schedules", metavar="FILE"
    )
    schedule: str = option(
        AUTO,
        "schedule of the tensor-parallel collectives: auto = by measuring in the first steps, once per machine; "
        "oases, sync, another name (oases@4: 4 sub-batches), or the path of a schedule file; with --experts of "
        f"theirs: {', '.join(EXPERT_SCHEDULES)} or a file, auto = block_wise, or plain with placement none",
        metavar="NAME|FILE",
    )
    wire_dtype: str = option(
        "none",
        "communication dtype of TP all-reduces and expert all-to-alls: none = compute dtype; int8 = quantized "
        "(lossy); auto:lossy = none, bfloat16 or int8, by measuring",
        (*WIRE_DTYPES, AUTO_LOSSY),
    )
    gradient_wire: str = option(
        "none",
        "data-parallel averages of gradients: none = in their own dtype; int8 = quantised, with error feedback",
        ("none", QUANTISED),
    )
    pipeline_wire: str = option(
        "none",
        "messages between pipeline stages: none = in the dtype they are computed in; int8 = quantised",
        ("none", QUANTISED),
    )
    sequence_parallel: bool = option(
        False, "sequence parallelism: shard activations between blocks along the sequence"
    )
    compile: str = option(
        "none", "torch.compile backend for the methods of each block, e.g. inductor; none = eager", metavar="NAME"
    )
    steps: int = option(200, "optimizer steps")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW")
    learning_rate_schedule: str = option(
        "cosine",
        "learning-rate schedule after warm-up, to a tenth of the peak; wsd = constant, then linear decay in the last "
        "tenth of the steps",
        SCHEDULES,
    )
    warmup: int = option(10, "linear warm-up, steps")
    clip: float = option(1.0, "gradient clipping: maximum global norm; 0 = no clipping")
    validation_batches: int = option(8, "held-out batches per validation loss")
    evaluate_every: int = option(0, "steps between validation losses; 0 = after the last step only")
    seed: int = option(0, "seed of weights and batches")
    device: str = option("cpu", "device of the ranks", ("cpu", "cuda"))
    checkpoint: str | None = option(None, "folder for checkpoints, one subfolder per saved step", metavar="DIR")
    checkpoint_every: int = option(0, "steps between checkpoints; 0 = after the last step only")
    keep: int = option(3, "number of newest checkpoints to keep; 0 = all")
    resume: str | None = option(
        None,
        "checkpoint to resume from, saved with any degrees or plan, or a folder of checkpoints (newest valid one); "
        "auto = the newest in --checkpoint, or start if there is none",
        metavar="DIR",
    )
    step_log: str | None = option(None, "JSON Lines log, one line per step; a resumed run appends", metavar="FILE")
    tensorboard: str | None = option(None, "folder for TensorBoard logs; a resumed run appends", metavar="DIR")
    bad_loss: str = option(
        "stop", "on a non-finite loss or gradient: stop, skip the step, or off (no check)", POLICIES
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", Degrees.of(self.degrees))
        records.check(self)  # before a schedule file is read
        weights = None
        if self.model is not None:
            from oases_train.model_stage import weights_of  # loads the compiler, which the built-in GPT needs not

            self._take_sizes(self.model)
            weights = weights_of(self.model)
        require_adapters(self.lora_rank, self.model, weights)
        self._sort_list()
        super().__post_init__()
        require_known(self, {"pipeline_schedule": PIPELINES}, or_file=True)
        self.require_experts(self.schedule, self.model)
        if self.learning_rate == 0:
            raise UsageError(f"learning_rate must be above 0, got {self.learning_rate}")
        require_device(self.device)
        require_compiler(None if self.compile == "none" else self.compile)
        self._require_survival()

    @property
    def lora(self) -> Any:
        """LoraConfig of the adapters that are trained; None without."""
        task = "SEQ_2_SEQ_LM" if self.encoder_decoder else "CAUSAL_LM"
        return lora_config(self.lora_rank, task=task) if self.lora_rank else None

    def _sort_list(self) -> None:
        """Move a pipeline schedule's file from `schedule` to its field. ScheduleError if invalid."""
        if self.schedule.partition("@")[0] in GENERATORS or not Path(self.schedule).is_file():
            return
        unit = read_schedule(self.schedule, None).unit
        if unit == "experts" and not self.experts:
            raise UsageError(f"schedule {self.schedule!r} needs a mixture of experts; give --experts N, too")
        if unit == "stage":
            if self.pipeline_schedule not in (TrainConfig.pipeline_schedule, self.schedule):
                raise UsageError(
                    f"schedule {self.schedule!r} is a file for --pipeline-schedule, given too; leave out one"
                )
            object.__setattr__(self, "pipeline_schedule", self.schedule)
            object.__setattr__(self, "schedule", AUTO)

    def _take_sizes(self, path: str) -> None:
        """Set the sizes to those of a transformers model. UsageError for options that it sets or cannot have."""
        from oases_train.model_stage import num_layers, trained_configuration

        found = trained_configuration(path)
        object.__setattr__(self, "encoder_decoder", found.is_encoder_decoder)
        object.__setattr__(self, "model_rows", found.vocab_size)
        sizes = {
            "hidden": found.hidden_size, "layers": num_layers(found), "heads": found.num_attention_heads,
        }  # fmt: skip
        usual = {item.name: item.default for item in fields(self)}
        for name, size in sizes.items():
            if getattr(self, name) not in (usual[name], size):
                raise UsageError(
                    f"{flag_of(name)} {getattr(self, name)}: --model {path!r} has {size}; leave out {flag_of(name)}, "
                    "or change the model's config.json"
                )
            object.__setattr__(self, name, size)
        remedy = "give the model's own as --tokenizer, or one whose embedding was resized to them as --model"
        require_rows(load_tokenizer(self.tokenizer), found.vocab_size, f"--model {path!r}: its vocabulary of", remedy)
        if self.experts != usual["experts"]:
            raise UsageError(f"{flag_of('experts')} is for the built-in GPT; leave it out with --model")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> TrainConfig:
        """Read a YAML or Python configuration file. Sizes come from its plan, if it names one.

        UsageError names file, line and field of an error.
        """
        values = cls.merged(read_values(Path(path), cls), {})
        return cls(**values) if values.get("plan") is None else config_for(read_plan(values["plan"]), values)

    @classmethod
    def merged(cls, in_file: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Merge a file's values with those `given`, which win. With a plan, drop a file's defaults."""
        values = in_file | given
        if "degrees" in values:
            values["degrees"] = Degrees.of(values["degrees"])
        if values.get("plan") is None:
            return values
        usual = {item.name: item.default for item in fields(cls)}
        return {name: value for name, value in values.items() if name in given or value != usual[name]}

    def to_yaml(self) -> str:
        """YAML of all fields with help texts as comments, readable by `from_yaml`."""
        return config_text(self.given(), fields(self))

    def given(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        usual = {item.name: item.default for item in fields(self)}
        usual |= {"heads": self.default_heads}
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @property
    def beyond_tensor_parallel(self) -> bool:
        """Whether a dense run uses data or pipeline parallelism, gradient accumulation, ZeRO-2 or FSDP."""
        more = self.degrees.data > 1 or self.degrees.pipeline > 1 or self.micro_batches > 1 or self.zero or self.fsdp
        return more and not self.experts

    @property
    def default_sub_batches(self) -> int:
        """Default sub-batches for the micro-batch size of a replica; 1 without tensor parallelism, 0 to measure."""
        if self.schedule == AUTO:
            return 0
        if not self.beyond_tensor_parallel:
            return super().default_sub_batches
        samples = self.batch // (self.degrees.data * max(1, self.micro_batches))
        return 1 if self.degrees.tensor == 1 or samples < 2 else 4 if samples >= 4 else 2

    @property
    def rows(self) -> int:
        """Vocabulary size, padded. UsageError for an unavailable tokenizer, or one with more tokens."""
        return self.model_rows or -(-load_tokenizer(self.tokenizer).size // ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def wires(self) -> dict[str, str | None]:
        """Types of gradients and of messages between stages, as `parallelize` takes them; None for their own type."""
        given = {name: getattr(self, name) for name in ("gradient_wire", "pipeline_wire")}
        return {name: None if code == "none" else code for name, code in given.items()}

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.learning_rate * rate_factor(self.learning_rate_schedule, self.steps, self.warmup, step)

    def corpus(self) -> Corpus | Instructions:
        """Open the training corpus. UsageError where it cannot be read."""
        tokenizer = load_tokenizer(self.tokenizer)
        if self.data is not None and self.model is not None and Instructions.is_at(Path(self.data)):
            return Instructions(Path(self.data), tokenizer)
        return open_corpus(self.data, tokenizer)

    def _require_survival(self) -> None:
        """Check options of checkpoints, restarts and bad losses that need no file access."""
        if self.checkpoint is None and (self.checkpoint_every or self.resume == AUTO):
            every = self.checkpoint_every
            what = f"checkpoint_every {every}" if every else f"resume {self.resume!r}"
            raise UsageError(f"{what} needs a checkpoint folder; give --checkpoint DIR")

    @property
    def resumes_newest(self) -> bool:
        """Whether the run resumes from the newest checkpoint in its own folder, if there is one."""
        return self.checkpoint is not None and (self.resume == AUTO or restart_count() > 0)

    def check_files(self, sizes: dict[str, Any]) -> Corpus | Instructions:
        """Check input and output files for a model of these sizes; returns the corpus."""
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
            self.samples(corpus, split, step=0, batch=1)
        return corpus

    def samples(self, corpus: Corpus | Instructions, split: str, step: int, batch: int) -> dict[str, Tensor]:
        """Draw a batch as a transformers model takes it. UsageError as the corpus raises."""
        draw = corpus.pairs if self.encoder_decoder else corpus.samples
        return draw(split=split, step=step, batch=batch, sequence=self.sequence, seed=self.seed)

    def _require_step_log(self) -> None:
        """Raise UsageError for a step log of another run, and for a file that is not a step log."""
        if self.step_log is None:
            return
        if Path(self.step_log).is_dir():
            raise UsageError(f"step log {self.step_log!r} is a folder; give the path of a file")
        make_folder(Path(self.step_log).resolve().parent, "step log")
        if last_logged_step(self.step_log) and self.resume is None and not self.resumes_newest:
            raise UsageError(f"step log {self.step_log!r} holds the steps of another run; give a new file")


def config_for(plan: Plan, given: Mapping[str, Any]) -> TrainConfig:
    """Configuration with the plan's sizes and the values `given`.

    UsageError for a given value that contradicts the plan or that only the plan sets, such as a schedule.
    """
    config = TrainConfig(**values_for(plan, given))
    require_fit(config, plan)
    return config


def values_for(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the values `given` with the plan's. UsageError for a given value that only the plan sets."""
    for name in _SET_BY_PLAN:
        if name in given:
            raise UsageError(
                "the plan sets schedules, recomputation, sequence parallelism, degrees and micro-batches; leave "
                f"out {flag_of(name)}"
            )
    return {**_sizes(plan), "precision": plan.model.dtype, **given}


def require_fit(config: TrainConfig, plan: Plan) -> None:
    """Raise UsageError, naming the field, unless plan and configuration agree."""
    sizes = plan.model.sizes
    if config.model is None and not (sizes is not None and sizes.is_gpt and sizes.tied):
        raise UsageError(
            f"plan: its model {plan.model.name!r} is not the built-in GPT; give the model's configuration as --model"
        )
    for name, size in ({"experts": 0} | _sizes(plan)).items():
        if getattr(config, name) != size:
            raise UsageError(
                f"plan: {name} is {size} there and {getattr(config, name)} here; leave out {flag_of(name)}, or "
                "make a plan for it"
            )
    if plan.model.dtype != config.precision:
        raise UsageError(
            f"plan: its model computes in {plan.model.dtype}, training here in {config.precision}; leave out "
            "--precision, or plan for that"
        )
    remedy = "plan for its tokens by oases plan --vocabulary, or give a smaller tokenizer"
    require_rows(load_tokenizer(config.tokenizer), plan.model.vocabulary, "plan: a vocabulary of", remedy)


def _sizes(plan: Plan) -> dict[str, Any]:
    """Options set by a plan."""
    names = ["hidden", "layers", "sequence"] + ["heads"] * (plan.model.sizes is not None)
    found: dict[str, Any] = {name: getattr(plan.model, name) for name in names} | {"batch": plan.global_batch}
    names = ["experts", "top_k", "expert_hidden", "balance_weight", "placement"]
    return found if plan.experts is None else found | {name: getattr(plan.experts, name) for name in names}
