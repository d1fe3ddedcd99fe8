"""`oases train` on one rank: agree, train with a progress bar, return what the command prints."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from oases.launch.ranks import require_agreement
from oases.parallel.mesh import Mesh
from oases.plans.plan import Plan
from oases.terminal import progress
from oases.train.config import TrainConfig, settings
from oases.train.mixture import mesh_of
from oases.train.trainer import Trainer


def run_training(
    config: TrainConfig, plan: Plan | None = None, timeout_seconds: float | None = None
) -> dict[str, Any]:
    """Train `config` on the default group, as `plan` says where one is given; to be called by every rank.

    timeout_seconds: until a collective in one of a plan's groups counts as lost; None is the backend's own.
    """
    written = None if plan is None else plan.to_json()
    require_agreement(settings(config) | {"plan": written})
    mesh = None
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    if config.experts:
        mesh = mesh_of(config, dist.group.WORLD, timeout)
    elif plan is not None:
        mesh = Mesh.of(plan, process_group=dist.group.WORLD, timeout=timeout)
    trainer = Trainer(config, process_group=dist.group.WORLD, plan=plan, mesh=mesh)
    with progress(
        "training", config.steps, dist.get_rank() == 0,
        done_before=trainer.steps_done, every=config.print_every, below=True,
    ) as advance:  # fmt: skip
        result = trainer.train(lambda report: advance(report.step, report.text()))
    if written is not None:
        return {"config": settings(config), "plan": json.loads(written), **result}
    return {"config": settings(config) | {"tp": dist.get_world_size()}, **result}
