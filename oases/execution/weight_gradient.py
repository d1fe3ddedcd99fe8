"""Deferred weight gradients: a linear's backward returns the input gradient and records the rest for a W op.

The next all-reduce needs the input gradient; only the optimizer needs the weight gradient. Deferred, it is computed
during that all-reduce, and summed over sub-batches inside the matmul (as in zero-bubble pipelines).
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from oases.extension import DeferredGradients, Leaves

__all__ = ["DeferredGradients", "Leaves", "active_deferral", "deferring", "linear"]

deferring: ContextVar[DeferredGradients | None] = ContextVar("oases_deferring", default=None)
"""Where linears of the current forward pass record weight gradients; a context variable, to cross user modules."""


def active_deferral(*parameters: Tensor | None) -> DeferredGradients | None:
    """Where the current forward pass defers the gradients of `parameters`; None where autograd computes them."""
    # A compiled block computes its own weight gradients.
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return deferred if deferred.takes(list(parameters)) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`F.linear`, whose weight gradient is deferred while `deferring` is set.

    [..., in] -> [..., out]; weight: [out, in], or [in, out] if transposed, as in GPT-2's Conv1D. The gradient has its
    layout.
    """
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is not None:
        found: Tensor | None = deferred.linear(x, weight, bias, transposed)
        if found is not None:
            return found
    return F.linear(x, weight.t() if transposed else weight, bias)
