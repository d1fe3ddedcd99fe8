"""Block inputs besides the activation, against the unsharded model under plain autograd."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import covered
from torch import nn

import oases
from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack
from oases.core.blocks.batch import BlockInputs
from oases.core.blocks.sharding import sharded_parameters
from oases.core.execution.group import group_rank, group_size, scheduler_of
from oases.core.schedule import along_sequence
from oases.layers.linear import shard

WIDTH, HEADS, TOKENS, ENCODED = 8, 4, 6, 5


class CrossAttention(nn.Module):
    """Queries of x, keys and values of an encoder's states, a position bias per head; all of them read in partial.

    The encoder's mean is read in combine, too, so that its gradient is a sum of shares and a whole part.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.group = None

    def cut(self, group):
        self.group = group
        for name in ("q", "k", "v"):
            setattr(self, name, OverlappedColumnLinear.from_linear(getattr(self, name), process_group=group))
        self.out = OverlappedRowLinear.from_linear(self.out, process_group=group)
        return self

    def product(self, h, mask, table, bias, encoded, nothing, program):
        assert nothing is None
        heads = HEADS // group_size(self.group)
        bias = bias.narrow(1, group_rank(self.group) * heads, heads)
        sources = (h + table, encoded, encoded)
        layers = (self.q, self.k, self.v)
        q, k, v = (
            (layer.partial(source) if hasattr(layer, "partial") else layer(source)).unflatten(-1, (heads, -1))
            for layer, source in zip(layers, sources, strict=True)
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + bias + mask
        y = program(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2))
        return self.out.partial(y) if hasattr(self.out, "partial") else F.linear(y, self.out.weight)

    def partial(self, x, *values):
        return self.product(self.norm(x), *values)

    def combine(self, x, y, mask, table, bias, encoded, nothing, program):
        return x + y + self.out.bias + encoded.mean(1, keepdim=True)


class Halved(CrossAttention):
    """With its norm on this rank's part of the sequence, under sequence parallelism."""

    def prepare(self, x, *values):
        return self.norm(x)


class Mlp(nn.Module):
    """Reads nothing besides."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def cut(self, group):
        self.up = OverlappedColumnLinear.from_linear(self.up, process_group=group)
        self.down = OverlappedRowLinear.from_linear(self.down, process_group=group)
        return self

    def partial(self, x):
        if hasattr(self.up, "partial"):
            return self.down.partial(F.gelu(self.up.partial(x)))
        return F.linear(F.gelu(self.up(x)), self.down.weight)

    def combine(self, x, y):
        return x + y + self.down.bias


class Scaled:
    """A program: any object that blocks call."""

    def __call__(self, x):
        return 2 * x


def leaves(batch):
    """Leaf tensors of the caller: the activation, and the tensors its inputs are computed from."""
    generator = torch.Generator().manual_seed(batch)
    shapes = {
        "x": (batch, TOKENS, WIDTH),
        "encoded": (batch, ENCODED, WIDTH),
        "bias": (1, HEADS, TOKENS, ENCODED),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def inputs_of(blocks, owned):
    """The same tensors for every block that reads any."""
    batch = owned["x"].shape[0]
    mask = torch.zeros(batch, 1, 1, ENCODED, dtype=torch.float64)
    for sample in range(batch):
        mask[sample, ..., : sample % ENCODED] = -1e3
    table = torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.float64).view(1, TOKENS, WIDTH)
    values = (mask, table, owned["bias"].tanh(), owned["encoded"].sin(), None, Scaled())
    reads = BlockInputs(values, (True, False, False, True, False, False))
    return [reads if isinstance(block, CrossAttention) else BlockInputs() for block in blocks]


def plain_blocks(kinds):
    torch.manual_seed(2)
    return [kind() for kind in kinds]


def make_stack(blocks, group, **options):
    return OverlappedStack([copy.deepcopy(block).cut(group) for block in blocks], process_group=group, **options)


def check(kinds, batch, options, number=1):
    """number: how many calls wait for their backward passes, each with inputs of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    blocks = plain_blocks(kinds)
    stack = make_stack(blocks, group, **options)
    expected, mine, losses = [], [], []
    for call in range(number):
        theirs, owned = leaves(batch + call), leaves(batch + call)
        out = theirs["x"]
        for block, given in zip(blocks, inputs_of(blocks, theirs), strict=True):
            out = block.combine(out, block.partial(out, *given.values), *given.values)
        out.square().mean().backward()
        result = stack(owned["x"], inputs_of(blocks, owned))
        torch.testing.assert_close(result, out, rtol=1e-12, atol=1e-12)
        expected.append(theirs)
        mine.append(owned)
        losses.append(result.square().mean())
    for loss in losses:
        loss.backward()
    for theirs, owned in zip(expected, mine, strict=True):
        for name in theirs:
            torch.testing.assert_close(owned[name].grad, theirs[name].grad, rtol=1e-12, atol=1e-12, msg=name)
    whole = dict(nn.ModuleList(blocks).named_parameters())
    dims = {name: dim for name, _, dim in sharded_parameters(stack)}
    for name, parameter in stack.named_parameters():
        gradient = shard(whole[name.removeprefix("blocks.")].grad, dims.get(name), group)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


DECODER = [Mlp, CrossAttention, Mlp, CrossAttention]
KINDS = {
    "decoder": DECODER,
    "from the first": [CrossAttention, CrossAttention, Mlp],
    "halved": [Mlp, Halved, Halved],
}
SCHEDULES = {"schedule": ["sync", "oases", "cross_pass"], "recompute": ["none", "full"]}
SPLITS = {"1 of 4": (1, 4), "2 of 4": (2, 4), "3 of 3": (3, 3), "3 of 5": (3, 5)}
"""Numbers of sub-batches and of samples."""


@pytest.mark.parametrize(
    ("schedule", "recompute", "kinds", "split"),
    covered(SCHEDULES | {"kinds": ["decoder", "from the first"], "split": list(SPLITS)}),
)
def test_gradients_equal_the_unsplit_model(two_ranks, schedule, recompute, kinds, split):
    sub_batches, batch = SPLITS[split]
    options = {"schedule": schedule, "sub_batches": sub_batches, "recompute": recompute}
    two_ranks.run(check, KINDS[kinds], batch, options)


@pytest.mark.parametrize(("schedule", "recompute", "kinds"), covered(SCHEDULES | {"kinds": list(KINDS)}))
def test_with_sequence_parallelism_inputs_pass_whole(two_ranks, schedule, recompute, kinds):
    options = {"schedule": schedule, "recompute": recompute, "sequence_parallel": True}
    two_ranks.run(check, KINDS[kinds], 5, options)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_call_holds_its_own(two_ranks, recompute):
    two_ranks.run(check, DECODER, 4, {"recompute": recompute}, 3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_group_of_one(recompute):
    check(DECODER, 5, {"recompute": recompute})


def check_sums():
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
    blocks = plain_blocks([CrossAttention] * 3)
    stack = make_stack(blocks, dist.group.WORLD, sub_batches=4)
    owned, fired = leaves(4), []
    inputs = inputs_of(blocks, owned)
    for tensor in inputs[0].values[2:4]:
        tensor.register_hook(lambda grad: fired.append(grad.shape))
    stack(owned["x"], inputs).sum().backward()
    assert len(fired) == 2
    return {other.where: other.collectives for other in oases.report().others}["gradients of block inputs"]


def test_shares_are_summed_once_per_backward_pass(two_ranks):
    """Once for each of two tensors, however many blocks and sub-batches read it."""
    assert two_ranks.run(check_sums) == [2, 2]


class SharesMemory(nn.Module):
    """Autograd hands one tensor to x and to the value, before the sum and after it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))

    def partial(self, x, value):
        return F.linear(x + value, self.weight)

    def combine(self, x, y, value):
        return x + y + value


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("schedule", ["sync", "oases", "cross_pass"])
def test_gradients_that_share_memory_stay_apart(schedule, per_sample):
    stack = OverlappedStack([SharesMemory(), SharesMemory()], schedule=schedule)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2 if per_sample else 1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    out = x
    for block in stack.blocks:
        out = block.combine(out, block.partial(out, value), value)
    wanted = [x, value, *stack.parameters()]
    expected = torch.autograd.grad(out.square().sum(), wanted)
    result = stack(x, [BlockInputs((value,), (per_sample,))] * 2)
    found = torch.autograd.grad(result.square().sum(), wanted)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_one_tensor_given_twice_and_one_that_is_not_read():
    """Whole and per sample in one block; what no result depends on gets no gradient."""

    class Twice(SharesMemory):
        def partial(self, x, first, second, unread):
            return F.linear(x * first + second.sum(0), self.weight)

        def combine(self, x, y, first, second, unread):
            return x + y

    stack = OverlappedStack([Twice()], sub_batches=2)
    value = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    x, unread = torch.randn_like(value), torch.randn(1, requires_grad=True)
    block = stack.blocks[0]
    expected = torch.autograd.grad(
        block.combine(x, block.partial(x, value, value, unread), None, None, None).square().sum(), [value]
    )
    given = [BlockInputs((value, value, unread), (True, False, False))]
    stack(x, given).square().sum().backward()
    torch.testing.assert_close(value.grad, expected[0])
    assert unread.grad is None


def test_inputs_alone_may_want_gradients():
    blocks = plain_blocks(DECODER)
    stack = make_stack(blocks, None)
    stack.requires_grad_(False)
    owned = leaves(4)
    y = stack(owned["x"].detach(), inputs_of(blocks, owned))
    y.sum().backward()
    assert owned["bias"].grad is not None
    with torch.no_grad():
        silent = stack(owned["x"], inputs_of(blocks, owned))
    assert not silent.requires_grad
    torch.testing.assert_close(silent, y)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.usefixtures("few_objects")
def test_a_step_leaves_no_tensor_behind(recompute):
    blocks = plain_blocks(DECODER)
    stack = make_stack(blocks, None, recompute=recompute)

    def tensors_after_a_step():
        stack.zero_grad()
        owned = leaves(4)
        stack(owned["x"], inputs_of(blocks, owned)).square().sum().backward()
        del owned
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    first = [tensors_after_a_step() for _ in range(2)][-1]
    assert [tensors_after_a_step() for _ in range(3)][-1] == first


def test_bad_inputs():
    blocks = plain_blocks([CrossAttention, CrossAttention])
    stack = make_stack(blocks, None)
    owned = leaves(4)
    good = inputs_of(blocks, owned)
    with pytest.raises(ValueError, match="1 BlockInputs were given to 2 blocks"):
        stack(owned["x"], good[:1])
    with pytest.raises(ValueError, match=r"value 0 of block 0 has shape \(4, 1, 1, 5\) .* the batch has 3 samples"):
        stack(owned["x"][:3], good)
    with pytest.raises(ValueError, match="2 values have 1 entries of per_sample"):
        BlockInputs((None, None), (False,))
    with pytest.raises(ValueError, match=r"value 1 is cut per sample, but is not a tensor \(NoneType\)"):
        BlockInputs((None, None), (False, True))
    stack.run_as(along_sequence(2, 2, frozenset({0, 1})))
    with pytest.raises(ValueError, match="splits the sequence, along which the blocks' inputs cannot be split"):
        stack(owned["x"], good)


def test_a_small_batch_with_inputs_is_not_cut_along_the_sequence():
    """Token-wise blocks would be, if they read nothing besides."""
    blocks = plain_blocks([CrossAttention, Mlp])
    blocks[1].token_wise = True
    owned = leaves(1)
    x, inputs = owned["x"], inputs_of(blocks, owned)
    stack = make_stack(blocks, None)
    with pytest.raises(ValueError, match="batch of 1 cannot be cut into 2 sub-batches"):
        stack(x, inputs)
    check([CrossAttention, Mlp], 1, {"small_batch": "whole"})
    stack = make_stack([blocks[1]] * 2, None)
    torch.testing.assert_close(stack(x, [BlockInputs()] * 2), make_stack([blocks[1]] * 2, None, sub_batches=1)(x))


class Tabled(nn.Module):
    """A block whose features and result are scaled by tables of the tokens. joint: it reads the tokens' mean."""

    def __init__(self, joint):
        super().__init__()
        self.token_wise = not joint
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))

    def partial(self, x, table, weights):
        h = x if self.token_wise else x + (weights.transpose(1, 2) * x).mean(1, keepdim=True)
        return self.down(F.gelu(self.up(h)) * table)

    def combine(self, x, y, table, weights):
        return x + y * table


def test_inputs_are_cut_along_the_sequence_where_they_say_how():
    """A table is read whole by a joint block's partial, in parts by its combine and by token-wise blocks."""
    blocks = [Tabled(joint) for joint in (True, False, False, True)]
    x = torch.randn(1, 7, WIDTH, dtype=torch.float64)
    owned = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 1), (1, 1, 7))]
    table, weights = owned
    given = BlockInputs((table[None], weights), (True, True), (1, None))
    found = []
    for options in ({"schedule": "sync"}, {"sub_batches": 3}, {"sub_batches": 2, "recompute": "full"}):
        stack = OverlappedStack(blocks, schedule=options.pop("schedule", "oases"), **options)
        for each in (*owned, *stack.parameters()):
            each.grad = None
        y = stack(x, [given] * 4)
        y.square().sum().backward(retain_graph=True)
        found.append([y.detach(), *(each.grad for each in (*owned, *stack.parameters()))])
        ran = stack.chooser.schedule_for(x, [given] * 4, stack.blocks)
        assert ran.along == ("batch" if len(found) == 1 else "sequence")
    for other in found[1:]:
        for mine, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    short = BlockInputs((table[None, :3], weights), (True, True), (1, None))
    with pytest.raises(ValueError, match=r"shape \(1, 3, 1\) and is cut along dimension 1, but the sequence has 7"):
        stack(x, [short] * 4)
    with pytest.raises(ValueError, match="2 values have 1 entries of tokens"):
        BlockInputs((table, weights), (False, False), (1,))
