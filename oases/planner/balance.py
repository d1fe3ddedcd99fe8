"""Cuts a model's layers into pipeline stages so that the slowest stage takes as little as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


@dataclass(frozen=True)
class StageLoad:
    """What a stage takes for a micro-batch, by its number of layers, if it keeps what fits and recomputes the rest.

    layer_seconds, again_seconds: of a layer that keeps its activations, and of one that is computed again.
    besides_seconds: embedding or head. kept_bytes, again_bytes: of such layers, with their state and all that is in
    flight. held_bytes: besides the layers. capacity: bytes that may be filled.
    """

    layer_seconds: float
    again_seconds: float
    besides_seconds: float = 0.0
    kept_bytes: float = 0.0
    again_bytes: float = 0.0
    held_bytes: float = 0.0
    capacity: float = float("inf")

    def seconds(self, layers: int) -> float:
        """Grows with the layers; where not even recomputation makes them fit, steeply with what is missing."""
        free = self.capacity - self.held_bytes - layers * self.again_bytes
        more = self.kept_bytes - self.again_bytes
        keeping = layers if free >= layers * more else max(0, int(free // more)) if more else 0
        seconds = self.besides_seconds + keeping * self.layer_seconds + (layers - keeping) * self.again_seconds
        return seconds if free >= 0 else seconds * (1 + _STEEP * -free / self.capacity)


_STEEP = 1e3
"""What lacks memory is avoided long before what takes time."""


def balanced(layers: int, loads: Sequence[Callable[[int], float]], least: int = 1) -> list[int]:
    """Layers of each stage, `least` or more, so that the largest load is as small as can be.

    loads: of each stage by its layers, growing with them. Where it makes no difference the stages in the middle have
    more: the first has more in flight, the last the head. There must be enough layers for all stages.
    """
    counts, middle = [least] * len(loads), (len(loads) - 1) / 2
    assert layers >= sum(counts), f"{layers} layers are too few for {len(loads)} stages of {least}"
    # To give every layer to the stage that is the least loaded with it is optimal, as loads grow.
    heap = [(load(least + 1), abs(stage - middle), stage) for stage, load in enumerate(loads)]
    heapify(heap)
    for _ in range(layers - sum(counts)):
        _, place, stage = heap[0]
        counts[stage] += 1
        heapreplace(heap, (loads[stage](counts[stage] + 1), place, stage))
    return counts
