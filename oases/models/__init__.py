"""Demo models built of oases layers."""

from oases.models.gpt import GPT, GPTConfig
from oases.models.moe_gpt import MoEGPT, MoEGPTConfig
from oases.models.timed import TimedBlock, TimedSeconds

__all__ = ["GPT", "GPTConfig", "MoEGPT", "MoEGPTConfig", "TimedBlock", "TimedSeconds"]
