"""Weight gradients put off: a linear's backward yields the input gradient at once and notes the rest.

The input gradient is what the next all-reduce waits for; the weight gradient is wanted only by the optimizer. Put
off, it can be computed while that all-reduce is on the wire, and added up over sub-batches inside the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Note(Protocol):
    """A part of some parameters' gradients that a backward pass has put off."""

    @property
    def grad(self) -> Tensor:
        """The output gradient it will read, whose memory must stay as it is until then."""

    def add_to(self, sums: dict[int, Tensor]) -> None:
        """Compute it and add it to `sums`, gradients by id() of the parameter, in memory of their own."""


@dataclass(frozen=True)
class _Product:
    """What the weight and bias of a linear lack: their input rows times the rows of the output gradient."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad: Tensor
    transposed: bool

    def add_to(self, sums: dict[int, Tensor]) -> None:
        if self.weight.requires_grad:
            known = sums.get(id(self.weight))
            rows, columns = (self.x, self.grad) if self.transposed else (self.grad, self.x)
            if known is not None and known.dtype == rows.dtype:
                known.addmm_(rows.t(), columns)
            else:
                _add(sums, self.weight, rows.t() @ columns)
        if self.bias is not None and self.bias.requires_grad:
            _add(sums, self.bias, self.grad.sum(0))


def _add(sums: dict[int, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    """In the type that the parameter's gradient has."""
    known = sums.get(id(parameter))
    sums[id(parameter)] = (
        gradient.to(parameter.grad_dtype or gradient.dtype) if known is None else known.add_(gradient)
    )


class PutOff:
    """The notes of what weight gradients still lack."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = {id(parameter) for parameter in parameters}
        self.notes: list[Note] = []
        self._calls, self._skip_last = 0, False
        self._last_output: Tensor | None = None
        self._skippable: int | None = None

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether all are parameters themselves; a weight computed from others is autograd's business."""
        return all(tensor is None or id(tensor) in self._known for tensor in tensors)

    def begin(self, skip_last: bool) -> None:
        """Count the calls of a forward pass from 0; skip_last: it may leave out the last, if that is known."""
        self._calls, self._last_output, self._skip_last = 0, None, skip_last

    def note(self, output: Tensor) -> Tensor:
        """Count one call and remember its output."""
        # Detached: the graph of an output holds this object, and a circle through a graph is never collected.
        self._calls, self._last_output = self._calls + 1, output.detach()
        return output

    def forget(self) -> None:
        """After a forward pass whose last product is of no more interest: let its memory go."""
        self._last_output = None

    def forget_unless_last(self, result: Tensor) -> None:
        """After a forward pass: its last product may be skipped next time if it made `result` and is whole there."""
        last, self._last_output = self._last_output, None
        made = last is not None and last.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        self._skippable = self._calls - 1 if made and last is not None and last.shape == result.shape else None

    @property
    def skips_next(self) -> bool:
        """Whether the call to come is the one whose output nobody will read."""
        return self._skip_last and self._calls == self._skippable

    def add_to(self, sums: dict[int, Tensor]) -> None:
        """Compute what was put off and add it to `sums`, gradients by id() of the parameter."""
        for note in self.notes:
            note.add_to(sums)
        self.notes.clear()


_active: ContextVar[PutOff | None] = ContextVar("oases_put_off", default=None)


@contextmanager
def putting_off(put_off: PutOff, *, skip_last: bool = False) -> Iterator[None]:
    """Let the linears that run forward in here note their weight gradients in `put_off`.

    skip_last: leave out the product that makes the result, where an earlier forward pass showed that it does: its
    output is undefined and only its backward is used.
    """
    put_off.begin(skip_last)
    token = _active.set(put_off)
    try:
        yield
    finally:
        _active.reset(token)


class _PuttingOff(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, skipped: bool, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.put_off, ctx.transposed = bias, put_off, transposed
        if skipped:
            features = weight.shape[1 if transposed else 0]
            return x.new_empty(()).expand(*x.shape[:-1], features)  # a shape without memory
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        note = _Product(weight, ctx.bias, x.flatten(0, -2), grad.flatten(0, -2), ctx.transposed)
        ctx.put_off.notes.append(note)
        back = weight.t() if ctx.transposed else weight
        return (grad @ back if ctx.needs_input_grad[0] else None), None, None, None, None, None


def active_put_off(*parameters: Tensor | None) -> PutOff | None:
    """Where a forward pass that runs now is to note the gradients of `parameters`; None: autograd computes them."""
    # In a compiled block the products are the compiler's business.
    put_off = None if torch.compiler.is_compiling() else _active.get()
    if put_off is None:
        return None
    # Activation checkpoints inside a block run their part again outside of `putting_off`, and must find the same ops.
    checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return put_off if not checkpointed and put_off.takes(*parameters) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`F.linear`, whose weight gradient is put off inside `putting_off`.

    [..., in] -> [..., out]; weight: [out, in], or [in, out] where it is transposed, as in GPT-2's Conv1D. Its
    gradient has its layout.
    """
    put_off = active_put_off(weight, bias)
    if put_off is None or x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        # Autocast's casts are autograd's business: it then keeps the whole.
        return F.linear(x, weight.t() if transposed else weight, bias)
    return put_off.note(_PuttingOff.apply(x, weight, bias, put_off, put_off.skips_next, transposed))
