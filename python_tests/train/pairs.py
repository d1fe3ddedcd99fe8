"""Data x pipeline x tensor parallelism, 2 x 2 x 2, against one process, in a covering array of pairs.

    python python_tests/train/pairs.py [--steps 50] [--json FILE] [--with CHOICE]

Every pair of choices of FACTORS stands in some row, and each row is trained on 8 ranks over gloo, on the standard
library's sources. Prints the largest difference of the losses from those of one process; exits with 1 above 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from covering import covering

from oases import TrainConfig, Trainer
from oases.core.schedule import GENERATORS, PIPELINES, WHOLE
from oases.plans.gpt import gpt
from oases.plans.pipelines import chunks_of
from oases.plans.plan import Plan, Segment, Stage
from oases.testing import RankPool
from oases_train.config import config_for
from oases_train.plan import Run

MODEL = gpt(hidden=32, layers=4, heads=4, sequence=32, vocabulary=256)
BATCH = 16
FACTORS = {
    "pipeline": tuple(PIPELINES),
    "schedule": tuple(GENERATORS),
    "recompute": ("none", "by stage", "full"),
    "replicas": ("average", "zero", "fsdp"),
    "micro_batches": ("2", "4"),
    "sequence": ("whole", "parallel"),
    "compile": ("none", "aot_eager"),
}
TOLERANCE = 1e-4


def rows() -> list[dict[str, str]]:
    """The covering array."""
    return covering(FACTORS)


def plan_of_row(row: Mapping[str, str]) -> Plan:
    """Two stages of two replicas of two ranks. "by stage": the first recomputes every layer, the last one none."""
    chunks = chunks_of(row["pipeline"])
    blocks = MODEL.num_blocks // 2 // chunks
    stages = []
    for stage in range(2):
        recomputed = {"none": 0, "full": blocks // 2, "by stage": blocks // 2 * (1 - stage)}[row["recompute"]]
        segment = Segment(
            blocks,
            2,
            row["schedule"],
            1 if row["schedule"] in WHOLE else 2,
            recomputed,
            row["sequence"] == "parallel",
        )
        stages.append(Stage((segment,) * chunks))
    return Plan(
        model=MODEL, world=8, ranks_per_node=8, global_batch=BATCH, micro_batches=int(row["micro_batches"]),
        stages=tuple(stages), zero=row["replicas"] == "zero", pipeline=row["pipeline"],
        fsdp=row["replicas"] == "fsdp",
    )  # fmt: skip


def options(steps: int, data: str | None) -> dict[str, Any]:
    """Return the options common to all runs."""
    return {"steps": steps, "warmup": 5, "learning_rate": 2e-3, "validation_batches": 1, "data": data}


def alone(steps: int, data: str | None = None) -> list[float]:
    """The losses of one process."""
    sizes = {name: getattr(MODEL, name) for name in ("hidden", "layers", "heads", "sequence")}
    trainer = Trainer(TrainConfig(**sizes, batch=BATCH, schedule="sync", **options(steps, data)))
    return [trainer.step() for _ in range(steps)]


def run_row(row: Mapping[str, str], steps: int, data: str | None = None) -> list[float]:
    """The losses of a row; on each of 8 ranks."""
    plan = plan_of_row(row)
    torch.compiler.reset()  # what other rows compiled counts towards a limit
    config = config_for(plan, {**options(steps, data), "compile": row["compile"]})
    Run(config, plan).corpus()
    trainer = Trainer(config, plan=plan)
    losses = [trainer.step() for _ in range(steps)]
    trainer.close()
    return losses


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest of all steps."""
    return max(abs(mine - theirs) for mine, theirs in zip(losses, expected, strict=True))


def main() -> int:
    """Run the array; 1 where a row is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--with", dest="choice", metavar="CHOICE", help="only rows with this choice, e.g. fsdp")
    given = parser.parse_args()
    expected = alone(given.steps)
    found: list[dict[str, Any]] = []
    print("| " + " | ".join(FACTORS) + " | largest difference | seconds |", flush=True)
    print("|" + "---|" * (len(FACTORS) + 2), flush=True)
    with RankPool(8) as pool:
        for row in (row for row in rows() if given.choice in (None, *row.values())):
            start = time.perf_counter()
            of_ranks = pool.run(run_row, row, given.steps, timeout_seconds=600.0)
            off = max(difference(losses, expected) for losses in of_ranks)
            found.append({**row, "difference": off, "losses": of_ranks[0]})
            took = time.perf_counter() - start
            print("| " + " | ".join(row.values()) + f" | {off:.1e} | {took:.0f} |", flush=True)
    worst = max(row["difference"] for row in found)
    of = f"{len(found)} rows of {given.steps} steps, loss {expected[0]:.3f} to {expected[-1]:.3f}"
    print(f"{of}: at most {worst:.1e} off")
    if given.json is not None:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"steps": given.steps, "alone": expected, "rows": found}, file, indent=1)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
