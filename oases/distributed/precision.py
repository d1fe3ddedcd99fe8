"""Precision of a model's weights, and what its optimizer has to do for it: float32 masters, sharded state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oases.distributed.dtensors import is_fsdp_shard, part_of_rank
from oases.errors import UsageError

_NEEDS = "oases_needs"
"""Attribute of a parameter with the options of `parallelize` that an optimizer of it must honor."""


Originals = dict[nn.Parameter, tuple[Tensor, tuple[int, int]]]
"""Float32 weights before the cast, by parameter, with the state of the cast one (see `state_now`)."""


@dataclass
class Needs:
    """Needs of a parallelized model, for its optimizer. options: as they were given. zero: sharded state.

    originals: float32 weights of before they were rounded, with the state of the rounded ones (see `state_now`).
    """

    options: str
    zero: bool
    originals: Originals = field(default_factory=dict)


def set_needs(model: nn.Module, *, zero: bool, dtype: torch.dtype | None) -> None:
    """Convert a model's weights to `dtype`, and have `make_optimizer` shard its state and keep float32 masters.

    Gradients of 16-bit weights accumulate in float32 from now on. Other optimizers are refused when they step.
    """
    low = dtype is not None and is_low(dtype)
    given = {"zero": "zero=True"} if zero else {}
    needs = Needs(" and ".join([*given.values(), *([f"dtype={dtype}"] if low else [])]), zero)
    for parameter in model.parameters():
        if is_fsdp_shard(parameter):  # gathered in the type, from float32 shards
            continue
        if dtype is not None and parameter.is_floating_point():
            before = parameter.data  # with a version of its own
            parameter.data = before.to(dtype)
            before = part_of_rank(before)
            if low and parameter.requires_grad and not parameter.is_meta:
                needs.originals[parameter] = (before.float(), state_now(parameter))
        if low and parameter.is_floating_point():
            parameter.grad_dtype = torch.float32
        if needs.options:
            setattr(parameter, _NEEDS, needs.options)
    object.__setattr__(model, _NEEDS, needs)


def needs_of(model: nn.Module) -> Needs | None:
    """Needs of a model for its optimizer; None where `set_needs` was not called."""
    found: Needs | None = getattr(model, _NEEDS, None)
    return found


def state_now(parameter: Tensor) -> tuple[int, int]:
    """Memory and version of a parameter, of which one changes with its values."""
    held = part_of_rank(parameter)
    return held.data_ptr(), held._version


def _refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UsageError where an optimizer would update rounded weights, or keep all state of a model with zero."""
    if hasattr(optimizer, _NEEDS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            needs = getattr(parameter, _NEEDS, None)
            if needs is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} does not know of {needs}, which parallelize() was given; make it by "
                    f"oases.make_optimizer(model, torch.optim.{type(optimizer).__name__}, ...)"
                )


register_optimizer_step_pre_hook(_refuse_others)


def mark_handled(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer that does what the model needs."""
    setattr(optimizer, _NEEDS, "")


def master_of(parameter: nn.Parameter, originals: Originals) -> Tensor:
    """Float32 weight that a master begins with: the one before the cast, unless the parameter has changed since."""
    original, state = originals.get(parameter, (None, None))
    if original is not None and state == state_now(parameter):
        return original
    return part_of_rank(parameter).detach().float().clone()


def is_low(dtype: torch.dtype) -> bool:
    """Whether a type is a floating-point one below float32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def require_dtype(dtype: Any) -> None:
    """Raise UsageError for a dtype that weights cannot be trained in."""
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
        raise UsageError(
            f"dtype {dtype!r}: weights are trained in torch.bfloat16, with float32 masters, float32 or float64; "
            "float16 would need its loss scaled"
        )
