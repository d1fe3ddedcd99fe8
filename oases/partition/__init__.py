"""Any model, unedited: its structure is found from its graph, its layers cut at their all-reduces."""

from oases.partition.gathering import full_state_dict, gather_state
from oases.partition.parallelization import parallelize
from oases.partition.pretrained import save_pretrained
from oases.partition.report import PartitionReport
from oases.partition.spec import ParallelSpec
from oases.partition.weights import load_full_state_dict, load_weights

__all__ = [
    "ParallelSpec",
    "PartitionReport",
    "full_state_dict",
    "gather_state",
    "load_full_state_dict",
    "load_weights",
    "parallelize",
    "save_pretrained",
]
