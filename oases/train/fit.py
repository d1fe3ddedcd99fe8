"""Whether a plan and a configuration are of the same model and batch, and what a plan says that a run is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from oases.errors import UsageError
from oases.plans.plan import Plan
from oases.train.tokenizer import tokenizer_called

_SIZES = ("hidden", "layers", "heads", "sequence", "vocabulary")
_SAID = (
    "schedule", "sub_batches", "recompute", "sequence_parallel", "degrees", "pipeline_schedule", "micro_batches",
    "zero", "fsdp",
)  # fmt: skip


class Told(Protocol):
    """What of a configuration a plan must fit, beside its sizes."""

    @property
    def vocabulary(self) -> int:
        """Rows of the table of tokens; 0 for as many as the tokenizer needs."""

    @property
    def precision(self) -> str:
        """Type of weights and activations."""

    @property
    def tokenizer(self) -> str | None:
        """None for bytes."""


def values_for(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values `given`, and the plan's for what it says. UsageError for one given that is the plan's alone."""
    for name in _SAID:
        if name in given:
            raise UsageError(
                "the plan says schedules, recomputation, what is sequence-parallel, degrees and micro-batches; leave "
                f"out {_option(name)}"
            )
    return {**_sizes(plan), "precision": plan.model.dtype, **given}


def require_fit(config: Told, plan: Plan) -> None:
    """Raise UsageError, naming the field, unless plan and configuration are of the same model and batch."""
    for name, size in _sizes(plan).items():
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
            f"precision {config.precision} and fsdp do not go together: the masters would have to be in shards, too; "
            "take zero, which has them so, or float32"
        )
    tokenizer = tokenizer_called(config.tokenizer)
    if plan.model.vocabulary < tokenizer.size:
        raise UsageError(
            f"plan: a vocabulary of {plan.model.vocabulary} is too small; {tokenizer.name} has {tokenizer.size} "
            "tokens"
        )


def _sizes(plan: Plan) -> dict[str, int]:
    return {name: getattr(plan.model, name) for name in _SIZES} | {"batch": plan.global_batch}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
