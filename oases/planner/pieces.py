"""A stage's passes as pieces of known length, and the pipeline that they make: step, waiting and memory by stage.

A pass that repeats is simulated once. Passes of a stage do not overlap, so nothing is lost: the last backward pass,
with the sums of gradients under it and the optimizer behind it, is a piece of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oases.schedule.pipeline import in_flight, turns
from oases.simulator.engine import run
from oases.simulator.program import Compute, Contention, Instruction, Program, Start, Wait

_SENT = "sent"


@dataclass(frozen=True)
class Piece:
    """A pass. exposed: seconds of it in which compute waits. Bytes: kept after it, and at its peak."""

    seconds: float
    exposed: float
    kept: int
    peak: int

    @staticmethod
    def of(contention: Mapping[str, Contention], *passes: Sequence[Instruction]) -> Piece:
        """Simulate passes one after the other, alone."""
        timeline = run(Program("", (tuple(op for some in passes for op in some),), contention))
        last = timeline.held[-1].num_bytes
        return Piece(timeline.total_seconds, timeline.exposed(0), last, timeline.peak_bytes(0))

    def after(self, forward: Piece) -> Piece:
        """The backward pass alone, if this is `forward` and it. It keeps nothing; `kept` is what it adds at most."""
        return Piece(
            self.seconds - forward.seconds, self.exposed - forward.exposed, self.peak - forward.kept, self.peak
        )

    def instructions(self, name: str, allocates: int, frees: int) -> list[Instruction]:
        """The same time, the same wait and the same bytes again."""
        waits: list[Instruction] = [Start(name, "exposed", self.exposed), Wait(name)] if self.exposed > 0 else []
        return [Compute(name, self.seconds - max(0.0, self.exposed), allocates, frees), *waits]


@dataclass(frozen=True)
class StagePieces:
    """A stage. last: the last backward pass, up to the optimizer's end; its gradient leaves after `until_sent`
    seconds. held: bytes before the first pass. message_seconds: of an activation on its way to the next stage.
    """

    forward: Piece
    backward: Piece
    last: Piece
    until_sent: float
    message_seconds: float
    held: int

    @staticmethod
    def of(
        contention: Mapping[str, Contention], forward: Sequence[Instruction], backward: Sequence[Instruction],
        last: Sequence[Instruction], finish: Sequence[Instruction], message_seconds: float, held: int,
    ) -> StagePieces:  # fmt: skip
        """From the instructions of the passes; finish: what follows the last one."""
        first = Piece.of(contention, forward)
        ops = (*forward, *last, Compute(_SENT, 0.0), *finish)
        timeline = run(Program("", (ops,), contention))
        sent = next(span.start for span in timeline.spans if span.name == _SENT)
        total = Piece(timeline.total_seconds, timeline.exposed(0), 0, timeline.peak_bytes(0))
        return StagePieces(
            first, Piece.of(contention, forward, backward).after(first), total.after(first), sent - first.seconds,
            message_seconds, held,
        )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """How a pipeline's step goes: seconds in all, and by stage exposed seconds, bubbles and bytes at the peak."""

    seconds: float
    exposed: tuple[float, ...]
    bubbles: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def course(name: str, num_micro_batches: int, stages: Sequence[StagePieces]) -> Course:
    """The course of the pipeline `name` over these stages, two micro-batches or more. Raises ScheduleError."""
    count, many = len(stages), num_micro_batches
    clocks = [_Clock(name, count, many, number, stage) for number, stage in enumerate(stages)]
    # When each micro-batch's activation, and its gradient, arrives at each stage; below 0: it has not been sent.
    forward = [[0.0 if number == 0 else -1.0] * many for number in range(count)]
    backward = [[0.0 if number == count - 1 else -1.0] * many for number in range(count)]
    running = list(range(count))
    while running:
        for number in running:
            clocks[number].run(
                forward[number], backward[number], forward[number + 1] if number + 1 < count else None,
                backward[number - 1] if number else None,
            )  # fmt: skip
        running = [number for number in running if not clocks[number].done]
    total = max(clock.now for clock in clocks)
    exposed = (many * s.forward.exposed + (many - 1) * s.backward.exposed + s.last.exposed for s in stages)
    peaks = (
        stage.held + (in_flight(name, count, many, number) - 1) * stage.forward.kept + stage.backward.peak
        for number, stage in enumerate(stages)
    )
    return Course(total, tuple(exposed), tuple(clock.waited + total - clock.now for clock in clocks), tuple(peaks))


class _Clock:
    """A stage on its way through its passes."""

    def __init__(self, name: str, count: int, num_micro_batches: int, number: int, stage: StagePieces) -> None:
        self._turns = turns(name, count, num_micro_batches, number)
        self._left = 2 * num_micro_batches
        self._next = next(self._turns)
        self._stage = stage
        self._sent_forward = self._sent_backward = 0.0  # when each outgoing link has sent all it was given
        self.now = 0.0
        self.waited = 0.0

    @property
    def done(self) -> bool:
        return self._left == 0

    def run(
        self, activations: list[float], gradients: list[float], onward: list[float] | None, back: list[float] | None
    ) -> None:
        """Go on until the end or something that has not been sent; note in `onward` and `back` what arrives there."""
        stage = self._stage
        while self._left:
            kind, m = self._next
            arrival = (activations if kind == "F" else gradients)[m]
            if arrival < 0:
                return
            if arrival > self.now:
                self.waited += arrival - self.now
                self.now = arrival
            self._left -= 1
            if kind == "F":
                self.now += stage.forward.seconds
                if onward is not None:
                    self._sent_forward = max(self.now, self._sent_forward) + stage.message_seconds
                    onward[m] = self._sent_forward
            else:
                sent = self.now + (stage.backward.seconds if self._left else stage.until_sent)
                self.now += stage.backward.seconds if self._left else stage.last.seconds
                if back is not None:
                    self._sent_backward = max(sent, self._sent_backward) + stage.message_seconds
                    back[m] = self._sent_backward
            if self._left:
                self._next = next(self._turns)
