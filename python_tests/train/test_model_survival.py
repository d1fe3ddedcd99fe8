"""Runs of parallelized models that are killed in steps and in saves go on equal to the bit, at other degrees too."""

import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kills import lines_of, losses_of
from model_sessions import run

from oases.testing import RankPool

STEPS = 12


def wait_for(condition, ended):
    """Whether a condition came true before the run ended."""
    end = time.monotonic() + 120
    while not condition():
        if ended() or time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def kill_one(folder, kind, step, generator, ended, ranks):
    """Kill a rank while it starts, in a step or in a save, after `step` steps; returns whether one was killed."""

    def pids():
        return [each.read_text() for each in folder.glob("rank-?")]

    def gone_on():
        resumed = folder / "resumed"
        done = resumed.read_text() if resumed.exists() else ""
        return bool(done) and len(lines_of(folder / "log.jsonl")) >= max(step, int(done) + 1)

    conditions = [lambda: len(pids()) == ranks and all(pids())]
    conditions += [gone_on] if kind != "start" else []
    conditions += [lambda: any((folder / "run").glob(".step-*.part"))] if kind == "checkpoint" else []
    if not all(wait_for(condition, ended) for condition in conditions):
        return False
    time.sleep(generator.uniform(0, 1 if kind == "start" else 0.02))
    if not ended():
        os.kill(int(generator.choice(pids())), signal.SIGKILL)
    return True


def killed_run(folder, kinds, seed, steps, degrees):
    """Train to the end, killed once for each kind; returns the number of kills that hit."""
    generator, hits = random.Random(seed), 0
    moments = sorted(generator.randrange(1, steps - 1) for _ in kinds)
    for kind, moment in [*zip(kinds, moments, strict=True), (None, None)]:
        for left in (*folder.glob("rank-?"), *folder.glob("resumed")):
            left.unlink()
        with RankPool(math.prod(degrees)) as ranks, ThreadPoolExecutor(1) as pool:
            training = pool.submit(ranks.run, run, str(folder), degrees, steps)
            hit = kind is not None and kill_one(folder, kind, moment, generator, training.done, math.prod(degrees))
            if not hit:
                training.result()
                return hits
            hits += 1
            with pytest.raises(RuntimeError, match="rank"):
                training.result()
    return hits


def check(ranks, folder, kinds, seed, steps, degrees):
    """Compare a killed run with one that nobody disturbs."""
    for name in ("killed", "unbroken"):
        (folder / name).mkdir()
    ranks.run(run, str(folder / "unbroken"), degrees, steps)
    assert killed_run(folder / "killed", kinds, seed, steps, degrees) >= len(kinds) - 1
    losses = losses_of(folder / "unbroken" / "log.jsonl")
    assert losses_of(folder / "killed" / "log.jsonl") == losses
    assert [step for step, _ in losses] == list(range(1, steps + 1))
    left = {path.name for path in (folder / "killed" / "run").iterdir() if path.name != ".lock"}
    assert left == {f"step-{steps - 2:06d}", f"step-{steps:06d}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "kinds", "degrees"),
    [
        ("two_ranks", ("step", "checkpoint"), [(1, 1, 2), (1, 2, 1), (1, 1, 1)]),
        ("four_ranks", ("step", "checkpoint", "start", "checkpoint") * 5, [(2, 1, 2), (1, 2, 2), (1, 1, 1)]),
    ],
)  # fmt: skip
def test_killed_runs_go_on_equal_to_the_bit(request, tmp_path, pool, kinds, degrees):
    """At the first of the degrees, and then resumed at the others."""
    steps, ranks = STEPS + 2 * len(kinds), request.getfixturevalue(pool)
    check(ranks, tmp_path, kinds, 5, steps, degrees[0])
    folder, more = tmp_path / "killed", steps + 2
    ranks.run(run, str(tmp_path / "unbroken"), degrees[0], more)
    losses = [loss for _, loss in losses_of(tmp_path / "unbroken" / "log.jsonl")]
    for others in degrees[1:]:
        ranks.run(run, str(folder), others, more, 100)
        found = [loss for _, loss in losses_of(folder / "log.jsonl")]
        assert found[:-2] == losses[:-2]
        assert found[-2:] == pytest.approx(losses[-2:], rel=1e-4)
