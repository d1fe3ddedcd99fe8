"""Sessions: worlds of runs, each with its kinds of faults, and what is judged at a session's end."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kills import losses_of
from safetensors.torch import load_file

import reliability.campaign.nodes as nodes
import reliability.campaign.surroundings as surroundings
from reliability.campaign.faults import FAULTS, MOMENTS, OF_DEGREES, OF_RANKS, Fault, lost_steps, suffer
from reliability.campaign.nodes import NodesRun
from reliability.campaign.runs import SAVE_EVERY, STEPS, ModelRun, ReshardedRun, Run, TorchrunRun
from reliability.campaign.surroundings import ClockRun, DiskRun

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3
"""Relative differences after other degrees, whose sums have another order: of float32 losses, and of a weight to the
largest of its tensor."""
KINDS = FAULTS | nodes.FAULTS | surroundings.FAULTS


def _always() -> str | None:
    return None


class World(NamedTuple):
    """Kind of run. options: see its class. same_as: world with equal losses and weights, "" for this one itself.

    kinds: of the faults; worlds with the same ones share a deck of them. why_not: reason why it is impossible here.
    """

    run: type[Run]
    options: str
    kinds: tuple[str, ...] = OF_RANKS
    same_as: str = ""
    why_not: Callable[[], str | None] = _always


OF_NODES = ("loss", "delay", "partition", "link down", "kill node", "kill", "kill launcher", "terminate", "stop")
OF_DISKS = ("full disk", "read-only disk", "full disk, kill", "kill", "kill launcher")
OF_CLOCKS = ("clock jump", "clock jump", "clock jump, kill", "kill launcher", "terminate")
OF_TORCHRUN = ("kill", "kill all", "kill launcher", "terminate", "terminate rank", "stop")
WORLDS = {
    "tp 2": World(Run, "--tp 2"),
    "dp 2": World(Run, "--dp 2 --tp 1 --zero"),
    "2 nodes": World(NodesRun, "--tp 2", OF_NODES, "tp 2", nodes.why_not),
    "torchrun, shards": World(TorchrunRun, "shards", OF_TORCHRUN),
    "pp 2": World(Run, "--pp 2 --tp 1 --micro-batches 2"),
    "resharding": World(ReshardedRun, "--dp 2 --tp 1", OF_DEGREES, "dp 2"),
    "small disk": World(DiskRun, "--tp 2", OF_DISKS, "tp 2", surroundings.why_no_disk),
    "dp 2, fsdp": World(Run, "--dp 2 --tp 1 --fsdp"),
    # Beside itself: gloo adds the numbers of four ranks in another order than staged, which "dp 2 x tp 2" has.
    "2 nodes x tp 2": World(NodesRun, "--dp 2 --tp 2", OF_NODES, why_not=nodes.why_not),
    "clock": World(ClockRun, "--tp 2", OF_CLOCKS, "tp 2", surroundings.why_no_clock),
    "torchrun, files": World(TorchrunRun, "files", OF_TORCHRUN, "torchrun, shards"),
    "torchrun, oases": World(TorchrunRun, "oases", OF_TORCHRUN, "torchrun, shards"),
    "pp 2 x tp 2": World(Run, "--pp 2 --tp 2 --micro-batches 2 --pipeline-schedule shifted_critical_path"),
    "dp 2 x tp 2": World(Run, "--dp 2 --tp 2"),
    "Llama, pp 2 x tp 2": World(ModelRun, "--pp 2 --tp 2 --micro-batches 2"),
    "Llama, dp 2, fsdp": World(ModelRun, "--dp 2 --tp 1 --fsdp"),
    "experts 4 over dp 2": World(Run, "--dp 2 --tp 1 --experts 4 --expert-hidden 48 --placement none"),
}
"""By name."""


@dataclass
class Session:
    """Run and its faults. wrong: kinds of failure, "stuck", "hang", "lost step", "difference" or "left", each with a
    sentence; empty for an equal run."""

    number: int
    world: str
    faults: list[Fault]
    wrong: list[tuple[str, str]] = field(default_factory=list)
    starts: int = 0

    def hits(self) -> list[Fault]:
        """Faults that hit the run before its end."""
        return [fault for fault in self.faults if fault.seconds is not None]


class Plan(NamedTuple):
    """Settings of a campaign. count: faults of a session. worlds: in turn. most_seconds: see `judge`."""

    seed: int
    count: int  # type: ignore[assignment]  # of tuple
    worlds: Sequence[str]
    most_seconds: float = 30.0


def plan_faults(number: int, plan: Plan) -> tuple[str, list[Fault]]:
    """World of a session, and its faults in order of their steps: all kinds come before one comes again."""
    seed, count, worlds, _ = plan
    generator = random.Random(f"{seed}/{number}")
    world = worlds[number % len(worlds)]
    deck = WORLDS[world].kinds
    before = sum(WORLDS[worlds[each % len(worlds)]].kinds == deck for each in range(number)) * count
    kinds: list[str] = []
    for shuffled in range((before + count) // len(deck) + 1):
        kinds += random.Random(f"{seed}/{deck}/{shuffled}").sample(deck, len(deck))
    faults = []
    steps = sorted(generator.sample(range(2, STEPS - 3 * SAVE_EVERY), count))
    for kind, step in zip(kinds[before : before + count], steps, strict=True):
        moment = generator.choice(MOMENTS if KINDS[kind].starting else ("save", "step"))
        faults.append(Fault(kind, moment, step))
    return world, faults


def play(number: int, plan: Plan, corpus: Path, folder: Path) -> Session:
    """Run a session and judge it. Its folder stays if something was wrong."""
    name, faults = plan_faults(number, plan)
    world, session = WORLDS[name], Session(number, name, faults)
    expected = undisturbed(name, corpus, folder)
    place = folder / f"session-{number:04d}"
    shutil.rmtree(place, ignore_errors=True)
    run = world.run(world.options, corpus, place)
    generator = random.Random(f"{plan.seed}/{number}/moments")
    try:
        try:
            for fault in faults:
                suffer(run, fault, KINDS[fault.kind], generator)
            run.wait_for(lambda: False, "the end of the run")
        except (TimeoutError, RuntimeError) as error:
            session.wrong.append(("stuck", str(error)))
        else:
            session.wrong += judge(run, session, expected, plan.most_seconds)
    finally:
        run.end()
    session.starts = run.starts
    if not session.wrong:
        shutil.rmtree(place)
    return session


class Expected(NamedTuple):
    """Result of an undisturbed run."""

    losses: list[tuple[int, float]]
    digest: str
    weights: Path


def undisturbed(world: str, corpus: Path, folder: Path) -> Expected:
    """Result of a run without faults, made once per world."""
    world = WORLDS[world].same_as or world
    place = folder / "undisturbed" / world.replace(" ", "-").replace(",", "")
    if not (place / "weights").is_file():
        shutil.rmtree(place, ignore_errors=True)
        run = WORLDS[world].run(WORLDS[world].options, corpus, place)
        run.join()
        if run.process.returncode != 0:
            raise RuntimeError(f"the undisturbed run ended with {run.process.returncode}; see {place / 'output'}")
        _, digest = run.result()
        (place / "digest").write_text(digest)
        run.weights().rename(place / "weights")
    return Expected(losses_of(place / "steps.jsonl"), (place / "digest").read_text(), place / "weights")


def judge(run: Run, session: Session, expected: Expected, most_seconds: float) -> list[tuple[str, str]]:
    """Judge a session: a sentence for each fault of it; none for a good one.

    most_seconds: from a fault to the next step.
    """
    wrong = [
        ("hang", f"{fault.seconds:.0f} s from {fault.kind} to the next step")
        for fault in session.hits()
        if (fault.seconds or 0) > most_seconds
    ]
    for fault in filter(lost_steps, session.hits()):
        text = f"step {fault.next_step} was repeated although checkpoint {fault.checkpoint} was complete"
        wrong.append(("lost step", f"{fault.kind}: {text}"))
    difference = differs(run, expected)
    if difference:
        wrong.append(("difference", difference))
    left = run.left()
    if left:
        wrong.append(("left", f"left behind: {', '.join(left)}"))
    return wrong


def differs(run: Run, expected: Expected) -> str:
    """Difference of losses or weights from those of the undisturbed run, in a sentence; "" without one."""
    losses, digest = run.result()
    exact = run.exact_steps
    if losses[:exact] != expected.losses[:exact]:
        return f"a loss of the first {exact} steps differs from that of the undisturbed run"
    if [step for step, _ in losses] != [step for step, _ in expected.losses]:
        return f"the log has {len(losses)} steps, that of the undisturbed run {len(expected.losses)}"
    if exact == STEPS:
        return "" if digest == expected.digest else "the weights differ from those of the undisturbed run"
    pairs = zip(losses, expected.losses, strict=True)
    apart = largest(abs(got - loss) / abs(loss) for (_, got), (_, loss) in pairs)
    if not apart <= LOSS_TOLERANCE:
        return f"the losses after other degrees are {apart:.1e} apart from those of the undisturbed run"
    apart = weights_apart(run.weights(), expected.weights)
    if not apart <= WEIGHT_TOLERANCE:
        return f"the weights after other degrees are {apart:.1e} apart from those of the undisturbed run"
    return ""


def weights_apart(file: Path, other: Path) -> float:
    """Largest difference of a weight, relative to the largest of its tensor."""
    first, second = load_file(file), load_file(other)
    if first.keys() != second.keys():
        raise RuntimeError(f"the weights of {file} and {other} have other names")
    return largest(float((first[name] - second[name]).abs().max() / second[name].abs().max()) for name in first)


def largest(values: Iterable[float]) -> float:
    """Largest of some numbers; NaN if one is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
