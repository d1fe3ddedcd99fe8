"""Write the tables of docs/models.md: what `oases.parallelize` does with models of transformers.

    python docs/models.py            # rewrites them
    python docs/models.py --check    # exits with 1 where they are not what this would write

The models are the small ones of python_tests/autotp/zoo.py, built on meta. One process represents two ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python_tests"))

import torch
import torch.distributed as dist
import transformers
from autotp.zoo import ALL, MIXTURES, MODELS, OTHERS, config

import oases
from oases.autotp.report import LayersReport, PartitionReport
from oases.testbed.backend import Backend

PAGE = Path(__file__).resolve().with_name("models.md")
COLUMNS = (
    "model", "layers", "column-parallel", "row-parallel", "vocabulary-parallel", "replicated",
    "all-reduces per layer", "overlapped", "remarks",
)  # fmt: skip


def report_of(name: str) -> PartitionReport:
    """The partition report of a model of the zoo."""
    with torch.device("meta"):
        model = getattr(transformers, ALL[name][0])(config(name))
    return oases.parallelize(model).oases_partition


def table(names: Iterable[str]) -> str:
    """The table of some models of the zoo: a row for each list of layers."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join(lines + [row for name in names for row in rows(report_of(name))])


def rows(report: PartitionReport) -> list[str]:
    """The rows of a model."""
    lines = []
    for number, layers in enumerate(report.layers):
        whose = (report.model, grouped(report.vocabulary)) if number == 0 else ("", "")
        lines.append("| " + " | ".join(cell or "-" for cell in _cells(layers, *whose)) + " |")
    return lines


def _cells(layers: LayersReport, model: str, vocabulary: str) -> tuple[str, ...]:
    remarks = [layers.reason] if layers.reason else []
    if layers.experts:
        remarks.append(f"expert-parallel: {grouped(layers.experts)}")
    if 0 < layers.blocks_per_layer < len(layers.row):
        remarks.append(f"{len(layers.row)} row-parallel linears share {layers.blocks_per_layer} all-reduce")
    remarks += [f"`{_short(name)}` is replicated: {why}" for name, why in layers.refused.items()]
    return (
        model,
        f"`{layers.name}`" if layers.name else "",
        grouped(layers.column),
        grouped(layers.row),
        vocabulary,
        grouped(layers.replicated),
        str(layers.blocks_per_layer or ""),
        "no" if layers.runs == "replicated" else layers.runs,
        "; ".join(remarks),
    )


def grouped(names: Iterable[str]) -> str:
    """Names without ".weight", a bias only where its weight is not there, and neighbours under their parent."""
    names = list(names)
    kept = [name for name in names if not (name.endswith(".bias") and f"{name[:-5]}.weight" in names)]
    parents: dict[str, list[str]] = {}
    for name in map(_short, kept):
        parent, _, child = name.rpartition(".")
        if child == "bias":
            parent, _, child = parent.rpartition(".")
            child += ".bias"
        parents.setdefault(parent, []).append(child)
    found = []
    for parent, children in parents.items():
        inner = children[0] if len(children) == 1 else "{" + ", ".join(children) + "}"
        found.append(f"`{parent}.{inner}`" if parent else ", ".join(f"`{child}`" for child in children))
    return ", ".join(found)


def _short(name: str) -> str:
    return name.removesuffix(".weight")


def page() -> str:
    """Return the page with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, names in (("promised", MODELS), ("mixtures", MIXTURES), ("others", OTHERS)):
        head, _, rest = text.partition(f"<!-- {mark}: python docs/models.py -->\n")
        _, end, tail = rest.partition(f"<!-- end of {mark} -->")
        if not end:
            raise SystemExit(f"{PAGE} lacks the marks of the table {mark!r}")
        text = f"{head}<!-- {mark}: python docs/models.py -->\n{table(names)}\n{end}{tail}"
    return text


def main() -> None:
    """Write or check the page."""
    Backend.parse("sim:alpha=1us,bandwidth=100GB/s,single_process").activate()
    dist.init_process_group("sim", store=dist.HashStore(), rank=0, world_size=2)
    written = page()
    dist.destroy_process_group()
    if "--check" not in sys.argv:
        PAGE.write_text(written, encoding="utf-8")
    elif written != PAGE.read_text(encoding="utf-8"):
        raise SystemExit(f"{PAGE.name} is not what python docs/models.py writes; run it and commit the page")


if __name__ == "__main__":
    main()
