"""Kills ranks of a run at random moments: `python kills.py [--stages] [KILLS [SEED]]`; the tests do it with few.

--stages: of a run by a plan of two stages with two tensor-parallel ranks each, else of two tensor-parallel ranks.
`python kills.py --seconds [KILLS [SEED]]` measures the time from a kill to the next step that was not done before, by
checkpoints on disk and in memory, of two replicas of 25 million parameters.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from oases.cli import main as oases_main
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage

SIZES = {
    "hidden": 64, "layers": 1, "heads": 4, "sequence": 64, "batch": 4, "warmup": 2,
    "validation-batches": 1,
}  # fmt: skip
STAGES = Plan(
    model=gpt(hidden=64, layers=2, heads=4, sequence=64, vocabulary=256),
    world=4, ranks_per_node=4, global_batch=8, micro_batches=4, stages=(Stage((Segment(2, 2, "oases", 2, 1),)),) * 2,
    pipeline="shifted_critical_path",
)  # fmt: skip
"""Data x pipeline x tensor parallel ranks 1 x 2 x 2."""
PAIR = replace(STAGES, world=2, ranks_per_node=2, stages=(Stage((Segment(2, 1, "oases", 2, 1),)),) * 2)
"""The same stages of one rank each."""
KINDS = ("step", "checkpoint", "start")
"""In a step, while a checkpoint is being written, while the ranks start."""


def write_corpus(path):
    path.write_text("".join(f"{i} plus {i % 7} is {i + i % 7}.\n" for i in range(4000)))
    return path


def arguments(corpus, **options):
    """The arguments of `oases` for a run; options by name, with _ for -. With a plan, that says the sizes."""
    sizes = {name: SIZES[name] for name in ("warmup", "validation-batches")} if "plan" in options else SIZES
    given = sizes | {name.replace("_", "-"): value for name, value in options.items()}
    return ["train", "--data", str(corpus), *(str(w) for name, value in given.items() for w in (f"--{name}", value))]


def command(corpus, **options):
    """The command line of a run in a process of its own."""
    return [sys.executable, "-m", "oases", *arguments(corpus, **options)]


class Run:
    """`oases` in this process, for a thread that acts on the ranks it starts.

    Its ranks are those that the fork server forks from then on.
    """

    def __init__(self, words, said):
        self.words, self.said = words, said
        self.pid = os.getpid()
        self.code = None
        self.before = set(ranks_of(self.pid))

    def poll(self):
        return self.code

    def ranks(self):
        return [rank for rank in ranks_of(self.pid) if rank not in self.before]

    def call(self, act):
        """Run to the end while `act(run)` runs in a thread; return the exit code. Raises what `act` raises."""
        with ThreadPoolExecutor(1) as pool, self.said.open("w", buffering=1) as said, stderr_in(said):
            acting = pool.submit(act, self)
            try:
                oases_main(self.words)
                self.code = 0
            except SystemExit as ended:
                self.code = ended.code or 0
            finally:
                self.code = -1 if self.code is None else self.code
            acting.result(timeout=60)
        return self.code


@contextmanager
def stderr_in(file):
    """Write stderr, that of ranks too, to a file."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        with contextlib.redirect_stderr(file):
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def write_plan(path, plan=STAGES):
    path.write_text(plan.to_json())
    return path


def lines_of(log):
    """The whole lines of a log."""
    text = Path(log).read_text() if Path(log).exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses_of(log):
    """(step, loss) of every line."""
    return [(line["step"], line["loss"]) for line in lines_of(log)]


def ranks_of(launcher):
    """The processes that run ranks, which the launcher's fork server has forked, in rank order."""
    servers = [child for child in children_of(launcher) if "forkserver" in words_of(child)]
    return sorted(rank for server in servers for rank in children_of(server))


def children_of(parent):
    try:
        return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []  # it has ended meanwhile


def words_of(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def wait_until(condition, run, seconds=300):
    """Whether the condition came true before the run ended."""
    end = time.monotonic() + seconds
    while not condition():
        if run.poll() is not None:
            return False
        assert time.monotonic() < end, "the run does not come to where it is to be killed"
        time.sleep(0.001)
    return True


def kill_a_rank(run, kind, step, ranks, before, log, folder, generator):
    """Wait for the moment and kill one of the ranks, new ones since `before`; returns them, [] if the run ended."""
    if not wait_until(lambda: len(set(run.ranks()) - set(before)) == ranks, run):
        return []
    now = sorted(set(run.ranks()) - set(before))
    if kind == "start":
        time.sleep(generator.uniform(0, 1))
    else:
        if not wait_until(lambda: any(line["step"] >= step for line in lines_of(log)), run):
            return []
        if kind == "checkpoint" and not wait_until(lambda: any(folder.glob(".step-*.part")), run):
            return []
        time.sleep(generator.uniform(0, 0.02))
    os.kill(now[generator.randrange(ranks)], signal.SIGKILL)
    return now


def ranks_as(plan):
    """(ranks of a run, the option that asks for them). plan: the path of one; None: two tensor-parallel ranks."""
    return (2, {"tp": 2}) if plan is None else (Plan.from_json(Path(plan).read_text()).world, {"plan": plan})


def killed_run(corpus, folder, *, kinds, seed, steps, plan=None, **options):
    """Run to the end, killed once for each kind; returns (exit code, what it said, its log, kills that hit)."""
    ranks, asked = ranks_as(plan)
    log, checkpoints = folder / "killed.jsonl", folder / "killed"
    words = arguments(
        corpus, steps=steps, checkpoint=checkpoints, checkpoint_every=4, keep=2, step_log=log,
        max_restarts=len(kinds), **asked, **options,
    )  # fmt: skip
    generator = random.Random(seed)
    moments = sorted(generator.randrange(1, steps - 1) for _ in kinds)
    hits = []

    def kill(run):
        now = []
        for kind, step in zip(kinds, moments, strict=True):
            now = kill_a_rank(run, kind, step, ranks, now, log, checkpoints, generator)
            hits.append(bool(now))

    code = Run(words, folder / "stderr").call(kill)
    return code, (folder / "stderr").read_text(), log, sum(hits)


def unbroken_run(corpus, folder, *, steps, plan=None, **options):
    """The log of a run that nobody disturbs."""
    log = folder / "unbroken.jsonl"
    oases_main(arguments(corpus, steps=steps, step_log=log, **ranks_as(plan)[1], **options))
    return log


def seconds_lost(corpus, folder, *, kills, seed, every):
    """Kill a rank `kills` times; returns for each the seconds to the next step that was not done before."""
    log, generator, found = folder / "log.jsonl", random.Random(seed), []
    sizes = {"hidden": 512, "layers": 8, "heads": 8, "sequence": 64, "batch": 4, "steps": 20 * kills + 15}
    words = arguments(
        corpus, dp=2, tp=1, checkpoint=folder / "run", checkpoint_every=every, keep=2, step_log=log,
        max_restarts=kills, **sizes,
    )  # fmt: skip

    def kill(run):
        for number in range(kills):
            moment = 20 * number + generator.randrange(22, 38)
            wait_until(lambda moment=moment: len(lines_of(log)) >= moment, run)
            begin, done = time.monotonic(), lines_of(log)[-1]["step"]
            os.kill(generator.choice(run.ranks()[-2:]), signal.SIGKILL)
            wait_until(lambda done=done: lines_of(log)[-1]["step"] > done, run)
            found.append(time.monotonic() - begin)

    code = Run(words, folder / "stderr").call(kill)
    assert code == 0, (folder / "stderr").read_text()
    return found


def print_seconds(kills, seed):
    for name, place, every in (("disk", None, 20), ("memory", "/dev/shm", 1)):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            folder = Path(directory)
            found = seconds_lost(write_corpus(folder / "text.txt"), folder, kills=kills, seed=seed, every=every)
        print(f"{name}: median {statistics.median(found):.1f} s, worst {max(found):.1f} s of {kills} kills")


def main(words):
    numbers = [int(word) for word in words if not word.startswith("--")]
    if "--seconds" in words:
        print_seconds(*numbers, *(5, 0)[len(numbers) :])
        return
    kills, seed = (*numbers, *(20, 0)[len(numbers) :])
    kinds = [("step", "checkpoint", "step", "checkpoint", "start")[i % 5] for i in range(kills)]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        corpus = write_corpus(folder / "text.txt")
        plan = write_plan(folder / "plan.json") if "--stages" in words else None
        start = time.monotonic()
        code, said, log, hits = killed_run(corpus, folder, kinds=kinds, seed=seed, steps=200, plan=plan)
        seconds = time.monotonic() - start
        print(said)
        same = losses_of(log) == losses_of(unbroken_run(corpus, folder, steps=200, plan=plan))
        print(
            f"{hits} of {kills} kills, exit code {code}, {len(losses_of(log))} steps logged, equal to the bit: {same}"
        )
        print(f"{seconds:.0f} s; kept: {sorted(path.name for path in (folder / 'killed').iterdir())}")


if __name__ == "__main__":
    main(sys.argv[1:])
