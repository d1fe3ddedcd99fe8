import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from oases import OverlappedEmbedding, parallel_cross_entropy
from oases.parallel.linear import shard


def check(dtype, ignore):
    torch.manual_seed(0)
    whole = (5 * torch.randn(3, 7, 12)).to(dtype).requires_grad_()
    targets = torch.randint(12, (3, 7))
    if ignore:
        targets[0, :4] = -100
    mine = shard(whole.detach(), -1, dist.group.WORLD).clone().requires_grad_()
    expected = F.cross_entropy(whole.float().flatten(0, 1), targets.flatten())
    loss = parallel_cross_entropy(mine, targets)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, shard(whole.grad, -1, dist.group.WORLD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignore", [False, True])
def test_equals_cross_entropy(two_ranks, dtype, ignore):
    two_ranks.run(check, dtype, ignore)


def test_four_ranks(four_ranks):
    four_ranks.run(check, torch.float32, True)


def check_large_logits():
    logits = torch.full((1, 2), 1e4 * (1 - 2 * dist.get_rank()))
    return float(parallel_cross_entropy(logits, torch.tensor([0])))


def test_large_logits_do_not_overflow(two_ranks):
    for loss in two_ranks.run(check_large_logits):
        assert loss == pytest.approx(0.6931472)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4\) do not fit targets of \(2, 4\)"):
        parallel_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))


def check_range():
    with pytest.raises(IndexError, match="target 99 is out of range for a vocabulary of 4"):
        parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 99]))
    with pytest.raises(IndexError, match="token -3 is out of range for a vocabulary of 8"):
        OverlappedEmbedding(8, 4)(torch.tensor([7, -3]))


def test_indices_out_of_range_are_errors(two_ranks):
    two_ranks.run(check_range)
