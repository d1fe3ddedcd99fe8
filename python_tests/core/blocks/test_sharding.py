"""Cuts of tensors over ranks."""

import pytest
import torch
from torch import nn

from oases import OverlappedColumnLinear
from oases.core.blocks.sharding import Cut, cuts, sharded_parameters
from oases.errors import UsageError


@pytest.mark.parametrize("segments", [(12,), (4, 4, 4), (8, 2, 2), (7, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_join_to_the_whole(segments, ranks, dim):
    whole = torch.arange(144.0).reshape(12, 12)
    cut = Cut(dim, segments)
    parts = [cut.take(whole, rank, ranks) for rank in range(ranks)]
    assert sum(part.shape[dim] for part in parts) == 12
    assert torch.equal(cut.join(parts), whole)


def test_every_rank_has_a_part_of_each_segment():
    assert Cut(0, (4, 2, 2)).ranges(1, 2) == [(2, 4), (5, 6), (7, 8)]


def test_another_length_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 5\) has 5 along dimension 1, where 4"):
        Cut(1, (4,)).take(torch.zeros(3, 5), 0, 2)


def test_segments_of_a_module_are_its_own():
    layer = nn.Linear(4, 6)
    layer.shard_dims, layer.tensor_parallel = {"weight": 0, "bias": 0}, 2
    layer.shard_segments = {"weight": (6, 3, 3)}
    found = cuts(layer)
    assert found[id(layer.weight)] == Cut(0, (6, 3, 3))
    assert found[id(layer.bias)] == Cut(0, (12,))


def test_a_parametrized_shard_is_refused():
    layer = OverlappedColumnLinear(4, 6)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(UsageError, match="weight is computed from other parameters"):
        sharded_parameters(layer)
