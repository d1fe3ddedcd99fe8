"""`oases train` on one rank: agree, train with a progress bar, return what the command prints."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from oases.ranks import require_agreement
from oases.terminal import progress
from oases.train.config import TrainConfig, settings
from oases.train.trainer import Trainer


def run_training(config: TrainConfig) -> dict[str, Any]:
    """Train `config` on the default group; to be called by every rank."""
    require_agreement(settings(config))
    trainer = Trainer(config, process_group=dist.group.WORLD)
    with progress("training", config.steps, dist.get_rank() == 0) as advance:

        def on_step(step: int, loss: float, seconds: float) -> None:
            rate = config.batch * config.sequence / seconds
            advance(step, f"loss {loss:.3f}, {1e3 * seconds:.0f} ms, {rate:.0f} tokens/s")

        result = trainer.train(on_step)
    return {"config": settings(config) | {"tp": dist.get_world_size()}, **result}
