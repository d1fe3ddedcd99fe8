"""Experts, sharded weights and autocast on the virtual device: results of the CPU, and no wait too many."""

import device
import pytest
import torch
import torch.distributed as dist

from oases import OverlappedMoE, OverlappedStack
from oases.distributed.mesh import Mesh
from oases.models.gpt import GPT, GPTConfig, transformer_blocks
from oases.moe.dispatch import RoutingError
from oases.moe.stack import ExpertStack
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage

HIDDEN, EXPERTS = 16, 4
SIZES = {"hidden": HIDDEN, "layers": 1, "heads": 4, "sequence": 8, "vocabulary": 32}


def step(module, x):
    """Output, gradients of input and parameters, on the CPU."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    return [each.detach().cpu() for each in (y, x.grad, *(parameter.grad for parameter in module.parameters()))]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts = torch.nn.LayerNorm(HIDDEN), experts()

    def before(self, x):
        return x, self.norm(x)

    def after(self, x, y):
        return x + y


def experts(**options):
    return OverlappedMoE(HIDDEN, 8, EXPERTS, shared_intermediate=8, gated=True, **options)


def made(kind):
    torch.manual_seed(5)
    return {"layer": experts, "copies": lambda: experts(placement="faster_moe"),
            "stack": lambda: ExpertStack([Block(), Block()])}[kind]().double()  # fmt: skip


def tokens_of(rank, number=12):
    return torch.randn(number, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["layer", "copies", "stack"])
def test_experts_are_those_of_the_cpu(two_virtual, kind):
    two_virtual.run(compare_experts, kind)


def compare_experts(kind):
    module, place = device.take()
    x = tokens_of(dist.get_rank())
    there = made(kind).to(place)
    for seed in range(3):
        module.set_delays(1e-3, 1 + seed)
        found = step(there, x.to(place))
    module.set_delays(0.0)
    for a, b in zip(found, step(made(kind), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@device.virtual_only
def test_the_host_waits_once_in_a_layer_of_experts(two_virtual):
    assert two_virtual.run(counts_waits) == [[1, 0]] * 2


def counts_waits():
    """Waits of the host in a forward and in a backward pass."""
    module, place = device.take()
    layer, x = made("layer").to(place), tokens_of(dist.get_rank()).to(place).requires_grad_()
    for _ in range(3):  # in calls 1 and 2 ranks compare samples of their inputs, too
        layer(x).sum().backward()
    torch.accelerator.synchronize()
    before = module.counts()["host_waits"]
    y = layer(x).sum()
    between = module.counts()["host_waits"]
    y.backward()
    return [between - before, module.counts()["host_waits"] - between]


def test_gates_that_are_not_finite_are_told_on_all_ranks(two_virtual):
    two_virtual.run(refuses_gates)


def refuses_gates():
    _, place = device.take()
    layer, x = made("layer").to(place), tokens_of(0).to(place)
    if dist.get_rank() == 1:
        x[3] = float("nan")
    with pytest.raises(RoutingError, match="on rank 1 of 2"):
        layer(x)
    assert layer(torch.ones_like(x)).isfinite().all()


def test_sharded_weights_are_those_of_the_cpu(two_virtual):
    two_virtual.run(compare_sharded)


def compare_sharded():
    module, place = device.take()
    segment = Segment(2 * SIZES["layers"], 1, "oases", 2, 1)
    plan = Plan(gpt(**SIZES), 2, 2, 8, 1, (Stage((segment,)),), fsdp=True)
    mesh = Mesh.of(plan)
    tokens, targets = torch.randint(32, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    whole, sharded = (GPT(GPTConfig(**SIZES), plan=plan, mesh=mesh) for _ in range(2))
    whole.loss(tokens, targets).backward()
    sharded.to(place)
    average = sharded.shard_weights()
    module.set_delays(1e-3, 1)
    with average.overlapped():
        sharded.loss(tokens.to(place), targets.to(place)).backward()
    expected, rank = dict(whole.named_parameters()), dist.get_rank()
    for name, parameter in sharded.named_parameters():  # ranks with equal batches
        part = expected[name].grad.chunk(2)[rank]
        torch.testing.assert_close(parameter.grad.to_local().cpu(), part, rtol=1e-4, atol=1e-6)
    module.set_delays(0.0)
    mesh.destroy()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_is_that_of_the_cpu(two_virtual, recompute):
    two_virtual.run(compare_autocast, recompute)


def compare_autocast(recompute):
    _, place = device.take()
    there, here = (under_autocast(where, recompute) for where in (place, torch.device("cpu")))
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def under_autocast(where, recompute):
    """A step of a stack whose forward pass runs under autocast, and so does what it recomputes."""
    blocks = transformer_blocks(GPTConfig(**SIZES), dist.group.WORLD)
    stack = OverlappedStack(
        blocks, process_group=dist.group.WORLD, schedule="oases", sub_batches=2, recompute=recompute
    ).to(where)
    dtypes = []
    for block in stack.blocks:
        note_dtypes(block.up if hasattr(block, "up") else block.qkv, dtypes)
    x = torch.randn(4, 8, HIDDEN, generator=torch.Generator().manual_seed(2)).to(where).requires_grad_()
    with torch.autocast(where.type, torch.bfloat16):
        y = stack(x)
    y.float().square().sum().backward()
    assert dtypes == [torch.bfloat16] * (2 * len(blocks) * (1 + (recompute == "full")))
    return [each.detach().cpu() for each in (y, x.grad, *(parameter.grad for parameter in stack.parameters()))]


def note_dtypes(linear, dtypes):
    partial = linear.partial

    def noted(x):
        y = partial(x)
        dtypes.append(y.dtype)
        return y

    linear.partial = noted
