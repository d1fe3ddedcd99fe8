"""Gradient checkpointing of transformers, mapped to recomputation of stacks."""

from __future__ import annotations

from typing import Any

from torch import nn

from oases.autotp.gathering import base_of
from oases.errors import UsageError

_PREFIXES = ("activation_checkpointing", "gradient_checkpointing")
_HARMLESS = {"use_reentrant", "preserve_rng_state", "determinism_check", "early_stop"}
"""Arguments of torch.utils.checkpoint that say how it does what a stack does in its own way."""


def checkpoints(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on in a transformers model; the attribute's name depends on the version."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    name = next((name for name in names if hasattr(type(model), name)), "")
    return bool(name and getattr(model, name))


def recomputing_options(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Options of stacks: recompute="full" for a model with gradient checkpointing on, which is turned off in it."""
    base: Any = base_of(model)
    if not checkpoints(base):
        return options
    name = next(f"{prefix}_disable" for prefix in _PREFIXES if hasattr(base, f"{prefix}_disable"))
    getattr(base, name)()
    return {"recompute": "full", **options}


def map_checkpointing(model: nn.Module) -> None:
    """Have the methods of a parallelized model that turn gradient checkpointing on and off change its stacks."""
    base = base_of(model)
    for prefix in _PREFIXES:
        if callable(getattr(base, f"{prefix}_enable", None)):
            object.__setattr__(base, f"{prefix}_enable", _Switch(model, True))
            object.__setattr__(base, f"{prefix}_disable", _Switch(model, False))


class _Switch:
    """Replacement of `activation_checkpointing_enable`, its deprecated alias, and the methods that turn it off."""

    def __init__(self, model: nn.Module, on: bool) -> None:
        self._model, self._on = model, on

    def __call__(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Recompute one in `every_n_layers` layers, or none.

        UsageError for offload, for other ways to recompute, and for layers that do not run as a stack.
        """
        given = {**(activation_checkpointing_kwargs or {}), **(gradient_checkpointing_kwargs or {})}
        strange = sorted(set(given) - _HARMLESS) + ["offload"] * offload
        if strange:
            raise UsageError(
                f"gradient checkpointing of a parallelized model is recomputation by its stacks, without "
                f"{', '.join(strange)}; leave it out"
            )
        partition: Any = self._model.oases_partition
        for found in partition.layers:
            if found.runner is None and self._on:
                raise UsageError(
                    f"{found.name or type(self._model).__name__} runs {found.runs} ({found.reason}), where gradient "
                    "checkpointing is not available; turn it off"
                )
            if found.runner is not None:
                number = -(-len(found.runner.layers) // every_n_layers)
                found.runner.recompute("none" if not self._on else "full" if every_n_layers == 1 else number)
