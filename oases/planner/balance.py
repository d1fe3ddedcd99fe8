"""Layers of pipeline stages, divided so that the slowest stage takes the least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


def part_blocks(blocks: int, chunks: int, each: int = 2) -> list[int]:
    """Divide a stage's blocks, `each` per layer, into its model parts: whole layers, the first parts longer."""
    if chunks == 1:
        return [blocks]
    layers = blocks // each
    return [each * (layers // chunks + (chunk < layers % chunks)) for chunk in range(chunks)]


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
        return seconds if free >= 0 else seconds * (1 + _STEEP * -free / max(1, self.capacity))


def least_load(loads: Sequence[StageLoad], layers: int) -> float:
    """Seconds of so many layers in the best of several ways."""
    return min(load.seconds(layers) for load in loads)


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


def balanced_runs(layers: int, stages: int, load: Callable[[int, int, int], float]) -> list[int]:
    """Layers of each stage, at least one, for layers of different kinds: consecutive runs with a small maximum load.

    load(stage, first, last): of layers [first, last) on a stage, increasing in `last`. There must be enough layers.
    """
    assert layers >= stages, f"{layers} layers are too few for {stages} stages"

    def runs(limit: float) -> list[int] | None:
        """The runs under a limit, each as long as it allows; None if layers are left over."""
        counts, first = [], 0
        for stage in range(stages):
            most, last = layers - (stages - 1 - stage), first + 1
            if load(stage, first, last) > limit:
                return None
            while last < most and load(stage, first, last + 1) <= limit:
                last += 1
            counts.append(last - first)
            first = last
        return counts if first == layers else None

    low, high = 0.0, max(load(stage, 0, layers) for stage in range(stages))
    best = runs(high) or [1] * (stages - 1) + [layers - stages + 1]
    for _ in range(40):
        middle = (low + high) / 2
        found = runs(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best
