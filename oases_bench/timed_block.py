"""Block with emulated compute: cheap arithmetic, then sleep for the rest of a given time.

For more ranks than cores: emulated compute occupies no core, so every rank computes as if on its own machine, while
communication is real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oases.extension import DeferredGradients
from oases.layers.weight_gradient import active_deferral

_READ = 4096
"""Parameter elements used in the arithmetic; the gradients of the others are zeros, communicated like any other."""


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of the parts of a block.

    forward, combine: of one run; recomputation takes them again. backward: of the input gradient, including combine's
    backward. weight_gradient: of the deferrable weight gradient.
    """

    forward: float
    combine: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 60:
                raise ValueError(f"{name} must be between 0 and 60 seconds, got {value}")


class TimedBlock(nn.Module):
    """Block of an `OverlappedStack` with given times: y = x * g, all-reduced, then x + y.

    g is the mean of the first 4096 elements of `weight`, this rank's shard of the parameters. x, y: [batch, ...], on
    the CPU.
    seconds: times for a number of samples, dimension 0 of x. tokens: sequence length; if given, the block is
        token_wise, and a chunk along dimension 1 counts as a fraction of its samples.
    num_parameters: elements of this rank's weight.
    Times are lower bounds: sleeps end a little late, and the arithmetic may take longer.
    Raises ValueError for a tensor on another device, whose queue would not wait for a sleep.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self,
        seconds: Callable[[float], BlockSeconds],
        *,
        num_parameters: int = 1,
        tokens: int | None = None,
    ) -> None:
        super().__init__()
        if num_parameters < 1:
            raise ValueError(f"num_parameters must be at least 1, got {num_parameters}")
        self.seconds = seconds
        self.tokens = tokens
        self.token_wise = tokens is not None
        self.weight = nn.Parameter(torch.full((num_parameters,), 0.01))

    def partial(self, x: Tensor) -> Tensor:
        """[batch, ...] -> this rank's partial sum, of the same shape."""
        if x.device.type != "cpu":
            raise ValueError(f"a TimedBlock emulates compute on the CPU, got an input on {x.device}")
        result: Tensor = _Timed.apply(x, self.weight, self._seconds(x), active_deferral(self.weight))
        return result

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Residual addition after the all-reduce."""
        start = time.perf_counter()
        out = x + y
        sleep_until(start + self._seconds(x).combine)
        return out

    def _seconds(self, x: Tensor) -> BlockSeconds:
        return self.seconds(x.shape[0] if self.tokens is None else x.shape[0] * x.shape[1] / self.tokens)


def sleep_until(end: float) -> None:
    """Sleep until `end` of time.perf_counter(); return at once if that has passed."""
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, seconds: BlockSeconds, deferred: DeferredGradients | None
    ) -> Tensor:
        start = time.perf_counter()
        gain = weight[:_READ].mean()
        ctx.save_for_backward(x, weight, gain)
        ctx.seconds, ctx.deferred = seconds, deferred
        y = x * gain
        sleep_until(start + seconds.forward)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        # Before the clock starts: torch.utils.checkpoint recomputes when saved tensors are unpacked.
        x, weight, gain = ctx.saved_tensors
        start = time.perf_counter()
        grad_x = grad * gain
        sleep_until(start + ctx.seconds.backward)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None
        made = partial(_gradient, weight, x, grad, ctx.seconds.weight_gradient)
        if ctx.deferred is None:
            return grad_x, made(), None, None
        ctx.deferred.note(grad, lambda leaves: leaves.add(weight, made()))
        return grad_x, None, None, None


def _gradient(weight: Tensor, x: Tensor, grad: Tensor, seconds: float) -> Tensor:
    """Gradient of a timed block's weight, taking `seconds`."""
    start = time.perf_counter()
    found = torch.zeros_like(weight)
    read = found[:_READ]
    read += (grad * x).sum() / read.numel()
    sleep_until(start + seconds)
    return found
