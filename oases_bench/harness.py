"""One harness for all benchmarks: what one is, its configuration, interleaved rounds, and its table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.launch.ranks import require_agreement
from oases.terminal import progress
from oases.train.config import settings

Result = dict[str, Any]
_Config = TypeVar("_Config", bound="BenchConfig")


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a benchmark are joined. given: the options that were given and not left at their defaults.

    shaped: whether a shaped link stands between all of them, on one node.
    """

    size: int = 2
    nodes: int = 1
    link: str | None = None
    backend: str = "gloo"
    given: frozenset[str] = frozenset()

    @property
    def shaped(self) -> bool:
        """See above."""
        return self.link is not None and self.nodes == 1


class BenchConfig:
    """What benchmarks are configured by: a frozen dataclass of options, which derives from this."""

    def prepared(self: _Config, ranks: Ranks) -> _Config:
        """The configuration to run, checked. UsageError for all that can be known before any rank starts."""
        return self

    def described(self) -> str:
        """What runs, in words, with places for the number of ranks and for how they are joined."""
        return "{} ranks {}"

    def require_least(self, least: int, *names: str) -> None:
        """Raise UsageError where an option is below `least`."""
        for name in names:
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} must be at least {least}, got {getattr(self, name)}")

    def parse_list(self, name: str, known: Iterable[str]) -> list[str]:
        """The names in an option, joined by commas. UsageError for one that is not `known`."""
        found = [text.strip() for text in getattr(self, name).split(",") if text.strip()]
        for each in found:
            if each not in known:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {each!r} is unknown; known are {', '.join(known)}")
        return found


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    config: the defaults of its options. run: called on every rank with configuration, ranks and whether to show
    progress; the first rank's result is printed and written. shown: what is printed of that, tables and lines.
    size: of ranks by default; None for a benchmark that starts none itself, and is called without `ranks`. nodes: by
    default.
    """

    name: str
    help: str
    config: Any
    run: Callable[..., Result]
    shown: Callable[[Result], Iterable[RenderableType]]
    size: int | None = 2
    nodes: int = 1


class Contestant(Protocol):
    """What takes turns with others."""

    def step(self) -> None:
        """One step, which it times itself."""


def timed_step(run: Callable[[], Any]) -> float:
    """Seconds from when every rank has begun to when the slowest has ended."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def first_rank() -> bool:
    """Whether this process shows progress."""
    return not dist.is_initialized() or dist.get_rank() == 0


def interleave(contestants: Iterable[Contestant], rounds: int, what: str, shows: bool) -> None:
    """Let contestants take turns, so that what disturbs the machine disturbs all alike."""
    each = list(contestants)
    with progress(what, rounds, shows and first_rank()) as advance:
        for done in range(1, rounds + 1):
            for contestant in each:
                contestant.step()
            advance(done)


def checked_settings(config: Any) -> Result:
    """The settings of a benchmark by name. UsageError unless every rank was given the same."""
    found = settings(config)
    require_agreement(found)
    return found


def add_speedups(base: Mapping[str, Any] | None, rows: Iterable[dict[str, Any]], predicted: bool = False) -> None:
    """Set each row's speed-up over `base`, where there is one; predicted: and that of the predictions."""
    for row in rows if base is not None else ():
        assert base is not None
        row["speedup"] = base["step_seconds"] / row["step_seconds"]
        if predicted:
            row["predicted_speedup"] = base["predicted_seconds"] / row["predicted_seconds"]


def gather_objects(value: Any) -> list[Any]:
    """A value of every rank, in their order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each value the largest over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def milliseconds(seconds: float) -> str:
    """As "93 ms"."""
    return f"{1e3 * seconds:.0f} ms"


def signed_percent(error: float) -> str:
    """A prediction's relative error, as "+1.5 %"."""
    return f"{100 * error:+.1f} %"


def times(ratio: float | None, digits: int = 3) -> str:
    """A ratio; "-" for None."""
    return "-" if ratio is None else f"{ratio:.{digits}f}"
