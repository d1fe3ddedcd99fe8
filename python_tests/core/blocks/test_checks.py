"""Stacks that are changed, copied and forked after construction, and calls that differ from those of before."""

import io
import multiprocessing
import pickle

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, Passing, make_stack, plain_blocks

from oases import OverlappedStack
from oases.core.execution.failure import FailedRankError


def example(batch=4):
    return torch.ones(batch, 3, WIDTH, dtype=torch.float64)


def used():
    """A stack after calls at which inputs are compared, and before the next of these."""
    stack = make_stack(plain_blocks(2), dist.group.WORLD)
    for _ in range(4):
        stack.zero_grad()
        stack(example()).sum().backward()
    return stack


# --- one rank that differs while the other is in the call of before ---


def larger(stack):
    stack(example(6))


def without_gradients(stack):
    with torch.no_grad():
        stack(example())


def in_evaluation_mode(stack):
    stack.eval()(example())


def check_one_that_differs(act, message):
    stack = used()
    if dist.get_rank() == 0:
        with pytest.raises(FailedRankError, match=message):
            stack(example())
    else:
        with pytest.raises(FailedRankError, match=message):
            act(stack)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            larger,
            r"rank 1 failed at stack \d+: the shape of the input differs .*\[4, .* rank 0, .*\[6, ",
        ),
        (without_gradients, "the computation of gradients differs .*True on rank 0, False on rank 1"),
        (in_evaluation_mode, "the training mode differs .*True on rank 0, False on rank 1"),
    ],
)
def test_a_rank_that_makes_another_call_than_before_is_told_on_all(two_ranks, act, message):
    two_ranks.run(check_one_that_differs, act, message)


# --- what works ---


def check_own_result():
    stack = OverlappedStack([Passing()], sub_batches=1, schedule="sync", recompute="full")
    x = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(stack(x), torch.full((2, 3), 3.0))
        assert torch.equal(x, torch.ones(2, 3))
    for recompute in ("none", "full"):
        stack.run_as("sync", 1, recompute)
        x.grad = None
        y = stack(x)
        y.sum().backward()
        assert torch.equal(x.detach(), torch.ones(2, 3))
        assert torch.equal(y, torch.full((2, 3), 3.0))
        assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_the_sum_is_not_written_over_an_input_that_partial_returns(two_ranks):
    two_ranks.run(check_own_result)


def check_replaced():
    stack, other = used(), used()
    stack.blocks[0] = other.blocks[0]
    stack.zero_grad()
    with torch.no_grad():
        other.blocks[0].up.weight.mul_(0.5)
    stack(example()).sum().backward()
    other(example()).sum()
    assert other.blocks[0].up.weight.grad is not None
    expected = make_stack(plain_blocks(2), dist.group.WORLD)
    with torch.no_grad():
        expected.blocks[0].up.weight.mul_(0.5)
    assert torch.equal(stack(example()), expected(example()))


def test_a_replaced_block_is_run(two_ranks):
    two_ranks.run(check_replaced)


def check_copies():
    stack = used()
    expected = stack(example())
    assert torch.equal(pickle.loads(pickle.dumps(stack))(example()), expected)
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(example()), expected)


def test_a_used_stack_can_be_pickled_and_saved(two_ranks):
    two_ranks.run(check_copies)


def call_in_child(stack, connection):
    try:
        stack(example())
    except RuntimeError as error:
        connection.send(str(error))


def check_fork():
    stack = used()
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.current_process()._config["daemon"] = False  # so that it may have a child
    process = multiprocessing.get_context("fork").Process(target=call_in_child, args=(stack, theirs))
    process.start()
    assert ours.poll(20)
    text = ours.recv()
    process.join(20)
    return text


def test_a_fork_that_uses_a_stack_raises(two_ranks):
    for text in two_ranks.run(check_fork):
        assert "in a fork of the process that created its process group" in text
