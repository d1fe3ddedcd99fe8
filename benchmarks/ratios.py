"""Tables of docs/benchmarks/ratios.md and second-model.md: schedules and peers by communication over compute.

    python benchmarks/ratios.py [--model second] [--out FOLDER]    # measures what is not there, prints the tables
    python benchmarks/ratios.py [--model second] --tables          # prints those of the runs that are there

Every cell is one `oases bench overlap` with its JSON file in the folder. The peers need: pip install --group peers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PAGES = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
RATIOS, KINDS = (4, 2, 1, 0.5), {"kept": "none", "recomputed": "full"}
PEERS = {"torch": "torch TP", "megatron": "Megatron-Core", "domino": "Domino"}
SUMMARY = [
    "communication / compute", "recompute", "over synchronous TP", "over the fastest peer", "share of the ideal",
    "int8 over the fastest peer",
]  # fmt: skip
FRONT = (2, 1)
Result = dict[str, Any]


class Model(NamedTuple):
    """Shape and schedules of a page. folder: of its JSON files."""

    layers: int
    hidden: int
    batch: int
    sequence: int
    schedules: tuple[str, ...]
    folder: Path


MODELS = {
    "first": Model(3, 768, 4, 256, ("sync", "oases@2", "auto", "oases:int8"), PAGES / "ratios"),
    "second": Model(6, 512, 8, 128, ("sync", "oases@2", "cross_pass@2", "auto"), PAGES / "second-model"),
}


def measure(model: Model, folder: Path, kind: str, ratio: float) -> None:
    """Run a cell; its result goes to its file."""
    options = {
        "layers": model.layers, "hidden": model.hidden, "batch": model.batch, "sequence": model.sequence,
        "ratio": ratio, "recompute": KINDS[kind], "schedules": ",".join(model.schedules), "peers": "all",
        "iterations": 5, "json": folder / f"{kind}-{ratio}.json",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "oases",
        "bench",
        "overlap",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    subprocess.run(command, check=True)


def results(folder: Path) -> list[Result]:
    """Results of a folder: without recomputation first, from the largest ratio to the least."""
    found = [json.loads(path.read_text())["ratios"][0] for kind in KINDS for path in folder.glob(f"{kind}-*.json")]
    return sorted(
        found, key=lambda each: (each["config"]["recompute"] != "none", -each["communication_over_compute"])
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "".join("| " + " | ".join(line) + " |\n" for line in (header, ["---"] * len(header), *rows))


def summary(found: list[Result]) -> str:
    """Table of the page: speed-ups of `auto`, and of int8 all-reduces."""
    return table(SUMMARY, _speed_ups(found))


def front(found: list[Result]) -> str:
    """Table of README: the rows of the summary that were asked for at these ratios, without int8."""
    rows = _speed_ups([each for each in found if each["ratio"] in FRONT])
    return table(SUMMARY[:-1], [row[:-1] for row in rows])


def _speed_ups(found: list[Result]) -> list[list[str]]:
    rows = []
    for each in found:
        step, peer = {name: row["step_seconds"] for name, row in each["schedules"].items()}, fastest_peer(each)
        rows.append([
            f"{each['communication_over_compute']:.2f}", each["config"]["recompute"],
            f"{step['sync'] / step['auto']:.2f} x", f"**{peer / step['auto']:.2f} x**",
            f"{100 * each['schedules']['auto']['of_ideal']:.0f} %", f"{peer / step['oases:int8']:.2f} x",
        ])  # fmt: skip
    return rows


def steps(found: list[Result], schedules: tuple[str, ...]) -> str:
    """Table of milliseconds of a step."""
    rows = []
    for each in found:
        auto = each["schedules"]["auto"]
        alone = (f"{1e3 * each[f'{name}_seconds']:.0f}" for name in ("compute", "communication"))
        peers = (each["peers"].get(name) for name in PEERS)
        rows.append([
            f"{each['communication_over_compute']:.2f}", each["config"]["recompute"], ", ".join(alone),
            *(f"{1e3 * each['schedules'][name]['step_seconds']:.0f}" for name in schedules),
            "`" + auto["chosen"].replace(" ", "@") + "`",
            *(f"{1e3 * row['step_seconds']:.0f}" if row else "cannot" for row in peers),
            f"**{fastest_peer(each) / auto['step_seconds']:.2f} x**", f"{100 * auto['of_ideal']:.0f} %",
        ])  # fmt: skip
    return table(
        ["communication / compute", "recompute", "compute, communication alone", *schedules, "auto chose",
         *PEERS.values(), "auto over the fastest peer", "of the ideal"], rows,
    )  # fmt: skip


def fastest_peer(result: Result) -> float:
    """Seconds of its step."""
    return min(float(row["step_seconds"]) for row in result["peers"].values())


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="first", help="shape of the layers (default: first)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of JSON files (default: beside the page)")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    model = MODELS[options.model]
    folder = options.out or model.folder
    folder.mkdir(parents=True, exist_ok=True)
    for kind in () if options.tables else KINDS:
        for ratio in RATIOS:
            if not (folder / f"{kind}-{ratio}.json").exists():
                measure(model, folder, kind, ratio)
    found = results(folder)
    if options.model == "first":
        print(summary(found))
        print(front(found))  # of README
    print(steps(found, model.schedules))


if __name__ == "__main__":
    main()
