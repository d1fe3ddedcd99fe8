"""Deferred weight gradients: a linear's backward returns the input gradient and records the rest for a W op.

The next all-reduce needs the input gradient; only the optimizer needs the weight gradient. Deferred, it is computed
during that all-reduce, and summed over sub-batches inside the matmul (as in zero-bubble pipelines).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oases.core.execution.compiled import CompiledDeferral, compiled_linear, deferring
from oases.extension import DeferredGradients, Leaves

__all__ = ["CompiledDeferral", "DeferredGradients", "Leaves", "active_deferral", "deferring", "in_piece", "linear"]

in_piece = [False]
"""Whether a compiled block is called by a piece that defers; torch.compile guards on it."""


def active_deferral(*parameters: Tensor | None) -> DeferredGradients | None:
    """Where the current forward pass defers the gradients of `parameters`; None where autograd computes them."""
    # Compiled ops other than `linear` compute their own weight gradients.
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return deferred if deferred.takes(list(parameters)) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`F.linear`, whose weight gradient is deferred while `deferring` is set.

    [..., in] -> [..., out]; weight: [out, in], or [in, out] if transposed, as in GPT-2's Conv1D. The gradient has its
    layout.
    """
    if torch.compiler.is_compiling():
        if in_piece[0] and x.dim() > 1:
            return compiled_linear(x, weight, bias, transposed)
        return F.linear(x, weight.t() if transposed else weight, bias)
    deferred = deferring.get()
    if deferred is not None:
        found: Tensor | None = deferred.linear(x, weight, bias, transposed)
        if found is not None:
            return found
    return F.linear(x, weight.t() if transposed else weight, bias)
