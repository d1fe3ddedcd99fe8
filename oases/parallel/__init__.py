"""Tensor-parallel layers that overlap communication with compute."""

from typing import TYPE_CHECKING, Any

from oases.execution.group import nccl_options
from oases.parallel.attention import causal_attention
from oases.parallel.batch import BlockInputs
from oases.parallel.dropout import ParallelDropout
from oases.parallel.embedding import OverlappedEmbedding
from oases.parallel.gradient_clipping import clip_grad_norm
from oases.parallel.gradient_hook import quantized_hook
from oases.parallel.linear import OverlappedColumnLinear, OverlappedRowLinear
from oases.parallel.loss import parallel_cross_entropy
from oases.parallel.optimizer import make_optimizer
from oases.parallel.sharding import sharded_parameters
from oases.parallel.stack import OverlappedStack
from oases.reporting import Report, report

if TYPE_CHECKING:
    from oases.parallel.styles import OverlappedColwiseParallel, OverlappedRowwiseParallel

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
        raise AttributeError(f"module 'oases.parallel' has no attribute {name!r}")
    import oases.parallel.styles as styles

    return getattr(styles, name)
