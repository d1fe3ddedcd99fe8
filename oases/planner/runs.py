"""The fastest way to run a stack of one degree: schedules and sub-batches compared by simulating short stacks."""

from __future__ import annotations

from dataclasses import dataclass

from oases.planner.space import Space
from oases.plans.plan import generated
from oases.plans.shape import ModelShape
from oases.schedule import WHOLE
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.lowering import program_of

_LAYERS = (2, 4)
"""Of the stacks whose difference says what one more layer takes."""


@dataclass(frozen=True)
class Run:
    """The fastest way to run a stack of one degree: seconds of one more layer, and besides, of forward + backward."""

    schedule: str
    sub_batches: int
    layer_seconds: float
    besides_seconds: float


class Runs:
    """Finds and remembers the fastest way for every degree, number of samples and choice of recomputation."""

    def __init__(self, model: ModelShape, hardware: Hardware, space: Space) -> None:
        self.model = model
        self.hardware = hardware
        self.space = space
        self._fastest: dict[tuple[int, float, bool], Run] = {}

    def fastest(self, tp: int, samples: float, *, again: bool) -> Run:
        """For a stack of degree `tp` on `samples` samples, computed `again` in the backward pass or not."""
        key = (tp, samples, again)
        if key not in self._fastest:
            runs = [self._simulated(key, name, count) for name, count in self.ways(tp, samples)]
            self._fastest[key] = min(
                runs, key=lambda each: each.layer_seconds + each.besides_seconds / self.model.layers
            )
        return self._fastest[key]

    def ways(self, tp: int, samples: float) -> list[tuple[str, int]]:
        """Schedules and sub-batches that such a stack can run."""
        if tp == 1:
            return [("fine_grained", 1)]  # nothing is sent, so nothing is cut
        whole = [(name, 1) for name in self.space.schedules if name in WHOLE]
        counts = [count for count in self.space.sub_batches if count <= samples]
        cut = [(name, s) for name in self.space.schedules if name not in WHOLE for s in counts]
        return whole + cut or [("fine_grained", 1)]  # what cannot be cut runs whole

    def _simulated(self, key: tuple[int, float, bool], name: str, sub_batches: int) -> Run:
        short, long = (self._stack_seconds(key, name, sub_batches, layers) for layers in _LAYERS)
        layer = (long - short) / (_LAYERS[1] - _LAYERS[0])
        return Run(name, sub_batches, layer, short - _LAYERS[0] * layer)

    def _stack_seconds(self, key: tuple[int, float, bool], name: str, sub_batches: int, layers: int) -> float:
        tp, samples, again = key
        schedule = generated(name, 2 * layers, sub_batches, "full" if again else "none")
        kinds = [self.model.kind_of(b) for b in range(2 * layers)]
        costs = stack_costs(self.hardware, self.model, kinds, tp, samples, schedule)
        return run(program_of(schedule, costs)).total_seconds
