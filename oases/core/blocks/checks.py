"""Checks of what a user gives an OverlappedStack; each error names the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import BlockInputs, tensors_in
from oases.core.execution.agreement import Form, Samples, is_sampled, samples_of
from oases.core.execution.call import refuse_recomputation
from oases.core.execution.communication import WireType
from oases.core.execution.group import ProcessGroup, group_size, refuse_capture
from oases.core.execution.piece import BlockParameters
from oases.core.reporting import report
from oases.core.schedule import Schedule
from oases.errors import OverlapError
from oases.limits import require_numbers

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def require_blocks(blocks: Sequence[nn.Module]) -> None:
    """Raise ValueError unless there are blocks, and each has the methods of one."""
    if not blocks:
        raise ValueError("OverlappedStack was given no blocks; give at least one")
    for index, block in enumerate(blocks):
        for method in ("partial", "combine"):
            if not callable(getattr(block, method, None)):
                raise ValueError(
                    f"block {index} ({type(block).__name__}) has no method {method}(); a block needs partial() "
                    "and combine(), or give the whole model to oases.parallelize"
                )


def require_sub_batches(sub_batches: int | str) -> None:
    """Raise ValueError, or UsageError beyond the limit, unless this is a number of sub-batches or "auto"."""
    if sub_batches != "auto" and (not isinstance(sub_batches, int) or sub_batches < 1):
        raise ValueError(f"sub_batches must be at least 1 or 'auto', got {sub_batches!r:.80}")
    require_numbers({"sub_batches": sub_batches})


def require_options(small_batch: str, layer_of: Sequence[int] | None, name: str, num_blocks: int) -> None:
    """Raise ValueError for options of a stack of so many blocks that are none."""
    if small_batch not in ("refuse", "whole"):
        raise ValueError(f"small_batch must be 'refuse' or 'whole', got {small_batch!r}")
    if layer_of is not None and len(layer_of) != num_blocks:
        raise ValueError(f"layer_of has {len(layer_of)} entries for {num_blocks} blocks; give one for each")
    if not re.fullmatch(r"[\w .-]*", name):
        raise ValueError(f"name must be of letters, digits, spaces and any of _.-, got {name!r}")


def checked_inputs(
    x: Any, inputs: Sequence[BlockInputs] | None, num_blocks: int, label: str
) -> Sequence[BlockInputs]:
    """Inputs of a call of a stack on `x` besides it, one for each block; () where no block reads any.

    TypeError or ValueError unless `x` is a tensor [batch, ...] of floating-point numbers, and for another number of
    inputs than of blocks. RuntimeError in a CUDA graph's capture and in a recomputation.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"an OverlappedStack was called with {x!r:.80}; give a tensor [batch, ...]")
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"an OverlappedStack was called with a tensor of shape {list(x.shape)} and type {x.dtype}; give an "
            "activation [batch, ...] of a floating-point type, such as an embedding of tokens"
        )
    refuse_capture(x)
    refuse_recomputation(label)
    if inputs is not None and len(inputs) != num_blocks:
        raise ValueError(f"{len(inputs)} BlockInputs were given to {num_blocks} blocks; give one for each")
    return inputs if inputs is not None and any(each.values for each in inputs) else ()


def require_overlap(
    schedule: Schedule, group: ProcessGroup | None, label: str, calls: int, too_small_for: int, measured: bool
) -> None:
    """Raise OverlapError if `schedule` cannot overlap communication, or the stack called `label` did not.

    calls: of the stack so far. too_small_for: sub-batches that the batch has too few samples for, or 0. measured:
    whether the schedule was chosen by measurements.
    """
    why = None
    if group_size(group) == 1:
        why = "the group has one rank, so nothing is communicated"
    elif not schedule.overlaps:
        why = f"schedule '{schedule.name}' with {schedule.num_sub_batches} sub-batches overlaps nothing"
        if too_small_for:
            why += f"; the batch has fewer samples than the {too_small_for} sub-batches"
        elif measured:
            why += "; it was chosen as the fastest in measurements"
    elif calls >= 4 and is_sampled(calls):  # not in each: the times of collectives on a device are waited for
        rows = [row for row in report(group).stacks if row.where == label]
        if rows and rows[0].hidden is not None and rows[0].hidden < 0.01:
            waited, busy = rows[0].blocked_seconds, rows[0].link_seconds
            why = f"the compute waited {waited:.2f} s for {busy:.2f} s of communication"
    if why is not None:
        raise OverlapError(f"overlap is required, but {why} ({label}; see oases.report())")


class BlockList:
    """Blocks of a stack as they were when it was made."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._blocks = list(blocks)

    def is_of(self, blocks: nn.ModuleList) -> bool:
        """Whether these are the blocks. RuntimeError where their number has changed."""
        now = [*blocks._modules.values()]
        if len(now) != len(self._blocks):
            raise RuntimeError(
                f"the stack was made of {len(self._blocks)} blocks, for which its schedule is, and has {len(now)} "
                "now; make a new stack of them"
            )
        return now == self._blocks  # modules are equal where they are the same


class BypassedHooks:
    """Hooks of a block that a stack would not call: it calls methods of the block, and no forward().

    Those of other modules inside of a block are called by the block itself. kinds: of modules inside of it that the
    stack runs without their forward(); (): those of classes with `runs_without_forward`. methods: that it calls, for
    errors.
    """

    def __init__(
        self,
        block: nn.Module,
        kinds: tuple[type[nn.Module], ...] = (),
        methods: str = "partial() and combine()",
    ) -> None:
        plain: nn.Module = getattr(block, "_orig_mod", block)

        def bypassed(part: nn.Module) -> bool:
            return isinstance(part, kinds) if kinds else getattr(part, "runs_without_forward", False)

        modules = [(path, part) for path, part in plain.named_modules() if part is plain or bypassed(part)]
        self._hooks = [(path, part, getattr(part, kind)) for path, part in modules for kind in _HOOKS]
        self._held = [hooks for _, _, hooks in self._hooks]
        self._methods = methods

    def refuse(self, number: int) -> None:
        """Raise RuntimeError where there is one."""
        if not any(self._held):
            return
        for path, part, hooks in self._hooks:
            if hooks:
                where = f"block {number}" + (f", module '{path}'" if path else "")
                raise RuntimeError(
                    f"{where} ({type(part).__name__}) has hooks, which would not be called: a stack calls "
                    f"{self._methods}, and no forward(); register them on the stack, on its parameters or on another "
                    "module inside of the block"
                )


def form_of(
    x: Tensor,
    inputs: Sequence[BlockInputs],
    parameters: Sequence[BlockParameters],
    schedule: Schedule,
    order: int,
    wire_dtype: WireType | None,
    *,
    training: bool,
    gradients: bool,
) -> Form:
    """Form of a call, equal on all ranks. order: hash of the schedule's ops."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    given = {id(value): value for each in inputs for value in each.values if isinstance(value, Tensor)}
    trained = [each.form for each in parameters]
    return (
        "shape of the input", x.shape, "type of the input", x.dtype, "computation of gradients", gradients,
        "training mode", training, "autocast", autocast, "schedule", schedule.name,
        "number of sub-batches", schedule.num_sub_batches, "wire_dtype", wire_dtype, "order of ops", order,
        "number of parameters that require gradients", sum(number for number, _ in trained),
        "digest of the parameters that require gradients", tuple(digest for _, digest in trained),
        "form of the blocks' inputs", tuple((tuple(value.shape), value.dtype) for value in given.values()),
    )  # fmt: skip


def compared(x: Tensor, inputs: Sequence[BlockInputs], call: int) -> Samples | None:
    """Samples of the tensors of this call, counted from 1, for ranks to compare; None in most calls."""
    return samples_of([x, *tensors_in(inputs)]) if is_sampled(call) else None
