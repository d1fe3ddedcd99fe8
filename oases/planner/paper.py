"""The planner's objective as the Oases paper publishes it (arXiv 2305.16121, section 4, and its code), to compare.

Blocks 0 .. n-1 with degrees d_i; f, g forward and backward, c all-reduce of one block and half the local batch:

    forward  = f_0 + sum_{i=1}^{n-2} [max(f_i, c_i) + max(f_{i+1}, c_i)] + max(f_{n-2}, c_{n-2}) + c_{n-1}
    backward = g_0 + the same sum and ends with g + f in the place of f
    change   = k c_i(a) + min(c_i(a), f_{i+1}(b)) from degree a to b > a, k = b / a
               k c_{i+1}(b) + min(c_i(a), g_{i+1}(b)) from a to b < a, k = a / b
    memory   = sum_i [12 b s h + 5 P_i] + runtime <= 0.95 of the device

As read here n counts attention and MLP blocks alone, and all of a sum's term i, f_{i+1} too, is taken at degree d_i,
so that it is a cost of node i; b is the whole local batch, runtime the most of any degree, the device's memory what
its driver gives (24 268 MiB on an RTX 3090). The published times of hidden 3072, 24 layers, on 8 GPUs, batch 8, then
give 14 blocks at degree 2 and 34 at degree 4, 1150.5 ms against 1204.3 ms for degree 4 alone, where smaller degrees
come first, as the published runtime needs it; with the larger degree first 1145.4 ms, since of the last block the
formulas count only the all-reduce, and of the first one only the compute.

It leaves out contention, launches, the data-parallel all-reduce, the optimizer and the head: the search has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from oases.errors import UsageError
from oases.planner.chain import Chain
from oases.planner.programme import Solution, solve
from oases.plans.shape import KINDS, BlockKind, ModelShape

USABLE = 0.95
"""Share of the device's memory that a plan may fill."""


@dataclass(frozen=True)
class PublishedTimes:
    """Seconds of one block for half the local batch, by (kind, degree); of its all-reduce, by degree.

    samples: the whole local batch, by degree. runtime_bytes: what a degree needs besides parameters and activations.
    """

    forward: Mapping[tuple[BlockKind, int], float]
    backward: Mapping[tuple[BlockKind, int], float]
    all_reduce: Mapping[int, float]
    runtime_bytes: Mapping[int, float]
    samples: Mapping[int, float]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Those that have times, in order."""
        return tuple(sorted(self.all_reduce))

    @staticmethod
    def from_rows(rows: Iterable[Mapping[str, Any]], hidden: int, gpus: int, batch: int) -> PublishedTimes:
        """From rows that hold hidden, tp, batch, the times in ms and runtime_memory_mib; null did not fit.

        gpus, batch: degree t gets batch x t / gpus samples; degrees without a row for half of them and, for the
        runtime's memory, all of them are left out. Raises UsageError if none is left.
        """
        table = {(row["tp"], row["batch"]): row for row in rows if row["hidden"] == hidden}
        forward: dict[tuple[BlockKind, int], float] = {}
        backward: dict[tuple[BlockKind, int], float] = {}
        all_reduce: dict[int, float] = {}
        runtime: dict[int, float] = {}
        samples: dict[int, float] = {}
        for tp in sorted({tp for tp, _ in table if tp <= gpus}):
            whole = batch * tp / gpus
            half, full = table.get((tp, whole / 2)), table.get((tp, whole))
            if half is None or full is None or None in (*half.values(), full["runtime_memory_mib"]):
                continue
            for kind in KINDS:
                forward[kind, tp] = half[f"{kind}_forward_ms"] / 1e3
                backward[kind, tp] = half[f"{kind}_backward_ms"] / 1e3
            all_reduce[tp], samples[tp] = half["all_reduce_ms"] / 1e3, whole
            runtime[tp] = full["runtime_memory_mib"] * 2**20
        if not all_reduce:
            raise UsageError(f"no published times of hidden {hidden} for a batch of {batch} on {gpus} ranks")
        return PublishedTimes(forward, backward, all_reduce, runtime, samples)

    def node_seconds(self, block: int, num_blocks: int, tp: int) -> float:
        """What the objective's forward and backward sums hold of one block."""
        kind, after = KINDS[block % 2], KINDS[(block + 1) % 2]
        c, total = self.all_reduce[tp], 0.0
        if block == 0:
            total += self.forward[kind, tp] + self.backward[kind, tp]
        if block == num_blocks - 1:
            total += 2 * c
        for share in (0.0, 1.0):  # the forward pass, then the backward pass, in which g + f stands for f
            own, next_one = (self.forward[each, tp] + share * self.backward[each, tp] for each in (kind, after))
            if 0 < block < num_blocks - 1:
                total += max(own, c) + max(next_one, c)
            if block == num_blocks - 2:
                total += max(own, c)
        return total

    def edge_seconds(self, block: int, tp: int, after: int) -> float:
        """What a change of degree between `block` and the next one costs."""
        if tp == after:
            return 0.0
        c, next_kind = self.all_reduce[tp], KINDS[(block + 1) % 2]
        if tp < after:
            return after / tp * c + min(c, self.forward[next_kind, after])
        return tp / after * self.all_reduce[after] + min(c, self.backward[next_kind, after])

    def weight(self, model: ModelShape, block: int, tp: int) -> float:
        """Bytes of one block: activations, and parameters with gradient and the optimizer's, five times."""
        h = model.hidden
        cut, whole = (4, 6) if KINDS[block % 2] == "attention" else (8, 7)
        parameters = 4 * (cut * h * h / tp + whole * h)
        return 12 * self.samples[tp] * model.sequence * h + 5 * parameters


def objective(times: PublishedTimes, degrees: Iterable[int]) -> float:
    """Seconds of a step by the published formulas, with degree `degrees[i]` for block i."""
    chosen = tuple(degrees)
    nodes = sum(times.node_seconds(i, len(chosen), tp) for i, tp in enumerate(chosen))
    return nodes + sum(times.edge_seconds(i, *pair) for i, pair in enumerate(pairwise(chosen)))


def best_degrees(
    times: PublishedTimes, model: ModelShape, device_bytes: float, smaller_first: bool = False
) -> Solution:
    """The degree of every block that the published objective likes best, within the published bound of memory.

    device_bytes: of one device, as its driver gives them. smaller_first: no degree follows a larger one, which is
    all that the published runtime executes. Raises InfeasibleError if no choice fits.
    """

    def edge(block: int, tp: int, after: int) -> float:
        return np.inf if smaller_first and tp > after else times.edge_seconds(block, tp, after)

    capacity = USABLE * device_bytes - max(times.runtime_bytes.values())
    return solve(
        Chain.made(
            [times.degrees] * model.num_blocks,
            lambda block, tp: times.node_seconds(block, model.num_blocks, tp),
            lambda block, tp: times.weight(model, block, tp),
            edge,
            capacity,
        )
    )
