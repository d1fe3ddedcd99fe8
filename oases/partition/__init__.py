"""Any model, unedited: its structure is found from its graph, its layers cut at their all-reduces."""

from oases.partition.parallelization import parallelize
from oases.partition.report import PartitionReport
from oases.partition.spec import ParallelSpec

__all__ = ["ParallelSpec", "PartitionReport", "parallelize"]
