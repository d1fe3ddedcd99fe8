"""Deferred weight gradients: a linear's backward returns the input gradient and notes the rest for an op W.

The next all-reduce waits for the input gradient; only the optimizer waits for the weight gradient. Deferred, it is
computed while that all-reduce is on the wire, and summed over sub-batches inside the matmul (zero-bubble style).
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from oases._C import DeferredGradients, Leaves

__all__ = ["DeferredGradients", "Leaves", "active_deferral", "deferring", "linear"]

deferring: ContextVar[DeferredGradients | None] = ContextVar("oases_deferring", default=None)
"""Where linears that run forward now are to note their weight gradients; crosses a user's module."""


def active_deferral(*parameters: Tensor | None) -> DeferredGradients | None:
    """Where a forward pass that runs now is to note the gradients of `parameters`; None: autograd computes them."""
    # In a compiled block the matmuls are the compiler's business.
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return deferred if deferred.takes(list(parameters)) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`F.linear`, whose weight gradient is deferred while `deferring` is set.

    [..., in] -> [..., out]; weight: [out, in], or [in, out] where it is transposed, as in GPT-2's Conv1D. Its
    gradient has its layout.
    """
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is not None:
        found: Tensor | None = deferred.linear(x, weight, bias, transposed)
        if found is not None:
            return found
    return F.linear(x, weight.t() if transposed else weight, bias)
