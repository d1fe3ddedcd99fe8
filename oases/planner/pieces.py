"""A stage's passes as pieces of known length, and the pipeline that they make: step, waiting and memory by stage.

A pass that repeats is simulated once. Passes of a stage do not overlap, so nothing is lost: the last one, with the
sums of gradients under it and the optimizer behind it, is a piece of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oases.schedule.pipeline import passes, read_stage
from oases.simulator.engine import run
from oases.simulator.program import Compute, Contention, Instruction, Program, Start, Wait
from oases.simulator.timeline import Timeline

SENT = "sent"
"""Marks in the last pass where its gradient leaves."""
OPTIMIZER = "optimizer"
"""Begins the names of what the optimizer computes."""


@dataclass(frozen=True)
class Piece:
    """A pass. exposed: seconds of it in which compute waits. Bytes: it adds at its peak, and leaves behind."""

    seconds: float = 0.0
    exposed: float = 0.0
    kept: int = 0
    peak: int = 0
    until_sent: float = 0.0

    @staticmethod
    def of(
        contention: Mapping[str, Contention], ops: Sequence[Instruction], before: Sequence[Instruction] = ()
    ) -> Piece:
        """Simulate a pass behind those of the same micro-batch `before` it, alone."""

        def simulated(instructions: Sequence[Instruction]) -> Timeline:
            return run(Program("", (tuple(instructions),), contention))

        ahead, whole = simulated(before), simulated((*before, *ops))
        held = [held.num_bytes for held in whole.held[len(ahead.held) - 1 :]]  # from where the pass begins
        sent = next((span.start for span in whole.spans if span.name == SENT), whole.total_seconds)
        return Piece(
            whole.total_seconds - ahead.total_seconds, whole.exposed(0) - ahead.exposed(0), held[-1] - held[0],
            max(held) - held[0], sent - ahead.total_seconds,
        )  # fmt: skip

    def instructions(self, name: str) -> list[Instruction]:
        """The same time, the same wait and the same bytes again."""
        if self == Piece():
            return []
        waits: list[Instruction] = [Start(name, "exposed", self.exposed), Wait(name)] if self.exposed > 0 else []
        return [Compute(name, self.seconds - max(0.0, self.exposed), self.peak, self.peak - self.kept), *waits]


@dataclass(frozen=True)
class PartPieces:
    """A part's passes. recompute: ahead of time; backward_after: what is left to the backward pass then.

    message_seconds: of an activation, or a gradient, on its way to a neighbour.
    """

    forward: Piece
    backward: Piece
    recompute: Piece = field(default_factory=Piece)
    backward_after: Piece = field(default_factory=Piece)
    weights: Piece = field(default_factory=Piece)
    message_seconds: float = 0.0


@dataclass(frozen=True)
class StagePieces:
    """A stage. last: its last pass, up to the optimizer's end. held: bytes before the first one.

    optimizer: seconds of `last` in which the optimizer computes.
    """

    parts: tuple[PartPieces, ...]
    last: Piece
    held: int
    optimizer: float = 0.0


@dataclass(frozen=True)
class Course:
    """How a pipeline's step goes: seconds in all, and by stage exposed seconds, bubbles, bytes at the peak, and the
    optimizer's seconds.
    """

    seconds: float
    exposed: tuple[float, ...]
    bubbles: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    optimizer: tuple[float, ...]


def course(name: str, num_micro_batches: int, stages: Sequence[StagePieces]) -> Course:
    """The course of a pipeline, by name or in its text form, over these stages. Raises ScheduleError.

    Two micro-batches or more, so that the last pass of a stage is none that repeats.
    """
    count, many = len(stages), num_micro_batches
    parts = count * len(stages[0].parts)
    # When each micro-batch's activation, and its gradient, arrives at each part; below 0: it has not been sent.
    activations = [[0.0 if part == 0 else -1.0] * many for part in range(parts)]
    gradients = [[0.0 if part == parts - 1 else -1.0] * many for part in range(parts)]
    clocks = [_Clock(name, count, many, number, stage) for number, stage in enumerate(stages)]
    running = clocks
    while running:
        for clock in running:
            clock.run(activations, gradients)
        running = [clock for clock in running if not clock.done]
    total = max(clock.now for clock in clocks)
    return Course(
        total, tuple(clock.exposed for clock in clocks), tuple(clock.waited + total - clock.now for clock in clocks),
        tuple(clock.peak for clock in clocks), tuple(stage.optimizer for stage in stages),
    )  # fmt: skip


def peak_bytes(name: str, num_micro_batches: int, count: int, number: int, stage: StagePieces) -> int:
    """Most bytes that stage `number` of `count` holds, whatever the others do."""
    clock = _Clock(name, count, num_micro_batches, number, stage)
    nothing_to_wait_for = [[0.0] * num_micro_batches for _ in range(count * len(stage.parts))]
    clock.run(nothing_to_wait_for, [list(times) for times in nothing_to_wait_for])
    return clock.peak


class _Clock:
    """A stage on its way through its passes."""

    def __init__(self, name: str, count: int, num_micro_batches: int, number: int, stage: StagePieces) -> None:
        self._passes = passes(name, count, num_micro_batches, number)
        self._next = next(self._passes, None)
        self._early = read_stage(name, count, num_micro_batches, number).early
        self._pieces = {count * chunk + number: pieces for chunk, pieces in enumerate(stage.parts)}
        self._last = stage.last
        self._sent_forward = self._sent_backward = 0.0  # when each outgoing link has sent all it was given
        self._held = self.peak = stage.held
        self.now = 0.0
        self.waited = 0.0
        self.exposed = 0.0

    @property
    def done(self) -> bool:
        return self._next is None

    def run(self, activations: list[list[float]], gradients: list[list[float]]) -> None:
        """Go on until the end or something that has not been sent; note what arrives at the parts around."""
        while self._next is not None:
            kind, part, m = self._next
            pieces = self._pieces[part]
            if kind == "F":
                piece, arrival = pieces.forward, activations[part][m]
            elif kind == "B":
                piece = pieces.backward_after if (part, m) in self._early else pieces.backward
                arrival = gradients[part][m]
            else:
                piece, arrival = pieces.recompute if kind == "R" else pieces.weights, 0.0
            if arrival < 0:
                return
            if arrival > self.now:
                self.waited += arrival - self.now
                self.now = arrival
            self._next = next(self._passes, None)
            if self._next is None:
                piece = self._last
            self.peak = max(self.peak, self._held + piece.peak)
            self._held += piece.kept
            self.exposed += piece.exposed
            sent = self.now + piece.until_sent
            self.now += piece.seconds
            if kind == "F" and part + 1 < len(activations):
                self._sent_forward = max(sent, self._sent_forward) + pieces.message_seconds
                activations[part + 1][m] = self._sent_forward
            elif kind == "B" and part:
                self._sent_backward = max(sent, self._sent_backward) + pieces.message_seconds
                gradients[part - 1][m] = self._sent_backward
