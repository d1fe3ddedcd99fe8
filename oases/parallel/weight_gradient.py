"""Weight gradients put off: a linear's backward yields the input gradient at once and notes the rest.

The input gradient is what the next all-reduce waits for; the weight gradient is wanted only by the optimizer. Put
off, it can be computed while that all-reduce is on the wire, and added up over sub-batches inside the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PutOff:
    """The products that weight gradients still lack: (weight, bias, input rows, output gradient rows)."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = {id(parameter) for parameter in parameters}
        self.products: list[tuple[Tensor, Tensor | None, Tensor, Tensor]] = []
        self._calls = 0
        self._last_output: Tensor | None = None
        self._skippable: int | None = None

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether all are parameters themselves; a weight computed from others is autograd's business."""
        return all(tensor is None or id(tensor) in self._known for tensor in tensors)

    def begin(self) -> None:
        """Count the calls of a forward pass from 0."""
        self._calls, self._last_output = 0, None

    def note(self, output: Tensor) -> Tensor:
        """Count one call and remember its output."""
        self._calls, self._last_output = self._calls + 1, output
        return output

    def forget_unless_last(self, result: Tensor) -> None:
        """After a forward pass: its last product may be skipped next time if it made `result` and is whole there."""
        last, self._last_output = self._last_output, None
        made = last is not None and last.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        self._skippable = self._calls - 1 if made and last is not None and last.shape == result.shape else None

    @property
    def skips_next(self) -> bool:
        """Whether the call to come is the one whose output nobody will read."""
        return self._calls == self._skippable

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


_active: ContextVar[tuple[PutOff, bool] | None] = ContextVar("oases_put_off", default=None)


@contextmanager
def putting_off(put_off: PutOff, *, skip_last: bool = False) -> Iterator[None]:
    """Let the linears that run forward in here note their weight gradients in `put_off`.

    skip_last: leave out the product that makes the result, where an earlier forward pass showed that it does: its
    output is undefined and only its backward is used.
    """
    put_off.begin()
    token = _active.set((put_off, skip_last))
    try:
        yield
    finally:
        _active.reset(token)


class _PuttingOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, skipped: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.put_off = bias, put_off
        if skipped:
            return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])  # a shape without memory
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.put_off.products.append((weight, ctx.bias, x.flatten(0, -2), grad.flatten(0, -2)))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose weight gradient is put off inside `putting_off`."""
    # In a compiled block the products are the compiler's business.
    active = None if torch.compiler.is_compiling() else _active.get()
    if active is None or x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)  # autocast's casts are autograd's business: it then keeps the whole
    put_off, skip_last = active
    # Activation checkpoints inside a block run their part again outside of `putting_off`, and must find the same ops.
    checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if checkpointed or not put_off.takes(weight, bias):
        return F.linear(x, weight, bias)
    skipped = skip_last and put_off.skips_next
    return put_off.note(_PuttingOff.apply(x, weight, bias, put_off, skipped))
