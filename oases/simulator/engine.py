"""Discrete-event engine: compute and links run concurrently, each in order, and slow each other down."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain
from typing import Any

from oases.simulator.program import Compute, Contention, Instruction, Program, Receive, Send, Start, Wait
from oases.simulator.timeline import Held, Span, Timeline

_ALONE = Contention()
_ENDED = 1e-12
"""Fraction of a collective that counts as zero: rounding error."""


class DeadlockError(ValueError):
    """Deadlock: ranks wait for messages that are never sent or collectives that were never started."""


class _Link:
    """Link of one rank: a queue of collectives, the first of them active."""

    def __init__(self, name: str, contention: Contention) -> None:
        self.name = name
        self.contention = contention
        self.queue: deque[tuple[str, float]] = deque()  # name and seconds without contention
        self.left = 0.0  # remaining seconds of the first one without contention
        self.since = 0.0  # when the first one became active


class _Rank:
    """State of one rank during the simulation."""

    def __init__(self, number: int, program: Program, spans: list[Span], held: list[Held]) -> None:
        self.number = number
        self.instructions = program.ranks[number]
        self.position = 0
        self.now = 0.0
        self._contention = program.contention
        self._links: dict[str, _Link] = {}
        self._busy: list[_Link] = []
        self._ended: dict[str, float] = {}
        self._flying: dict[str, _Link] = {}
        self._free: dict[str, float] = {}  # when each outgoing link becomes idle
        self._spans = spans
        self._held = held
        self._bytes = program.held[number] if program.held else 0
        self._note(0.0)
        self._entered = -1  # side by side: the last instruction that was begun, when, and compute left of it
        self._begun = self._left = 0.0

    def run(self, messages: dict[str, float]) -> None:
        """Run until the end or a message not in `messages` (name -> arrival); add those sent."""
        do: dict[type[Any], Callable[[Any], None]] = {
            Compute: self._compute, Start: self._start, Wait: self._wait,
            Send: lambda send: self._send(send, messages),
        }  # fmt: skip
        while self.position < len(self.instructions):
            instruction = self.instructions[self.position]
            if isinstance(instruction, Receive):
                if instruction.name not in messages:
                    return
                self._receive(instruction, messages[instruction.name])
            else:
                do[type(instruction)](instruction)
            self.position += 1
        while self._busy:  # collectives without a wait still have to end
            self._pass()

    @property
    def stuck_at(self) -> Instruction | None:
        """The instruction that blocks; None at the end."""
        return self.instructions[self.position] if self.position < len(self.instructions) else None

    def _compute(self, op: Compute) -> None:
        begin = self.now
        if op.allocates:
            self._bytes += op.allocates
            self._note(begin)
        left = op.seconds
        while left > 0:
            left = self._work(left)
        if op.frees:
            self._bytes -= op.frees
            self._note(self.now)
        self._spans.append(Span(self.number, "compute", op.name, begin, self.now))

    def _work(self, left: float) -> float:
        """Compute for `left` seconds or until a link's first collective ends; returns the remaining seconds."""
        if not self._busy:
            self.now += left
            return 0.0
        slower = max([link.contention.compute for link in self._busy])
        need = left * slower
        step = min(need, min([link.left * link.contention.link for link in self._busy]))
        self._progress(step, [step / link.contention.link for link in self._busy])
        return 0.0 if step >= need else left - step / slower

    def _pass(self, until: float | None = None) -> None:
        """Wait until a link's first collective ends, or until the given time if that is earlier."""
        step = min([link.left for link in self._busy])
        if until is not None and self.now + step >= until:
            step = until - self.now
        self._progress(step, [step] * len(self._busy))

    def _progress(self, step: float, done: Iterable[float]) -> None:
        self.now += step
        ended = []
        for link, seconds in zip(self._busy, done, strict=True):
            link.left -= seconds
            if link.left <= _ENDED * link.queue[0][1]:
                ended.append(link)
        for link in ended:
            name, _ = link.queue.popleft()
            self._spans.append(Span(self.number, link.name, name, link.since, self.now))
            self._ended[name] = self.now
            del self._flying[name]
            if link.queue:
                link.left, link.since = link.queue[0][1], self.now
            else:
                self._busy.remove(link)

    def _start(self, start: Start) -> None:
        if start.name in self._flying or start.name in self._ended:
            raise DeadlockError(f"rank {self.number}: collective {start.name!r} is started twice")
        link = self._links.get(start.link)
        if link is None:
            contention = self._contention.get(start.link, _ALONE)
            link = self._links[start.link] = _Link(start.link, contention)
        if not link.queue:
            link.left, link.since = start.seconds, self.now
            self._busy.append(link)
        link.queue.append((start.name, start.seconds))
        self._flying[start.name] = link

    def _wait(self, wait: Wait) -> None:
        begin = self.now
        self._require_started(wait)
        while wait.name in self._flying:
            self._pass()
        if wait.frees:
            self._bytes -= wait.frees
            self._note(self.now)
        self._stood("wait", wait.name, begin)

    def _require_started(self, wait: Wait) -> None:
        if wait.name not in self._ended and wait.name not in self._flying:
            raise DeadlockError(f"rank {self.number}: waits for {wait.name!r}, which was not started")

    def _send(self, send: Send, messages: dict[str, float]) -> None:
        if send.name in messages:
            raise DeadlockError(f"rank {self.number}: message {send.name!r} is sent twice")
        begin = max(self.now, self._free.get(send.link, 0.0))
        self._free[send.link] = messages[send.name] = begin + send.seconds
        if send.seconds:
            self._spans.append(Span(self.number, send.link, f"send {send.name}", begin, begin + send.seconds))

    def _receive(self, receive: Receive, arrival: float) -> None:
        begin = self.now
        while self.now < arrival:
            if self._busy:
                self._pass(arrival)
            else:
                self.now = arrival
        self._stood("receive", receive.name, begin)

    def _stood(self, how: str, name: str, begin: float) -> None:
        if self.now > begin:
            self._spans.append(Span(self.number, "compute", f"{how} {name}", begin, self.now))

    def _note(self, now: float) -> None:
        self._held.append(Held(self.number, now, self._bytes))

    # --- concurrent simulation of ranks, event by event ---

    def pass_what_ends(self, messages: dict[str, float]) -> bool:
        """Complete every instruction that takes no more time; returns whether there was any."""
        begin = self.position
        while self.position < len(self.instructions):
            at = self.instructions[self.position]
            if self._entered < self.position:
                self._entered, self._begun = self.position, self.now
                self._enter(at, messages)
            if not self._ends(at, messages):
                break
            self._leave(at)
            self.position += 1
        return self.position > begin

    def _enter(self, at: Instruction, messages: dict[str, float]) -> None:
        if isinstance(at, Compute):
            self._left = at.seconds
            self._hold(at.allocates)
        elif isinstance(at, Start):
            self._start(at)
        elif isinstance(at, Send):
            self._send(at, messages)
        elif isinstance(at, Wait):
            self._require_started(at)

    def _ends(self, at: Instruction, messages: dict[str, float]) -> bool:
        if isinstance(at, Compute):
            return self._left <= _ENDED * at.seconds
        if isinstance(at, Wait):
            return at.name not in self._flying
        return not isinstance(at, Receive) or messages.get(at.name, math.inf) <= self.now

    def _leave(self, at: Instruction) -> None:
        if isinstance(at, Compute):
            self._hold(-at.frees)
            self._spans.append(Span(self.number, "compute", at.name, self._begun, self.now))
        elif isinstance(at, Wait):
            self._hold(-at.frees)
            self._stood("wait", at.name, self._begun)
        elif isinstance(at, Receive):
            self._stood("receive", at.name, self._begun)

    def _hold(self, change: int) -> None:
        if change:
            self._bytes += change
            self._note(self.now)

    def on(self, shared: Set[str]) -> Iterable[str]:
        """Shared links that the rank is using."""
        return (link.name for link in self._busy if link.name in shared)

    def next_event(self, sharers: Mapping[str, int], messages: dict[str, float]) -> float:
        """Seconds until the rank's next event; infinite if there is none."""
        at = self.stuck_at
        steps = [link.left * self._slowness(link, sharers) for link in self._busy]
        if isinstance(at, Compute):
            steps.append(self._left * self._compute_slowness)
        elif isinstance(at, Receive) and at.name in messages:
            steps.append(messages[at.name] - self.now)
        return max(0.0, min(steps)) if steps else math.inf

    def advance(self, step: float, sharers: Mapping[str, int]) -> None:
        """Advance by `step` seconds, during which no event occurs."""
        done = [step / self._slowness(link, sharers) for link in self._busy]
        if isinstance(self.stuck_at, Compute):
            self._left -= step / self._compute_slowness
        self._progress(step, done)

    @property
    def _compute_slowness(self) -> float:
        return max([1.0, *(link.contention.compute for link in self._busy)])

    def _slowness(self, link: _Link, sharers: Mapping[str, int]) -> float:
        contended = link.contention.link if isinstance(self.stuck_at, Compute) else 1.0
        return contended * sharers.get(link.name, 1)


def run(program: Program, shared: Set[str] = frozenset()) -> Timeline:
    """Simulate one step. Raises DeadlockError if a rank blocks forever.

    shared: links that all ranks of the program share. Durations of collectives are for an otherwise idle link; of n
    ranks that use it at once, each gets an n-th of the bandwidth.
    """
    spans: list[Span] = []
    held: list[Held] = []
    ranks = [_Rank(number, program, spans, held) for number in range(len(program.ranks))]
    if shared:
        _run_side_by_side(ranks, shared)
    else:
        _run_one_by_one(ranks)
    return Timeline(program.name, tuple(spans), tuple(held))


def _run_one_by_one(ranks: list[_Rank]) -> None:
    """Run each rank as far as possible: fast, and exact if ranks interact through messages alone."""
    messages: dict[str, float] = {}
    waiting = ranks
    while waiting:
        before = [rank.position for rank in waiting]
        for rank in waiting:
            rank.run(messages)
        if before == [rank.position for rank in waiting]:
            _require_end(waiting)
        waiting = [rank for rank in waiting if rank.stuck_at is not None]


def _run_side_by_side(ranks: list[_Rank], shared: Set[str]) -> None:
    """Run all ranks event by event: concurrent collectives on a shared link get equal shares."""
    messages: dict[str, float] = {}
    while True:
        while sum([rank.pass_what_ends(messages) for rank in ranks]):
            pass
        sharers = Counter(chain.from_iterable(rank.on(shared) for rank in ranks))
        step = min(rank.next_event(sharers, messages) for rank in ranks)
        if step == math.inf:
            break
        for rank in ranks:
            rank.advance(step, sharers)
    _require_end(ranks)


def _require_end(ranks: list[_Rank]) -> None:
    stuck = next((rank for rank in ranks if rank.stuck_at is not None), None)
    if stuck is not None:
        raise DeadlockError(f"rank {stuck.number} waits for the message {stuck.stuck_at!r}, which no rank sends")
