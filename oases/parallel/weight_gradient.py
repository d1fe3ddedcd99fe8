"""Weight gradients put off: a linear's backward yields the input gradient at once and notes the rest.

The input gradient is what the next all-reduce waits for; the weight gradient is wanted only by the optimizer. Put
off, it can be computed while that all-reduce is on the wire, and added up over sub-batches inside the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PutOff:
    """The products that weight gradients still lack: (weight, bias, input rows, output gradient rows)."""

    def __init__(self) -> None:
        self.products: list[tuple[Tensor, Tensor | None, Tensor, Tensor]] = []

    def add_to(self, sums: dict[int, Tensor]) -> None:
        """Compute what was put off and add it to `sums`, gradients by id() of the parameter."""
        for weight, bias, x, grad in self.products:
            if weight.requires_grad:
                known = sums.get(id(weight))
                sums[id(weight)] = grad.t() @ x if known is None else known.addmm_(grad.t(), x)
            if bias is not None and bias.requires_grad:
                known = sums.get(id(bias))
                sums[id(bias)] = grad.sum(0) if known is None else known.add_(grad.sum(0))
        self.products.clear()


_active: ContextVar[PutOff | None] = ContextVar("oases_put_off", default=None)


@contextmanager
def putting_off(put_off: PutOff) -> Iterator[None]:
    """Let the linears that run forward in here note their weight gradients in `put_off`."""
    token = _active.set(put_off)
    try:
        yield
    finally:
        _active.reset(token)


class _PuttingOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.put_off = bias, put_off
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.put_off.products.append((weight, ctx.bias, x.flatten(0, -2), grad.flatten(0, -2)))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose weight gradient is put off inside `putting_off`."""
    put_off = _active.get()
    if put_off is None or x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)  # autocast's casts are autograd's business: it then keeps the whole
    return _PuttingOff.apply(x, weight, bias, put_off)
