"""The Trainer of transformers, and its subclasses, with parallelized models: what it saves, loads and gathers.

Trainer gives the ranks of a tensor-parallel group the same batches, does not wrap the model, and averages losses as
it does for models that transformers sharded; the model averages its gradients. Left are the functions that only the
first rank runs: saving the model and the optimizer's state, which have to be gathered from the other ranks.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch

from oases.autotp.tools.accelerate import require_callable
from oases.autotp.tools.optimizer_state import accept_full_state, full_optimizer_state
from oases.errors import UsageError

_REFUSED = {
    "fsdp": "the mesh's dimension 'dp' for replicas, or fully_shard in a custom training loop",
    "deepspeed": "the mesh's dimension 'dp' for replicas",
    "torch_compile": "no option: layers run as traced graphs",
}
"""Options that would wrap or shard the model again, and what to use in place of each."""


def patch_trainer(module: Any) -> None:
    """Replace functions of `transformers.trainer`, once, for parallelized models alone."""
    trainer: Any = module.Trainer
    if hasattr(trainer._save, "__wrapped__"):
        return
    _replace(trainer, "__init__", _created)
    _replace(trainer, "_save", _save)
    _replace(trainer, "_save_optimizer_and_scheduler", _save_optimizer)
    _replace(trainer, "_load_optimizer_and_scheduler", _load_optimizer)


def _replace(owner: Any, name: str, function: Any) -> None:
    """Replace a method by function(original, self, *args); models that are not parallelized keep the original."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = (args[0] if args else kwargs.get("model")) if name == "__init__" else self.model
        if getattr(model, "oases_partition", None) is None:
            return original(self, *args, **kwargs)
        return function(original, self, *args, **kwargs)

    setattr(owner, name, replaced)


def _created(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse options that cannot work, before and not in the middle of a run."""
    require_callable(args[0] if args else kwargs.get("model"), "Trainer")
    options = args[1] if len(args) > 1 else kwargs.get("args")
    for name, remedy in _REFUSED.items():
        if getattr(options, name, None):
            raise UsageError(f"TrainingArguments({name}=...) with a parallelized model; use {remedy}")
    original(self, *args, **kwargs)


def _save(original: Any, self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
    """Save the model, gathered from all ranks; the first one also saves what belongs to it."""
    if self.args.should_save:
        original(self, output_dir, state_dict)
    else:
        self.model.save_pretrained(output_dir if output_dir is not None else self.args.output_dir)


def _save_optimizer(original: Any, self: Any, output_dir: str) -> None:
    """Save the optimizer's state as that of one process, which any number of ranks resumes from."""
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

    state = full_optimizer_state(self.optimizer, [self.model])
    if self.args.should_save:
        torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))


def _load_optimizer(original: Any, self: Any, checkpoint: str | None) -> None:
    """Load the optimizer's state, of which each rank keeps its shards."""
    accept_full_state(self.optimizer, [self.model])
    original(self, checkpoint)
