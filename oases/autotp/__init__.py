"""Automatic tensor parallelism for unedited models: trace layers, shard weights, cut layers at their all-reduces."""

from oases.autotp.checking import ParallelSpec
from oases.autotp.gathering import full_state_dict, gather_state
from oases.autotp.parallelization import parallelize
from oases.autotp.pretrained import save_pretrained
from oases.autotp.report import PartitionReport
from oases.autotp.weights import load_full_state_dict, load_weights

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
