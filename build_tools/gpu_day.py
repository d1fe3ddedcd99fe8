"""All that a GPU is needed for, in one command: `make gpu-day`.

    python -m build_tools.gpu_day --check    whether there is a GPU: exit code 2 and a sentence, where there is none
    python -m build_tools.gpu_day            run the steps that have not succeeded at this commit; write the report

A step's output is in build/gpu-day/COMMIT/STEP.log, its outcome beside it, so a run that was cut off goes on where it
stopped; a step that failed runs again. The steps take twenty minutes at most: each has a share, and what one leaves
over the next may use. The report is report.md there. Exit code 1 where a step has failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from build_tools import objects

FEW = " or ".join(f"({each})" for each in (
    "test_against_float64 and rms", "test_half_precision and bfloat16", "test_memory_that_is_not_aligned",
    "test_bias_gelu and tanh and bfloat16", "test_swiglu and bfloat16",
    "test_rows_are_grouped and int64 and bfloat16", "test_round_trip and float32 and bfloat16",
    "test_pack_and_unpack and 1000 and bfloat16", "test_encode_and_decode",
    "test_quantize and not test_bad_arguments",
))  # fmt: skip
"""Tests of kernels under a sanitizer, which slows them down a hundredfold: every plan of a kernel, in one dtype."""
SHOWN = 15
"""Lines of a step's output in the report."""


@dataclass(frozen=True)
class Step:
    """A command, whose name is that of its log. minutes: its share. needs: a program that may be missing."""

    name: str
    command: tuple[str, ...]
    minutes: float
    needs: str = ""


@dataclass(frozen=True)
class Outcome:
    """End of a step: its exit code, or None where it did not end in time."""

    code: int | None
    seconds: float


def steps(folder: Path) -> list[Step]:
    """The steps, in their order: what other steps rest on comes first."""
    python = (sys.executable, "-m")
    gpu_tests = (*python, "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    few = ("--maxfail=1", "-k", FEW, "python_tests/kernels")
    stack = ("--hidden", "2048", "--sequence", "1024", "--dtype", "bfloat16", "--device", "cuda")
    ranks = ("env", "OASES_TEST_DEVICE=cuda", *python, "pytest", "-p", "no:cacheprovider", "-m", "not slow")
    return [
        Step("tests", gpu_tests, 3),
        *(
            Step(tool, ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *gpu_tests, *few), 1.5,
                 needs="compute-sanitizer")
            for tool in ("memcheck", "racecheck")
        ),
        Step("bench", (*python, "oases", "bench", "gpu", "--report", str(folder / "bench.md"), "--json",
                       str(folder / "bench.json")), 3),
        Step("ranks", (*ranks, "python_tests/virtual_device"), 3),
        Step("profile", (*python, "oases", "profile", "--tp", "1", "--backend", "nccl", *stack, "--json",
                         str(folder / "profile.json")), 1.5),
        *over_nccl(folder),
    ]  # fmt: skip


def over_nccl(folder: Path) -> list[Step]:
    """Steps of ranks that share the GPU over NCCL (2.30 or later; LD_PRELOAD=libnccl.so.2 where torch's is older).

    With MPS each rank has a part of the multiprocessors; without it ranks would take turns. One and two channels are
    links like PCIe 4 and 5.
    """
    mps = 'nvidia-cuda-mps-control -d; "$@"; code=$?; echo quit | nvidia-cuda-mps-control; exit $code'
    overlap = (
        sys.executable, "-m", "oases", "bench", "overlap", "--tp", "2", "--device", "cuda", "--backend", "nccl",
        "--peers", "all", "--layers", "4", "--hidden", "4096", "--heads", "32", "--batch", "4", "--sequence", "2048",
        "--dtype", "bfloat16", "--schedules", "sync,oases@2,oases@4,auto", "--iterations", "7",
    )  # fmt: skip

    def step(name: str, minutes: float, percentage: int, command: Sequence[str], *more: str) -> Step:
        given = ("NCCL_MULTI_RANK_GPU_ENABLE=1", "CUDA_MODULE_LOADING=EAGER", "CUDA_DEVICE_MAX_CONNECTIONS=32")
        share = f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}"
        started = ("env", *given, share, *more, "sh", "-c", mps, "sh", *command)
        return Step(name, started, minutes, needs="nvidia-cuda-mps-control")

    def setups(ranks: int) -> tuple[str, ...]:
        return (
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "reliability.setups",
            "--backend", "nccl", "--json", str(folder / f"setups-{ranks}.json"),
        )  # fmt: skip

    return [
        step("setups-2", 2, 50, setups(2)),
        step("setups-4", 2, 25, setups(4), "NCCL_MAX_CTAS=4"),
        *(
            step(f"overlap-{channels}", 0.8, 50, (*overlap, "--json", str(folder / f"overlap-{channels}.json")),
                 f"NCCL_MAX_NCHANNELS={channels}")
            for channels in (1, 2, 32)
        ),
    ]  # fmt: skip


def run(step: Step, folder: Path, seconds: float) -> Outcome | None:
    """The outcome of a step, which runs for so long at most; that of before, if it has succeeded; None where its
    program is missing.
    """
    said = folder / f"{step.name}.json"
    if said.exists() and (before := Outcome(**json.loads(said.read_text()))).code == 0:
        objects.report(f"gpu-day: {step.name} has succeeded before")
        return before
    if step.needs and shutil.which(step.needs) is None:
        objects.report(f"gpu-day: {step.name} is left out: {step.needs} is not installed")
        return None
    objects.report(f"gpu-day: {step.name}")
    began = time.monotonic()
    with (folder / f"{step.name}.log").open("w") as log:
        try:
            code: int | None = subprocess.run(
                step.command, stdout=log, stderr=subprocess.STDOUT, cwd=objects.ROOT, timeout=seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    outcome = Outcome(code, time.monotonic() - began)
    said.write_text(json.dumps(asdict(outcome)))
    return outcome


def markdown(outcomes: Sequence[tuple[Step, Outcome | None]], folder: Path, machine: str) -> str:
    """The report: a row per step, the benchmark's own report, and the ends of the logs of steps that failed."""
    lines = [
        f"# One GPU, all of it, {datetime.date.today().isoformat()}",
        "",
        f"{machine}, commit {folder.name}.",
        "",
    ]
    lines += ["| step | outcome | seconds |", "|---|---|---|"]
    failed = []
    for step, outcome in outcomes:
        if outcome is None:
            lines.append(f"| {step.name} | not run: {step.needs} is not installed | |")
            continue
        text = {0: "passed", None: "stopped, its time was over"}.get(outcome.code, f"exit {outcome.code}")
        last = (_lines(step, folder) or [""])[-1]
        lines.append(f"| {step.name} | {text}: {last.strip(' =').replace('|', '/')} | {outcome.seconds:.0f} |")
        if outcome.code != 0:
            failed.append(step)
    if (folder / "bench.md").exists():
        lines += ["", (folder / "bench.md").read_text().replace("# ", "## ", 1).rstrip()]
    for step in failed:
        lines += ["", f"## {step.name} failed", "", "```", *_lines(step, folder)[-SHOWN:], "```"]
    return "\n".join(lines) + "\n"


def _lines(step: Step, folder: Path) -> list[str]:
    return [line for line in (folder / f"{step.name}.log").read_text(errors="replace").splitlines() if line.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="gpu-day", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see whether there is a GPU")
    asked = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(
            "gpu-day: this torch sees no GPU; run it where there is one, with a CUDA build of torch", file=sys.stderr
        )
        return 2
    if asked.check:
        return 0
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=objects.ROOT, capture_output=True, text=True, check=True
    )
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return run_all(objects.BUILD / "gpu-day" / commit.stdout.strip(), machine)


def run_all(folder: Path, machine: str) -> int:
    """Run the steps, with logs in `folder`, and write the report; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes, end = [], time.monotonic()
    for step in steps(folder):
        end += 60 * step.minutes
        outcomes.append((step, run(step, folder, end - time.monotonic())))
    report = folder / "report.md"
    report.write_text(markdown(outcomes, folder, machine))
    objects.report(f"gpu-day: {report}")
    return int(any(outcome is not None and outcome.code != 0 for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
