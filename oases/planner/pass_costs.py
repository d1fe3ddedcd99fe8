"""Costs of a stage's passes, and the step time, bubbles and peak memory of the pipeline they form.

A pass that repeats is simulated once. Passes of a stage do not overlap, so this is exact; the last pass, which
overlaps the all-reduce of gradients and ends with the optimizer, has a cost of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from oases.plans.pipelines import Lane, lane_of, parts_on, passes, placement_of, read_stage
from oases.simulator.engine import run
from oases.simulator.program import Compute, Contention, Instruction, Program, Start, Wait
from oases.simulator.timeline import Timeline

SENT = "sent"
"""Name of the mark in the last pass at which its input gradient is sent."""
OPTIMIZER = "optimizer"
"""Prefix of the names of the optimizer's instructions."""
_SENT: tuple[Literal["F", "B"], ...] = ("F", "B")


@dataclass(frozen=True)
class PassCost:
    """Cost of one pass of one micro-batch.

    exposed: seconds in which compute waits. kept: bytes the pass leaves allocated. peak: bytes it adds at its peak.
    until_sent: seconds until its result is sent; 0 unless it is the stage's last pass.
    """

    seconds: float = 0.0
    exposed: float = 0.0
    kept: int = 0
    peak: int = 0
    until_sent: float = 0.0

    @staticmethod
    def of(
        contention: Mapping[str, Contention], ops: Sequence[Instruction], before: Sequence[Instruction] = ()
    ) -> PassCost:
        """Simulate the pass `ops` of a micro-batch after its earlier passes `before`, without other stages."""

        def simulated(instructions: Sequence[Instruction]) -> Timeline:
            return run(Program("", (tuple(instructions),), contention))

        ahead, whole = simulated(before), simulated((*before, *ops))
        held = [held.num_bytes for held in whole.held[len(ahead.held) - 1 :]]  # from where the pass begins
        sent = next((span.start for span in whole.spans if span.name == SENT), whole.total_seconds)
        return PassCost(
            whole.total_seconds - ahead.total_seconds, whole.exposed(0) - ahead.exposed(0), held[-1] - held[0],
            max(held) - held[0], sent - ahead.total_seconds,
        )  # fmt: skip

    def instructions(self, name: str) -> list[Instruction]:
        """Instructions that take the same time, wait as long and allocate as much."""
        if self == PassCost():
            return []
        waits: list[Instruction] = [Start(name, "exposed", self.exposed), Wait(name)] if self.exposed > 0 else []
        return [Compute(name, self.seconds - max(0.0, self.exposed), self.peak, self.peak - self.kept), *waits]


@dataclass(frozen=True)
class PartCosts:
    """Costs of the passes of one model part (chunk) of a stage.

    recompute: recomputation ahead of the backward pass. backward_after: the backward pass after it.
    message_seconds: transfer time of an activation to the next part; gradient_seconds: of a gradient to the part
    before.
    """

    forward: PassCost
    backward: PassCost
    recompute: PassCost = field(default_factory=PassCost)
    backward_after: PassCost = field(default_factory=PassCost)
    weights: PassCost = field(default_factory=PassCost)
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0


@dataclass(frozen=True)
class StageCosts:
    """Costs of a stage.

    last: its last pass with the optimizer. held: bytes allocated before the first pass. optimizer: seconds of `last`
    in which the optimizer computes.
    """

    parts: tuple[PartCosts, ...]
    last: PassCost
    held: int
    optimizer: float = 0.0


@dataclass(frozen=True)
class PipelineTimes:
    """Times of a pipeline's step.

    seconds: of the whole step. By stage: exposed communication, bubbles and optimizer in seconds; peak bytes.
    """

    seconds: float
    exposed: tuple[float, ...]
    bubbles: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    optimizer: tuple[float, ...]

    @property
    def busiest(self) -> int:
        """Stage that computes most: all end together, so that it waits least."""
        return min(range(len(self.exposed)), key=lambda stage: self.exposed[stage] + self.bubbles[stage])


def pipeline_times(name: str, num_micro_batches: int, stages: Sequence[StageCosts]) -> PipelineTimes:
    """Step time, bubbles and peak memory of a pipeline, given by name or in its text form. Raises ScheduleError.

    num_micro_batches: at least 2, so that a stage's last pass differs from those that repeat.
    """
    count, many = len(stages), num_micro_batches
    parts = count * len(stages[0].parts)
    # Arrival time of each micro-batch's activation and gradient at each part; negative: not sent yet.
    activations = [[0.0 if part == 0 else -1.0] * many for part in range(parts)]
    gradients = [[0.0 if part == parts - 1 else -1.0] * many for part in range(parts)]
    timings = [_StageTiming(name, count, many, number, stage) for number, stage in enumerate(stages)]
    running = timings
    while running:
        for timing in running:
            timing.run(activations, gradients)
        running = [timing for timing in running if not timing.done]
    total = max(timing.now for timing in timings)
    return PipelineTimes(
        total, tuple(each.exposed for each in timings), tuple(each.waited + total - each.now for each in timings),
        tuple(each.peak for each in timings), tuple(stage.optimizer for stage in stages),
    )  # fmt: skip


def peak_bytes(name: str, num_micro_batches: int, count: int, number: int, stage: StageCosts) -> int:
    """Peak bytes of stage `number` of `count`, which do not depend on the other stages."""
    timing = _StageTiming(name, count, num_micro_batches, number, stage)
    nothing_to_wait_for = [[0.0] * num_micro_batches for _ in range(count * len(stage.parts))]
    timing.run(nothing_to_wait_for, [list(times) for times in nothing_to_wait_for])
    return timing.peak


class _StageTiming:
    """Simulates one stage: runs its passes in order while their inputs have arrived."""

    def __init__(self, name: str, count: int, num_micro_batches: int, number: int, stage: StageCosts) -> None:
        self._passes = passes(name, count, num_micro_batches, number)
        self._next = next(self._passes, None)
        self._early = read_stage(name, count, num_micro_batches, number).early
        parts, placement = parts_on(name, count, number), placement_of(name)
        self._costs = dict(zip(parts, stage.parts, strict=True))
        self._lanes = {kind: {part: lane_of(part, kind, count, placement) for part in parts} for kind in _SENT}
        self._last = stage.last
        self._idle = dict.fromkeys(get_args(Lane), 0.0)  # when each outgoing lane becomes idle
        self._held = self.peak = stage.held
        self.now = 0.0
        self.waited = 0.0
        self.exposed = 0.0

    @property
    def done(self) -> bool:
        return self._next is None

    def run(self, activations: list[list[float]], gradients: list[list[float]]) -> None:
        """Run passes until the list ends or an input has not been sent; record arrivals at neighbouring parts.

        The planner spends a good part of its time here: what changes is kept in local variables meanwhile.
        """
        ahead, parts = self._passes, len(activations)
        now, waited, exposed, held, peak = self.now, self.waited, self.exposed, self._held, self.peak
        lanes, idle = self._lanes, self._idle
        following = self._next
        while following is not None:
            kind, part, m = following
            costs = self._costs[part]
            if kind == "F":
                cost, arrival = costs.forward, activations[part][m]
            elif kind == "B":
                cost = costs.backward_after if (part, m) in self._early else costs.backward
                arrival = gradients[part][m]
            else:
                cost, arrival = costs.recompute if kind == "R" else costs.weights, 0.0
            if arrival < 0:
                break
            if arrival > now:
                waited += arrival - now
                now = arrival
            following = next(ahead, None)
            if following is None:
                cost = self._last
            if held + cost.peak > peak:
                peak = held + cost.peak
            held += cost.kept
            exposed += cost.exposed
            sent = now + cost.until_sent
            now += cost.seconds
            if kind == "F" and part + 1 < parts:
                lane = lanes["F"][part]
                idle[lane] = activations[part + 1][m] = max(sent, idle[lane]) + costs.message_seconds
            elif kind == "B" and part:
                lane = lanes["B"][part]
                idle[lane] = gradients[part - 1][m] = max(sent, idle[lane]) + costs.gradient_seconds
        self._next = following
        self.now, self.waited, self.exposed, self._held, self.peak = now, waited, exposed, held, peak
