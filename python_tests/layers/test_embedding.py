import pytest
import torch
import torch.distributed as dist
from torch import nn

from oases import OverlappedEmbedding
from oases.core.blocks.sharding import Cut
from oases.layers.embedding import look_up
from oases.layers.linear import shard

ROWS, WIDTH = 16, 6


def check(num_tokens, padding=None):
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
    layer = OverlappedEmbedding.from_embedding(table)
    tokens = torch.randint(ROWS, (2, num_tokens))
    tokens[0, 0] = 9 if padding is None else padding
    grad = torch.randn(2, num_tokens, WIDTH)
    expected = table(tokens)
    expected.backward(grad)
    y = layer(tokens)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.backward(grad)
    group = dist.group.WORLD if dist.is_initialized() else None
    torch.testing.assert_close(layer.weight.grad, shard(table.weight.grad, 0, group))


@pytest.mark.parametrize("num_tokens", [1, 3, 40], ids=["summed", "summed", "gathered"])
def test_equals_embedding(two_ranks, num_tokens):
    two_ranks.run(check, num_tokens)


def test_four_ranks(four_ranks):
    four_ranks.run(check, 2)
    four_ranks.run(check, 40)


def check_uneven(rows, num_tokens, padding):
    torch.manual_seed(0)
    table = nn.Embedding(rows, WIDTH, padding_idx=padding)
    cut, rank, ranks = Cut(0, (rows,)), dist.get_rank(), dist.get_world_size()
    weight = cut.take(table.weight.detach(), rank, ranks).clone().requires_grad_()
    tokens = torch.randint(rows, (2, num_tokens))
    tokens[0, 0] = padding
    grad = torch.randn(2, num_tokens, WIDTH)
    expected = table(tokens)
    expected.backward(grad)
    y = look_up(tokens, weight, rows, dist.group.WORLD, padding)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.backward(grad)
    torch.testing.assert_close(weight.grad, cut.take(table.weight.grad, rank, ranks))


@pytest.mark.parametrize("padding", [0, 8, 16])
@pytest.mark.parametrize("num_tokens", [3, 40], ids=["summed", "gathered"])
def test_uneven_rows_and_a_padding_row(two_ranks, four_ranks, num_tokens, padding):
    two_ranks.run(check_uneven, 17, num_tokens, padding)
    four_ranks.run(check_uneven, 19, num_tokens, padding)


def test_group_of_one():
    table = nn.Embedding(ROWS, WIDTH)
    layer = OverlappedEmbedding.from_embedding(table)
    tokens = torch.randint(ROWS, (3, 4))
    assert torch.equal(layer(tokens), table(tokens))
    assert "16, 6, tensor_parallel=1" in repr(layer)


@pytest.mark.parametrize("num_tokens", [3, 40], ids=["summed", "gathered"])
def test_a_padding_row_has_no_gradient(two_ranks, num_tokens):
    check(num_tokens, 9)
    two_ranks.run(check, num_tokens, 9)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_options_that_rows_cannot_keep_are_refused(options):
    with pytest.raises(ValueError, match=r"an embedding with .* cannot be sharded by rows; leave .* out"):
        OverlappedEmbedding.from_embedding(nn.Embedding(ROWS, WIDTH, **options))
