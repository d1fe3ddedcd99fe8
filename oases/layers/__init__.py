"""Tensor-parallel layers that overlap communication with compute."""

from typing import TYPE_CHECKING, Any

import oases.distributed.guards  # noqa: F401  (watches shards of all layers)
from oases.core.blocks.batch import BlockInputs
from oases.core.blocks.sharding import sharded_parameters
from oases.core.blocks.stack import OverlappedStack
from oases.core.execution.group import nccl_options
from oases.distributed.gradient_clipping import clip_grad_norm
from oases.distributed.gradient_hook import quantized_hook
from oases.distributed.optimizer import make_optimizer
from oases.layers.attention import causal_attention
from oases.layers.dropout import ParallelDropout
from oases.layers.embedding import OverlappedEmbedding
from oases.layers.linear import OverlappedColumnLinear, OverlappedRowLinear
from oases.layers.loss import parallel_cross_entropy
from oases.reporting import Report, report

if TYPE_CHECKING:
    from oases.layers.styles import OverlappedColwiseParallel, OverlappedRowwiseParallel

__all__ = [
    "BlockInputs",
    "OverlappedColumnLinear",
    "OverlappedColwiseParallel",
    "OverlappedEmbedding",
    "OverlappedRowLinear",
    "OverlappedRowwiseParallel",
    "OverlappedStack",
    "ParallelDropout",
    "Report",
    "causal_attention",
    "clip_grad_norm",
    "make_optimizer",
    "nccl_options",
    "parallel_cross_entropy",
    "quantized_hook",
    "report",
    "sharded_parameters",
]


def __getattr__(name: str) -> Any:
    """Load the DTensor styles on first use: importing DTensor takes longer than all the rest."""
    if name not in ("OverlappedColwiseParallel", "OverlappedRowwiseParallel"):
        raise AttributeError(f"module 'oases.layers' has no attribute {name!r}")
    import oases.layers.styles as styles

    return getattr(styles, name)
