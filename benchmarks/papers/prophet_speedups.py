"""The speed-ups of Pro-Prophet's evaluation (arXiv 2411.10003), modelled.

16 GPUs in nodes of 4, 100 Gb/s between the nodes and PCIe inside, one expert on each; five models, top-1 and top-2,
sequences of 256, 16,384 tokens an iteration. Which experts were loaded how much is not published, only that the three
heaviest take over half of the inputs, nor are the rates that the devices reached: one set of `Assumptions` stands for
all rows.

    python benchmarks/papers/prophet_speedups.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from oases.cli.options import require_writable, result_output, write_json
from oases.moe.costs import Costs
from oases.moe.placement import Chosen, Integers, Placement, make_placement, owner_only, plan
from oases.terminal import console, percent, table

DEVICES, PER_NODE, SEQUENCE, TOKENS = 16, 4, 256, 16384
ELEMENT_BYTES = 4

MODELS: dict[str, tuple[int, int, int]] = {
    "S": (12, 512, 1024), "M": (12, 1024, 2048), "L": (12, 2048, 4096), "DS": (24, 512, 1024), "DM": (24, 1024, 2048),
}  # fmt: skip
"""Layers, embedding, hidden of an expert."""

SPEEDUPS: dict[tuple[str, int], tuple[float, float]] = {
    ("S", 1): (1.63, 1.98), ("M", 1): (1.99, 2.22), ("L", 1): (1.62, 1.80), ("DS", 1): (1.34, 1.70),
    ("DM", 1): (1.68, 2.26), ("S", 2): (2.31, 2.62), ("M", 2): (1.82, 2.10), ("L", 2): (1.94, 2.23),
    ("DS", 2): (1.77, 1.94), ("DM", 2): (1.84, 2.07),
}  # fmt: skip
"""Over DeepSpeed-MoE, by model and top-k: FasterMoE and Pro-Prophet."""

EXCLUDED = (0, 1, 2, 4, 8)
"""Devices that the paper's search leaves out: tried one after the other."""
ALPHA = 0.1
"""Its search ends where loads differ by less than this share of the mean; the paper's value is not known."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions common to all rows.

    skew: exponent of the experts' loads, which fall as rank ** -skew; at 1 the three heaviest of 16 take 54 %. The
    experts' homes are drawn with `seed`. flops: per second, that an expert reaches in float32. bandwidth: bytes per
    second over PCIe, node_bandwidth: between nodes, shared by a node's devices. launch_seconds: of a layer's kernels
    outside of the experts, each pass. latency: of an all-to-all. faster_moe_hides: FasterMoE's transfers run under
    compute, too, as its own schedule may let them; else it blocks, (6). own_search: Pro-Prophet's copies and routes
    are those of `plan`, which may send tokens to any copy; else those of the paper's greedy search.
    """

    skew: float = 1.0
    flops: float = 8e12
    bandwidth: float = 10e9
    node_bandwidth: float = 12.5e9
    latency: float = 1e-4
    launch_seconds: float = 5e-4
    seed: int = 0
    faster_moe_hides: bool = False
    own_search: bool = False


@dataclass(frozen=True)
class Row:
    """One model: modelled and published speed-up over plain expert parallelism."""

    model: str
    top_k: int
    method: str
    modelled: float
    published: float


def costs(model: str, assumed: Assumptions, *, scheduled: bool) -> Costs:
    """Costs of one layer; attention lies between two."""
    _, embedding, hidden = MODELS[model]
    tokens = TOKENS / DEVICES
    attention = 2 * tokens * (4 * embedding**2 + 2 * SEQUENCE * embedding) / assumed.flops
    return Costs(
        token_seconds=4 * embedding * hidden / assumed.flops,
        token_bytes=ELEMENT_BYTES * embedding,
        expert_bytes=ELEMENT_BYTES * 2 * embedding * hidden,
        bandwidth=assumed.bandwidth,
        latency=assumed.latency,
        non_expert_seconds=attention + assumed.launch_seconds,
        scheduled=scheduled,
        devices_per_node=PER_NODE,
        node_bandwidth=assumed.node_bandwidth,
        transfer="mean",
    )


def loads(top_k: int, assumed: Assumptions) -> Integers:
    """Counts [expert, device]: every device's tokens go to `top_k` different experts, by the experts' weights."""
    random = np.random.default_rng(assumed.seed)
    weights = np.arange(1, DEVICES + 1, dtype=float) ** -assumed.skew
    chosen = np.log(random.permutation(weights)) + random.gumbel(size=(TOKENS, DEVICES))
    experts = np.argpartition(-chosen, top_k - 1, axis=1)[:, :top_k]  # Gumbel's top k are draws without replacement
    counts = np.zeros((DEVICES, DEVICES), dtype=np.int64)
    np.add.at(counts, (experts, np.repeat(np.arange(DEVICES), TOKENS // DEVICES)[:, None]), 1)
    return counts


def greedy(counts: Integers, costs: Costs) -> Placement:
    """The paper's search: the busiest device's expert to all but the n devices with fewest tokens for it.

    One n for all experts, the best of those tried; a device with a copy computes its own tokens, all others go home.
    """
    devices = counts.shape[1]
    found = [make_placement("prophet", counts, costs, owner_only(counts))]
    for left_out in EXCLUDED:
        routes, held = owner_only(counts)
        copies = list(held)
        while True:
            loads = np.zeros(devices)
            np.add.at(loads, routes, counts)
            expert = int(loads.argmax())
            if copies[expert] or np.ptp(loads) < ALPHA * counts.sum() / devices:
                break
            others = [device for device in np.argsort(counts[expert], kind="stable") if device != expert]
            copies[expert] = [int(device) for device in others[left_out:]]
            routes[expert, copies[expert]] = copies[expert]
            chosen: Chosen = (routes.copy(), list(copies))
            found.append(make_placement("prophet", counts, costs, chosen))
    return min(found, key=lambda placed: placed.predicted_seconds)


def modelled(assumed: Assumptions | None = None) -> list[Row]:
    """Both systems for every model: FasterMoE blocks while it copies, (6); Pro-Prophet copies under compute, (8)."""
    assumed = assumed or Assumptions()
    rows = []
    for (model, top_k), published in SPEEDUPS.items():
        counts = loads(top_k, assumed)
        blocking, hiding = (costs(model, assumed, scheduled=scheduled) for scheduled in (False, True))
        placed = {
            "faster_moe": plan(counts, hiding if assumed.faster_moe_hides else blocking, method="faster_moe"),
            "prophet": plan(counts, hiding) if assumed.own_search else greedy(counts, hiding),
        }
        plain = _seconds(plan(counts, blocking, method="none"), hiding)
        for (method, placement), figure in zip(placed.items(), published, strict=True):
            rows.append(Row(model, top_k, method, plain / _seconds(placement, hiding), figure))
    return rows


def _seconds(placed: Placement, costs: Costs) -> float:
    """A layer with what lies between it and the next one, forward and backward."""
    return placed.predicted_seconds + (1 + costs.backward) * costs.non_expert_seconds


def error(rows: Sequence[Row]) -> float:
    """Geometric mean of how far modelled and published are apart, as a share."""
    return exp(sum(abs(log(row.modelled / row.published)) for row in rows) / len(rows)) - 1


def report(assumed: Assumptions | None = None) -> dict[str, Any]:
    """Rows, errors by method and of all, and errors that other assumptions would give."""
    assumed = assumed or Assumptions()
    others = {
        "skew 1.2": replace(assumed, skew=1.2),
        "FasterMoE hides its transfers": replace(assumed, faster_moe_hides=True),
        "our search for Pro-Prophet": replace(assumed, own_search=True),
        "experts at 5 TFLOP/s": replace(assumed, flops=5e12),
        "experts at 12 TFLOP/s": replace(assumed, flops=12e12),
        "half the bandwidth between nodes": replace(assumed, node_bandwidth=assumed.node_bandwidth / 2),
        "no launch overhead": replace(assumed, launch_seconds=0.0),
    }
    rows = modelled(assumed)
    return {
        "assumptions": asdict(assumed),
        "rows": [asdict(row) for row in rows],
        "error": _errors(rows),
        "other_assumptions": {name: _errors(modelled(each)) for name, each in others.items()},
    }


def _errors(rows: Sequence[Row]) -> dict[str, float]:
    by_method = {method: [row for row in rows if row.method == method] for method in ("faster_moe", "prophet")}
    return {"all": error(rows), **{method: error(those) for method, those in by_method.items()}}


def main() -> None:
    """Print modelled and published speed-ups; below, the errors under the assumptions and under others."""
    parser = argparse.ArgumentParser(description="The speed-ups of Pro-Prophet's evaluation, modelled.")
    parser.add_argument("--json", metavar="FILE", help="write the result there as JSON; - = to standard output")
    options = parser.parse_args()
    require_writable("--json", options.json)
    with result_output(options.json):
        _show(options)


def _show(options: argparse.Namespace) -> None:
    result = report()
    error = result["error"]
    rows = [
        (f"{row['model']} top-{row['top_k']}", row["method"], f"{row['modelled']:.2f}", f"{row['published']:.2f}")
        for row in result["rows"]
    ]
    for name, errors in {"these assumptions": error, **result["other_assumptions"]}.items():
        by_method = ", ".join(f"{method} {percent(errors[method])}" for method in ("faster_moe", "prophet"))
        rows.append((f"error: {name}", by_method, percent(errors["all"]), "-"))
    columns = ("model", "method", "modelled", "published")
    console.print(table(columns, rows, words=2, title=f"off by {percent(error['all'])}, geometric mean"))
    write_json(options.json, result)


if __name__ == "__main__":
    main()
