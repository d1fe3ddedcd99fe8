"""Benchmark harness: definition, configuration, interleaved rounds, and formatting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.core.execution.group import all_gather_objects
from oases.errors import UsageError
from oases.launch.ranks import require_agreement
from oases.limits import flag_of
from oases.terminal import progress

Result = dict[str, Any]
_Config = TypeVar("_Config", bound="BenchConfig")


@dataclass(frozen=True)
class Ranks:
    """Ranks of a benchmark and their link. given: names of the options given on the command line.

    shaped: whether an emulated link connects all of them, on one node.
    """

    size: int = 2
    nodes: int = 1
    link: str | None = None
    backend: str = "gloo"
    given: frozenset[str] = frozenset()

    @property
    def shaped(self) -> bool:
        """Whether an emulated link connects all ranks."""
        return self.link is not None and self.nodes == 1


class BenchConfig:
    """Base class of benchmark configurations, which are frozen dataclasses of options."""

    def prepared(self: _Config, ranks: Ranks) -> _Config:
        """Validate and complete the configuration. UsageError for errors that are known before any rank starts."""
        return self

    @property
    def least_link(self) -> str | None:
        """Link to start behind where none is given: one whose rate the benchmark sets by itself; None for no link."""
        return None

    def described(self) -> str:
        """Format string of a title line; arguments: number of ranks, and their link."""
        return "{} ranks {}"

    def require_least(self, least: int, *names: str) -> None:
        """Raise UsageError for an option below `least`."""
        for name in names:
            if getattr(self, name) < least:
                raise UsageError(f"{flag_of(name)} must be at least {least}, got {getattr(self, name)}")

    def parse_list(self, name: str, known: Iterable[str]) -> list[str]:
        """Names of an option that joins them by commas, each once. UsageError for one that is not `known`."""
        found = list(dict.fromkeys(text.strip() for text in getattr(self, name).split(",") if text.strip()))
        for each in found:
            if each not in known:
                raise UsageError(f"{flag_of(name)} {each!r} is unknown; known are {', '.join(known)}")
        return found


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    config: its default configuration. run(config, ranks, shows): called on every rank; rank 0's result is printed and
    written. shown: printable tables and lines of a result. size: default number of ranks; None for a benchmark that
    starts no ranks, called as run(config, shows). nodes: default number of nodes.
    """

    name: str
    help: str
    config: Any
    run: Callable[..., Result]
    shown: Callable[[Result], Iterable[RenderableType]]
    size: int | None = 2
    nodes: int = 1


class Contestant(Protocol):
    """Contestant of an interleaved benchmark."""

    def step(self) -> None:
        """Run and time a step."""


def timed_step(run: Callable[[], Any]) -> float:
    """Time `run` between barriers: until the slowest rank has finished, seconds."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def first_rank() -> bool:
    """Whether this process is rank 0, which shows progress."""
    return not dist.is_initialized() or dist.get_rank() == 0


def interleave(contestants: Iterable[Contestant], rounds: int, what: str, shows: bool) -> None:
    """Run contestants in turns, so that other load on the machine affects all alike."""
    each = list(contestants)
    with progress(what, rounds, shows and first_rank()) as advance:
        for done in range(1, rounds + 1):
            for contestant in each:
                contestant.step()
            advance(done)


def checked_settings(config: Any) -> Result:
    """Settings of a benchmark by name. UsageError unless they are equal on all ranks."""
    found = asdict(config)
    require_agreement(found)
    return found


def add_speedups(base: Mapping[str, Any] | None, rows: Iterable[dict[str, Any]], predicted: bool = False) -> None:
    """Add each row's speed-up over `base`, if any; predicted: also that of the predictions."""
    for row in rows if base is not None else ():
        assert base is not None
        row["speedup"] = base["step_seconds"] / row["step_seconds"]
        if predicted:
            row["predicted_speedup"] = base["predicted_seconds"] / row["predicted_seconds"]


def gather_objects(value: Any) -> list[Any]:
    """Gather an object from every rank, in rank order."""
    return all_gather_objects(value, dist.group.WORLD)


def parse_peers(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The peers in `text`: names joined by commas, all of the known ones, or none. UsageError for an unknown one."""
    if text in ("all", "none"):
        return tuple(known) if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UsageError(f"--peers: unknown peer {name!r}; known are {', '.join(known)}, or say all or none")
    return names


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Maximum of each value over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def milliseconds(seconds: float) -> str:
    """Format seconds as "93 ms"."""
    return f"{1e3 * seconds:.0f} ms"


def signed_percent(error: float) -> str:
    """Format a relative error as "+1.5 %"."""
    return f"{100 * error:+.1f} %"


def times(ratio: float | None, digits: int = 3) -> str:
    """Format a ratio; "-" for None."""
    return "-" if ratio is None else f"{ratio:.{digits}f}"
