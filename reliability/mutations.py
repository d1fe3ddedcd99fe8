"""Mutation testing: apply each fault of `mutation_list` to a copy of the tree and run the tests that should notice.

    python -m reliability.mutations [--only NAME] [--all] [--json FILE]        (make mutations)

The copy lies in build/mutations and is kept: a mutation of csrc/ compiles one file. Exit code 1 when one survives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from oases.terminal import console, progress
from reliability.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutations"
BUILT = ("build", "oases/_C*.so", "oases/_svm*.so", "oases_staged/_C*.so")
"""Products of a build of the copy, from its root."""
TEST_SECONDS = 300
"""Time limit of a test: a mutation may make ranks wait for ever."""


class Outcome(NamedTuple):
    """caught_by: the test that failed first; None for a mutation that survived."""

    mutation: Mutation
    caught_by: str | None
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", nargs="+", help="names of the mutations to run (default: all)")
    parser.add_argument("--all", action="store_true", help="run the whole of `make test-all` for one that survives")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the outcomes to FILE")
    parser.add_argument(
        "--no-baseline", action="store_true", help="skip the run of the named tests without any mutation"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - {each.name for each in MUTATIONS}
    if unknown:
        parser.error(f"unknown mutations: {', '.join(sorted(unknown))}")
    chosen = [each for each in MUTATIONS if not options.only or each.name in options.only]
    chosen.sort(key=lambda each: (each.compiled, each.file))  # files of csrc/ one after another, at the end
    update_copy(build=any(each.compiled for each in chosen))
    if not options.no_baseline:
        failed = run_tests(sorted({test for each in chosen for test in each.tests}))
        if failed:
            console.print(f"without any mutation fails {failed}")
            return 2
    outcomes = run(chosen, everything=options.all)
    console.print(table(outcomes))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([_as_json(each) for each in outcomes], indent=1) + "\n")
    survived = [each.mutation.name for each in outcomes if each.caught_by is None]
    console.print(f"{len(outcomes) - len(survived)} of {len(outcomes)} mutations caught")
    return 1 if survived else 0


def run(mutations: Sequence[Mutation], *, everything: bool) -> list[Outcome]:
    """Run the named tests of each mutation, and all tests for one that survives them if `everything`."""
    outcomes = []
    with progress("mutations", len(mutations), log=True, every=1) as advance:
        for number, mutation in enumerate(mutations, start=1):
            start = time.perf_counter()
            with mutated(mutation):
                caught_by = run_tests(mutation.tests)
                if caught_by is None and everything:
                    caught_by = run_tests(()) or run_cpp_tests()
            outcomes.append(Outcome(mutation, caught_by, time.perf_counter() - start))
            advance(number, f"{mutation.name}: {'caught by ' + caught_by if caught_by else 'SURVIVED'}")
    return outcomes


def update_copy(*, build: bool) -> None:
    """Make the copy equal to the tree; compile its extensions, or copy those of the tree.

    build: compile, even where the copy has not been compiled before.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for path in sorted(COPY.rglob("*")):
        inside = path.relative_to(COPY)
        kept = inside.parts[0] == "build" or path.suffix == ".so" or "__pycache__" in inside.parts
        if path.is_file() and not kept and str(inside) not in names:
            path.unlink()
    for name in names:
        content, target = (ROOT / name).read_bytes(), COPY / name
        if not target.is_file() or target.read_bytes() != content:  # else it keeps its time, and its object file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    if build or (COPY / "build").is_dir():
        compile_copy()
        return
    for pattern in BUILT[1:]:
        for library in ROOT.glob(pattern):
            shutil.copy2(library, COPY / library.relative_to(ROOT))


def compile_copy() -> None:
    """Compile what has changed in the copy. Raises RuntimeError with the compiler's output."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=COPY, env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the copy does not compile:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Context in which the copy has a mutation. Afterwards files, objects and their times are as before."""
    path = COPY / mutation.file
    times = path.stat()
    original = path.read_text(encoding="utf-8")
    built = COPY.with_name("mutations-built")
    if mutation.compiled:
        shutil.rmtree(built, ignore_errors=True)
        _copy_built(COPY, built)
    try:
        path.write_text(mutation.applied_to(original), encoding="utf-8")
        if mutation.compiled:
            compile_copy()
        yield
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if mutation.compiled:
            _copy_built(built, COPY)


def _copy_built(source: Path, target: Path) -> None:
    for pattern in BUILT:
        for path in source.glob(pattern):
            to = target / path.relative_to(source)
            if path.is_dir():
                shutil.rmtree(to, ignore_errors=True)
                shutil.copytree(path, to)
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)


def run_tests(tests: Sequence[str]) -> str | None:
    """Run tests in the copy until one fails; return its name, or None if all pass. No tests: all of them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-o"]
    command += [
        f"timeout={TEST_SECONDS}",
        "-m",
        "not gpu" if tests else "not gpu and not slow",
    ]  # named ones, also where they are slow
    code, output = _run([*command, *(f"python_tests/{test}" for test in tests)])
    if code == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) python_tests/(.*?)(?: - .*)?$", output, re.MULTILINE)
    if failed is None and code != 1:
        raise RuntimeError(f"pytest ended with {code}:\n{output[-4000:]}")
    return failed[1] if failed else f"exit code {code}"


def run_cpp_tests() -> str | None:
    """Run the C++ tests of the copy; return their name if one fails."""
    code, _ = _run(["sh", "cpp_tests/run.sh", sys.executable, "build/cpp"])
    return "cpp_tests" if code else None


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command in the copy; return its exit code and output. Its process group ends with it."""
    process = subprocess.Popen(
        command, cwd=COPY, env=_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate()
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(COPY)}


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table of mutations and the tests that catch them."""
    found = Table("mutation", "file", "caught by", "s")
    order: Callable[[Outcome], tuple[str, str]] = lambda each: (each.mutation.file, each.mutation.name)  # noqa: E731
    for mutation, caught_by, seconds in sorted(outcomes, key=order):
        found.add_row(mutation.name, mutation.file, caught_by or "SURVIVED", f"{seconds:.0f}")
    return found


def _as_json(outcome: Outcome) -> dict[str, object]:
    mutation = outcome.mutation
    return {
        "name": mutation.name, "file": mutation.file, "fault": mutation.fault,
        "caught_by": outcome.caught_by, "seconds": round(outcome.seconds, 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
