import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from oases import OverlappedEmbedding, UsageError, parallel_cross_entropy
from oases.core.blocks.sharding import Cut
from oases.layers.linear import shard


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


def check_options(vocabulary, reduction, smoothing):
    torch.manual_seed(0)
    whole = (5 * torch.randn(3, 7, vocabulary)).requires_grad_()
    targets = torch.randint(vocabulary, (3, 7))
    targets[0, :4] = 2
    options = {"ignore_index": 2, "reduction": reduction, "label_smoothing": smoothing}
    cut = Cut(-1, (vocabulary,))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = cut.take(whole.detach(), rank, ranks).clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), **options)
    loss = parallel_cross_entropy(mine, targets, vocabulary=vocabulary, **options)
    torch.testing.assert_close(loss.flatten(), expected.reshape(loss.shape).flatten())
    weights = torch.rand(loss.shape)
    (weights * expected.reshape(loss.shape)).sum().backward()
    (weights * loss).sum().backward()
    torch.testing.assert_close(mine.grad, cut.take(whole.grad, rank, ranks))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_uneven_parts_and_the_options_of_cross_entropy(two_ranks, reduction, smoothing):
    two_ranks.run(check_options, 13, reduction, smoothing)


def test_uneven_parts_of_four_ranks(four_ranks):
    four_ranks.run(check_options, 13, "mean", 0.1)


def test_options_in_a_group_of_one():
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    losses = parallel_cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    expected = F.cross_entropy(logits.mT, targets, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(
        parallel_cross_entropy(logits[0, 0], targets[0, 0]), F.cross_entropy(logits[0, 0], targets[0, 0])
    )


@pytest.mark.parametrize("options", [{"reduction": "median"}, {"label_smoothing": 1.5}])
def test_options_that_cross_entropy_does_not_have(options):
    with pytest.raises(ValueError, match=str(*options.values())):
        parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), **options)


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
    with pytest.raises(ValueError, match=r"shape \(2, 2\) do not fit a vocabulary of 13"):
        parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), vocabulary=13)
    with pytest.raises(IndexError, match="target 99 is out of range for a vocabulary of 4"):
        parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 99]))
    with pytest.raises(IndexError, match="token -3 is out of range for a vocabulary of 8"):
        OverlappedEmbedding(8, 4)(torch.tensor([7, -3]))


def test_indices_out_of_range_are_errors(two_ranks):
    two_ranks.run(check_range)


def check_sizes():
    """Other numbers of targets on each rank would abort gloo, or wait for its timeout."""
    rank = dist.get_rank()
    with pytest.raises(UsageError, match=r"shape of the targets differs .*\[3\].* on rank 0, .*\[4\].* on rank 1"):
        parallel_cross_entropy(torch.randn(3 + rank, 5), torch.zeros(3 + rank, dtype=torch.int64))
    parallel_cross_entropy(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64))


def test_ranks_with_other_numbers_of_targets_are_told(two_ranks):
    two_ranks.run(check_sizes)
