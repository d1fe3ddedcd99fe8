"""What a model of transformers takes: inputs made from its configuration, on `meta`, with shapes and no values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from oases.errors import UsageError

SEQUENCE = 1024
"""Tokens per sample where nothing says otherwise and the model has positions for them."""
_OWN = "give its own with inputs=(args, kwargs)"


def sample_inputs(model: nn.Module, batch: int, sequence: int | None) -> dict[str, Any]:
    """Keyword arguments of a forward pass of `batch` samples. UsageError where the model does not say which."""
    name = type(model).__name__
    config, wanted = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or wanted is None:
        raise UsageError(f"model {name} is none of transformers' and does not say what it takes; {_OWN}")
    if batch < 1 or (sequence is not None and sequence < 1):
        raise UsageError(f"batch and sequence must be at least 1, got {batch} and {sequence}")
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    tokens = torch.empty(batch, _length(name, config, sequence), dtype=torch.int64, device="meta")
    if wanted == "input_ids":
        found[wanted] = tokens
    elif wanted == "pixel_values":
        found[wanted] = torch.empty(batch, *_image(name, config), dtype=dtype, device="meta")
    elif wanted == "input_features":
        bins, positions = (_size(name, config, each) for each in ("num_mel_bins", "max_source_positions"))
        found[wanted] = torch.empty(batch, bins, 2 * positions, dtype=dtype, device="meta")  # a convolution halves it
    else:
        raise UsageError(f"model {name} takes {wanted}, of which its configuration gives no shape; {_OWN}")
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = torch.empty_like(tokens)
    return found


def _length(name: str, config: Any, sequence: int | None) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = (getattr(text, each, None) for each in ("max_position_embeddings", "max_target_positions"))
    limit = next((each for each in limits if isinstance(each, int) and each > 0), None)
    if sequence is None:
        return min(SEQUENCE, limit or SEQUENCE)
    if limit is not None and sequence > limit:
        raise UsageError(f"sequence {sequence} is longer than the {limit} positions of {name}; give at most {limit}")
    return sequence


def _image(name: str, config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if not isinstance(height, int) or not isinstance(width, int):
        raise UsageError(f"model {name} takes pixel_values, but its configuration gives no image_size; {_OWN}")
    return _size(name, config, "num_channels"), height, width


def _size(name: str, config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int):
        raise UsageError(f"model {name}: its configuration gives no {field}; {_OWN}")
    return value
