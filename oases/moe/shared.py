"""The expert of a mixture that computes every token."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class SharedExpert(nn.Module):
    """An expert that computes every token, alike on all ranks. scaled: its output times a sigmoid gate of its own."""

    def __init__(
        self, hidden: int, intermediate: int, *, gated: bool, bias: bool, scaled: bool, **options: Any
    ) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(hidden, 2 * intermediate if gated else intermediate, bias=bias, **options)
        self.down = nn.Linear(intermediate, hidden, bias=bias, **options)
        self.gate = nn.Linear(hidden, 1, bias=False, **options) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        middle = self.up(x)
        if self.gated:
            gate, up = middle.chunk(2, dim=-1)
            y = self.down(F.silu(gate) * up)
        else:
            y = self.down(F.gelu(middle))
        return y if self.gate is None else self.gate(x).sigmoid() * y
