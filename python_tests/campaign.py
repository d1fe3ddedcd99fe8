"""Fault campaign: kills, ends and stops ranks and launchers of training runs, and compares with undisturbed runs.

    python python_tests/campaign.py [--faults N] [--seed N] [--folder FOLDER]         (make campaign)

A session is a run of `oases train` that meets several faults and is started again, as a scheduler would, when its
launcher has ended. Every fault is a row of FOLDER/faults.jsonl; a campaign that was cut off goes on after its last
complete session. Exit code 1 when a session differs from the undisturbed run in a bit of its losses or weights, lost
a step beyond its last checkpoint, took longer than 30 s to the next step, or left a process or a file behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests" / "train")]

from kills import children_of, lines_of, losses_of, words_of, write_corpus  # noqa: E402
from marked_processes import with_mark  # noqa: E402
from rich.table import Table  # noqa: E402

from oases.errors import SAVED_EXIT_CODE  # noqa: E402
from oases.terminal import console, progress  # noqa: E402
from oases.train.checkpoint import retention  # noqa: E402
from oases.train.checkpoint.files import export  # noqa: E402

STEPS = 60
SAVE_EVERY = 2
FAULTS_PER_SESSION = 5
HANG_SECONDS = 30.0
GIVE_UP_SECONDS = 180.0
END_SECONDS = 10.0
"""Time that processes have to end after the run."""
SIZES = (
    "--hidden 32 --layers 4 --heads 4 --sequence 32 --batch 8 --sub-batches 2 --warmup 2 --validation-batches 1 "
    f"--steps {STEPS} --checkpoint-every {SAVE_EVERY} --keep 2 --max-restarts 100 --resume auto"
).split()
SHAPES = {
    "tp 2": "--tp 2",
    "dp 2": "--dp 2 --tp 1 --zero",
    "pp 2": "--pp 2 --tp 1 --micro-batches 2",
    "dp 2, fsdp": "--dp 2 --tp 1 --fsdp",
    "pp 2 x tp 2": "--pp 2 --tp 2 --micro-batches 2 --pipeline-schedule shifted_critical_path",
    "dp 2 x tp 2": "--dp 2 --tp 2",
    "experts 4 over dp 2": "--dp 2 --tp 1 --experts 4 --expert-hidden 48 --placement none",
}
"""Options of the runs by name."""


@dataclass
class Fault:
    """Fault of a session: what, when, and what came of it.

    kind: see FAULTS. moment: "start", "step" or "save". hit_while_saving: whether a checkpoint was incomplete at the
    fault. checkpoint: step of the newest complete one at the fault, next_step: the first step logged after it.
    seconds: from the fault, or the end of a stop, to that step; None: the run had ended before the fault.
    """

    kind: str
    moment: str
    at_step: int
    hit_while_saving: bool = False
    checkpoint: int = 0
    next_step: int = 0
    seconds: float | None = None


@dataclass
class Session:
    """Run and its faults. faults_of_run: what a row of the campaign says was wrong; empty for an equal run."""

    number: int
    shape: str
    faults: list[Fault]
    wrong: list[str] = field(default_factory=list)


class Run:
    """`oases train` in a process of its own, started again after it has ended before its last step."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.folder, self.command = folder, list(command)
        self.log = folder / "steps.jsonl"
        self.checkpoints = folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.mark = f"OASES_CAMPAIGN={folder.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the launcher; its output goes to a file."""
        self.starts += 1
        name, _, value = self.mark.partition("=")
        environment = os.environ | {name: value, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with (self.folder / "output").open("a") as output:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=ROOT
            )

    def ranks(self) -> list[int]:
        """Processes of the ranks, in rank order."""
        servers = [child for child in children_of(self.process.pid) if "forkserver" in words_of(child)]
        return sorted(rank for server in servers for rank in children_of(server))

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".step-*.part"))

    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return max((retention.step_of(path) for path in retention.checkpoints(self.checkpoints)), default=0)

    def keep_alive(self) -> bool:
        """Start the launcher again where it has ended early; False once the run is done."""
        code = self.process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        if code not in (SAVED_EXIT_CODE, -signal.SIGKILL, 130, -signal.SIGTERM):
            raise RuntimeError(f"the launcher ended with exit code {code}")
        self.start()
        return True

    def wait_for(self, condition: Callable[[], bool], what: str) -> bool:
        """Wait for a condition; False where the run ends before. Raises TimeoutError."""
        end = time.monotonic() + GIVE_UP_SECONDS
        while not condition():
            if not self.keep_alive():
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come within {GIVE_UP_SECONDS:.0f} s")
            time.sleep(0.002)
        return True

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def kill(run: Run, generator: random.Random) -> None:
    """Kill a rank."""
    _send(generator.choice(run.ranks() or [run.process.pid]), signal.SIGKILL)


def kill_all(run: Run, generator: random.Random) -> None:
    """Kill all ranks at once."""
    for rank in run.ranks():
        _send(rank, signal.SIGKILL)


def kill_launcher(run: Run, generator: random.Random) -> None:
    """Kill the launcher."""
    _send(run.process.pid, signal.SIGKILL)
    run.process.wait()


def terminate(run: Run, generator: random.Random) -> None:
    """End the launcher in order: the ranks save."""
    _send(run.process.pid, signal.SIGTERM)
    run.process.wait()


def stop(run: Run, generator: random.Random) -> None:
    """Stop a rank for a while."""
    ranks = run.ranks()
    if ranks:
        rank = generator.choice(ranks)
        _send(rank, signal.SIGSTOP)
        time.sleep(generator.uniform(0.5, 3))
        _send(rank, signal.SIGCONT)


FAULTS = {"kill": kill, "kill all": kill_all, "kill launcher": kill_launcher, "terminate": terminate, "stop": stop}
KINDS = ("kill", "kill", "kill all", "kill launcher", "terminate", "stop")
MOMENTS = ("save", "step", "save", "start", "step")


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile, which the run shows
        os.kill(process, number)


def suffer(run: Run, fault: Fault, generator: random.Random) -> bool:
    """Apply a fault at its moment and wait for the next step; False where the run ends before."""
    if fault.moment == "start":
        begun = run.wait_for(lambda: bool(run.ranks()), "the start of ranks")
        time.sleep(generator.uniform(0, 2))
    else:
        begun = run.wait_for(lambda: _last_step(run) >= fault.at_step, f"step {fault.at_step}")
        if begun and fault.moment == "save":
            begun = run.wait_for(run.saving, "the next checkpoint")
        time.sleep(generator.uniform(0, 0.02))
    if not begun or run.process.poll() is not None:
        return False
    ranks = set(run.ranks())
    fault.hit_while_saving, fault.checkpoint = run.saving(), run.newest()
    FAULTS[fault.kind](run, generator)
    struck = time.monotonic()
    if fault.kind != "stop" and not run.wait_for(lambda: bool(run.ranks()) and not ranks & set(run.ranks()), "ranks"):
        return False
    seen = len(lines_of(run.log))

    def logged() -> bool:
        nonlocal seen
        before, seen = seen, len(lines_of(run.log))
        return seen > before

    if not run.wait_for(logged, "the next step"):
        return False
    fault.seconds, fault.next_step = time.monotonic() - struck, seen
    return True


def _last_step(run: Run) -> int:
    lines = lines_of(run.log)
    return int(lines[-1]["step"]) if lines else 0


def weights(folder: Path) -> str:
    """SHA-256 of the weights of the newest checkpoint in a folder."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        export(folder, file)
        return hashlib.sha256(file.read_bytes()).hexdigest()


def command_of(shape: str, corpus: Path, folder: Path) -> list[str]:
    """Command line of a run."""
    files = ["--data", str(corpus), "--checkpoint", str(folder / "run"), "--step-log", str(folder / "steps.jsonl")]
    return [sys.executable, "-m", "oases", "train", *SIZES, *SHAPES[shape].split(), *files]


def undisturbed(shape: str, corpus: Path, folder: Path) -> tuple[list[tuple[int, float]], str]:
    """(losses, digest of the weights) of a run without faults, made once per shape."""
    place = folder / "undisturbed" / shape.replace(" ", "-")
    if not (place / "done").is_file():
        shutil.rmtree(place, ignore_errors=True)
        run = Run(command_of(shape, corpus, place), place)
        if run.process.wait() != 0:
            raise RuntimeError(f"the undisturbed run failed; see {place / 'output'}")
        (place / "done").touch()
    return losses_of(place / "steps.jsonl"), weights(place / "run")


def play(number: int, seed: int, corpus: Path, folder: Path) -> Session:
    """Run a session and judge it."""
    generator = random.Random(f"{seed}/{number}")
    shape = list(SHAPES)[number % len(SHAPES)]
    steps = sorted(generator.sample(range(2, STEPS - 6), FAULTS_PER_SESSION))
    faults = [Fault(generator.choice(KINDS), generator.choice(MOMENTS), step) for step in steps]
    losses, digest = undisturbed(shape, corpus, folder)
    place = folder / f"session-{number:04d}"
    shutil.rmtree(place, ignore_errors=True)
    session = Session(number, shape, faults)
    run = Run(command_of(shape, corpus, place), place)
    try:
        for fault in faults:
            suffer(run, fault, generator)
        run.wait_for(lambda: False, "the end of the run")
    except (TimeoutError, RuntimeError) as error:
        session.wrong.append(str(error))
    finally:
        run.end()
    session.wrong += judge(run, session.faults, losses, digest)
    if not session.wrong:
        shutil.rmtree(place)
    return session


def judge(run: Run, faults: Sequence[Fault], losses: list[tuple[int, float]], digest: str) -> list[str]:
    """Faults of a session's end, in sentences; none for a good one."""
    wrong = []
    if losses_of(run.log) != losses:
        wrong.append("the losses differ from those of the undisturbed run")
    elif weights(run.checkpoints) != digest:
        wrong.append("the weights differ from those of the undisturbed run")
    for fault in faults:
        if fault.seconds is not None and fault.seconds > HANG_SECONDS:
            wrong.append(f"{fault.seconds:.0f} s from {fault.kind} to the next step")
        if fault.seconds is not None and fault.next_step <= fault.checkpoint:
            wrong.append(f"step {fault.next_step} was repeated although checkpoint {fault.checkpoint} was complete")
    end = time.monotonic() + END_SECONDS
    while (left := with_mark(run.mark)) and time.monotonic() < end:
        time.sleep(0.1)
    left += [path.name for path in run.checkpoints.glob(".*")]
    left += [name for name in os.listdir(run.temporary) if not name.startswith("torchinductor_")]  # torch's cache
    if left:
        wrong.append(f"left behind: {', '.join(left)}")
    return wrong


def table(sessions: Sequence[Session]) -> Table:
    """Table of seconds from a fault to the next step, by kind."""
    made = Table(title="seconds from a fault to the next step")
    for title in ("fault", "number", "while saving", "median", "worst"):
        made.add_column(title, justify="left" if title == "fault" else "right")
    hit = [fault for session in sessions for fault in session.faults if fault.seconds is not None]
    for kind in [*FAULTS, "all"]:
        rows = [fault for fault in hit if kind in (fault.kind, "all")]
        seconds = [fault.seconds or 0.0 for fault in rows]
        if rows:
            saving = sum(fault.hit_while_saving for fault in rows)
            made.add_row(
                kind, f"{len(rows)}", f"{saving}", f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
            )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=300, metavar="N", help="faults that hit a run (default: 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of kinds and moments (default: 0)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "campaign", help="results, kept to go on from"
    )
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(options.folder / "text.txt")
    rows = options.folder / f"faults-{options.seed}.jsonl"
    sessions = [
        Session(each["number"], each["shape"], [Fault(**fault) for fault in each["faults"]], each["wrong"])
        for each in lines_of(rows)
    ]
    with progress("faults", options.faults, log=True, every=1) as advance:
        while (done := _hits(sessions)) < options.faults:
            session = play(len(sessions), options.seed, corpus, options.folder)
            sessions.append(session)
            with rows.open("a") as file:
                file.write(json.dumps(asdict(session)) + "\n")
            for wrong in session.wrong:
                console.print(f"session {session.number} ({session.shape}): {wrong}", soft_wrap=True)
            advance(min(options.faults, done + _hits([session])), session.shape)
    console.print(table(sessions))
    bad = sum(bool(session.wrong) for session in sessions)
    console.print(f"{_hits(sessions)} faults in {len(sessions)} sessions, {bad} of which went wrong")
    return 1 if bad else 0


def _hits(sessions: Sequence[Session]) -> int:
    return sum(fault.seconds is not None for session in sessions for fault in session.faults)


if __name__ == "__main__":
    sys.exit(main())
