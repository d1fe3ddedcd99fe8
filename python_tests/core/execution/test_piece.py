"""Pieces of the autograd graph against autograd itself, and stand-ins in the place of parameters."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oases.core.execution.piece import BlockParameters, Leaves, Piece, method_of, recorded
from oases.extension import generator_mark
from oases.moe.exchange_work import RandomStates


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_gradients_of_inputs_and_leaves_are_those_of_autograd():
    x, y, weight, bias = drawn(3, 4), drawn(3, 5), drawn(5, 4), drawn(5)
    grads = [drawn(3, 5), drawn(3, 4)]

    def function(x, y, weight, bias):
        return F.linear(x, weight, bias).sin() * y, x * 2

    given = [each.clone().requires_grad_() for each in (x, y, weight, bias)]
    expected = torch.autograd.grad(function(*given), given, grads)
    leaves = Leaves([each.clone().requires_grad_() for each in (weight, bias)])
    for whole in (False, True):
        for _ in range(2):  # sums over two pieces
            piece = Piece([leaves], whole)
            results = function(piece.input(x), piece.input(y), *leaves.stand_ins)
            assert not any(piece.output(each).requires_grad for each in results)
            found = piece.backward(grads)
            for mine, other in zip(found, expected[:2], strict=True):
                torch.testing.assert_close(mine, other)
        assert leaves.take(not whole) == [None, None]
        for mine, other in zip(leaves.take(whole), expected[2:], strict=True):
            torch.testing.assert_close(mine, 2 * other)
    assert leaves.take(True) == [None, None], "sums are taken once"


def test_without_leaves_gradients_go_to_the_parameters_hooks_included():
    linear, fired = nn.Linear(4, 2, dtype=torch.float64), []
    linear.weight.register_post_accumulate_grad_hook(lambda _: fired.append(True))
    x, grad = drawn(3, 4), drawn(3, 2)
    piece = Piece([])
    assert torch.equal(piece.output(linear(piece.input(x))), linear(x))
    (found,) = piece.backward([grad])
    torch.testing.assert_close(found, grad @ linear.weight)
    torch.testing.assert_close(linear.weight.grad, grad.t() @ x)
    assert fired == [True]


def test_what_depends_on_nothing_has_no_gradient():
    leaves = Leaves([drawn(2).requires_grad_(), drawn(2)])
    used, frozen = leaves.stand_ins
    assert not frozen.requires_grad
    piece = Piece([leaves])
    _, y = piece.input(drawn(2)), piece.input(drawn(2))
    piece.output(y * used + frozen)
    piece.output(torch.ones(2))
    first, second = piece.backward([drawn(2), drawn(2)])
    assert first is None
    assert second is not None
    assert [each is None for each in leaves.take(False)] == [False, True]
    with pytest.raises(RuntimeError, match="of 0 results was given 1 gradients"):
        piece.backward([drawn(2)])  # its graph is gone


@pytest.mark.long
def test_a_source_keeps_no_memory_and_a_freed_graph_none_either():
    piece = Piece([Leaves([])])
    data = drawn(1000)
    storage = weakref.ref(data.untyped_storage())
    made = piece.input(data)
    result = piece.output(made + 1)  # nobody saves the input of a sum
    del data, made
    gc.collect()
    assert storage() is None
    assert result.shape == (1000,)


def test_fresh_gradients_share_no_memory():
    grad = drawn(3)
    for fresh in (False, True):
        piece = Piece([Leaves([])])
        piece.output(piece.input(drawn(3)).view(3))
        (found,) = piece.backward([grad], fresh=fresh)
        assert torch.equal(found, grad)
        assert (found.data_ptr() == grad.data_ptr()) is not fresh


def test_sums_are_of_their_own_memory_and_of_the_type_of_the_gradient():
    leaves = Leaves([drawn(2, 3).requires_grad_()])
    (stand_in,) = leaves.stand_ins
    expanded = drawn(1, 3).expand(2, 3)
    leaves.add(stand_in, expanded)
    (found,) = leaves.take(False)
    assert found.is_contiguous()
    assert found.data_ptr() != expanded.data_ptr()
    half = drawn(3).bfloat16().requires_grad_()
    half.grad_dtype = torch.float32
    leaves = Leaves([half])
    leaves.add(leaves.stand_ins[0], torch.ones(3, dtype=torch.bfloat16))
    assert leaves.take(False)[0].dtype == torch.float32


def test_a_result_that_is_written_over_cannot_be_read_by_its_graph():
    piece = Piece([Leaves([])])
    result = piece.input(drawn(3)).exp()  # its backward reads the result
    piece.output(result, overwritten=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        piece.backward([drawn(3)])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.weight = self.up.weight

    def partial(self, x):
        return self.down(self.up(x))


def test_stand_ins_stand_in_every_place_and_go_again():
    block = Tied()
    known, before = BlockParameters(block), dict(block.named_parameters())
    assert known.names == ["up.weight", "up.bias", "down.bias"]
    leaves = Leaves(known.parameters)
    known.put(leaves.stand_ins)
    assert block.up.weight is block.down.weight is leaves.stand_ins[0]
    _, piece = recorded(block.partial, (torch.randn(2, 4),), (), [leaves])
    known.put_back()
    assert dict(block.named_parameters()) == before
    piece.backward([torch.randn(2, 4)])
    assert all(gradient is not None for gradient in leaves.take(False))
    assert all(parameter.grad is None for parameter in block.parameters())


def frozen(block):
    block.up.weight.requires_grad_(False)


def replaced(block):
    block.up.bias = nn.Parameter(torch.zeros(4))


def another_child(block):
    block.up = nn.Linear(4, 4)


def added(block):
    block.down.extra = nn.Parameter(torch.zeros(4))


def removed(block):
    block.up.bias = None


@pytest.mark.parametrize("change", [frozen, replaced, another_child, added, removed])
def test_a_change_of_parameters_is_seen(change):
    block = Tied()
    known = BlockParameters(block)
    assert known.current
    change(block)
    assert not known.current
    assert BlockParameters(block).current


@pytest.mark.long
def test_methods_are_those_of_the_block_compiled_or_not():
    block = Tied()
    assert method_of(block, "partial") == block.partial
    compiled = torch.compile(block, backend="eager")
    method = method_of(compiled, "partial")
    assert method is method_of(compiled, "partial")
    x = torch.randn(2, 4)
    torch.testing.assert_close(method(x), block.partial(x))
    block.compile(backend="eager")
    with pytest.raises(ValueError, match=r"give the stack torch\.compile"):
        method_of(block, "partial")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1), lambda: torch.randn(1, dtype=torch.float64), lambda: torch.empty(624).bernoulli_(0.5),
        lambda: torch.empty(1).normal_(), lambda: torch.randperm(3), lambda: F.dropout(torch.ones(3), 0.5),
    ],
)  # fmt: skip
def test_the_mark_of_a_generator_changes_whenever_it_draws(draw):
    torch.manual_seed(3)
    seen = {generator_mark(torch.default_generator)}
    for number in range(1, 1300):
        draw()
        seen.add(generator_mark(torch.default_generator))
        assert len(seen) == number + 1
    generator = torch.Generator()
    before = generator_mark(generator)
    draw()
    assert generator_mark(generator) == before


def test_random_states_are_copied_where_something_has_drawn():
    random = RandomStates(torch.device("cpu"))
    first = random.now()
    assert random.now() is first
    drawn_then = torch.rand(3)
    assert random.now() is not first
    after = torch.default_generator.get_state()
    (again,) = random.replayed(first, lambda: (torch.rand(3),))
    assert torch.equal(again, drawn_then)
    assert torch.equal(torch.default_generator.get_state(), after)
