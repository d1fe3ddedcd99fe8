"""Passes that are split up: recomputation ahead of the gradient and weight gradients behind it change no bit."""

import gc
import weakref

import block_examples
import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, Mlp, make_stack, plain_blocks
from covering import covered

from oases.core.execution.executor import Context
from oases.core.schedule import GENERATORS


def gradients(kind, schedule, recompute, *, early=False, weights_late=False, sequence_parallel=False, number=2):
    """Gradients of several calls in flight at once, as in a pipeline."""
    torch.manual_seed(7)
    group = dist.group.WORLD if dist.is_initialized() else None
    stack = make_stack(
        plain_blocks(4), group, kind, schedule=schedule, recompute=recompute, sequence_parallel=sequence_parallel
    )
    inputs = [torch.randn(4, 4, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(number)]
    outputs, calls = [], []
    for x in inputs:
        context = Context()
        outputs.append(stack(x, context=context))
        calls.append(context.handles)
    for y, call in zip(outputs, calls, strict=True):
        if early:
            call.recompute()
            call.recompute()
        if weights_late:
            call.defer_weights()
        y.square().sum().backward()
        call.recompute()
    for call in calls:
        if weights_late:
            assert all(block.up.weight.grad is None for block in stack.blocks) or call is calls[1]
        call.compute_weights()
        call.compute_weights()
    return [x.grad for x in inputs] + [p.grad for p in stack.parameters()]


RECOMPUTE = {"none": "none", "one layer": 1, "full": "full"}
SPLITS = {
    "early": {"early": True}, "weights late": {"weights_late": True}, "both": {"early": True, "weights_late": True},
}  # fmt: skip
SOME = {"schedule": ["sync", "oases", "cross_pass"], "split": list(SPLITS)}


def check_split(kind, schedule, recompute, split, sequence_parallel=False):
    options = {"sequence_parallel": sequence_parallel}
    at_once = gradients(kind, schedule, RECOMPUTE[recompute], **options)
    others = gradients(kind, schedule, RECOMPUTE[recompute], **SPLITS[split], **options)
    assert all(torch.equal(a, b) for a, b in zip(at_once, others, strict=True))


@pytest.mark.few(11)
@pytest.mark.parametrize(
    ("schedule", "recompute", "split"),
    covered({"schedule": sorted(GENERATORS), "recompute": list(RECOMPUTE), "split": list(SPLITS)}),
)
def test_splitting_passes_up_changes_no_bit(two_ranks, schedule, recompute, split):
    two_ranks.run(check_split, Mlp, schedule, recompute, split)


@pytest.mark.parametrize(("schedule", "split", "kind"), covered(SOME | {"kind": ["Dropping", "PlainProducts"]}))
def test_splitting_passes_of_other_kinds_up(two_ranks, schedule, split, kind):
    two_ranks.run(check_split, getattr(block_examples, kind), schedule, "full", split)


@pytest.mark.parametrize(("schedule", "split"), covered(SOME))
def test_splitting_passes_of_parts_of_a_sequence_up(two_ranks, schedule, split):
    two_ranks.run(check_split, Mlp, schedule, "full", split, True)


def kept_bytes(recompute, *, early):
    """Bytes that graphs keep between forward and backward pass, beyond parameters; and those of block inputs."""
    stack = make_stack(plain_blocks(4), None, schedule="oases", recompute=recompute)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(4, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    context = Context()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stack(x, context=context)
        if early:
            context.handles.recompute()
    work = y.grad_fn.call._work
    held = [*work._x.values(), *work._h.values()]
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
    context = Context()
    y = stack(torch.randn(4, 3, WIDTH, dtype=torch.float64), context=context)
    alive = weakref.ref(y.grad_fn.call)
    gc.disable()
    try:
        del y
        assert alive() is None, "no circle keeps a call until the garbage collector comes"
    finally:
        gc.enable()
    context.handles.recompute()
    with torch.no_grad():
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64), context=context)
    context.handles.recompute()


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
    context = Context()
    y = stack(torch.randn(4, 3, WIDTH, dtype=torch.float64), context=context)
    with pytest.raises(RuntimeError) as caught:
        context.handles.recompute()
    del y
    return str(caught.value)


def test_hooks_of_weights_fire_when_they_are_computed():
    stack = make_stack(plain_blocks(2), None, schedule="oases")
    fired = []
    for name, parameter in stack.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    context = Context()
    y = stack(torch.randn(4, 3, WIDTH, dtype=torch.float64), context=context)
    context.handles.defer_weights()
    y.sum().backward()
    deferred = {name for name, _ in stack.named_parameters() if ".up." in name or name.endswith("down.weight")}
    assert all(stack.get_parameter(name).grad is None for name in deferred)
    fired.clear()  # autograd calls them for a gradient that is not there, too
    context.handles.compute_weights()
    assert sorted(fired) == sorted(deferred)


def test_a_weight_that_blocks_share_is_accumulated_once():
    """Hooks, by which gradients are sent to other replicas, find it complete."""
    stack = make_stack(plain_blocks(3), None, schedule="oases")
    stack.blocks[2].up.weight = stack.blocks[1].up.weight = stack.blocks[0].up.weight
    x, seen = torch.randn(4, 3, WIDTH, dtype=torch.float64), []
    stack(x).square().sum().backward()
    expected = stack.blocks[0].up.weight.grad.clone()
    stack.zero_grad()
    stack.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    context = Context()
    y = stack(x, context=context)
    context.handles.defer_weights()
    y.square().sum().backward()
    seen.clear()  # autograd calls them for a gradient that is not there, too
    context.handles.compute_weights()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
