"""Tensor-parallel layers whose communication is hidden under compute."""

from oases.parallel.embedding import OverlappedEmbedding
from oases.parallel.linear import OverlappedColumnLinear, OverlappedRowLinear
from oases.parallel.loss import parallel_cross_entropy
from oases.parallel.stack import OverlappedStack, sharded_parameters
from oases.parallel.statistics import Report, report

__all__ = [
    "OverlappedColumnLinear",
    "OverlappedEmbedding",
    "OverlappedRowLinear",
    "OverlappedStack",
    "Report",
    "parallel_cross_entropy",
    "report",
    "sharded_parameters",
]
