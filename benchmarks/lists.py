"""Search over the order of a schedule's ops, by simulated time: does any order beat those that oases generates?

Simulated annealing from each generated list. A move takes one op to another place between the ops that it reads and
those that read it, in its own pass. Blocks are equal, with assumed shares of compute (`TIMES`), not those of a
profile; an op of a block and sub-batch takes its share of 1 / sub-batches. Contention slows compute and link while
both are active.

    python benchmarks/lists.py
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal, cast

from rich.console import RenderableType

from oases.core.schedule import Op, Schedule, generate
from oases.core.schedule.validate import needs, validate
from oases.errors import UsageError
from oases.models.options import option
from oases.simulator.cost import BlockTimes, StackCosts
from oases.simulator.program import Contention
from oases.simulator.simulate import simulate
from oases.terminal import progress, table
from oases_bench.command_line import script
from oases_bench.harness import BenchConfig, Benchmark, Ranks, Result

GENERATED = ("oases", "cross_pass")
"""Schedules that the search begins with; `fine_grained` and `sub_pipelined` are never faster."""
TIMES = BlockTimes(0.31, 0.31, 0.03, 0.25, 0.31, 0.03, 0.33, 0.30)
"""Assumed shares of a block's forward and backward pass."""
WARMTH = 0.01
"""Slower lists that are accepted at first: about this share of the step."""


@dataclass(frozen=True)
class ListsBenchConfig(BenchConfig):
    """Lists to begin with, and how long to search."""

    blocks: int = option(6, "blocks, two in a layer")
    moves: int = option(2000, "moves of a search")
    seeds: int = option(2, "searches from each generated list")
    slowdown: float = option(1.15, "factor by which compute and link slow each other down, beside none")

    def prepared(self, ranks: Ranks) -> ListsBenchConfig:
        """See `BenchConfig`."""
        for name, least in {"blocks": 1, "moves": 0, "seeds": 1, "slowdown": 1}.items():
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        return self


def costs_at(ratio: float, blocks: int, sub_batches: int, slowdown: float) -> StackCosts:
    """Costs of equal blocks whose two sums, one a pass, take `ratio` times their compute."""
    times = (TIMES.scaled(1 / sub_batches),) * blocks
    contention = Contention(slowdown, slowdown)
    return StackCosts(times, {"all_reduce": ratio / 2 / sub_batches}, contention=contention)


def searched(start: Schedule, costs: StackCosts, moves: int, seed: int) -> tuple[float, Schedule]:
    """The fastest list found and its simulated seconds."""
    reads = {op: needs(op, start) for op in start}
    readers: defaultdict[Op, list[Op]] = defaultdict(list)
    for op, read in reads.items():
        for each in read:
            readers[each].append(op)
    generator, ops = random.Random(seed), list(start.ops)
    turn = len(start.forward)
    now = seconds = simulate(start, costs).total_seconds
    best, warmth = start, WARMTH * now
    for move in range(moves):
        place = {op: at for at, op in enumerate(ops)}
        op = generator.choice(ops)
        first = max((place[each] + 1 for each in reads[op]), default=0)
        last = min((place[each] - 1 for each in readers[op]), default=len(ops) - 1)
        first, last = (max(first, turn), last) if op.in_backward else (first, min(last, turn - 1))
        if first >= last:
            continue
        near = min(max(place[op] + generator.choice((-2, -1, 1, 2)), first), last)
        moved = [each for each in ops if each != op]
        moved.insert(generator.choice((near, generator.randint(first, last))), op)
        candidate = replace(start, name="searched", ops=tuple(moved))
        found = simulate(candidate, costs).total_seconds
        if found <= now or generator.random() < math.exp((now - found) / (warmth * (1 - move / moves))):
            ops, now = moved, found
            if now < seconds - 1e-12:
                seconds, best = now, candidate
    validate(best, "block")
    return seconds, best


def run_lists_bench(config: ListsBenchConfig, shows: bool) -> Result:
    """Search at three ratios, with two and four sub-batches, kept and recomputed, with and without contention."""
    cells = list(product(("none", "full"), (2, 4), (2.0, 1.0, 0.5), (1.0, config.slowdown)))
    rows: list[dict[str, Any]] = []
    with progress("searching", len(cells), shows) as advance:
        for done, (recompute, sub_batches, ratio, slowdown) in enumerate(cells, start=1):
            again = cast(Literal["none", "full"], recompute)
            costs = costs_at(ratio, config.blocks, sub_batches, slowdown)
            lists = {name: generate(name, config.blocks, sub_batches, again) for name in GENERATED}
            generated = {name: simulate(each, costs).total_seconds for name, each in lists.items()}
            found = min(
                searched(each, costs, config.moves, seed)[0]
                for each in lists.values()
                for seed in range(config.seeds)
            )
            gain = min(generated.values()) / found
            cell = {"recompute": recompute, "sub_batches": sub_batches, "ratio": ratio, "slowdown": slowdown}
            rows.append(cell | {"generated": generated, "searched": found, "gain": gain})
            advance(done)
    return {"config": asdict(config), "cells": rows}


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per cell."""
    rows = (
        (
            row["recompute"], str(row["sub_batches"]), f"{row['ratio']:g}", f"{row['slowdown']:g}",
            *(f"{row['generated'][name]:.3f}" for name in GENERATED), f"{row['searched']:.3f}",
            f"{row['gain']:.3f} x",
        )
        for row in result["cells"]
    )  # fmt: skip
    columns = ("recompute", "sub-batches", "ratio", "slowdown", *GENERATED, "searched", "gain")
    yield table(columns, rows, title="simulated steps, in forward and backward passes of a block")


BENCHMARK = Benchmark(
    "lists",
    "the order of a schedule's ops, searched by simulated time, beside the generated lists",
    ListsBenchConfig(),
    run_lists_bench,
    shown,
    size=None,
)

if __name__ == "__main__":
    script(BENCHMARK, __file__)
