"""Wrong uses that would go on with wrong numbers, or on one rank alone: each raises on both ranks, with the remedy."""

import pytest
import torch
import torch.distributed as dist
from test_misuse import Misuse, raised, started
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import ZeroRedundancyOptimizer

from block_examples import WIDTH, Mlp
from oases.errors import UsageError


def example(batch=4, **options):
    return torch.ones(batch, 3, WIDTH, dtype=torch.float64, **options)


def is_first():
    return dist.get_rank() == 0


# --- wrappers that take shards for the whole ---


def under_replicate_over_tensor_parallel_ranks():
    stack = started()
    replicate(stack)
    stack(example())


def with_an_optimizer_that_shards_states_over_tensor_parallel_ranks():
    stack = started()
    optimizer = ZeroRedundancyOptimizer(stack.parameters(), torch.optim.SGD, lr=0.1)
    stack(example()).sum().backward()
    optimizer.step()


CASES = (
    Misuse(
        under_replicate_over_tensor_parallel_ranks,
        UsageError,
        r"over ranks \[0, 1\] would overwrite OverlappedColumnLinear\.weight.*the data-parallel group alone",
    ),
    Misuse(
        with_an_optimizer_that_shards_states_over_tensor_parallel_ranks,
        UsageError,
        r"ZeroRedundancyOptimizer over ranks \[0, 1\] would overwrite .*the data-parallel group alone",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_misuse_is_an_error_on_both_ranks(two_ranks, case):
    two_ranks.run(raised, *case, timeout_seconds=60)
