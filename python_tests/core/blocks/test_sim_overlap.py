"""Stacks over the simulated link, with blocks that sleep, beside the simulator, by bounds that no load can break.

Sleeps and link times are lower bounds. Time that is lost between ops, or in them, only hides more: a collective goes
on under it. So a step takes at least as long as the simulator says, and compute waits at most as long as it says of
collectives that take as long as they took.
"""

import math
import time

import pytest
import torch
import torch.distributed as dist

from oases.core.execution.group import scheduler_of
from oases.core.schedule import GENERATORS, generate
from oases.launch.ranks import RankOptions, run_ranks
from oases.layers import OverlappedStack
from oases.reporting import names_op
from oases.simulator import simulate
from oases.testbed import Backend
from oases_bench.timed_block import BlockSeconds, TimedBlock

BLOCKS, LINK = 4, 0.001
COMPUTE = {"F": 0.002, "R": 0.002, "B": 0.002, "W": 0.002}
CASES = [(name, recompute) for name in GENERATORS for recompute in ("none", "full")]
ATTEMPTS = 2


def run_cases():
    """Seconds of steps, records of collectives and reported waits, by case and attempt."""
    scheduler = scheduler_of(dist.group.WORLD)
    seconds = BlockSeconds(forward=COMPUTE["F"], backward=COMPUTE["B"], weight_gradient=COMPUTE["W"])
    found = []
    for name, recompute in CASES:
        schedule = generate(name, BLOCKS, 2, recompute)
        stack = OverlappedStack([TimedBlock(lambda samples: seconds) for _ in range(BLOCKS)], schedule=schedule)
        for attempt in range(ATTEMPTS + 1):
            x = torch.ones(4, 8, requires_grad=True)
            scheduler.take_records()
            scheduler.reset_totals()
            scheduler.set_recording(True)
            start = time.perf_counter()
            stack(x).sum().backward()
            took = time.perf_counter() - start
            scheduler.set_recording(False)
            records = [each for each in scheduler.take_records() if names_op(each.label)]
            reported = sum(each.blocked_seconds for label, each in scheduler.totals().items() if names_op(label))
            if attempt:  # the first call compares the lists of the ranks
                times = [(each.issued, each.finished, each.waited_from) for each in records]
                found.append((schedule, took, times, reported))
    return found


@pytest.fixture(scope="module")
def steps():
    return run_ranks(run_cases, (), RankOptions(2, Backend("sim", LINK, math.inf, single_process=True)))


def exposed(schedule, links):
    """Seconds that compute waits, where the collectives of a list take `links` in turn."""
    now = free = waited = 0.0
    ends, links = {}, iter(links)
    for op in schedule:
        place = op.of, op.block, op.sub_batch
        if op.kind == "all_reduce":
            ends[place] = free = max(now, free) + next(links)
        elif op.kind == "wait":
            waited += max(0.0, ends[place] - now)
            now = max(now, ends[place])
        else:
            now += COMPUTE.get(op.kind, 0.0)
    return waited


def durations(times):
    """Seconds of each collective in order, from its issue or the end of the one before it."""
    free, found = 0.0, []
    for issued, finished, _ in sorted(times):
        found.append(finished - max(issued, free))
        free = max(free, finished)
    return found


def test_a_step_takes_at_least_as_long_as_simulated(steps):
    for schedule, took, _, _ in steps:
        assert took >= simulate(schedule, COMPUTE | {"all_reduce": LINK}).total_seconds
        if schedule.name == "sync":
            busy = sum(COMPUTE.get(op.kind, 0.0) for op in schedule if op.kind != "wait")
            sums = sum(op.kind == "all_reduce" for op in schedule)
            assert took >= busy + sums * LINK


def test_what_is_exposed_is_what_the_simulator_says_at_most(steps):
    for schedule, _, times, _ in steps:
        links = durations(times)
        assert min(links) >= LINK
        told = simulate(schedule, COMPUTE | {"all_reduce": LINK}).exposed(0)
        assert exposed(schedule, [LINK] * len(links)) == pytest.approx(told)
        waited = sum(max(0.0, finished - waited_from) for _, finished, waited_from in times)
        assert waited <= exposed(schedule, links) + 1e-6, schedule.name


def test_no_wait_is_left_out_of_the_report(steps):
    for _, _, times, reported in steps:
        waited = sum(max(0.0, finished - waited_from) for _, finished, waited_from in times)
        assert reported >= waited - 1e-6
