"""Faults: what hits a run, when, and what comes of it. Those of links are in `nodes`, of disks in `surroundings`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from reliability.campaign.runs import ReshardedRun, Run, send

MOMENTS = ("save", "save", "save", "step", "start")
STOP_SECONDS = (0.5, 3.0)
MOST_TRIES = 5


@dataclass
class Fault:
    """Fault of a session: what, when, and what came of it.

    kind: see the tables of faults. moment: "start": while ranks start; "step"; "save": while a checkpoint is written.
    hit_while_saving: whether a checkpoint was incomplete at the fault. checkpoint: step of the newest complete one at
    the fault, next_step: the first step logged after it. seconds: from the fault, or its end where it lasts, to that
    step; None: the run had ended before the fault.
    """

    kind: str
    moment: str
    at_step: int
    hit_while_saving: bool = False
    checkpoint: int = 0
    next_step: int = 0
    seconds: float | None = None


class Kind(NamedTuple):
    """Kind of fault. apply: does it to a run. ends: ranks are started anew. starting: starting ranks may meet it.

    during: context manager around the fault and the wait for the next step, such as a full disk.
    """

    apply: Callable[[Any, random.Random], None]
    ends: bool
    starting: bool = True
    during: Callable[[Any], AbstractContextManager[None]] = nullcontext


def kill(run: Run, generator: random.Random) -> None:
    """Kill a rank."""
    send(_one_of(run, generator), signal.SIGKILL)


def kill_all(run: Run, generator: random.Random) -> None:
    """Kill all ranks at once."""
    for rank in run.ranks():
        send(rank, signal.SIGKILL)


def kill_launcher(run: Run, generator: random.Random) -> None:
    """Kill the launcher."""
    run.kill_job()


def terminate(run: Run, generator: random.Random) -> None:
    """End the launcher in order; ranks of `oases train` save."""
    send(run.process.pid, signal.SIGTERM)
    run.join()


def terminate_rank(run: Run, generator: random.Random) -> None:
    """End a rank in order, as a service of the machine may; all ranks of `oases train` save and end."""
    send(_one_of(run, generator), signal.SIGTERM)


def stop(run: Run, generator: random.Random) -> None:
    """Stop a rank for a while."""
    _stop([_one_of(run, generator)], generator)


def stop_all(run: Run, generator: random.Random) -> None:
    """Stop launcher and ranks for a while, as a suspended machine does."""
    _stop([run.process.pid, *run.ranks()], generator)


def reshard(run: ReshardedRun, generator: random.Random) -> None:
    """End the launcher in order; the next start has other degrees."""
    _other_degrees(run, generator)
    terminate(run, generator)


def kill_and_reshard(run: ReshardedRun, generator: random.Random) -> None:
    """Kill the launcher; the next start has other degrees."""
    _other_degrees(run, generator)
    kill_launcher(run, generator)


def kill_while_resharding(run: ReshardedRun, generator: random.Random) -> None:
    """End the launcher in order, start it with other degrees, and kill a rank while it loads."""
    reshard(run, generator)
    if run.wait_for(lambda: bool(run.ranks()), "the start of ranks"):
        time.sleep(generator.uniform(0, 3))
        kill(run, generator)


FAULTS = {
    "kill": Kind(kill, True),
    "kill all": Kind(kill_all, True),
    "kill launcher": Kind(kill_launcher, True),
    "terminate": Kind(terminate, True),
    "terminate rank": Kind(terminate_rank, True),
    "stop": Kind(stop, False),
    "stop all": Kind(stop_all, False),
    "reshard": Kind(reshard, True),
    "kill, reshard": Kind(kill_and_reshard, True),
    "reshard, kill": Kind(kill_while_resharding, True),
}
OF_RANKS = ("kill", "kill", "kill all", "kill launcher", "terminate", "terminate rank", "stop", "stop all")
OF_DEGREES = ("reshard", "kill, reshard", "reshard, kill")


def _one_of(run: Run, generator: random.Random) -> int:
    return generator.choice(run.ranks() or [run.process.pid])


def _stop(processes: list[int], generator: random.Random) -> None:
    for process in processes:
        send(process, signal.SIGSTOP)
    time.sleep(generator.uniform(*STOP_SECONDS))
    for process in processes:
        send(process, signal.SIGCONT)


def _other_degrees(run: ReshardedRun, generator: random.Random) -> None:
    run.options = generator.choice([each for each in run.degrees if each != run.options])


def suffer(run: Run, fault: Fault, kind: Kind, generator: random.Random) -> bool:
    """Apply a fault at its moment and wait for the next step; False where the run ends before."""
    if not _moment(run, fault, generator):
        return False
    ranks = set(run.ranks())
    # What ranks find as they start may be the checkpoint that the ones before were killed in.
    fault.hit_while_saving, fault.checkpoint = fault.moment != "start" and run.saving(), run.newest()
    with kind.during(run):
        kind.apply(run, generator)
        struck = time.monotonic()
        if kind.ends and not run.wait_for(lambda: bool(run.ranks()) and not ranks & set(run.ranks()), "new ranks"):
            return False
        seen = run.steps()

        def logged() -> bool:  # a start may cut the log
            nonlocal seen
            before, seen = seen, run.steps()
            return seen > before

        if not run.wait_for(logged, "the next step"):
            return False
        fault.seconds, fault.next_step = time.monotonic() - struck, seen
    return True


def _moment(run: Run, fault: Fault, generator: random.Random) -> bool:
    """Wait for the moment of a fault; False where the run ends before."""
    if fault.moment == "start":
        if run.steps():
            before = set(run.ranks())
            kill(run, generator)
        else:
            before = set()
        if not run.wait_for(lambda: bool(set(run.ranks()) - before), "the start of ranks"):
            return False
        time.sleep(generator.uniform(0, 2))
    elif not run.wait_for(lambda: run.steps() >= fault.at_step, f"step {fault.at_step}"):
        return False
    for _ in range(MOST_TRIES):
        if fault.moment == "save" and not run.wait_for(run.saving, "the next checkpoint"):
            return False
        time.sleep(generator.uniform(0, 0.02))
        if fault.moment != "save" or run.saving():
            break
    return run.process.poll() is None


def lost_steps(fault: Fault) -> bool:
    """Whether a step was repeated that a complete checkpoint held."""
    return fault.seconds is not None and fault.next_step <= fault.checkpoint
