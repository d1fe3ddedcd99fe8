"""The exactness matrix: every schedule, split, layout and degree gives the gradients of the unsplit model.

Of the whole matrix (`make test-slow`), `make test-all` runs every schedule with a part of the layouts, on two ranks
with each of them either with recomputation or without.

The reference is one process and plain autograd, without a stack: blocks called one after another on the whole batch,
with dropout on. It shares with the stack only where random numbers come from.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack, ParallelDropout
from oases.core.blocks.randomness import Extent, Randomness
from oases.core.blocks.sharding import sharded_parameters
from oases.core.schedule import GENERATORS
from oases.layers.dropout import adopt_dropouts
from oases.layers.linear import shard

HIDDEN, HEADS, TOKENS, SEED = 16, 4, 8, 5


class Column(nn.Linear):
    """An uncut layer with the method that blocks call."""

    def partial(self, x):
        return F.linear(x, self.weight, self.bias)


class Row(nn.Linear):
    def partial(self, x):
        return F.linear(x, self.weight)


class Attention(nn.Module):
    """Dropout on the weights of this rank's heads, and on the sum."""

    def __init__(self, generator, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.qkv = Column(HIDDEN, 3 * HIDDEN, dtype=dtype)
        self.projection = Row(HIDDEN, HIDDEN, dtype=dtype)
        self.on_weights, self.on_sum = ParallelDropout(0.2, shard_dim=1), nn.Dropout(0.3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def cut(self, group):
        self.qkv = OverlappedColumnLinear.from_linear(self.qkv, process_group=group)
        self.projection = OverlappedRowLinear.from_linear(self.projection, process_group=group)
        return self

    def prepare(self, x):
        return self.norm(x)

    def product(self, h):
        qkv = self.qkv.partial(h).unflatten(-1, (-1, 3, HIDDEN // HEADS))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2))
        weights = self.on_weights((q @ k.transpose(-1, -2)).softmax(-1))
        return self.projection.partial((weights @ v).transpose(1, 2).flatten(-2))

    def partial(self, x):
        return self.product(self.prepare(x))

    def combine(self, x, y):
        return x + self.on_sum(y + self.projection.bias)


class Mlp(nn.Module):
    """Dropout on this rank's features, and on the sum."""

    token_wise = True

    def __init__(self, generator, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.up, self.down = Column(HIDDEN, 32, dtype=dtype), Row(32, HIDDEN, dtype=dtype)
        self.on_features, self.on_sum = ParallelDropout(0.2, shard_dim=-1), nn.Dropout(0.3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def cut(self, group):
        self.up = OverlappedColumnLinear.from_linear(self.up, process_group=group)
        self.down = OverlappedRowLinear.from_linear(self.down, process_group=group)
        return self

    def partial(self, x):
        return self.down.partial(self.on_features(F.gelu(self.up.partial(self.norm(x)))))

    def combine(self, x, y):
        return x + self.on_sum(y + self.down.bias)


class Halved(Mlp):
    """An MLP whose norm may run on a part of the sequence."""

    def prepare(self, x):
        return self.norm(x)

    def product(self, h):
        return self.down.partial(self.on_features(F.gelu(self.up.partial(h))))


class WithPrologue(Mlp):
    """An MLP behind a linear with dropout that every rank computes in full."""

    has_prologue = True

    def __init__(self, generator, dtype):
        super().__init__(generator, dtype)
        self.whole, self.on_whole = nn.Linear(HIDDEN, HIDDEN, dtype=dtype), nn.Dropout(0.3)
        for parameter in self.whole.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def prologue(self, x):
        return x + self.on_whole(self.whole(x))


def reference(blocks, x, grad):
    """Output and gradients of one process that knows nothing of schedules."""
    randomness = Randomness(SEED, 1, 0, x.device, {})
    whole = Extent(0, x.shape[0])
    x = x.clone().requires_grad_()
    out = x
    for b, block in enumerate(blocks):
        if b and hasattr(block, "prologue"):  # that of the first block is its owner's to call
            out = randomness.run("prologue", b, 0, lambda s: whole, partial(block.prologue, out))
        y = randomness.run("partial", b, 0, lambda s: whole, partial(block.partial, out))
        out = randomness.run("combine", b, 0, lambda s: whole, partial(block.combine, out, y))
    out.backward(grad)
    return (
        out.detach(),
        x.grad,
        {f"blocks.{b}.{n}": p.grad for b, k in enumerate(blocks) for n, p in k.named_parameters()},
    )


def error(mine, expected):
    """The largest difference, relative to the largest entry."""
    return float((mine.detach() - expected).abs().max() / expected.abs().max())


def check(kinds, batch, dtype, limit, options, device):
    group = dist.group.WORLD if dist.is_initialized() else None
    generator = torch.Generator().manual_seed(11)
    plain = [kind(generator, dtype).to(device) for kind in kinds]
    stack = OverlappedStack([copy.deepcopy(block).cut(group) for block in plain], process_group=group, **options)
    adopt_dropouts(nn.ModuleList(plain))
    x, grad = (torch.randn(batch, TOKENS, HIDDEN, dtype=dtype, generator=generator).to(device) for _ in range(2))
    expected, x_grad, gradients = reference(plain, x, grad)
    torch.manual_seed(SEED)
    mine = x.clone().requires_grad_()
    out = stack(mine)
    out.backward(grad)
    assert error(out, expected) < limit
    assert error(mine.grad, x_grad) < limit
    dims = {name: dim for name, _, dim in sharded_parameters(stack)}
    for name, parameter in stack.named_parameters():
        assert error(parameter.grad, shard(gradients[name], dims.get(name), group)) < limit, name


def layouts(schedule):
    """(batch, options): sub-batches of samples, even and uneven; parts of the sequence; parts of one sample."""
    for sub_batches in (1, 2, 3, 4):
        yield 4, {"sub_batches": sub_batches}
        yield 4, {"sub_batches": sub_batches, "sequence_parallel": True}
    yield 5, {"sub_batches": 2}
    if schedule == "oases":
        yield 1, {"sub_batches": 2}
        yield 2, {"sub_batches": 3}


KINDS = {
    "transformer": [Attention, Mlp, Attention, Mlp],
    "halved": [Attention, Halved, Halved],
    "with prologues": [Attention, WithPrologue, WithPrologue],
    "one block": [Mlp],
}


def check_all(kinds, dtype, schedule, recompute, share=1, device="cpu"):
    """share: one in so many layouts is checked; which ones depends on the rest, so that others meet the others."""
    limit = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    first = (sorted(GENERATORS).index(schedule) + sorted(KINDS).index(kinds) + (recompute == "full")) % share
    for batch, options in list(layouts(schedule))[first::share]:
        check(KINDS[kinds], batch, dtype, limit, {"schedule": schedule, "recompute": recompute} | options, device)


PARTLY = [
    ("transformer", torch.float64, 2, 2), ("transformer", torch.float64, 1, 4), ("transformer", torch.float64, 4, 6),
    ("transformer", torch.float32, 2, 6), ("halved", torch.float64, 2, 4), ("with prologues", torch.float64, 2, 2),
    ("one block", torch.float64, 2, 6),
]  # fmt: skip
SLOW = [case[:-1] for case in PARTLY] + [("transformer", torch.float32, 1), ("transformer", torch.float32, 4)]
CASES = [*PARTLY, *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.few(10, 20)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", sorted(GENERATORS))
@pytest.mark.parametrize(("kinds", "dtype", "degree", "share"), CASES)
def test_gradients_with_dropout_equal_the_unsplit_model(request, kinds, dtype, degree, share, schedule, recompute):
    arguments = (kinds, dtype, schedule, recompute, share)
    if degree == 1:
        check_all(*arguments)
    else:
        request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[degree]).run(check_all, *arguments)


@pytest.mark.few(7, 100)
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", sorted(GENERATORS))
@pytest.mark.parametrize("kinds", ["transformer", "halved", "with prologues"])
def test_the_first_layer_alone_may_be_computed_again(two_ranks, kinds, schedule, share):
    two_ranks.run(check_all, kinds, torch.float64, schedule, 1, share)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["sync", "cross_pass", "oases"])
def test_two_ranks_on_one_gpu(two_ranks, schedule, recompute):
    two_ranks.run(check_all, "transformer", torch.float64, schedule, recompute, 1, "cuda")


def test_the_reference_drops():
    """The matrix would prove nothing if the masks were all ones, or the same in every call."""
    blocks = [Mlp(torch.Generator().manual_seed(1), torch.float64)]
    adopt_dropouts(nn.ModuleList(blocks))
    x = torch.ones(2, TOKENS, HIDDEN, dtype=torch.float64)
    with_dropout, _, _ = reference(blocks, x, x)
    blocks[0].eval()
    without, _, _ = reference(blocks, x, x)
    assert error(with_dropout, without) > 0.1
    assert not torch.equal(with_dropout[0], with_dropout[1]), "equal samples, other masks"
