"""Recomputation before the gradient is there: the same gradients to the last bit, and what it keeps meanwhile."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from test_execution import Dropping
from test_stack import WIDTH, Mlp, make_stack, plain_blocks

from oases.schedule import GENERATORS


def gradients(kind, schedule, recompute, *, early, sequence_parallel=False):
    """Of two calls in flight at once, as a pipeline has them."""
    torch.manual_seed(7)
    group = dist.group.WORLD if dist.is_initialized() else None
    stack = make_stack(
        plain_blocks(6), group, kind, schedule=schedule, recompute=recompute, sequence_parallel=sequence_parallel
    )
    inputs = [torch.randn(4, 4, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    outputs, calls = [], []
    for x in inputs:
        outputs.append(stack(x))
        calls.append(stack.recent)
    for y, call in zip(outputs, calls, strict=True):
        if early:
            call.recompute()
            call.recompute()
        y.square().sum().backward()
        call.recompute()
    return [x.grad for x in inputs] + [p.grad for p in stack.parameters()]


def check_early(kind, schedule, recompute, sequence_parallel=False):
    options = {"sequence_parallel": sequence_parallel}
    late = gradients(kind, schedule, recompute, early=False, **options)
    early = gradients(kind, schedule, recompute, early=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


@pytest.mark.parametrize("schedule", sorted(GENERATORS))
def test_early_recomputation_changes_no_bit(two_ranks, schedule):
    for recompute in ("none", 1, 2, "full"):
        two_ranks.run(check_early, Mlp, schedule, recompute)
    two_ranks.run(check_early, Dropping, schedule, "full")


@pytest.mark.parametrize("schedule", ["sync", "oases", "cross_pass"])
def test_early_recomputation_of_parts_of_a_sequence(two_ranks, schedule):
    two_ranks.run(check_early, Mlp, schedule, "full", True)


def kept_bytes(recompute, *, early):
    """Bytes that graphs keep between forward and backward pass, beyond parameters; and those of block inputs."""
    stack = make_stack(plain_blocks(4), None, schedule="oases", recompute=recompute)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(4, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stack(x)
        if early:
            stack.recent.recompute()
    execution = y.grad_fn.call.execution
    held = [*execution._x.values(), *execution._h.values()]
    for parameter in stack.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values()), sum(t.untyped_storage().nbytes() for t in held)


def test_recomputed_early_it_keeps_what_no_recomputation_keeps():
    nothing_again, _ = kept_bytes("none", early=False)
    late, inputs = kept_bytes("full", early=False)
    early, inputs_left = kept_bytes("full", early=True)
    assert late < early <= nothing_again
    assert inputs > 0 == inputs_left


def test_a_handle_keeps_no_tensor():
    stack = make_stack(plain_blocks(2), None, schedule="oases", recompute="full")
    y = stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))
    execution = y.grad_fn.call.execution
    call, alive = stack.recent, weakref.ref(execution)
    del y, execution
    gc.collect()
    assert alive() is None
    call.recompute()
    with torch.no_grad():
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))
    stack.recent.recompute()


class Fails(Mlp):
    """The second run of partial, the recomputation's, fails on rank 1."""

    runs = 0

    def partial(self, x):
        self.runs += 1
        if self.runs == 2 and dist.get_rank() == 1:
            raise ValueError("a value that is wrong")
        return super().partial(x)


def test_what_fails_early_names_its_op(two_ranks):
    errors = two_ranks.run(fails_early)
    assert all("rank 1 failed at R 0.0" in text and "a value that is wrong" in text for text in errors)


def fails_early():
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fails, schedule="sync", recompute="full")
    y = stack(torch.randn(4, 3, WIDTH, dtype=torch.float64))
    with pytest.raises(RuntimeError) as caught:
        stack.recent.recompute()
    del y
    return str(caught.value)
