"""The grid of docs/benchmarks: schedules, "auto" and peers over links, recomputation and shapes, cell by cell.

    python benchmarks/overlap.py --out results            # needs: pip install -r requirements-peers.txt
    python benchmarks/overlap.py --out results --tables   # the tables again, from the results that are there

Every cell is one `oases bench overlap` with its JSON file in the folder; cells that are there already are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = {"3 x 768": (4, 256, 768, 3), "6 x 512": (8, 128, 512, 6)}
"""Batch, sequence, hidden, layers."""
SCHEDULES = ("sync", "fine_grained", "sub_pipelined", "cross_pass", "oases", "oases@2", "auto")
OURS = ("oases", "oases@2", "auto")
BASELINES = {"torch": "torch TP", "megatron": "Megatron-Core", "domino": "Domino"}
_ALONE = ("compute", "communication", "communication_cpu", "ideal")
Cell = tuple[str, str, str]
"""Link, shape, recomputation."""


def cells(links: list[str]) -> list[Cell]:
    """All cells of the grid."""
    return list(itertools.product(links, SHAPES, ("none", "full")))


def path_of(cell: Cell, folder: Path) -> Path:
    """Where a cell's result is kept."""
    return folder / ("-".join(cell).replace(" ", "") + ".json")


def measure(cell: Cell, options: argparse.Namespace) -> None:
    """Run one cell; its result goes to its file."""
    link, shape, recompute = cell
    batch, sequence, hidden, layers = SHAPES[shape]
    given = {
        "link": link, "tp": 2, "batch": batch, "sequence": sequence, "hidden": hidden, "layers": layers,
        "recompute": recompute, "schedules": ",".join(SCHEDULES), "peers": options.peers,
        "iterations": options.iterations, "json": path_of(cell, options.out),
    }  # fmt: skip
    command = [sys.executable, "-m", "oases", "bench", "overlap"]
    subprocess.run(command + [f"--{key}={value}" for key, value in given.items()], check=True)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def milliseconds(result: dict[str, Any], name: str) -> str:
    """A contestant's step; "cannot" for a peer that did not run."""
    row = result["schedules"].get(name) or result["peers"].get(name)
    return f"{1e3 * row['step_seconds']:.0f}" if row else "cannot"


def share(value: float | None) -> str:
    """A share with two digits; null where there was nothing to hide."""
    return "-" if value is None else f"{value:.2f}"


def tables(results: dict[Cell, dict[str, Any]]) -> str:
    """All tables of the report."""
    against: list[list[str]] = []
    ablation: list[list[str]] = []
    shares: list[list[str]] = []
    ratios: dict[str, list[float]] = {}
    for cell, result in results.items():
        schedules, peers = result["schedules"], result["peers"]
        best = min(OURS, key=lambda name: schedules[name]["step_seconds"])
        mine = schedules[best]["step_seconds"]
        default = schedules["oases"]["step_seconds"]
        line = [*cell, *(milliseconds(result, name) for name in (*BASELINES, *OURS))]
        if peers:
            fastest = min(row["step_seconds"] for row in peers.values())
            ratios.setdefault(cell[0], []).append(fastest / mine)
            ideal = result["ideal_seconds"]
            line += [f"{fastest / default:.2f}", f"**{fastest / mine:.2f}**", f"{fastest / ideal:.2f}"]
            megatron = peers["megatron"]["step_seconds"] if "megatron" in peers else math.nan
            line += [f"{megatron / mine:.2f}", f"{megatron / ideal:.2f}"]
        against.append(line)
        ablation.append([*cell, *(milliseconds(result, name) for name in SCHEDULES[:6])])
        auto = schedules["auto"]
        shares.append(
            [
                *cell,
                *(f"{1e3 * result[f'{key}_seconds']:.0f}" for key in _ALONE),
                *(share(schedules[name][key]) for key in ("of_ideal", "hidden") for name in OURS[:2]),
                auto["chosen"], f"{auto['slower_than_sync']:.2f}",
            ]
        )  # fmt: skip
    place = ["link", "layers x hidden", "recompute"]
    text = "Milliseconds of a step.\n\n"
    text += table(
        [
            *place,
            *BASELINES.values(),
            *OURS,
            "oases over fastest peer",
            "best of ours",
            "ideal",
            "best over Megatron-Core",
            "ideal",
        ],
        against,
    )
    for link, found in ratios.items():
        text += f"\nGeometric mean at {link}: {mean(found):.2f}"
    both = [ratio for link, found in ratios.items() if link != "2gbit" for ratio in found]
    if both:
        text += f"\nGeometric mean at 500mbit and 1gbit: {mean(both):.2f}\n"
    text += "\n" + table([*place, *SCHEDULES[:6]], ablation) + "\n"
    text += table(
        [*place, "compute", "communication", "its CPU time", "ideal", "of ideal", "@2", "hidden", "@2", "auto chose",
         "auto / sync"], shares,
    )  # fmt: skip
    return text + "\n" + memory_table(results)


def summary(results: dict[Cell, dict[str, Any]]) -> str:
    """README's table: per link, geometric mean and range over shapes of the speed-up of `oases`."""
    header = [
        "link", "over synchronous TP", "over Domino, no recomputation", "over the fastest peer, full recomputation",
        "share of the ideal",
    ]  # fmt: skip
    links = list(dict.fromkeys(link for link, _, _ in results))
    rows = []
    for link in [*links, None]:
        sync, domino, recomputed, ideal = [], [], [], []
        for (of, _, recompute), result in results.items():
            if link not in (of, None):
                continue
            ours = result["schedules"]["oases"]
            sync.append(ours["speedup"])
            ideal.append(ours["of_ideal"])
            times = {name: row["step_seconds"] / ours["step_seconds"] for name, row in result["peers"].items() if row}
            if recompute == "none":
                domino.append(times["domino"])
            else:
                recomputed.append(min(times.values()))
        ratios = [f"**{mean(found):.2f} x** ({spread(found)})" for found in (sync, domino, recomputed)]
        rows.append([link or "all", *ratios, f"{spread([100 * each for each in ideal], '.0f')} %"])
    return table(header, rows)


def mean(ratios: list[float]) -> float:
    """Geometric mean."""
    return math.prod(ratios) ** (1 / len(ratios))


def spread(values: list[float], digits: str = ".2f") -> str:
    """Smallest and largest value."""
    return f"{min(values):{digits}} to {max(values):{digits}}"


def memory_table(results: dict[Cell, dict[str, Any]]) -> str:
    """Table of memory per schedule, which does not depend on the link."""
    rows = {}
    for (_, shape, recompute), result in results.items():
        for name in SCHEDULES[:6]:
            row = result["schedules"][name]
            formula = row["formula_units"]
            kept, peak = f"{row['kept_units']:.2f}", f"{row['peak_bytes'] / 1e6:.0f} MB"
            rows[shape, recompute, name] = [kept, "-" if formula is None else str(formula), peak]
    return table(
        ["layers x hidden", "recompute", "schedule", "kept, units per layer", "formula", "peak"],
        [[*key, *row] for key, row in rows.items()],
    )


def main() -> None:
    """Measure what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--links", default="500mbit,1gbit,2gbit", help="links, comma-separated")
    parser.add_argument("--peers", default="all", help="as in `oases bench overlap`")
    parser.add_argument("--iterations", type=int, default=7, metavar="N", help="interleaved repetitions per cell")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    grid = cells(options.links.split(","))
    for cell in grid:
        if not options.tables and not path_of(cell, options.out).exists():
            measure(cell, options)
    found = {
        cell: json.loads(path_of(cell, options.out).read_text())
        for cell in grid
        if path_of(cell, options.out).exists()
    }
    print(tables(found))
    if all(result["peers"] for result in found.values()):
        print(summary(found))


if __name__ == "__main__":
    main()
