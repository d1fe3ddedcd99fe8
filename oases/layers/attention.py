"""Causal attention, also in sub-batches of tokens, which read the keys and values of the ones before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oases.core.blocks.attention import current_prefix


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool | None = None, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention`, causal without a mask, also in sub-batches of tokens.

    A block with `causal = True` calls it, and nothing else that relates tokens. query, key, value: [batch, heads,
    tokens, width]. attn_mask: of the whole sequence, as for torch, and causal, too.
    Raises ValueError in a sub-batch of tokens for dropout, whose mask would be another, and for is_causal=False
    without a mask.
    """
    is_causal = attn_mask is None if is_causal is None else is_causal
    keys = None if torch.compiler.is_compiling() else current_prefix.get()
    if keys is not None:
        if dropout_p or not (is_causal or attn_mask is not None):
            raise ValueError(
                f"attention with dropout_p={dropout_p} and is_causal={is_causal} cannot be cut along the sequence; "
                "leave causal = True out of the block"
            )
        key, value = keys.after(key), keys.after(value)
        attn_mask, is_causal = _of_sub_batch(query, key, attn_mask)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _of_sub_batch(query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor | None, bool]:
    """Mask and `is_causal` of the last queries over all keys so far."""
    tokens, end = query.shape[-2], key.shape[-2]
    if mask is not None:
        rows = mask if mask.shape[-2] == 1 else mask.narrow(-2, end - tokens, tokens)
        return (rows if mask.shape[-1] == 1 else rows.narrow(-1, 0, end)), False
    if tokens == end:
        return None, True
    return torch.ones(tokens, end, dtype=torch.bool, device=query.device).tril(end - tokens), False
