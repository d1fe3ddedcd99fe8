"""Runs of parallelized models that are killed in steps and in saves go on equal to the bit, at other degrees too."""

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
TP = (1, 1, 2)


def kill_one(folder, kind, step, generator, ended):
    """Kill a rank in a step or in a save, once `step` steps are logged; returns whether one was killed."""
    end = time.monotonic() + 120
    while not ended() and time.monotonic() < end:
        moment = len(lines_of(folder / "log.jsonl")) >= step
        if moment and (kind == "step" or any((folder / "run").glob(".step-*.part"))):
            time.sleep(generator.uniform(0, 0.02))
            victim = generator.choice([*folder.glob("rank-?")])
            os.kill(int(victim.read_text()), signal.SIGKILL)
            return True
        time.sleep(0.0005)
    return False


def killed_run(folder, kinds, seed, steps):
    """Train to the end, killed once for each kind; returns the number of kills that hit."""
    generator, hits = random.Random(seed), 0
    moments = sorted(generator.randrange(1, steps - 1) for _ in kinds)
    for kind, moment in [*zip(kinds, moments, strict=True), (None, None)]:
        for left in folder.glob("rank-?"):
            left.unlink()
        with RankPool(2) as ranks, ThreadPoolExecutor(1) as pool:
            training = pool.submit(ranks.run, run, str(folder), TP, steps)
            hit = kind is not None and kill_one(folder, kind, moment, generator, training.done)
            if not hit:
                training.result()
                return hits
            hits += 1
            with pytest.raises(RuntimeError, match="rank"):
                training.result()
    return hits


def check(two_ranks, folder, kinds, seed, steps):
    for name in ("killed", "unbroken"):
        (folder / name).mkdir()
    expected = two_ranks.run(run, str(folder / "unbroken"), TP, steps)
    assert killed_run(folder / "killed", kinds, seed, steps) >= len(kinds) - 1
    losses = losses_of(folder / "unbroken" / "log.jsonl")
    assert losses_of(folder / "killed" / "log.jsonl") == losses
    assert [step for step, _ in losses] == list(range(1, steps + 1))
    left = {path.name for path in (folder / "killed" / "run").iterdir() if path.name != ".lock"}
    assert left == {f"step-{steps - 2:06d}", f"step-{steps:06d}"}
    return expected


@pytest.mark.parametrize(
    "kinds", [("step", "checkpoint"), pytest.param(("step", "checkpoint") * 10, marks=pytest.mark.slow)]
)
def test_killed_runs_go_on_equal_to_the_bit(two_ranks, tmp_path, kinds):
    steps = STEPS + 2 * len(kinds)
    check(two_ranks, tmp_path, kinds, 5, steps)
    folder, more = tmp_path / "killed", steps + 2
    two_ranks.run(run, str(tmp_path / "unbroken"), TP, more)
    losses = [loss for _, loss in losses_of(tmp_path / "unbroken" / "log.jsonl")]
    for degrees in ((1, 2, 1), (1, 1, 1)):
        two_ranks.run(run, str(folder), degrees, more, 100)
        found = [loss for _, loss in losses_of(folder / "log.jsonl")]
        assert found[:-2] == losses[:-2]
        assert found[-2:] == pytest.approx(losses[-2:], rel=1e-4)
