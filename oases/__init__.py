"""Overlapped tensor parallelism for PyTorch: train large transformers on commodity servers."""

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_PUBLIC = {
    "OverlappedColumnLinear": "oases.layers",
    "OverlappedColwiseParallel": "oases.layers",
    "OverlappedRowwiseParallel": "oases.layers",
    "OverlappedEmbedding": "oases.layers",
    "OverlappedMoE": "oases.moe.layer",
    "OverlappedRowLinear": "oases.layers",
    "OverlappedStack": "oases.layers",
    "ParallelDropout": "oases.layers",
    "ParallelSpec": "oases.autotp",
    "causal_attention": "oases.layers",
    "clip_grad_norm": "oases.layers",
    "full_state_dict": "oases.autotp",
    "load_checkpoint": "oases.checkpoint.parallelized",
    "load_weights": "oases.autotp",
    "make_optimizer": "oases.layers",
    "nccl_options": "oases.layers",
    "parallel_cross_entropy": "oases.layers",
    "parallelize": "oases.autotp",
    "plan": "oases.planner",
    "quantized_hook": "oases.layers",
    "report": "oases.layers",
    "S2Reducer": "oases_sparse",
    "s2_hook": "oases_sparse",
    "save_checkpoint": "oases.checkpoint.parallelized",
    "save_pretrained": "oases.autotp",
    "Trainer": "oases_train.trainer",
    "TrainConfig": "oases_train.config",
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
    from oases.checkpoint.parallelized import load_checkpoint, save_checkpoint
    from oases.errors import UsageError
    from oases.layers import (
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
    from oases.moe.layer import OverlappedMoE
    from oases.planner import plan
    from oases_sparse import S2Reducer, s2_hook
    from oases_train.config import TrainConfig
    from oases_train.trainer import Trainer


def __getattr__(name: str) -> Any:
    """Load the parts that need torch when they are first asked for: schedules and planners do without."""
    if name == "svm":  # a part of its own, which needs no torch
        import importlib

        return importlib.import_module("oases.svm")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'oases' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


if "torch" in sys.modules:  # else with the first name that needs torch: schedules and planners do without
    import oases_staged  # noqa: F401
