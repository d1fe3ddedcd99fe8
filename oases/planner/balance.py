"""Layers of pipeline stages, divided so that the slowest stage takes the least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


def part_blocks(blocks: int, chunks: int) -> list[int]:
    """Divide a stage's blocks into its model parts: whole layers, the first parts longer if they do not divide."""
    layers = blocks // 2
    return [2 * (layers // chunks + (chunk < layers % chunks)) for chunk in range(chunks)]


@dataclass(frozen=True)
class StageLoad:
    """Time of a stage per micro-batch by its number of layers, keeping what fits and recomputing the rest.

    layer_seconds, recomputed_seconds: of a layer without and with recomputation. fixed_seconds: embedding or head.
    kept_bytes, recomputed_bytes: of such layers, with state and tensors in flight. held_bytes: besides the layers.
    capacity: bytes of memory.
    """

    layer_seconds: float
    recomputed_seconds: float
    fixed_seconds: float = 0.0
    kept_bytes: float = 0.0
    recomputed_bytes: float = 0.0
    held_bytes: float = 0.0
    capacity: float = float("inf")

    def seconds(self, layers: int) -> float:
        """Seconds, increasing in layers; steep where memory does not suffice even with recomputation."""
        free = self.capacity - self.held_bytes - layers * self.recomputed_bytes
        more = self.kept_bytes - self.recomputed_bytes
        keeping = layers if free >= layers * more else max(0, int(free // more)) if more else 0
        seconds = self.fixed_seconds + keeping * self.layer_seconds + (layers - keeping) * self.recomputed_seconds
        return seconds if free >= 0 else seconds * (1 + _STEEP * -free / self.capacity)


_STEEP = 1e3
"""Penalty weight: lack of memory is worse than any time."""


def balanced(layers: int, loads: Sequence[Callable[[int], float]], least: int = 1) -> list[int]:
    """Layers of each stage, at least `least`, with the smallest maximum load.

    loads: of each stage by its number of layers, increasing. Ties favour the middle stages: the first has more
    micro-batches in flight, the last the head. There must be enough layers for all stages.
    """
    counts, middle = [least] * len(loads), (len(loads) - 1) / 2
    assert layers >= sum(counts), f"{layers} layers are too few for {len(loads)} stages of {least}"
    # Greedy is optimal for increasing loads: give every layer to the stage with the smallest resulting load.
    heap = [(load(least + 1), abs(stage - middle), stage) for stage, load in enumerate(loads)]
    heapify(heap)
    for _ in range(layers - sum(counts)):
        _, place, stage = heap[0]
        counts[stage] += 1
        heapreplace(heap, (loads[stage](counts[stage] + 1), place, stage))
    return counts
