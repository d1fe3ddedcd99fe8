"""Speed of two trees: the benchmarks of `oases bench`, run by turns in each, and the ratio of their medians.

    python reliability/speed.py BASE [--rounds N] [--bench "overlap --ratio 1"]... [--json FILE]

BASE: another checkout with a compiled oases. What a benchmark measures in seconds is compared by its place in the
result; a place that one tree lacks is named. A ratio above 1: this tree is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from oases.terminal import console

HERE = Path(__file__).resolve().parents[1]
BENCHES = (
    "host --layers 12 --iterations 5",
    "overlap --ratio 1 --iterations 5 --schedules sync,oases@2,cross_pass@2,auto",
    "overlap --ratio 1 --iterations 5 --recompute full --schedules sync,oases@2",
    "moe --tp 2 --link 1gbit --iterations 3 --methods none,faster_moe,prophet",
    "pipeline --tp 2 --link 1gbit --iterations 3",
)
"""Commands that are run where none is given; each takes less than two minutes on two cores."""
Place = tuple[str, ...]


def seconds_in(found: Any, at: Place = ()) -> Iterator[tuple[Place, float]]:
    """Numbers of a benchmark's result that are seconds, with their place; its configuration is none of it."""
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, value in items:
        place = (*at, str(name))
        if name == "config" and not at:
            continue
        if isinstance(value, dict | list):
            yield from seconds_in(value, place)
        elif isinstance(value, float) and any(key.endswith("seconds") for key in place):
            yield place, value


def measure(tree: Path, bench: str) -> dict[Place, float]:
    """Run a benchmark in a tree. SystemExit, with its output, where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "oases", "bench", *bench.split(), "--json", str(file)],
            cwd=tree, env=os.environ | {"PYTHONPATH": str(tree), "OASES_CACHE": str(Path(folder) / "cache.json")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{tree}: oases bench {bench} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return dict(seconds_in(json.loads(file.read_text())))


def compare(base: Path, benches: list[str], rounds: int) -> list[dict[str, Any]]:
    """Run every benchmark by turns in both trees; the first tree of a round changes with each."""
    rows = []
    turns = [(bench, number) for bench in benches for number in range(rounds)]
    runs: dict[str, dict[Path, list[dict[Place, float]]]] = {bench: {base: [], HERE: []} for bench in benches}
    for bench, number in track(turns, description="benchmarks", console=console):
        for tree in (base, HERE) if number % 2 else (HERE, base):
            runs[bench][tree].append(measure(tree, bench))
    for bench, found in runs.items():
        places = dict.fromkeys(place for of_tree in found.values() for run in of_tree for place in run)
        for place in places:
            seen = {tree: [run[place] for run in of_tree if place in run] for tree, of_tree in found.items()}
            before, now = (statistics.median(seen[tree]) if seen[tree] else None for tree in (base, HERE))
            ratio = now / before if before and now is not None else None
            rows.append({"bench": bench, "place": " ".join(place), "before": before, "now": now, "ratio": ratio})
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare the speed of this tree with another's.")
    parser.add_argument("base", type=Path, help="the other checkout, with a compiled oases")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each benchmark in each tree (default: 5)")
    parser.add_argument("--bench", action="append", help="a benchmark with its options, instead of the usual ones")
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    given = parser.parse_args()
    base = given.base.resolve()
    if not any((base / "oases").glob("_C*.so")):
        parser.error(f"{given.base} holds no compiled oases; run make build there")
    rows = compare(base, given.bench or list(BENCHES), given.rounds)
    table = Table("benchmark", "what", "before, ms", "now, ms", "now / before")
    for row in rows:
        shown = ["-" if row[name] is None else f"{row[name] * 1e3:.4g}" for name in ("before", "now")]
        ratio = "in one tree alone" if row["ratio"] is None else f"{row['ratio']:.3f}"
        table.add_row(row["bench"], row["place"], *shown, ratio)
    console.print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
