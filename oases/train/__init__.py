"""Training runs: configuration, data, the loop, checkpoints."""

from oases.train.config import TrainConfig
from oases.train.trainer import Trainer

__all__ = ["TrainConfig", "Trainer"]
