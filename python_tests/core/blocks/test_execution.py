"""Executor: recomputation, dropout, shared memory, graphs of the user's own."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_examples import WIDTH, Dropping, Mlp, check_exact, make_stack, plain_blocks
from resident_memory import resident
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Matmuls(TorchDispatchMode):
    """Notes the matmuls of forward passes by their output features."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append("up" if args[-1].shape[1] != WIDTH else "down")
        return function(*args, **(kwargs or {}))


class CountsMatmuls(Mlp):
    calls = None

    def partial(self, x):
        with Matmuls(self.calls):
            return super().partial(x)


@pytest.mark.parametrize(("schedule", "expected"), [("sync", {"up": 4, "down": 4}), ("oases", {"up": 8, "down": 4})])
def test_the_row_parallel_product_is_not_recomputed(schedule, expected):
    stack = make_stack(plain_blocks(2), None, CountsMatmuls, schedule=schedule, recompute="full")
    CountsMatmuls.calls = []
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64)).sum().backward()
    assert {name: CountsMatmuls.calls.count(name) for name in ("up", "down")} == expected


def check_dropout():
    """With dropout on, recomputation and the order of ops change nothing; ranks agree after the all-reduce."""
    results = {}
    for schedule in ("oases", "cross_pass", "sub_pipelined"):
        for recompute in ("none", "full"):
            torch.manual_seed(7)
            stack = make_stack(plain_blocks(4), dist.group.WORLD, Dropping, schedule=schedule, recompute=recompute)
            torch.manual_seed(8 + dist.get_rank())  # the ranks' own random states need not agree
            x = torch.linspace(-1, 1, 4 * 3 * WIDTH, dtype=torch.float64).view(4, 3, WIDTH).requires_grad_()
            state = torch.get_rng_state()
            y = stack(x)
            y.square().sum().backward()
            assert torch.equal(torch.get_rng_state(), state), "the caller's random state is its own"
            results[schedule, recompute] = [y, x.grad, *(p.grad for p in stack.parameters())]
    first = results.pop(("oases", "none"))
    for other in results.values():
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    again = stack(x)
    assert not torch.equal(again, first[0]), "another call, other masks"
    return first[0].detach(), first[1]


def test_dropout_is_the_same_when_recomputed_and_on_all_ranks(two_ranks):
    (y, grad), (other_y, other_grad) = two_ranks.run(check_dropout)
    assert torch.equal(y, other_y)
    assert torch.equal(grad, other_grad)


def kept_bytes(schedule, recompute, num_blocks=8):
    """Bytes alive between forward and backward pass, beyond parameters, in units of one block input."""
    stack = make_stack(plain_blocks(num_blocks), None, schedule=schedule, recompute=recompute)
    x = torch.randn(4, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    y = stack(x)
    work = y.grad_fn.call._work
    held = [*work._x.values(), *work._h.values()]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values()) / x.untyped_storage().nbytes()


def test_recomputation_keeps_block_inputs_alone():
    """Units of one block input per layer (two blocks): layer checkpoints keep 1, block checkpoints 2."""
    assert kept_bytes("sync", "full") == pytest.approx(4 - 1)  # 4 layers; the first input is the caller's
    assert kept_bytes("oases", "full") == pytest.approx(8 - 1)
    assert kept_bytes("oases", "none") == 0  # held by the graphs themselves


class SharesMemory(Mlp):
    """Autograd hands one tensor to the input and to a parameter of its shape, before and after the sum."""

    def __init__(self, norm, up, down):
        super().__init__(norm, up, down)
        self.position = nn.Parameter(torch.zeros(1, 3, WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(1, 3, WIDTH, dtype=torch.float64))

    def partial(self, x):
        return self.down.partial(F.gelu(self.up.partial(x + self.position)))

    def combine(self, x, y):
        return 0.5 * (x + y + self.shift)


def check_shared_memory(schedule):
    blocks = plain_blocks(3)
    stack = make_stack(blocks, dist.group.WORLD, SharesMemory, schedule=schedule)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    position = [torch.zeros(1, 3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in blocks]
    shift = [torch.zeros(1, 3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in blocks]
    expected = reference
    for (_, up, down), p, s in zip(blocks, position, shift, strict=True):
        y = F.linear(F.gelu(up(expected + p)), down.weight)
        expected = 0.5 * (expected + y + s)
    expected.square().sum().backward()
    stack(mine).square().sum().backward()
    torch.testing.assert_close(mine.grad, reference.grad)
    for block, p, s in zip(stack.blocks, position, shift, strict=True):
        torch.testing.assert_close(block.position.grad, p.grad)
        torch.testing.assert_close(block.shift.grad, s.grad)


@pytest.mark.parametrize("schedule", ["sync", "oases", "cross_pass"])
def test_gradients_that_share_memory_stay_apart(two_ranks, schedule):
    two_ranks.run(check_shared_memory, schedule)


class Checkpointed(Mlp):
    """An activation checkpoint of the user's own inside the block."""

    def partial(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().partial, x, use_reentrant=False)


class Computed(Mlp):
    """A weight that is computed from parameters."""

    def partial(self, x):
        weight = self.up.weight * 1.0
        from oases.layers.weight_gradient import linear

        return self.down.partial(F.gelu(linear(self.norm(x), weight, self.up.bias)))


@pytest.mark.parametrize("kind", [Checkpointed, Computed])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_with_graphs_of_their_own(two_ranks, kind, recompute):
    two_ranks.run(check_exact, 3, "oases", 2, 4, recompute, kind)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["sync", "cross_pass", "oases"])
@pytest.mark.usefixtures("few_objects")
def test_a_step_leaves_no_tensor_behind(schedule, recompute):
    """A graph must not be part of a reference cycle through C++: no garbage collector finds it."""
    stack = make_stack(plain_blocks(2), None, schedule=schedule, recompute=recompute)
    x = torch.randn(4, 8, WIDTH, dtype=torch.float64)

    def tensors_after_a_step():
        stack.zero_grad()
        stack(x.clone().requires_grad_()).square().sum().backward()
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    first = [tensors_after_a_step() for _ in range(2)][-1]
    assert [tensors_after_a_step() for _ in range(3)][-1] == first


class ReadTwice(Mlp):
    """The gradient of `shift` is the very tensor that the put-off weight gradient of `up` will read."""

    def __init__(self, norm, up, down):
        super().__init__(norm, up, down)
        self.shift = nn.Parameter(torch.zeros(1, 3, 32, dtype=torch.float64))

    def partial(self, x):
        return self.down.partial(self.up.partial(x) + self.shift)


def test_sums_are_not_written_over_what_is_put_off():
    blocks = plain_blocks(2)
    stack = make_stack(blocks, None, ReadTwice, sub_batches=3)
    x = torch.randn(3, 3, WIDTH, dtype=torch.float64)
    expected = x
    for _, up, down in blocks:
        expected = expected + down(up(expected))
    expected.square().sum().backward()
    stack(x).square().sum().backward()
    for block, (_, up, _) in zip(stack.blocks, blocks, strict=True):
        torch.testing.assert_close(block.up.weight.grad, up.weight.grad)
        torch.testing.assert_close(block.shift.grad.sum((0, 1)), up.bias.grad)


@pytest.mark.parametrize("schedule", ["oases", "sync"])
@pytest.mark.parametrize("around", ["forward", "backward", "both"])
def test_recomputation_runs_under_the_autocast_of_the_forward_pass(schedule, around):
    types = []

    class Recorded(Mlp):
        def partial(self, x):
            y = super().partial(x)
            types.append(y.dtype)
            return y

    def gradients(recompute):
        stack = make_stack(plain_blocks(2), None, Recorded, schedule=schedule, recompute=recompute).float()
        types.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=around != "backward"):
            y = stack(torch.linspace(-1, 1, 12 * WIDTH).view(4, 3, WIDTH))
        with torch.autocast("cpu", torch.bfloat16, enabled=around != "forward"):
            y.float().square().sum().backward()
        return [parameter.grad for parameter in stack.parameters()]

    expected = gradients("none")
    forward = list(types)
    found = gradients("full")
    assert types == 2 * forward
    assert set(forward) == {torch.float32 if around == "backward" else torch.bfloat16}
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-3)


class ChangesItsInput(Mlp):
    """Block whose `partial` or `combine` adds to what it was given in place. where: its name."""

    where = ""

    def partial(self, x):
        if self.where == "partial":
            x += 1.0
        return super().partial(x)

    def combine(self, x, y):
        if self.where == "combine":
            x += y
            return x
        return super().combine(x, y)


@pytest.mark.parametrize("where", ["partial", "combine"])
@pytest.mark.parametrize("schedule", ["sync", "fine_grained", "oases"])
def test_an_input_that_a_block_changes_in_place_is_not_recomputed_from(schedule, where, monkeypatch):
    monkeypatch.setattr(ChangesItsInput, "where", where)
    stack = make_stack(plain_blocks(3), None, ChangesItsInput, schedule=schedule, recompute="full")
    with pytest.raises(RuntimeError, match=rf"{where}\(\) of a block changes its input in place.*change a copy"):
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))


class AlwaysDropping(Mlp):
    """Dropout that no mode turns off."""

    def partial(self, x):
        return super().partial(F.dropout(x, 0.5))


def test_dropout_that_stays_on_in_eval_is_recomputed_as_it_was():
    def gradients(recompute):
        torch.manual_seed(3)
        stack = make_stack(plain_blocks(2), None, AlwaysDropping, schedule="oases", recompute=recompute).eval()
        x = torch.linspace(-1, 1, 4 * 3 * WIDTH, dtype=torch.float64).view(4, 3, WIDTH).requires_grad_()
        stack(x).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in stack.parameters())]

    for mine, theirs in zip(gradients("full"), gradients("none"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_keeps_no_copy_of_a_call():
    """Micro-batches in one region would each leave the weights behind once more."""
    wide = [(nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(2)]
    stack, x = make_stack(wide, None, schedule="oases"), torch.ones(4, 3, 512)
    with torch.autocast("cpu", torch.bfloat16):
        for number in range(32):
            stack(x).sum().backward()
            if number == 7:
                before = resident()
    assert resident() - before < 24 * 4 * 512 * 2048  # half of what the copies of 24 calls take


def test_a_stack_is_left_alone_by_torch_compile():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.stack = make_stack(plain_blocks(2), None, schedule="oases")

        def forward(self, x):
            return self.stack(self.first(x)) * 2

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    expected = model(x)
    found = torch.compile(model, backend="eager")(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_stack_is_refused(reentrant):
    from torch.utils.checkpoint import checkpoint

    stack = make_stack(plain_blocks(2), None, schedule="oases")
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    y = checkpoint(stack, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match='leave the checkpoint out and give the stack recompute="full"'):
        y.sum().backward()
