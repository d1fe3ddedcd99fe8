"""Example models built from oases layers."""

from oases.models.gpt import GPT, GPTConfig
from oases.models.moe_gpt import MoEGPT, MoEGPTConfig

__all__ = ["GPT", "GPTConfig", "MoEGPT", "MoEGPTConfig"]
