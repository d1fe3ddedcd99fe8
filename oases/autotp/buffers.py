"""Buffers that are in no file: those of a model built on `meta` are computed again, as transformers would."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oases.errors import UsageError

FILLED = "_is_hf_initialized"
"""The mark of tensors that transformers' initialisation leaves alone."""


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is one of transformers' models, which name their weights and compute their buffers themselves.

    UsageError for transformers before 5, which did both in another way.
    """
    if "transformers" not in sys.modules:  # then nobody can have built one
        return False
    transformers: Any = importlib.import_module("transformers")
    if not isinstance(module, transformers.PreTrainedModel):
        return False
    if int(transformers.__version__.split(".")[0]) < 5:
        raise UsageError(f"transformers {transformers.__version__} is too old; install transformers 5 or newer")
    return True


@torch.no_grad()
def materialize_buffers(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Make every non-persistent buffer on `meta` real on `device`: rotary frequencies, position ids and their like.

    Within a transformers model its own initialisation computes them; parameters and other buffers keep their values.
    UsageError names a buffer that nobody here can compute, and any other tensor that a module keeps on `meta`.
    """
    owners = {"": model}
    for path, module in model.named_modules():
        parent = owners[path.rpartition(".")[0]]
        owners[path] = module if is_pretrained(module) else parent
        _refuse_plain(path, module)
        lost = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        ]
        if lost:
            _compute(path, module, lost, owners[path], torch.device(device))


def _compute(path: str, module: nn.Module, lost: list[str], owner: nn.Module, device: torch.device) -> None:
    empty: dict[str, Tensor] = {}
    if is_pretrained(owner):
        for name in lost:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = empty[name] = torch.empty_like(buffer, device=device)
        initialise: Any = owner._init_weights
        with _filled(module, set(lost)), torch.device(device):
            initialise(module)
    for name in lost:
        if name not in empty or (module._buffers[name] is empty[name] and empty[name]._version == 0):
            for other in empty:  # none is left with the bytes that happened to be there
                module._buffers[other] = empty[other].to("meta")
            raise UsageError(
                f"buffer {f'{path}.{name}'.lstrip('.')!r} is on meta and in no file, and {type(owner).__name__} does "
                "not compute it anew; build the model with real buffers, only its parameters on meta"
            )


@contextmanager
def _filled(module: nn.Module, but: set[str]) -> Iterator[None]:
    """Mark what a module holds, `but` these buffers of its own, so that its initialisation leaves it alone."""
    marked = []
    for child in module.modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and not (child is module and name in but) and not hasattr(tensor, FILLED):
                setattr(tensor, FILLED, True)
                marked.append(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, FILLED)


def _refuse_plain(path: str, module: nn.Module) -> None:
    """A tensor that is neither parameter nor buffer is in no file either, and nobody would ever fill it."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise UsageError(
                f"tensor {f'{path}.{name}'.lstrip('.')!r} is on meta and neither a parameter nor a buffer; make it a "
                "buffer, or build the model with this tensor real"
            )
