"""Runs a program whose ranks share links: pipeline stages on one node, whose sums all leave by its one link.

`engine.run` goes through one rank after another, which is fast, and right as long as no rank slows another down but
by a message. Here all ranks go on together, and what is on a shared link at once gets a like part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import replace

from oases.simulator.engine import DeadlockError
from oases.simulator.program import Compute, Contention, Instruction, Program, Receive, Send, Start, Wait
from oases.simulator.timeline import Held, Span, Timeline

_ROUNDING = 1e-12
_ALONE = Contention()


class _Rank:
    """One rank, standing at an instruction that takes time, or at its end."""

    def __init__(self, number: int, program: Program, spans: list[Span], held: list[Held]) -> None:
        self.number = number
        self.instructions = program.ranks[number]
        self.position = -1
        self.begun = 0.0  # when it came to where it stands
        self.left = 0.0  # seconds of compute alone that it still needs there
        self.links: dict[str, deque[list[float | str]]] = {}  # [name, seconds alone that are left, since]
        self.ended: set[str] = set()
        self._free: dict[str, float] = {}  # when each outgoing link has sent all it was given
        self._spans, self._held = spans, held
        self._bytes = program.held[number] if program.held else 0
        self._hold(0.0, 0)

    @property
    def at(self) -> Instruction | None:
        """What the rank stands at; None at the end."""
        return self.instructions[self.position] if self.position < len(self.instructions) else None

    def go_on(self, now: float, messages: dict[str, float]) -> bool:
        """Pass every instruction that takes no more time; whether there was any."""
        moved = False
        while self.position < 0 or (self.at is not None and self._done(now, messages)):
            self._leave(now)
            self.position, self.begun, moved = self.position + 1, now, True
            self._enter(now, messages)
        return moved

    def _done(self, now: float, messages: dict[str, float]) -> bool:
        at = self.at
        if isinstance(at, Compute):
            return self.left <= _ROUNDING * at.seconds
        if isinstance(at, Wait):
            return at.name in self.ended
        if isinstance(at, Receive):
            return at.name in messages and messages[at.name] <= now
        return True

    def _enter(self, now: float, messages: dict[str, float]) -> None:
        at = self.at
        if isinstance(at, Compute):
            self.left = at.seconds
            self._hold(now, at.allocates)
        elif isinstance(at, Start):
            self.links.setdefault(at.link, deque()).append([at.name, at.seconds, now])
        elif isinstance(at, Send):
            begin = max(now, self._free.get(at.link, 0.0))
            self._free[at.link] = messages[at.name] = begin + at.seconds
            if at.seconds:
                self._spans.append(Span(self.number, at.link, f"send {at.name}", begin, begin + at.seconds))

    def _leave(self, now: float) -> None:
        at = self.at if self.position >= 0 else None
        if isinstance(at, Compute):
            self._hold(now, -at.frees)
            self._spans.append(Span(self.number, "compute", at.name, self.begun, now))
        elif isinstance(at, (Wait, Receive)):
            if isinstance(at, Wait):
                self._hold(now, -at.frees)
            if now > self.begun:
                how = "wait" if isinstance(at, Wait) else "receive"
                self._spans.append(Span(self.number, "compute", f"{how} {at.name}", self.begun, now))

    def _hold(self, now: float, change: int) -> None:
        self._bytes += change
        if change or not self._held or self._held[-1].rank != self.number:
            self._held.append(Held(self.number, now, self._bytes))

    def busy(self) -> Iterator[tuple[str, list[float | str]]]:
        """The links on which something is, with it."""
        return ((name, queue[0]) for name, queue in self.links.items() if queue)

    def end_of(self, link: str, now: float) -> None:
        """The first collective of a link has ended."""
        name, _, since = self.links[link].popleft()
        self.ended.add(str(name))
        self._spans.append(Span(self.number, link, str(name), float(since), now))
        if self.links[link]:
            self.links[link][0][2] = now


def run_shared(program: Program, shared: Set[str]) -> Timeline:
    """Simulate one step. shared: names of links that all ranks of the program put their collectives on together.

    Seconds of a collective are those that it takes while no other rank is on the link; of n ranks that are, each goes
    on at an n-th of the pace. With nothing shared this is `engine.run`. Raises DeadlockError where no rank can go on.
    """
    spans: list[Span] = []
    held: list[Held] = []
    ranks = [_Rank(number, program, spans, held) for number in range(len(program.ranks))]
    messages: dict[str, float] = {}
    now = 0.0
    while True:
        while sum(rank.go_on(now, messages) for rank in ranks):  # of every rank, not up to the first
            pass
        paces = _paces(ranks, program, shared)
        step = _next_event(ranks, paces, messages, now)
        if step is None:
            break
        now += step
        for rank, (compute, links) in zip(ranks, paces, strict=True):
            if isinstance(rank.at, Compute):
                rank.left -= step * compute
            for link, pace in links.items():
                first = rank.links[link][0]
                first[1] = float(first[1]) - step * pace
                if float(first[1]) <= _ROUNDING * step + 1e-15:
                    rank.end_of(link, now)
    stuck = next((rank for rank in ranks if rank.at is not None), None)
    if stuck is not None:
        raise DeadlockError(f"rank {stuck.number} waits for {stuck.at!r}, which nobody sends or starts")
    return Timeline(program.name, tuple(spans), tuple(held))


def replicated(program: Program, replicas: int, shared: Set[str]) -> Program:
    """All replicas of the program's ranks, each a collective later than the one before.

    Alike, and begun at once, they would stay in step for ever, all sending and then all computing; what runs on
    machines does not, and one that is ahead sends while another computes. How far ahead makes little difference.
    """
    first = next((op for ops in program.ranks for op in ops if isinstance(op, Start) and op.link in shared), None)
    later = 0.0 if first is None else first.seconds

    def of(replica: int, ops: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        begun = (Compute(f"replica {replica} begins", replica * later),) if replica else ()
        return (*begun, *(replace(op, name=f"replica {replica} {op.name}") for op in ops))

    ranks = tuple(of(replica, ops) for replica in range(replicas) for ops in program.ranks)
    return replace(program, ranks=ranks, held=program.held * replicas)


def _paces(ranks: list[_Rank], program: Program, shared: Set[str]) -> list[tuple[float, dict[str, float]]]:
    """Of each rank: seconds alone that pass in a second, of its compute and on each of its busy links."""
    sharers = {link: sum(bool(rank.links.get(link)) for rank in ranks) for link in shared}
    found = []
    for rank in ranks:
        computes = isinstance(rank.at, Compute)
        contending = {name: program.contention.get(name, _ALONE) for name, _ in rank.busy()}
        compute = 1 / max([1.0, *(each.compute for each in contending.values())])
        links = {
            name: 1 / (each.link if computes else 1.0) / max(1, sharers.get(name, 1))
            for name, each in contending.items()
        }
        found.append((compute, links))
    return found


def _next_event(
    ranks: list[_Rank], paces: list[tuple[float, dict[str, float]]], messages: dict[str, float], now: float
) -> float | None:
    """Seconds until something ends or arrives; None where nothing will."""
    steps: list[float] = []
    for rank, (compute, links) in zip(ranks, paces, strict=True):
        if isinstance(rank.at, Compute):
            steps.append(rank.left / compute)
        elif isinstance(rank.at, Receive) and rank.at.name in messages:
            steps.append(messages[rank.at.name] - now)
        steps += [float(first[1]) / links[name] for name, first in rank.busy()]
    return max(0.0, min(steps)) if steps else None
