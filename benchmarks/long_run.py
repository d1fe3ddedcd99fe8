"""Long run: memory, threads, descriptors and store keys of ranks and launcher, which must not grow with the steps.

python benchmarks/long_run.py [--steps 5000] [--dp N] [--pp N] [--tp N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import oases
from oases.cli.options import require_writable, result_output, write_result
from oases.distributed.mesh import Mesh
from oases.launch.ranks import RankOptions, run_ranks
from oases.terminal import console, table
from oases_train.config import Degrees, TrainConfig
from oases_train.metrics import StepReport
from oases_train.plan import Run
from oases_train.trainer import Trainer

SAVE_EVERY = 50
SIZES: dict[str, Any] = {
    "hidden": 32, "layers": 2, "heads": 4, "sequence": 32, "batch": 8, "validation_batches": 1,
}  # fmt: skip
COLUMNS = (
    "step",
    "rank MiB",
    "launcher MiB",
    "rank threads",
    "launcher threads",
    "rank files",
    "launcher files",
    "keys",
)


def usage(process: int) -> tuple[float, int, int]:
    """(resident MiB, threads, open files) of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["Threads"]), len(os.listdir(f"/proc/{process}/fd"))


def train(run: Run, launcher: int, every: int) -> list[dict[str, Any]]:
    """Train and measure every so many steps: the most of any rank, the launcher, and the keys of the store."""
    rows: list[dict[str, Any]] = []

    def measure(report: StepReport) -> None:
        if report.step % every:
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, usage(os.getpid()))
        mine = [max(values) for values in zip(*everyone, strict=True)]
        numbers = [each for pair in zip(mine, usage(launcher), strict=True) for each in pair]
        rows.append(dict(zip(COLUMNS, [report.step, *numbers, _get_default_store().num_keys()], strict=True)))
        if dist.get_rank() == 0:
            console.print(f"step {report.step}: loss {report.loss:.3f}, {numbers[0]:.0f} MiB", soft_wrap=True)

    mesh = Mesh.of(run.plan, process_group=dist.group.WORLD)
    Trainer(run, process_group=dist.group.WORLD, mesh=mesh).train(measure)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000, metavar="N", help="optimizer steps (default: 5000)")
    parser.add_argument("--every", type=int, default=250, metavar="N", help="measure every N steps (default: 250)")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel degree (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages (default: 1)")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor-parallel degree (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - = to standard output")
    options = parser.parse_args()
    require_writable("--json", options.json)
    with result_output(options.json):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            **SIZES, steps=options.steps, degrees=Degrees(options.dp, options.pp, options.tp),
            micro_batches=2 if options.pp > 1 else 1, data=str(Path(oases.__file__).parent),
            checkpoint=f"{folder}/run", checkpoint_every=SAVE_EVERY, keep=2, step_log=f"{folder}/steps.jsonl",
        )  # fmt: skip
        ranks = options.dp * options.pp * options.tp
        run = Run.of(config, ranks)
        run.corpus()
        rows = run_ranks(train, (run, os.getpid(), options.every), RankOptions(ranks))
    texts = [[f"{value:.1f}" if "MiB" in name else str(value) for name, value in row.items()] for row in rows]
    console.print(table(COLUMNS, texts))
    if options.json is not None:
        write_result(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
