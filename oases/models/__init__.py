"""Demo models built of oases layers."""

from oases.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
