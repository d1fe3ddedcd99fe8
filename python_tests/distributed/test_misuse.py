"""Wrong uses of the API on two ranks: each raises an error with the remedy, and no rank hangs or trains garbage."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, Mlp, Passing, make_stack, plain_blocks
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import oases
from oases import OverlappedColumnLinear, OverlappedEmbedding, OverlappedMoE, OverlappedRowLinear, OverlappedStack
from oases.distributed.fsdp import FsdpUnit
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.replicas import average_replicas
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.errors import UsageError
from oases.layers import BlockInputs
from oases.moe.stack import ExpertStack


def example(batch=4, **options):
    return torch.ones(batch, 3, WIDTH, dtype=torch.float64, **options)


def started(kind=Mlp, **options):
    return make_stack(plain_blocks(2), dist.group.WORLD, kind, **options)


def used(**options):
    """A stack after calls at which inputs are compared, and before the next of these."""
    stack = started(**options)
    for _ in range(4):
        stack.zero_grad()
        stack(example()).sum().backward()
    return stack


def is_first():
    return dist.get_rank() == 0


class ExpertsAlone(nn.Module):
    """A block of experts and a residual."""

    def __init__(self):
        super().__init__()
        self.experts = OverlappedMoE(WIDTH, 8, 4, placement="none")

    def before(self, x):
        return x, x

    def after(self, x, y):
        return x + y


# --- wrong arguments ---


def without_blocks():
    OverlappedStack([])


def with_a_named_group():
    OverlappedStack([Passing()], process_group="tp")


def with_a_named_wire_type():
    started(wire_dtype="bf16")


def of_nothing():
    started()(None)


def of_a_scalar():
    started()(torch.tensor(1.0))


def of_tokens():
    started()(torch.ones(4, 3, WIDTH, dtype=torch.int64))


def with_inputs_of_one_block():
    started()(example(), [BlockInputs()])


def linear_over_a_named_group():
    OverlappedColumnLinear(4, 4, process_group="tp")


def parallelized_over_a_named_group():
    oases.parallelize(nn.Sequential(nn.Linear(2, 2)), mesh="tp")


# --- changes after construction ---


def with_another_block():
    stack = used()
    stack.blocks.append(Passing())
    stack(example())


def with_fewer_blocks():
    stack = used()
    del stack.blocks[1]
    stack(example())


def with_hooks_of_a_block():
    stack = used()
    stack.blocks[0].register_forward_hook(lambda *_: None)
    stack(example())


def with_hooks_of_a_linear():
    stack = used()
    stack.blocks[1].up.register_full_backward_hook(lambda *_: None)
    stack(example())


# --- changes between the passes ---


def with_another_input():
    stack, x = used(recompute="full"), example()
    y = stack(x)
    x.mul_(2)
    y.sum().backward()


def with_other_weights():
    stack = used(recompute="full")
    y = stack(example())
    with torch.no_grad():
        stack.blocks[0].up.weight.mul_(2)
    y.sum().backward()


def expert_stack():
    return ExpertStack([ExpertsAlone() for _ in range(2)], schedule="plain", recompute=True)


def with_another_input_of_experts():
    stack, x = expert_stack(), torch.ones(6, WIDTH)
    y = stack(x)
    x.mul_(2)
    y.sum().backward()


def with_another_block_of_experts():
    stack = expert_stack()
    stack.blocks.append(ExpertsAlone())
    stack(torch.ones(6, WIDTH))


def with_two_backward_passes():
    y = started()(example())
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def with_two_backward_passes_of_experts():
    layer = OverlappedMoE(WIDTH, 8, 4, placement="none")
    y = layer(torch.ones(6, WIDTH, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()


def with_second_derivatives_of_an_expert_stack():
    x = torch.ones(6, WIDTH, requires_grad=True)
    torch.autograd.grad(expert_stack()(x).square().sum(), x, create_graph=True)


def with_second_derivatives():
    x = example(requires_grad=True)
    (gradient,) = torch.autograd.grad(started()(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()


def with_second_derivatives_of_experts():
    x = torch.ones(6, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        OverlappedMoE(WIDTH, 8, 4, placement="none")(x).square().sum(), x, create_graph=True
    )
    gradient.sum().backward()


# --- wrappers that take shards for the whole ---


def under_ddp_over_tensor_parallel_ranks():
    DistributedDataParallel(started())


def with_an_embedding_under_ddp():
    DistributedDataParallel(nn.Sequential(OverlappedEmbedding(8, 4), nn.Linear(4, 4)))


def under_fsdp2_over_tensor_parallel_ranks():
    stack = started()
    fully_shard(stack)
    torch.optim.SGD(stack.parameters()).step()


def under_fsdp1_over_tensor_parallel_ranks():
    FullyShardedDataParallel(nn.Sequential(started()), device_id=torch.device("cpu"))


# --- ranks that differ ---


def with_other_inputs():
    stack = started()
    torch.manual_seed(dist.get_rank())
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))


def with_other_inputs_later():
    stack = started()
    for step in range(4):
        torch.manual_seed(step + (step == 3) * dist.get_rank())
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))


def with_other_sizes_at_first():
    started()(example(4 + 2 * dist.get_rank()))


def with_other_types_at_first():
    stack = started().to(torch.float32 if is_first() else torch.float64)
    stack(example().to(torch.float32 if is_first() else torch.float64))


def with_other_schedules():
    started(schedule="oases" if is_first() else "sync")(example())


def with_other_wire_types():
    started(wire_dtype=torch.float32 if is_first() else None)(example())


def with_other_wires_of_a_column_parallel_linear():
    layer = OverlappedColumnLinear(4, 4, wire_dtype="int8" if is_first() else None)
    layer(torch.ones(3, 4, requires_grad=True)).sum().backward()


def with_other_wires_of_a_row_parallel_linear():
    layer = OverlappedRowLinear(4, 4, wire_dtype="int8" if is_first() else None)
    layer(torch.ones(3, 2))


def with_other_wires_of_a_linear_later():
    layer = OverlappedRowLinear(4, 4)
    for _ in range(3):
        layer(torch.ones(3, 2))
    other = OverlappedRowLinear(4, 4, wire_dtype=None if is_first() else "int8")
    other(torch.ones(3, 2))


def with_other_wires_of_a_compiled_linear():
    layer = OverlappedRowLinear(4, 8, wire_dtype="int8" if is_first() else None)
    torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(3, 2))


def averaged_by(first, second):
    model = nn.Linear(4, 4)
    GradientAverager([(model.parameters(), dist.group.WORLD)], wire=first if is_first() else second)


def with_a_code_of_averages_on_one_rank():
    averaged_by("int8", "")


def with_other_wires_of_replicas():
    model, mesh = nn.Linear(4, 4), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    average_replicas(model, mesh, "int8" if is_first() else "")
    model(torch.ones(2, 4))


def with_other_wires_of_sharded_gradients():
    unit = FsdpUnit(nn.Linear(4, 4), dist.group.WORLD, dist.group.WORLD, "layer")
    ShardedGradientAverager([unit], "int8" if is_first() else "").prepare()


def with_other_types_of_experts():
    dtype = torch.float32 if is_first() else torch.float64
    layer = OverlappedMoE(WIDTH, 8, 4, placement="none", name="experts of another type").to(dtype)
    layer(torch.ones(6, WIDTH, dtype=dtype))


class Misuse(NamedTuple):
    """act: what a user does on both ranks. error, message: what it raises on both."""

    act: Callable[[], None]
    error: type[Exception]
    message: str


CASES = (
    Misuse(without_blocks, ValueError, "was given no blocks; give at least one"),
    Misuse(with_a_named_group, TypeError, r"a process group was expected, got 'tp'; give .*mesh\.get_group"),
    Misuse(with_a_named_wire_type, ValueError, r"wire_dtype must be .*torch\.bfloat16, .* got 'bf16'"),
    Misuse(of_nothing, TypeError, r"called with None; give a tensor \[batch, ...\]"),
    Misuse(of_a_scalar, ValueError, r"shape \[\] .*give an activation"),
    Misuse(of_tokens, ValueError, r"torch\.int64; give an activation .*embedding of tokens"),
    Misuse(with_inputs_of_one_block, ValueError, "1 BlockInputs were given to 2 blocks; give one for each"),
    Misuse(linear_over_a_named_group, TypeError, "a process group was expected, got 'tp'"),
    Misuse(parallelized_over_a_named_group, TypeError, "a process group was expected, got 'tp'"),
    Misuse(with_another_block, RuntimeError, "made of 2 blocks, .* has 3 now; make a new stack"),
    Misuse(with_fewer_blocks, RuntimeError, "made of 2 blocks, .* has 1 now; make a new stack"),
    Misuse(with_hooks_of_a_block, RuntimeError, r"block 0 \(Mlp\) has hooks, which would not be called"),
    Misuse(with_hooks_of_a_linear, RuntimeError, r"block 1, module 'up' \(OverlappedColumnLinear\) has hooks"),
    Misuse(with_another_input, RuntimeError, "inputs of a stack were changed in place between .*change a copy"),
    Misuse(with_other_weights, RuntimeError, "weights of a stack were changed in place between its forward"),
    Misuse(with_another_input_of_experts, RuntimeError, "inputs of a stack were changed in place"),
    Misuse(with_another_block_of_experts, RuntimeError, "made of 2 blocks, .* has 3 now"),
    Misuse(with_second_derivatives_of_an_expert_stack, RuntimeError, "second derivatives of ExpertStack are not"),
    Misuse(with_two_backward_passes, RuntimeError, "has run already .* call the stack again"),
    Misuse(with_two_backward_passes_of_experts, RuntimeError, "has run already; call the layer again"),
    Misuse(with_second_derivatives, RuntimeError, "second derivatives"),
    Misuse(with_second_derivatives_of_experts, RuntimeError, "second derivatives"),
    Misuse(under_ddp_over_tensor_parallel_ranks, UsageError, r"ranks \[0, 1\] would overwrite .*get_group\(.dp"),
    Misuse(with_an_embedding_under_ddp, UsageError, r"would overwrite 0\.weight, .* process_group=mesh"),
    Misuse(under_fsdp2_over_tensor_parallel_ranks, UsageError, r"would mix the shards of Over.*mesh=mesh\[.dp"),
    Misuse(under_fsdp1_over_tensor_parallel_ranks, UsageError, r"would mix the shards of 0\..*get_group\(.dp"),
    Misuse(with_other_inputs, UsageError, "ranks 0 and 1 were given different inputs, .*the same batch"),
    Misuse(with_other_inputs_later, UsageError, "ranks 0 and 1 were given different inputs"),
    Misuse(with_other_sizes_at_first, UsageError, r"shape of the input differs .*\[4, 3, 16\].* rank 0, .*\[6,"),
    Misuse(with_other_types_at_first, UsageError, "type of the input differs .*float32 on rank 0, torch.float64"),
    Misuse(with_other_types_of_experts, UsageError, "type of the input differs .*float32 on rank 0, torch.float64"),
    Misuse(with_other_schedules, UsageError, "the schedule differs .*oases on rank 0, sync on rank 1"),
    Misuse(with_other_wire_types, UsageError, "the wire_dtype differs .*float32 on rank 0, None on rank 1"),
    Misuse(
        with_other_wires_of_a_column_parallel_linear,
        UsageError,
        "column-parallel linear of 4 -> 4 features: the wire_dtype differs .* int8 on rank 0, None on rank 1",
    ),
    Misuse(
        with_other_wires_of_a_row_parallel_linear,
        UsageError,
        "row-parallel linear of 4 -> 4 features: the wire_dtype differs .* int8 on rank 0, None on rank 1",
    ),
    Misuse(
        with_other_wires_of_a_linear_later,
        RuntimeError,
        "the wire_dtype differs .* None on rank 0, int8 on rank 1",
    ),
    Misuse(with_other_wires_of_a_compiled_linear, InternalTorchDynamoError, "differs .*int8 on rank 0, None on"),
    Misuse(
        with_a_code_of_averages_on_one_rank,
        UsageError,
        "average of gradients: the gradient_wire differs .* int8 on rank 0, None on rank 1",
    ),
    Misuse(with_other_wires_of_replicas, UsageError, "wire differs .* int8 on rank 0, None on rank 1"),
    Misuse(
        with_other_wires_of_sharded_gradients,
        UsageError,
        "sharded gradients: the gradient_wire differs .* int8 on rank 0, None on rank 1",
    ),
)


def raised(act, error, message):
    with pytest.raises(error, match=message):
        act()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_misuse_is_an_error_on_both_ranks(two_ranks, case):
    two_ranks.run(raised, *case)
