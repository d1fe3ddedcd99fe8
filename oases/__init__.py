"""Overlapped tensor parallelism for PyTorch: train large transformers on commodity servers."""

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_PUBLIC = {
    "OverlappedColumnLinear": "oases.parallel",
    "OverlappedColwiseParallel": "oases.parallel",
    "OverlappedRowwiseParallel": "oases.parallel",
    "OverlappedEmbedding": "oases.parallel",
    "OverlappedMoE": "oases.moe.layer",
    "OverlappedRowLinear": "oases.parallel",
    "OverlappedStack": "oases.parallel",
    "ParallelDropout": "oases.parallel",
    "ParallelSpec": "oases.autotp",
    "causal_attention": "oases.parallel",
    "clip_grad_norm": "oases.parallel",
    "full_state_dict": "oases.autotp",
    "load_checkpoint": "oases.train.checkpoint.parallelized",
    "load_weights": "oases.autotp",
    "make_optimizer": "oases.parallel",
    "nccl_options": "oases.parallel",
    "parallel_cross_entropy": "oases.parallel",
    "parallelize": "oases.autotp",
    "plan": "oases.planner",
    "quantized_hook": "oases.parallel",
    "report": "oases.parallel",
    "S2Reducer": "oases.sparse",
    "s2_hook": "oases.sparse",
    "save_checkpoint": "oases.train.checkpoint.parallelized",
    "save_pretrained": "oases.autotp",
    "Trainer": "oases.train.trainer",
    "TrainConfig": "oases.train.config",
    "UsageError": "oases.errors",
}

__all__ = [
    "OverlappedColumnLinear",
    "OverlappedColwiseParallel",
    "OverlappedEmbedding",
    "OverlappedMoE",
    "OverlappedRowLinear",
    "OverlappedRowwiseParallel",
    "OverlappedStack",
    "ParallelDropout",
    "ParallelSpec",
    "S2Reducer",
    "TrainConfig",
    "Trainer",
    "UsageError",
    "__version__",
    "causal_attention",
    "clip_grad_norm",
    "full_state_dict",
    "load_checkpoint",
    "load_weights",
    "make_optimizer",
    "nccl_options",
    "parallel_cross_entropy",
    "parallelize",
    "plan",
    "quantized_hook",
    "report",
    "s2_hook",
    "save_checkpoint",
    "save_pretrained",
]

if TYPE_CHECKING:
    from oases.autotp import ParallelSpec, full_state_dict, load_weights, parallelize, save_pretrained
    from oases.errors import UsageError
    from oases.moe.layer import OverlappedMoE
    from oases.parallel import (
        OverlappedColumnLinear,
        OverlappedColwiseParallel,
        OverlappedEmbedding,
        OverlappedRowLinear,
        OverlappedRowwiseParallel,
        OverlappedStack,
        ParallelDropout,
        causal_attention,
        clip_grad_norm,
        make_optimizer,
        nccl_options,
        parallel_cross_entropy,
        quantized_hook,
        report,
    )
    from oases.planner import plan
    from oases.sparse import S2Reducer, s2_hook
    from oases.train.checkpoint.parallelized import load_checkpoint, save_checkpoint
    from oases.train.config import TrainConfig
    from oases.train.trainer import Trainer


def __getattr__(name: str) -> Any:
    """Load the parts that need torch when they are first asked for: schedules and planners do without."""
    if name == "svm":  # a part of its own, which needs no torch
        import importlib

        return importlib.import_module("oases.svm")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'oases' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _register_backends() -> None:
    """Make the backend `staged` known to torch.distributed; the extension is loaded when a group is made.

    torch calls this at the end of its own import, where oases is installed (pyproject.toml).
    """
    import torch.distributed as dist

    if not dist.is_available() or "staged" in dist.Backend.backend_list:
        return

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        from oases.execution.group import make_staged

        return make_staged(store, rank, size, timeout)

    dist.Backend.register_backend("staged", create, devices=["cpu", "cuda"])


if "torch" in sys.modules:
    _register_backends()
