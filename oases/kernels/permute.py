"""Permutation of token rows by expert and back, for mixture-of-experts layers.

A slot is a (token, expert) pair, numbered token * k + j for the j-th of a token's k experts. Every function is
deterministic, also on CUDA: slots keep their order within an expert, and sums are in the order of j.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import oases.extension  # noqa: F401  (registers the ops)


def histogram(expert_ids: Tensor, num_experts: int, *, check: bool = True) -> Tensor:
    """Count the slots of each expert.

    expert_ids: int64 or int32 [tokens, k]. Returns int64 [num_experts]. Raises RuntimeError for an id outside [0,
    num_experts); this check synchronises with a CUDA device. Without it such an id counts as the nearest expert.
    """
    return torch.ops.oases.histogram(expert_ids, num_experts, check)


def permute(x: Tensor, expert_ids: Tensor, num_experts: int, *, check: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row to each of its experts, grouped by expert and in token order within an expert.

    x: float32, float16 or bfloat16 [tokens, n]; expert_ids, check: as for `histogram`, with its errors. Returns rows
    [tokens * k, n], source int64 [tokens * k] (the slot of each row), and counts int64 [num_experts] (rows per
    expert). The gradient of x is the fp32 sum over the k rows of a token. A CUDA call synchronises to check the
    ids; its backward pass does not.
    """
    rows, source, counts = torch.ops.oases.permute(x, expert_ids, num_experts, check)
    return rows, source, counts


def unpermute(rows: Tensor, source: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    """Weighted sum of the k rows of each token: the inverse of `permute` after the experts.

    rows: float32, float16 or bfloat16 [tokens * k, n]; source: int64 [tokens * k] from `permute`; weights: [tokens,
    k] in float32 or the dtype of the rows, None for ones. Returns [tokens, n]; sums are fp32. Rows and weights have
    gradients. A source without some slot is a RuntimeError on the CPU; on CUDA, where the check would synchronise,
    the tokens of such slots become NaN.
    """
    return torch.ops.oases.unpermute(rows, source, weights, tokens)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.tokens = inputs[0].shape[0]


def _permute_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    (source,) = ctx.saved_tensors
    return torch.ops.oases.unpermute(grad, source, None, ctx.tokens), None, None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, source, weights, _ = inputs
    ctx.save_for_backward(None if weights is None else rows, source, weights)


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, source, weights = ctx.saved_tensors
    grad_rows, grad_weights = torch.ops.oases.unpermute_backward(grad, rows, source, weights)
    return grad_rows, None, None if weights is None else grad_weights, None


torch.library.register_autograd("oases::permute", _permute_backward, setup_context=_save_permute)
torch.library.register_autograd("oases::unpermute", _unpermute_backward, setup_context=_save_unpermute)
