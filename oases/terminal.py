"""Terminal output (rich): console, progress bars, tables and percentages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
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

console.quiet = os.environ.get("RANK", "0") != "0"  # under torchrun every rank runs the command, but only one prints


class _WithNote(Progress):
    """Progress bar with a note on a line below it."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.note)


@contextmanager
def progress(
    what: str, total: int, visible: bool = True, *, done_before: int = 0, every: int = 0, below: bool = False
) -> Iterator[Callable[..., None]]:
    """Progress bar over `total` steps. Yields advance(done, note=""). Without a terminal, prints ten lines instead.

    done_before: steps already done, which took no time here. every: steps between lines without a terminal; 0 for
    ten lines in all. below: show the note on a line below the bar.
    """
    if not visible:
        yield lambda done, note="": None
        return
    if not console.is_terminal:
        every = every or max(1, total // 10)
        start = time.perf_counter()

        def line(done: int, note: str = "") -> None:
            if done % every == 0 or done == total:
                each = (time.perf_counter() - start) / max(1, done - done_before)
                left = f"  {timedelta(seconds=round(each * (total - done)))} left" if below and done < total else ""
                console.print(f"{what} {done}/{total} {note}{left}", soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    if below:
        with _WithNote(*columns[:-1], TextColumn("left"), console=console) as lines:
            task = lines.add_task(what, total=total, completed=done_before)

            def advance(done: int, note: str = "") -> None:
                lines.note = note
                lines.update(task, completed=done)

            yield advance
        return
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total, completed=done_before, note="")
        yield lambda done, note="": bar.update(task, completed=done, note=note)


def percent(share: float | None) -> str:
    """Format a fraction as "93 %"; "-" for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Spinner with elapsed seconds during work of unknown length; without a terminal, one line."""
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        bar.add_task(what, total=None)
        yield


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: int = 1,
    title: str | None = None,
    below: str = "",
) -> Table:
    """Table of results. words: number of leading text columns; the others are right-aligned numbers."""
    made = Table(title=title, title_justify="left", caption=below or None)
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < words else "right", no_wrap=place < words and place == 0)
    for row in rows:
        made.add_row(*row)
    return made
