"""Wrong uses that would go on with wrong numbers, or on one rank alone: each raises on both ranks."""

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, Mlp, make_stack, plain_blocks
from test_misuse import Misuse, expert_stack, raised, started
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import ZeroRedundancyOptimizer

import oases
from oases import OverlappedEmbedding, OverlappedRowLinear, OverlappedStack, ParallelSpec
from oases.core.execution.failure import FailedRankError
from oases.errors import UsageError
from oases.layers import BlockInputs


def example(batch=4, **options):
    return torch.ones(batch, 3, WIDTH, dtype=torch.float64, **options)


def is_first():
    return dist.get_rank() == 0


class Masked(Mlp):
    """Block with a mask, or more inputs."""

    def partial(self, x, mask, *_):
        return super().partial(x * mask if torch.is_tensor(mask) else x)

    def combine(self, x, y, *_):
        return super().combine(x, y)


class Scaled(nn.Module):
    """Model of tokens with an optional argument."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, tokens, scale=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x) if scale is None else self.last(x) * scale


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


# --- ranks that differ ---


def doubled(x):
    class Doubling(nn.Module):
        def partial(self, x):
            return x * 1

        def combine(self, x, y):
            return x + y

    return OverlappedStack([Doubling()])(x)


def with_other_numbers_beside_a_constant_channel():
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 64, 64)
    x[..., 0] = 1000.0
    doubled(x)


def with_other_numbers_beside_an_outlier():
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, WIDTH)
    x[0, 0, 0] = 1000.0
    doubled(x)


def with_one_outlier():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 64)
    x[3, 5, 7] += 100.0 * dist.get_rank()
    doubled(x)


def with_samples_in_another_order():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 64)
    doubled(x if is_first() else x.flip(0))


def of_two(inputs):
    started(Masked)(example(), [inputs] * 2)


def with_other_masks():
    of_two(BlockInputs((torch.full((4, 1, 1), 1.0 + dist.get_rank(), dtype=torch.float64),), (True,)))


def with_other_infinite_masks():
    mask = torch.zeros(4, 1, 1, dtype=torch.float64)
    mask[2] = 0.0 if is_first() else -torch.inf
    of_two(BlockInputs((mask.exp(), mask), (True, True)))


def with_masks_of_other_shapes():
    of_two(BlockInputs((torch.ones(4, 1 + 2 * dist.get_rank(), 1, dtype=torch.float64),), (True,)))


def with_other_programs():
    of_two(BlockInputs(({"ids": torch.tensor([dist.get_rank()])},), (False,)))


def with_frozen_norms_on_one_rank():
    stack = started()
    for block in stack.blocks:
        block.norm.requires_grad_(is_first())
    stack(example())


def with_another_frozen_norm():
    stack = started()
    stack.blocks[dist.get_rank()].norm.requires_grad_(False)
    stack(example())


def model():
    torch.manual_seed(0)
    return oases.parallelize(Scaled(), spec=ParallelSpec(inputs=((torch.ones(4, 3, dtype=torch.int64),), {})))


def with_an_argument_on_one_rank():
    tokens = torch.ones(4, 3, dtype=torch.int64)
    model()(tokens, **({} if is_first() else {"scale": torch.ones(())}))


def with_other_tokens_in_one_place():
    tokens = torch.ones(64, 16, dtype=torch.int64)
    tokens[5, 3] += dist.get_rank()
    model()(tokens)


def with_a_frozen_model_on_one_rank():
    cut = model()
    cut.last.weight.requires_grad_(is_first())
    cut(torch.ones(4, 3, dtype=torch.int64))


def with_other_options_of_a_model():
    oases.parallelize(Scaled(), dtype=torch.bfloat16 if is_first() else None)


def with_inputs_of_other_shapes_of_linears():
    # Of sizes that no other case has: a form known to a group is not compared again before its collective.
    OverlappedRowLinear(8, 24)(torch.ones(4 + dist.get_rank(), 4))


def with_inputs_of_other_types_of_linears():
    dtype = torch.float32 if is_first() else torch.float64
    OverlappedRowLinear(8, 40).to(dtype)(torch.ones(4, 4, dtype=dtype))


def with_inputs_of_other_shapes_of_an_embedding():
    OverlappedEmbedding(16, 8)(torch.zeros(4 + dist.get_rank(), dtype=torch.long))


def with_second_derivatives_of_a_linear():
    x = torch.ones(4, 4, requires_grad=True)
    torch.autograd.grad(OverlappedRowLinear(8, 8)(x).pow(3).sum(), x, create_graph=True)


def with_hooks_of_experts():
    stack = expert_stack()
    stack.blocks[0].experts.register_forward_hook(lambda *_: None)
    stack(torch.ones(6, WIDTH))


CASES = (
    Misuse(with_other_options_of_a_model, UsageError, "dtype is torch.bfloat16 on one rank and None on another"),
    Misuse(with_inputs_of_other_shapes_of_linears, UsageError, "shape of the input differs"),
    Misuse(with_inputs_of_other_types_of_linears, UsageError, "type of the input differs"),
    Misuse(with_inputs_of_other_shapes_of_an_embedding, UsageError, "the embedding of 16 x 8: the shape of"),
    Misuse(with_second_derivatives_of_a_linear, RuntimeError, "second derivatives of OverlappedRowLinear"),
    Misuse(with_hooks_of_experts, RuntimeError, r"block 0, module 'experts' \(OverlappedMoE\) has hooks"),
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
    Misuse(with_other_numbers_beside_a_constant_channel, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_numbers_beside_an_outlier, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_one_outlier, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_samples_in_another_order, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_masks, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_infinite_masks, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_programs, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_tokens_in_one_place, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_masks_of_other_shapes, UsageError, r"form of the blocks' inputs differs .*4, 1, 1.*4, 3, 1"),
    Misuse(with_frozen_norms_on_one_rank, UsageError, "require gradients differs .* 12 on rank 0, 8 on rank 1"),
    Misuse(with_another_frozen_norm, UsageError, "digest of the parameters that require gradients differs"),
    Misuse(with_an_argument_on_one_rank, UsageError, "shape of scale differs .* not given on rank 0, .*Size"),
    Misuse(with_a_frozen_model_on_one_rank, UsageError, "require gradients differs .* on rank 0, .* on rank 1"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_misuse_is_an_error_on_both_ranks(two_ranks, case):
    two_ranks.run(raised, *case)


class Forgetful(Mlp):
    """Its `method` forgets to return."""

    method = ""

    def partial(self, x):
        y = super().partial(x)
        return None if self.method == "partial" else y

    def combine(self, x, y):
        y = super().combine(x, y)
        return [y] if self.method == "combine" else y


def check_result(method, said, grad):
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Forgetful)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        stack(x)
        dist.barrier()
        if dist.get_rank() == 1:
            stack.blocks[0].method = method
        op = "F" if method == "partial" else "C"
        message = (
            rf"rank 1 failed at {op} 0\.\d .*block 0, .*TypeError: Forgetful\.{method}\(\) of a block returned {said}"
        )
        with pytest.raises(FailedRankError, match=message):
            stack(x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("method", "said"), [("partial", "None"), ("combine", r"\[tensor")])
def test_a_block_that_returns_no_tensor_is_named(two_ranks, method, said, grad):
    two_ranks.run(check_result, method, said, grad)
