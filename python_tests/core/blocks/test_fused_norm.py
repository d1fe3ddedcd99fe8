"""Bias, residual and the next block's norm as one op, against blocks called one after another by plain autograd."""

import pytest
import torch
import torch.distributed as dist
from called_ops import CalledOps, fused_on_cpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oases import OverlappedStack
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.sharding import sharded_parameters
from oases.core.schedule import GENERATORS, generate
from oases.distributed.mesh import Mesh
from oases.layers.linear import shard
from oases.models.gpt import GPT, GPTConfig, Mlp, transformer_blocks
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage

CONFIG = GPTConfig(hidden=32, layers=2, heads=4, sequence=8)
FORWARD = "oases::bias_dropout_residual_norm"
BACKWARD = f"{FORWARD}_backward"


def whole_blocks(alone, dtype):
    """Blocks of the model on one rank, with norms and biases that are not ones and zeros."""
    blocks = nn.ModuleList(transformer_blocks(CONFIG, alone)).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.1)
    return blocks


def stack_of(whole, group, **options):
    """The same blocks, sharded, as a stack."""
    stack = OverlappedStack(transformer_blocks(CONFIG, group), process_group=group, **options)
    stack.to(next(whole.parameters()).dtype)
    dims = {name: dim for name, _, dim in sharded_parameters(stack)}
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            parameter.copy_(shard(whole.get_parameter(name.removeprefix("blocks.")), dims.get(name), group))
    return stack


def groups():
    """(the group of all ranks, one of this rank alone)."""
    if not dist.is_initialized():
        return None, None
    return dist.group.WORLD, dist.new_subgroups(1)[0]


def error(mine, expected):
    """The largest difference, relative to the largest entry."""
    return float((mine.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def compare(stack, whole, group, limit, batch=4):
    """Check output and all gradients; return the ops that the stack called."""
    x, grad = torch.randn(2, batch, 8, 32, generator=torch.Generator().manual_seed(3)).to(next(whole.parameters()))
    theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = theirs
    for block in whole:
        expected = block.combine(expected, block.partial(expected))
    expected.backward(grad)
    with fused_on_cpu(), CalledOps() as called:
        out = stack(mine)
        out.backward(grad)
    assert error(out, expected) < limit
    assert error(mine.grad, theirs.grad) < limit
    dims = {name: dim for name, _, dim in sharded_parameters(stack)}
    for name, parameter in stack.named_parameters():
        gradient = whole.get_parameter(name.removeprefix("blocks.")).grad
        assert error(parameter.grad, shard(gradient, dims.get(name), group)) < limit, name
    with fused_on_cpu(), torch.no_grad():
        assert error(stack(x), expected) < limit
    return called.ops


def check(schedule, recompute, along=False):
    group, alone = groups()
    whole = whole_blocks(alone, torch.float32)
    stack = stack_of(whole, group, schedule=schedule, recompute=recompute, sequence_parallel=along)
    ops = compare(stack, whole, group, 2e-6)
    places = stack.schedule.num_sub_batches * (len(whole) - 1)
    if recompute == "none":
        assert ops[FORWARD] == ops[BACKWARD] == places
    elif not stack.schedule.sequence_parallel:
        assert ops[FORWARD] == ops[BACKWARD] == 0, "x and h of a block would be kept"
    else:
        assert 0 < ops[BACKWARD] <= places
        assert ops[FORWARD] == 2 * ops[BACKWARD] or schedule != "sync"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", sorted(GENERATORS))
def test_group_of_one(schedule, recompute):
    check(schedule, recompute)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", sorted(GENERATORS))
@pytest.mark.parametrize("along", [False, True])
def test_two_ranks(two_ranks, schedule, recompute, along):
    two_ranks.run(check, schedule, recompute, along)


def test_bfloat16():
    whole = whole_blocks(None, torch.bfloat16)
    ops = compare(stack_of(whole, None, schedule="oases"), whole, None, 3e-2)
    assert ops[FORWARD] == ops[BACKWARD] == 6


# --- where the two methods are called instead ---


def hook_of_norm(stack, seen):
    stack.blocks[1].norm.register_forward_hook(lambda *_: seen.append("hook"))


def other_norm(stack, seen):
    class Noted(nn.LayerNorm):
        def forward(self, x):
            seen.append("norm")
            return super().forward(x)

    stack.blocks[1].norm.__class__ = Noted


def other_forward(stack, seen):
    forward = stack.blocks[1].norm.forward
    stack.blocks[1].norm.forward = lambda x: (seen.append("forward"), forward(x))[1]


def other_method(name):
    def change(stack, seen):
        method = getattr(stack.blocks[1], name)
        setattr(stack.blocks[1], name, lambda *given: (seen.append(name), method(*given))[1])

    return change


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (hook_of_norm, 2), (other_norm, 2), (other_forward, 2), (other_method("combine"), 1),
        (other_method("prepare"), 1), (other_method("partial"), 1),
    ],
)  # fmt: skip
def test_what_a_user_changed_is_called(change, left):
    """left: neighbours of four blocks that still share an op."""
    whole, seen = whole_blocks(None, torch.float32), []
    stack = stack_of(whole, None, schedule="oases")
    change(stack, seen)
    ops = compare(stack, whole, None, 2e-6)
    assert ops[FORWARD] == ops[BACKWARD] == 2 * left
    assert len(seen) == 4, "two sub-batches, with gradients and without"


def test_float64_is_computed_by_torch(two_ranks):
    two_ranks.run(check_float64, False)
    two_ranks.run(check_float64, True)


def check_float64(along):
    group, alone = groups()
    whole = whole_blocks(alone, torch.float64)
    ops = compare(stack_of(whole, group, schedule="oases", sequence_parallel=along), whole, group, 1e-12)
    assert ops[FORWARD] == 0


def test_under_autocast_torch_chooses_the_types():
    whole = whole_blocks(None, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ops = compare(stack_of(whole, None, schedule="oases"), whole, None, 5e-2)
    assert ops[FORWARD] == 0


def test_hooks_on_saved_tensors_see_all_of_them():
    whole, seen = whole_blocks(None, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.shape), x)[1], lambda x: x):
        ops = compare(stack_of(whole, None, schedule="oases"), whole, None, 2e-6)
    assert ops[FORWARD] == 0


def test_compiled_blocks_are_their_own():
    stack = stack_of(whole_blocks(None, torch.float32), None, schedule="oases")
    compiled = [torch.compile(block, backend="eager") for block in stack.blocks]
    with fused_on_cpu():
        joined = BlockProgram(stack.schedule, list(stack.blocks), "", None).joined
        assert [each is not None for each in joined] == [False, True, True, True]
        assert not any(BlockProgram(stack.schedule, compiled, "", None).joined)
        assert not any(BlockProgram(stack.schedule, list(stack.blocks), "", None, "meta").joined)


# --- gradients ---


def test_only_the_norms_gradients_come_a_block_later():
    blocks = list(stack_of(whole_blocks(None, torch.float32), None, schedule="oases").blocks)
    schedule = generate("oases", 4, 2)
    apart = BlockProgram(schedule, blocks, "", None)
    with fused_on_cpu():
        together = BlockProgram(schedule, blocks, "", None)
    assert together.ends == apart.ends
    assert together.order != apart.order, "ranks would sum gradients of h and of x"


def test_frozen_parameters_get_no_gradient():
    whole = whole_blocks(None, torch.float32)
    stack = stack_of(whole, None, schedule="oases")
    for frozen in (stack.blocks[1].norm.weight, stack.blocks[1].down.bias):
        frozen.requires_grad_(False)
    with fused_on_cpu(), CalledOps() as called:
        stack(torch.randn(4, 8, 32)).sum().backward()
    assert called.ops[BACKWARD] == 6
    without = {name for name, parameter in stack.named_parameters() if parameter.grad is None}
    assert without == {"blocks.1.norm.weight", "blocks.1.down.bias"}


class Overwriting(Mlp):
    """Doubles its input in place, and so the output of the block below."""

    def product(self, h):
        self.held.mul_(2)
        return super().product(h)


def test_an_output_changed_in_place_is_not_read():
    stack = stack_of(whole_blocks(None, torch.float32), None, schedule="sync")
    stack.blocks[1].__class__ = Overwriting
    outputs = []
    original = torch.ops.oases.bias_dropout_residual_norm

    class Keeping(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **kwargs or {})
            if function is original.default:
                outputs.append(made[0])
                stack.blocks[1].held = made[0]
            return made

    with fused_on_cpu(), Keeping():
        out = stack(torch.randn(4, 8, 32))
        with pytest.raises(RuntimeError, match="was changed in place after the next block's norm had read it"):
            out.sum().backward()


def check_sharded_weights():
    sizes = {"hidden": 16, "layers": 2, "heads": 4, "sequence": 8, "vocabulary": 32}
    plan = Plan(
        model=gpt(**sizes), world=2, ranks_per_node=2, global_batch=8, micro_batches=1,
        stages=(Stage((Segment(4, 1, "oases", 2),)),), fsdp=True,
    )  # fmt: skip
    mesh = Mesh.of(plan)
    model = GPT(GPTConfig(**sizes), plan=plan, mesh=mesh)
    tokens = torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    model.loss(*tokens).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    average = model.shard_weights()
    model.stack.segments[0]._programs.clear()  # of the CPU without the op
    with fused_on_cpu(), CalledOps() as called, average.overlapped():
        model.loss(*tokens).backward()
    assert called.ops[FORWARD] == called.ops[BACKWARD] == 6
    for name, parameter in model.named_parameters():  # the average of ranks with equal batches
        assert error(parameter.grad.full_tensor(), expected[name]) < 2e-6, name
    mesh.destroy()


def test_sharded_weights(two_ranks):
    two_ranks.run(check_sharded_weights)
