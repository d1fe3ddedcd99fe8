"""What a simulation runs: for every rank the instructions of a step, with their seconds and bytes, in issue order.

A schedule says what happens; a program says besides how long each part takes alone and which link it needs. Any
schedule of the IR, and any whole plan, comes down to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of the rank's device, one piece after another. allocates: bytes from its start on; frees: at its end."""

    name: str
    seconds: float
    allocates: int = 0
    frees: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Puts a collective on a link, which carries its collectives one after another. `name` is its ticket."""

    name: str
    link: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stands still until the collective of this name has ended."""

    name: str
    frees: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Puts a message for another rank on this rank's outgoing link. `name` is the same at both ends."""

    name: str
    seconds: float
    link: str = "pipeline"


@dataclass(frozen=True, slots=True)
class Receive:
    """The compute stands still until the message of this name has arrived."""

    name: str


Instruction: TypeAlias = Compute | Start | Wait | Send | Receive


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long each takes while the other goes on: the compute of a rank and one of its links."""

    compute: float = 1.0
    link: float = 1.0


@dataclass(frozen=True)
class Program:
    """The instructions of every rank that differs; ranks that do the same need be there once.

    contention: by the name of the link; what is not named does not contend. held: bytes on each rank before the
    first instruction.
    """

    name: str
    ranks: tuple[tuple[Instruction, ...], ...]
    contention: Mapping[str, Contention] = field(default_factory=dict)
    held: tuple[int, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.ranks))


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
