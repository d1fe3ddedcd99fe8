"""Number of chunks of an overlapped linear: given, or chosen by measuring the op on its first call.

Chunks hide communication but make matmuls smaller; the best number depends on shapes, machine and link. "auto" times
the forward and backward op on the layer's own shapes, and all ranks agree on the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from oases.core.execution.autotune import Autotune, cache_key
from oases.core.execution.failure import refuse_capture
from oases.core.execution.group import ProcessGroup, group_of, scheduler_of
from oases.distributed.clock import timed

NumChunks = int | Literal["auto"]
Kind = Literal["column", "row"]

CANDIDATES = (1, 2, 4)
ROUNDS = 5
"""Measured rounds of a calibration: more than for stacks, because times of one layer vary more."""
MAX_CALIBRATIONS = 8
"""Input shapes that one layer measures; bounds the cost for batches of varying length."""

# Below this many rows a smaller matmul costs more than its all-reduce can hide.
_ROWS_PER_CHUNK = 64

# By group: its ranks make the same calls, so they find a key here together or not at all.
_chosen: WeakKeyDictionary[ProcessGroup, dict[str, int]] = WeakKeyDictionary()


class Chunks:
    """Overlapped linear op of one layer with its chunk counts. kind: selects the op `oases::<kind>_linear`."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._known: dict[tuple[object, ...], int] = {}
        self._last: tuple[int, int] | None = None  # rows and count of the last choice by measuring

    def linear(
        self,
        num_chunks: NumChunks,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_name: str,
        sequence_parallel: bool,
    ) -> Tensor:
        """Run the op on local tensors: x [..., in], weight [out, in], bias [out], see csrc/linear.h.

        num_chunks: "auto" measures on the first eager call with gradients for new shapes, which every rank of the
        group must make. Otherwise (no_grad mode, fake tensors, traced graphs) the count follows from the size; a
        traced graph takes the last measured count if it has as many rows. group_name: the c10d name.
        """
        if not torch.compiler.is_compiling():
            refuse_capture(x)
        count = self._count(num_chunks, x, weight, group_name, sequence_parallel)
        return self._op("linear")(x, weight, bias, group_name, count, sequence_parallel)

    def _op(self, name: str) -> Any:
        return getattr(torch.ops.oases, f"{self._kind}_{name}")

    def _count(
        self, num_chunks: NumChunks, x: Tensor, weight: Tensor, group_name: str, sequence_parallel: bool
    ) -> int:
        if num_chunks != "auto":
            return num_chunks
        rows = x.numel() // max(x.shape[-1], 1)
        if torch.compiler.is_compiling():
            # Compare only: a lookup by shape would specialise the graph.
            if self._last is not None and rows >= self._last[0]:
                return self._last[1]
        elif is_real(x) and is_real(weight):
            key = (x.shape, x.dtype, x.device, weight.shape, group_name, sequence_parallel)
            if key not in self._known and rows >= 2 * _ROWS_PER_CHUNK and self._may_measure():
                self._known[key] = self._choose(rows, x, weight, group_name, sequence_parallel)
            if key in self._known:
                self._last = rows, self._known[key]
                return self._known[key]
        return 2 if rows >= 2 * _ROWS_PER_CHUNK else 1

    def _may_measure(self) -> bool:
        fixed = torch.are_deterministic_algorithms_enabled()
        return torch.is_grad_enabled() and not fixed and len(self._known) < MAX_CALIBRATIONS

    def _choose(self, rows: int, x: Tensor, weight: Tensor, group_name: str, sequence_parallel: bool) -> int:
        group = group_of(group_name)
        counts = [count for count in CANDIDATES if count == 1 or rows >= count * _ROWS_PER_CHUNK]
        if group is None or group.size() == 1:
            return 1
        what = repr((self._kind, tuple(weight.shape), x.device.type, sequence_parallel))
        key = cache_key(what, x.shape, x.dtype, group)
        chosen = _chosen.setdefault(group, {})
        if key not in chosen:
            labelled = {"off" if count == 1 else f"{count} chunks": count for count in counts}
            tuning = Autotune(labelled, group, key, has_off=True, rounds=ROUNDS)
            if tuning.choice is None:
                calibrate(tuning, group, self._trial(x, weight, group_name, sequence_parallel), x.device)
            assert tuning.choice is not None
            chosen[key] = tuning.choice
        return chosen[key]

    def _trial(self, x: Tensor, weight: Tensor, group_name: str, sequence_parallel: bool) -> Callable[[int], None]:
        forward, backward = self._op("linear"), self._op("linear_backward")
        x, weight = x.detach(), weight.detach()

        def run(count: int) -> None:
            y = forward(x, weight, None, group_name, count, sequence_parallel)
            backward(torch.zeros_like(y), x, weight, group_name, count, sequence_parallel)

        return run


def calibrate(tuning: Autotune[int], group: ProcessGroup, run: Callable[[int], None], device: torch.device) -> None:
    """Time `run(count)` for the candidates by turns until `tuning` has chosen.

    No side effects: the ops are called below autograd, draw no random numbers, and neither `oases.report()` nor the
    caller's dispatch modes (a FLOP counter, say) see them.
    """
    scheduler = scheduler_of(group)
    scheduler.set_counting(False)
    try:
        with torch.no_grad(), _disable_current_modes():
            while tuning.choice is None:
                tuning.note(tuning.turn, timed(partial(run, tuning.current), device))
    finally:
        scheduler.set_counting(True)


def is_real(x: Tensor) -> bool:
    """Whether a tensor has data: fake and functional tensors are subclasses."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta
