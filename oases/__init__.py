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
    "check": "oases_check",
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

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from oases.autotp import ParallelSpec as ParallelSpec
    from oases.autotp import full_state_dict as full_state_dict
    from oases.autotp import load_weights as load_weights
    from oases.autotp import parallelize as parallelize
    from oases.autotp import save_pretrained as save_pretrained
    from oases.checkpoint.parallelized import load_checkpoint as load_checkpoint
    from oases.checkpoint.parallelized import save_checkpoint as save_checkpoint
    from oases.errors import UsageError as UsageError
    from oases.layers import OverlappedColumnLinear as OverlappedColumnLinear
    from oases.layers import OverlappedColwiseParallel as OverlappedColwiseParallel
    from oases.layers import OverlappedEmbedding as OverlappedEmbedding
    from oases.layers import OverlappedRowLinear as OverlappedRowLinear
    from oases.layers import OverlappedRowwiseParallel as OverlappedRowwiseParallel
    from oases.layers import OverlappedStack as OverlappedStack
    from oases.layers import ParallelDropout as ParallelDropout
    from oases.layers import causal_attention as causal_attention
    from oases.layers import clip_grad_norm as clip_grad_norm
    from oases.layers import make_optimizer as make_optimizer
    from oases.layers import nccl_options as nccl_options
    from oases.layers import parallel_cross_entropy as parallel_cross_entropy
    from oases.layers import quantized_hook as quantized_hook
    from oases.layers import report as report
    from oases.moe.layer import OverlappedMoE as OverlappedMoE
    from oases.planner import plan as plan
    from oases_check import check as check
    from oases_sparse import S2Reducer as S2Reducer
    from oases_sparse import s2_hook as s2_hook
    from oases_train.config import TrainConfig as TrainConfig
    from oases_train.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    """Load the parts that need torch when they are first asked for: schedules and planners do without."""
    if name == "svm":  # a part of its own, which needs no torch
        import importlib

        return importlib.import_module("oases.svm")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'oases' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _register_backend() -> None:
    import oases_staged  # noqa: F401


if "torch" in sys.modules:  # else with the first name that needs torch: schedules and planners do without
    _register_backend()
