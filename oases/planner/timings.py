"""Fastest way to run a stack of each degree, by simulating stacks of few layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from oases.core.schedule import WHOLE
from oases.planner.space import Space
from oases.plans.expert_schedules import exchanging
from oases.plans.layered import Kind, Model
from oases.plans.plan import Segment
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.lowering import program_of

SEQUENCE_GAIN = 0.01
"""Minimum relative gain of sequence parallelism, whose further kernels are not all priced."""
_LAYERS = (2, 4)
"""Numbers of layers of the two simulated stacks whose difference is the time per layer."""


class Way(NamedTuple):
    """Way to run a stack: schedule, sub-batches, and whether along the sequence between blocks."""

    schedule: str
    sub_batches: int
    sequence_parallel: bool = False


@dataclass(frozen=True)
class StackTiming:
    """Fastest way to run a stack of one degree: seconds per additional layer and constant seconds, both passes.

    by_kind: seconds per additional layer of each kind; layer_seconds: mean over the model's layers.
    """

    way: Way
    by_kind: tuple[float, ...]
    layer_seconds: float
    fixed_seconds: float


class StackTimings:
    """Cache of the fastest schedule for every degree, number of samples and recomputation."""

    def __init__(self, model: Model, hardware: Hardware, space: Space) -> None:
        self.model = model
        self.hardware = hardware
        self.space = space
        self.fastest = cache(self._fastest)

    def _fastest(self, tp: int, samples: float, recompute: bool, wire: str = "none") -> StackTiming:
        """For a stack of degree `tp` on `samples` samples, with recomputation or without."""
        made = (self._simulated((tp, samples, recompute, wire), way) for way in self.ways(tp, samples))
        return min(made, key=self._cost)

    def _cost(self, timing: StackTiming) -> float:
        seconds = timing.layer_seconds + timing.fixed_seconds / self.model.layers
        return seconds * (1 + SEQUENCE_GAIN) if timing.way.sequence_parallel else seconds

    def ways(self, tp: int, samples: float) -> list[Way]:
        """Ways in which such a stack can run."""
        if tp == 1 and not self.model.expert_parallel:
            return [Way("fine_grained", 1)]  # nothing is sent, so nothing is cut
        whole = [Way(name, 1) for name in self.space.schedules if name in WHOLE]
        counts = [count for count in self.space.sub_batches if count <= samples]
        cut = [Way(name, s) for name in self.space.schedules if name not in WHOLE for s in counts]
        found = whole + cut or [Way("fine_grained", 1)]  # a batch that cannot be cut runs whole
        if not self.model.token_wise or self.model.sequence % tp:
            return found
        return [way._replace(sequence_parallel=along) for along in self.space.sequence_parallel for way in found]

    def _simulated(self, key: tuple[int, float, bool, str], way: Way) -> StackTiming:
        order = self.model.layer_order
        by_kind, fixed = [], []
        for kinds in self.model.layer_kinds:
            short, long = (self._stack_seconds(key, way, kinds, layers) for layers in _LAYERS)
            layer = (long - short) / (_LAYERS[1] - _LAYERS[0])
            by_kind.append(layer)
            fixed.append(short - _LAYERS[0] * layer)
        mean = sum(order.count(kind) * seconds for kind, seconds in enumerate(by_kind)) / len(order)
        return StackTiming(way, tuple(by_kind), mean, fixed[order[0]])

    def _stack_seconds(
        self, key: tuple[int, float, bool, str], way: Way, layer: Sequence[Kind], layers: int
    ) -> float:
        tp, samples, recompute, wire = key
        numbers = tuple(number for number in range(layers) for _ in layer)
        segment = Segment(len(numbers), tp, way.schedule, way.sub_batches, layers * recompute, way.sequence_parallel)
        kinds = [*layer] * layers
        sends = [b for b, kind in enumerate(kinds) if self.model.expert_parameters(kind)]
        schedule = exchanging(segment.generated(numbers), sends)
        costs = stack_costs(self.hardware, self.model, kinds, tp, samples, schedule, wire)
        return run(program_of(schedule, costs)).total_seconds
