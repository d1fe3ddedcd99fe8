"""Memory of a training step: kept activations and peak.

On the CPU the profiler's record of every allocation and release is used, so bytes are exact and include tensors
that only autograd holds. On CUDA they are the caching allocator's, in blocks of 512 bytes. Saved-tensor hooks
cannot be used to count, because the executor does other work under them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from oases.core.schedule import Schedule

_FORMULA_UNITS = {"sync": 1, "fine_grained": 4, "cross_pass": 3, "oases": 4}
_MARK = "oases: the forward pass has ended"
_ALLOCATED = 512
"""Bytes of which an accelerator's allocator gives multiples."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward pass in addition to those allocated before.

    kept: live between the passes, without the output. peak: maximum, with output and gradients.
    """

    kept: int
    peak: int


def formula_units(schedule: Schedule) -> int | None:
    """Activations kept per layer by the Oases paper's formula, in units; None if it does not cover the schedule.

    A unit is sequence x batch x hidden x element size. The formula covers recomputation only, and it counts the
    input of every layer, the first included.
    """
    return _FORMULA_UNITS.get(schedule.name) if schedule.recompute == "full" else None


def measure_memory(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    """Run `forward` and, on its output, `backward`; return the bytes they allocated on `device`.

    Both must do their work in the calling thread. Raises RuntimeError if the profiler recorded nothing.
    """
    return (_measure_cpu if device.type == "cpu" else _measure_accelerator)(forward, backward, device)


def _measure_accelerator(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    output = forward()
    own = -(-output.untyped_storage().nbytes() // _ALLOCATED) * _ALLOCATED
    kept = torch.accelerator.memory_allocated(device) - before - own
    backward(output)
    return StepMemory(kept, torch.accelerator.max_memory_allocated(device) - before)


def _measure_cpu(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    # Read by the profiler at its first start; without it, the profiler logs its start and end to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # acc_events: the profiler of torch 2.11 warns without it that it keeps one cycle; there is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        output = forward()
        with record_function(_MARK):
            pass
        backward(output)
    result = recorded.profiler.kineto_results if recorded.profiler is not None else None
    if result is None:
        raise RuntimeError("torch's profiler recorded nothing, so memory cannot be measured")
    return _account(list(_flat(result.experimental_event_tree())), output.untyped_storage().data_ptr())


def _account(events: list[Any], output: int) -> StepMemory:
    """Sum up the allocator's events. output: address of the memory that does not count as kept."""
    live: dict[int, int] = {}  # bytes by address
    total = peak = 0
    kept = None
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name == _MARK:
            kept = total - live.get(output, 0)
        if event.tag != torch._C._profiler._EventType.Allocation:
            continue
        change = event.extra_fields
        # A release without an allocation here is of older memory. An address allocated twice was released in
        # between by a thread that the profiler does not record.
        total -= live.pop(change.ptr, 0)
        if change.alloc_size > 0:
            live[change.ptr] = change.alloc_size
            total += change.alloc_size
        peak = max(peak, total)
    if kept is None:
        raise RuntimeError(f"torch's profiler did not record {_MARK!r}, so memory cannot be measured")
    return StepMemory(kept, peak)


def _flat(events: list[Any]) -> Iterator[Any]:
    """Events of a tree, parents before children."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
