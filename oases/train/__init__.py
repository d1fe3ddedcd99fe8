"""Training runs: configuration, data, the loop, checkpoints."""

from oases.train.checkpoint.parallelized import load_checkpoint, save_checkpoint
from oases.train.config import TrainConfig
from oases.train.trainer import Trainer

__all__ = ["TrainConfig", "Trainer", "load_checkpoint", "save_checkpoint"]
