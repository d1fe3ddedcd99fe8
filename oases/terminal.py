"""Console output: progress bars, tables, percentages (rich)."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, markup=False)  # paths may hold brackets
if not console.is_terminal:
    console = Console(
        highlight=False, markup=False, width=110
    )  # logs have no width; 80 columns would truncate tables

console.quiet = os.environ.get("RANK", "0") != "0"  # under torchrun every rank runs the command; rank 0 prints

_FIRST_LINE_SECONDS, _LINE_SECONDS = 2.0, 5.0
"""Without a terminal: delay of the first line of progress, and the time between lines."""


class _WithNote(Progress):
    """Progress bar with a note, if it has one, on a separate line below it."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            yield Text(self.note)


class _Lines:
    """Thread that prints a line of progress to stderr every few seconds, and none for short work."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._stop = threading.Event()
        self._start = time.perf_counter()
        # A thread: one unit of the work, such as building a model, may take longer than the time between lines.
        self._thread = threading.Thread(target=self._print, name="oases-progress", daemon=True)
        self._thread.start()

    def _print(self) -> None:
        wait = _FIRST_LINE_SECONDS
        while not self._stop.wait(wait):
            elapsed = timedelta(seconds=round(time.perf_counter() - self._start))
            print(f"oases: {self.text} ({elapsed})", file=sys.stderr, flush=True)
            wait = _LINE_SECONDS

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


@contextmanager
def progress(
    what: str, total: int | None, visible: bool = True, *, done_before: int = 0, every: int = 0, log: bool = False
) -> Iterator[Callable[..., None]]:
    """Progress bar over `total` steps; yields advance(done, note=""). Without a terminal, lines on stderr.

    total: None for a spinner with the note alone. done_before: steps done before, excluded from the estimate. log:
    the notes are a log: below the bar on a terminal, else a line on stdout every `every` steps (0: ten lines in all),
    and stderr only until the first step is done.
    """
    if not visible or console.quiet:
        yield lambda done, note="": None
    elif not console.is_terminal:
        with closing(_Lines(what if total is None else f"{what} {done_before}/{total}")) as lines:
            if log and total is not None:
                yield _log_advance(what, total, done_before, every, lines)
            else:
                yield functools.partial(_set_line, lines, what, total)
    else:
        times: tuple[ProgressColumn, ...] = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        times = (SpinnerColumn(), TimeElapsedColumn()) if total is None else (*times, TimeRemainingColumn())
        note = TextColumn("left" if log else "{task.fields[note]}")
        with _WithNote(TextColumn("{task.description}"), *times, note, console=console) as bar:
            task = bar.add_task(what, total=total, completed=done_before, note="")

            def advance(done: int, note: str = "") -> None:
                bar.note = note if log else ""
                bar.update(task, completed=done, note=note)

            yield advance


def _set_line(lines: _Lines, what: str, total: int | None, done: int, note: str = "") -> None:
    lines.text = f"{what}{'' if total is None else f' {done}/{total}'} {note}".rstrip()


def _log_advance(what: str, total: int, done_before: int, every: int, lines: _Lines) -> Callable[..., None]:
    every = every or max(1, total // 10)
    start = time.perf_counter()

    def advance(done: int, note: str = "") -> None:
        lines.close()
        if done % every == 0 or done == total:
            each = (time.perf_counter() - start) / max(1, done - done_before)
            left = f"  {timedelta(seconds=round(each * (total - done)))} left" if done < total else ""
            console.print(f"{what} {done}/{total} {note}{left}", soft_wrap=True)

    return advance


@contextmanager
def working(what: str, visible: bool = True) -> Iterator[Callable[..., None]]:
    """Spinner with elapsed time; yields update(done, total). Without a terminal, lines on stderr."""
    with progress(what, None, visible) as advance:
        yield lambda done, total: advance(0, f"{done}/{total}")


def percent(share: float | None) -> str:
    """Format a fraction as "93 %"; None as "-"."""
    return "-" if share is None else f"{100 * share:.0f} %"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: int = 1,
    title: str | None = None,
    below: str = "",
) -> Table:
    """Table of results. words: number of leading text columns; all others are right-aligned numbers."""
    made = Table(title=title, title_justify="left", caption=below or None)
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < words else "right", no_wrap=place < words and place == 0)
    for row in rows:
        made.add_row(*row)
    return made
