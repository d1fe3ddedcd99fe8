"""Checks of sharded models: what `oases check` finds in small transformers models, by each way to shard them.

    python -m reliability.checks [--only PATTERN] [--ways oases,tp_plan,fsdp2,ddp] [--page FILE]

A row per model and way goes to a file of JSON Lines; a run goes on where that file ends. The exit code is 1 where
something differs from one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).resolve().parents[1] / "python_tests"
sys.path.append(str(HELPERS))

from autotp.zoo import ALL, batch, build  # type: ignore[import-not-found]  # noqa: E402
from rich.progress import track  # noqa: E402
from torch import nn  # noqa: E402

from oases.errors import UsageError  # noqa: E402
from oases.terminal import console  # noqa: E402
from oases_check import check  # noqa: E402
from oases_check.ways import WAYS, Way  # noqa: E402

FILE = Path("build") / "checks.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """Unsharded model of this name, and the batch of each step; picklable."""

    name: str

    def __call__(self, number: int | None = None) -> Any:
        """Return the model; with the number of a step its batch."""
        if number is None:
            model: nn.Module = build(self.name)
            return model
        return batch(self.name, seed=1 + number)


def run(name: str, way: str) -> Row:
    """Check a model that is sharded over two ranks."""
    dp, tp = (2, 1) if way in ("ddp", "fsdp2") else (1, 2)
    data: Callable[[int], Any] = Made(name)
    began = time.monotonic()
    try:
        report = check(Made(name), Way(way, dp, tp, data), data, tp=tp, dp=dp)
        found = [f"{each.kind} {each.name}: {each.factor}".strip(": ") for each in report.findings]
        row: Row = {"verdict": "equal" if report.equal else "differs", "found": found}
    except UsageError as error:
        row = {"verdict": "refused", "found": [str(error).strip().splitlines()[-1]]}  # of a traceback the error
    return {"model": name, "way": way, "seconds": round(time.monotonic() - began, 1), **row}


def page(rows: Sequence[Row]) -> Iterable[str]:
    """The page: verdicts by way, and what was found in which models."""
    yield from (
        "# What `oases check` finds",
        "",
        f"{len(ALL)} small models, each trained for two steps in one process and on two ranks: tensor-parallel by",
        "`oases` and `tp_plan` (a model's own), data-parallel by `fsdp2` and `ddp`, as far as they stand below.",
        "`python -m reliability.checks --page FILE` writes this page.",
        "",
        "| way | equal | differs | refused | seconds a check, median |",
        "|---|---|---|---|---|",
    )
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        count = Counter(row["verdict"] for row in mine)
        seconds = sorted(row["seconds"] for row in mine)[len(mine) // 2]
        yield f"| {way} | {count['equal']} | {count['differs']} | {count['refused']} | {seconds:.0f} |"
    yield from ("", "| model | way | | first finding |", "|---|---|---|---|")
    for row in rows:
        if row["verdict"] != "equal":
            text = row["found"][0].replace("|", "/").replace("\n", " ")
            yield f"| {row['model']} | {row['way']} | {row['verdict']}, {len(row['found'])} | {text[:240]} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="NAMES")
    parser.add_argument("--file", type=Path, default=FILE, help="results, and where a run goes on")
    parser.add_argument("--page", type=Path, help="write the page here")
    given = parser.parse_args(arguments)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    done = {(row["model"], row["way"]) for row in rows}
    pairs = [(name, way) for way in given.ways.split(",") for name in ALL if fnmatch(name, given.only)]
    for name, way in track([each for each in pairs if each not in done], "checking", console=console):
        rows.append(run(name, way))
        with given.file.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    if given.page is not None:
        given.page.write_text("\n".join(page(rows)) + "\n")
    count = Counter((row["way"], row["verdict"]) for row in rows)
    console.print(", ".join(f"{way} {verdict}: {number}" for (way, verdict), number in sorted(count.items())))
    return int(any(row["verdict"] == "differs" and row["way"] == "oases" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
