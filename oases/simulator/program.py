"""Program of a simulation: the instructions of a step for every rank, with seconds and bytes, in issue order.

A schedule defines the ops; a program adds the duration of each instruction without contention and the link it uses.
Every schedule and every plan is lowered to a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from oases.records import Name, Number


@dataclass(frozen=True, slots=True)
class Compute:
    """Work on the rank's device, executed in order. allocates: bytes from its start on; frees: bytes at its end."""

    name: str
    seconds: float
    allocates: int = 0
    frees: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Enqueue a collective on a link, which carries its collectives in order. `name` is its ticket."""

    name: str
    link: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the collective of this name."""

    name: str
    frees: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Enqueue a message to another rank on this rank's outgoing link. `name` is the same at both ends."""

    name: str
    seconds: float
    link: str = "pipeline"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the message of this name."""

    name: str


Instruction: TypeAlias = Compute | Start | Wait | Send | Receive


Slowdown = Annotated[float, Number("times as long", least=1)]
"""Factor of at least 1."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown factors of a rank's compute and of one of its links while both are active."""

    compute: Annotated[Slowdown, Name("compute_slowdown")] = 1.0
    link: Annotated[Slowdown, Name("link_slowdown")] = 1.0


@dataclass(frozen=True)
class Program:
    """Instructions of every distinct rank; equal ranks need only one entry.

    contention: by link; links not listed have none. held: bytes on each rank before the first instruction.
    """

    name: str
    ranks: tuple[tuple[Instruction, ...], ...]
    contention: Mapping[str, Contention] = field(default_factory=dict)
    held: tuple[int, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.ranks))


def replicated(program: Program, replicas: int, shared: Set[str]) -> Program:
    """Replicate the program's ranks, each replica offset by one collective.

    Identical replicas that start together would stay in lockstep, all sending and then all computing. Real machines
    do not, and a replica that is ahead sends while another computes. The amount of the offset matters little.
    """
    first = next((op for ops in program.ranks for op in ops if isinstance(op, Start) and op.link in shared), None)
    later = 0.0 if first is None else first.seconds

    def of(replica: int, ops: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        begun = (Compute(f"replica {replica} begins", replica * later),) if replica else ()
        return (*begun, *(replace(op, name=f"replica {replica} {op.name}") for op in ops))

    ranks = tuple(of(replica, ops) for replica in range(replicas) for ops in program.ranks)
    return replace(program, ranks=ranks, held=program.held * replicas)
