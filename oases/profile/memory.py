"""What a training step keeps in memory: for its backward pass, and at its peak.

On the CPU every allocation and every release is read from the profiler, so the bytes are exact and tensors that only
autograd holds are among them. On CUDA they are the caching allocator's, in blocks of 512 bytes. Hooks on saved
tensors would be no way to count: the executor does other work under them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from oases.schedule import Schedule

_FORMULA_UNITS = {"sync": 1, "fine_grained": 4, "cross_pass": 3, "oases": 4}
_MARK = "oases: the forward pass has ended"
_CUDA_BLOCK = 512


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward pass, beyond what was there before it.

    kept: alive between the two passes, the output apart. peak: most alive at once, output and gradients included.
    """

    kept: int
    peak: int


def formula_units(schedule: Schedule) -> int | None:
    """What the Oases paper says a schedule keeps, in units per layer; None where it says nothing.

    A unit is sequence x batch x hidden x element size. The paper's formula is for recomputation alone, and it counts
    the input of every layer, that of the first among them.
    """
    return _FORMULA_UNITS.get(schedule.name) if schedule.recompute == "full" else None


def measure_memory(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    """Run `forward` and, on its output, `backward`; return the bytes they allocated on `device` and held.

    Both must do their work in the calling thread. RuntimeError where the profiler recorded nothing.
    """
    return (_measure_cuda if device.type == "cuda" else _measure_cpu)(forward, backward, device)


def _measure_cuda(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    own = -(-output.untyped_storage().nbytes() // _CUDA_BLOCK) * _CUDA_BLOCK
    kept = torch.cuda.memory_allocated(device) - before - own
    backward(output)
    return StepMemory(kept, torch.cuda.max_memory_allocated(device) - before)


def _measure_cpu(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> StepMemory:
    # Read by the profiler when it first starts: without it, it reports its start and end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        output = forward()
        with record_function(_MARK):
            pass
        backward(output)
    result = recorded.profiler.kineto_results if recorded.profiler is not None else None
    if result is None:
        raise RuntimeError("torch's profiler recorded nothing, so memory cannot be measured")
    return _account(list(_flat(result.experimental_event_tree())), output.untyped_storage().data_ptr())


def _account(events: list[Any], output: int) -> StepMemory:
    """Add up the allocator's events. output: address of the memory that does not count as kept."""
    live: dict[int, int] = {}  # bytes by address
    total = peak = 0
    kept = None
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name == _MARK:
            kept = total - live.get(output, 0)
        if event.tag != torch._C._profiler._EventType.Allocation:
            continue
        change = event.extra_fields
        # What is released without having been allocated here was there before. An address allocated twice was
        # released in between by a thread that the profiler does not see.
        total -= live.pop(change.ptr, 0)
        if change.alloc_size > 0:
            live[change.ptr] = change.alloc_size
            total += change.alloc_size
        peak = max(peak, total)
    if kept is None:
        raise RuntimeError(f"torch's profiler did not record {_MARK!r}, so memory cannot be measured")
    return StepMemory(kept, peak)


def _flat(events: list[Any]) -> Iterator[Any]:
    """The events of a tree, parents before children."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
