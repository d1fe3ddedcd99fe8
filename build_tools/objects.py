"""Compile object files in parallel, and only those whose command or included files have changed.

$MAX_JOBS: compilers at a time, one per core by default. Progress goes to stderr, a line per object; where a terminal
cannot see stderr, as under pip, also to the terminal (see `report`).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


class CompileError(Exception):
    """An object file does not compile; the message has the first error and the path of the log."""

    def __init__(self, message: str, unit: Unit, output: str) -> None:
        super().__init__(message)
        self.unit = unit
        self.output = output


@dataclass(frozen=True)
class Unit:
    """Object file `target`, compiled from `source` by a command that takes -MMD, -c and -o."""

    source: Path
    target: Path
    compiler: tuple[str, ...]
    """The compiler and its options."""
    heading: str = ""
    """Text that opens the log; the object is compiled again where it has changed."""

    @property
    def command(self) -> list[str]:
        """The whole command."""
        depends = ["-MMD", "-MF", str(self.target.with_suffix(".d"))]
        return [*self.compiler, *depends, "-c", str(self.source), "-o", str(self.target)]

    @property
    def log(self) -> Path:
        """The command and its output."""
        return self.target.with_suffix(".log")

    @property
    def first_line(self) -> str:
        """First line of the log."""
        return f"{self.heading}{shlex.join(self.command)}"

    def up_to_date(self) -> bool:
        """Whether the object is newer than every file it includes, and the command is the same."""
        dependencies = self.target.with_suffix(".d")
        if not (self.target.exists() and self.log.exists() and dependencies.exists()):
            return False
        if self.log.read_text().partition("\n")[0] != self.first_line:
            return False
        # "x.o : a.cu \\\n b.h" of nvcc, "x.o: a.cpp" of g++; no path of a repository has a blank in it.
        names = dependencies.read_text().partition(":")[2].replace("\\\n", " ").split()
        built = self.target.stat().st_mtime
        return bool(names) and all(
            (ROOT / name).exists() and (ROOT / name).stat().st_mtime <= built for name in names
        )

    def compile(self) -> None:
        """Run the compiler. Raises CompileError."""
        self.target.unlink(missing_ok=True)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        began = time.time()
        result = subprocess.run(self.command, capture_output=True, text=True, check=False, cwd=ROOT)
        output = result.stdout + result.stderr
        self.log.write_text(f"{self.first_line}\n{output}")
        if result.returncode:
            first = next((line for line in output.splitlines() if "error" in line), f"exit code {result.returncode}")
            compiler = Path(self.compiler[0]).name
            message = f"{compiler} failed on {_shown(self.source)}: {first.strip()}; all of it is in {self.log}"
            raise CompileError(message, self, output)
        os.utime(self.target, (began, began))  # a file saved during the compilation is newer than the object


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def report(line: str) -> None:
    """Print a line of progress.

    pip hides the stderr of a build unless it runs with -v. The build backend therefore sets $OASES_BUILD_TTY, and the
    line also goes to the controlling terminal, if there is one.
    """
    print(line, file=sys.stderr, flush=True)
    if os.environ.get("OASES_BUILD_TTY") and not sys.stderr.isatty():
        try:
            with open("/dev/tty", "w") as terminal:
                print(f"\r{line}", file=terminal)
        except OSError:  # no terminal, as in CI; stderr has the line
            pass


def compile_units(units: Sequence[Unit]) -> None:
    """Compile the units that are not up to date, in their order; put those that take longest first.

    Raises CompileError for the first that fails; those not begun are given up.
    """
    waiting = [unit for unit in units if not unit.up_to_date()]
    if not waiting:
        return
    jobs = max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
    report(f"oases: compiling {len(waiting)} files, {min(jobs, len(waiting))} at a time")
    began = time.monotonic()
    with ThreadPoolExecutor(jobs) as workers:
        running = {workers.submit(unit.compile): unit for unit in waiting}
        try:
            for count, done in enumerate(as_completed(running), 1):
                done.result()
                seconds = time.monotonic() - began
                report(f"oases: [{count}/{len(waiting)}] {_shown(running[done].source)} after {seconds:.0f} s")
        finally:
            workers.shutdown(cancel_futures=True)
