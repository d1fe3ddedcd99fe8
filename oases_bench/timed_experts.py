"""Experts whose compute is emulated by sleeps, and whose tokens' choices are prescribed."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from oases.kernels.permute import histogram
from oases.moe.experts import ExpertWeights
from oases.moe.layer import OverlappedMoE
from oases.moe.router import Router, Routing
from oases_bench.timed_block import sleep_until


class ForcedRouter(Router):
    """Router with prescribed choices. Weights are its gates of the chosen experts."""

    counts: Tensor | None = None
    """int64 [E]: slots of the next call for each expert; they sum up to T k. None: the router's own choice."""

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Routing:
        """See `Router`."""
        if self.counts is None:
            return super().forward(x, bias=bias)
        slots = torch.arange(self.num_experts).repeat_interleave(self.counts)
        # Side by side in this order a token would meet one expert several times; a column is one k-th of the slots.
        experts = slots.view(self.top_k, len(x)).t().contiguous()
        gates = (x.float() @ self.weight.float().t()).softmax(-1)
        weights = gates.gather(1, experts)
        demand = histogram(experts, self.num_experts)
        return Routing(experts, weights, demand, demand, None, None, None, ~weights.isfinite().all())


class TimedMoE(OverlappedMoE):
    """OverlappedMoE whose experts take `token_seconds` a token forward, and `backward` times that backward."""

    def __init__(self, *sizes: int, token_seconds: float, backward: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.token_seconds, self.backward_times = token_seconds, backward
        self.router.__class__ = ForcedRouter

    def compute(self, rows: Tensor, counts: list[int], weights: ExpertWeights) -> Tensor:
        """rows * the mean of the first numbers of each expert's weights, after the wait."""
        seconds = self.token_seconds * len(rows)
        result: Tensor = _Timed.apply(rows, seconds, self.backward_times * seconds, counts, *weights.given)
        return result


class TimedExpertBlock(nn.Module):
    """A block for an `ExpertStack`: a wait in the place of attention, then timed experts."""

    def __init__(self, experts: TimedMoE, non_expert_seconds: float, backward: float) -> None:
        super().__init__()
        self.experts = experts
        self.gain = nn.Parameter(torch.ones(1))
        self.seconds, self.backward_times = non_expert_seconds, backward

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The wait."""
        x = _Timed.apply(x, self.seconds, self.backward_times * self.seconds, [len(x)], self.gain)
        return x, x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual."""
        return x + y


class _Timed(torch.autograd.Function):
    """rows times a number of each weight, as long as it is told to take."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, forward: float, backward: float, counts: list[int], *weights: Tensor
    ) -> Tensor:
        start = time.perf_counter()
        gain = torch.stack([weight.flatten()[:1].mean() for weight in weights]).mean() if len(weights[0]) else 1.0
        ctx.seconds, ctx.gain = backward, gain
        ctx.save_for_backward(*weights)
        y = rows * gain
        sleep_until(start + forward)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        start = time.perf_counter()
        found = [torch.zeros_like(weight) for weight in ctx.saved_tensors]
        y = grad * ctx.gain
        sleep_until(start + ctx.seconds)
        return y, None, None, None, *found
