"""Failure of an op on one rank: all ranks raise an error with rank, op and cause, then and in later calls."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block_examples import WIDTH, Mlp, make_stack, plain_blocks
from covering import covered

from oases import OverlappedRowLinear
from oases.core.execution import failure
from oases.core.execution.failure import FailedRankError, FailedRankMemoryError
from oases.testing import RankPool


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.act("backward")
        return grad, None


class Fragile(Mlp):
    """A block whose `plan`, (method, countdown, exception), raises in that method's countdown-th call.

    meeting: group whose ranks raise together, before one hears of the other.
    """

    plan = None
    meeting = None

    def act(self, method):
        if self.plan is not None and self.plan[0] == method:
            self.plan[1] -= 1
            if self.plan[1] == 0:
                if self.meeting is not None:
                    dist.barrier(self.meeting)
                raise self.plan[2]

    def partial(self, x):
        self.act("partial")
        return super().partial(Failing.apply(x, self.act) if x.requires_grad else x)

    def combine(self, x, y):
        self.act("combine")
        return super().combine(x, y)


def step(stack, x):
    """One step; the input's gradient and those of the parameters."""
    for parameter in stack.parameters():
        parameter.grad = None
    x = x.clone().requires_grad_()
    stack(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in stack.parameters())]


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


def repeat(call):
    """Call again and again, until another rank's failure ends it."""
    while True:
        call()


def refuses(stack, x):
    """A later call raises the failure again."""
    with pytest.raises(FailedRankError) as caught:
        step(stack, x)
    return str(caught.value)


def check_failure(victim, block, method, countdown, options, kind=Fragile):
    """Raises on every rank at once, and in every later call."""
    torch.manual_seed(3)
    blocks = plain_blocks(3)
    stack = make_stack(blocks, dist.group.WORLD, kind, **options)
    x = torch.randn(4, 4, WIDTH, dtype=torch.float64)
    step(stack, x)
    mine = dist.get_rank() == victim
    dist.barrier()
    if mine:
        stack.blocks[block].plan = [method, countdown, out_of_memory()]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(stack, x)
    if mine:
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert not isinstance(caught.value.__cause__, FailedRankError)
    stack.blocks[block].plan = None
    assert refuses(stack, x) == str(caught.value)
    return str(caught.value), caught.value.failure.rank


CALLS = {
    "partial 1": ("F 1.0",),
    "partial 2": ("F 1.0", "F 1.1"),
    "combine 1": ("C 1.0",),
    "backward 1": ("B 1.",),
    "backward 2": ("B 1.",),
}
"""Method and the call of it that raises; the ops one of which that is."""
SCHEDULES = {"schedule": ["sync", "oases"], "recompute": ["none", "full"]}


def is_made(row):
    """Whether there is such a call: sync calls each method once per pass, and partial again when it recomputes."""
    again = row.get("call") == "partial 2" and row.get("recompute", "full") == "full"
    return row.get("schedule") != "sync" or not row.get("call", "").endswith("2") or again


def check_messages(results, victim, ops):
    for text, rank in results:
        assert rank == victim
        assert f"in act: rank {victim} ran out of memory at " in text, text
        assert any(f"at {op}" in text for op in ops), text
        assert "line " in text
        assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.;" in text
        assert "sub_batches, or a smaller batch" in text
        assert "restart the run from its newest checkpoint" in text


@pytest.mark.few(8, 100)
@pytest.mark.parametrize(("schedule", "recompute", "call"), covered(SCHEDULES | {"call": list(CALLS)}, is_made))
def test_every_rank_of_two_raises(two_ranks, schedule, recompute, call):
    method, countdown = call.split()
    ops = ("R 1.0",) if (schedule, call) == ("sync", "partial 2") else CALLS[call]
    options = {"schedule": schedule, "recompute": recompute}
    check_messages(two_ranks.run(check_failure, 1, 1, method, int(countdown), options), 1, ops)


@pytest.mark.few(3, 100)
@pytest.mark.parametrize(
    ("schedule", "recompute", "method"), covered(SCHEDULES | {"method": ["partial", "combine", "backward"]})
)
def test_every_rank_of_four_raises(four_ranks, schedule, recompute, method):
    options = {"schedule": schedule, "recompute": recompute}
    check_messages(four_ranks.run(check_failure, 2, 1, method, 1, options), 2, CALLS[f"{method} 1"])


def test_an_op_after_the_last_collective_of_the_forward_pass(two_ranks):
    """The other rank is in the backward pass already."""
    check_messages(two_ranks.run(check_failure, 0, 2, "combine", 2, {"schedule": "oases"}), 0, ("C 2.1",))


class Halved(Fragile):
    def prepare(self, x):
        self.act("prepare")
        return self.norm(x)

    def product(self, h):
        self.act("product")
        return self.down.partial(F.gelu(self.up.partial(Failing.apply(h, self.act) if h.requires_grad else h)))


@pytest.mark.few(3, 4)
@pytest.mark.parametrize(
    ("method", "countdown", "ops"),
    [("prepare", 2, ("C 0.1",)), ("product", 2, ("F 1.1",)), ("combine", 1, ("C 1.0",)), ("backward", 1, ("B 1.",))],
)
def test_sequence_parallel_on_a_wire_of_another_type(two_ranks, method, countdown, ops):
    options = {"schedule": "oases", "sequence_parallel": True, "wire_dtype": torch.float32}
    check_messages(two_ranks.run(check_failure, 1, 1, method, countdown, options, Halved), 1, ops)


def check_both_fail():
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    rank = dist.get_rank()
    stack.blocks[0].plan = ["partial", 2, ValueError(f"told by {rank}")]
    stack.blocks[0].meeting = dist.new_group()
    with pytest.raises(FailedRankError, match=r"rank (\d) failed at F 0\.1 .*ValueError: told by \1") as caught:
        stack(x)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    return caught.value.failure.rank, str(caught.value.__cause__)


def test_the_first_of_two_failures_counts(two_ranks):
    (first, cause), (other_first, other_cause) = two_ranks.run(check_both_fail)
    assert first == other_first
    assert {cause, other_cause} >= {f"told by {first}"}


def check_outside():
    """One rank fails in a stack after the other has left its own call of it; that one waits in a layer."""
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    layer = OverlappedRowLinear(WIDTH, WIDTH, process_group=dist.group.WORLD, dtype=torch.float64, num_chunks=4)
    x, left = torch.ones(4, 3, WIDTH // 2, dtype=torch.float64), dist.new_group()
    with torch.no_grad():
        layer(x)
        if dist.get_rank() == 1:
            stack.blocks[1].plan = ["combine", 2, out_of_memory()]
            stack.blocks[1].meeting = left
            with pytest.raises(FailedRankMemoryError):
                stack(torch.ones(4, 3, WIDTH, dtype=torch.float64))
        else:
            stack(torch.ones(4, 3, WIDTH, dtype=torch.float64))
            dist.barrier(left)
            with pytest.raises(
                torch.OutOfMemoryError, match=r"rank 0 stopped at all_reduce of .*: rank 1 ran out of"
            ):
                layer(x)


def test_a_rank_outside_of_the_stack_is_told_too(two_ranks):
    two_ranks.run(check_outside)


def check_other_groups():
    """A failure in one pair's group ends the other pair's work, of other groups, too."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    rank = dist.get_rank()
    stack = make_stack(plain_blocks(2), pairs[rank // 2], Fragile)
    step(stack, x)
    if rank == 3:
        stack.blocks[0].plan = ["partial", 1, ValueError("told")]
    dist.barrier()
    with pytest.raises(FailedRankError, match=r"rank 3 failed at F 0\.0 .*told"):
        repeat(lambda: step(stack, x))


@pytest.mark.long
def test_ranks_of_other_groups_are_told(four_ranks):
    four_ranks.run(check_other_groups)


def check_foreign(seconds):
    """Rank 1 is in a collective of its own when rank 0 fails: over gloo its end is that of rank 0's process."""
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    step(stack, x)
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))
    if dist.get_rank() == 0:
        stack.blocks[1].plan = ["combine", 2, out_of_memory()]
        with pytest.raises(FailedRankMemoryError):
            stack(x)
    else:
        stack(x)
        with pytest.raises(RuntimeError):
            dist.barrier()
    with pytest.raises(FailedRankMemoryError, match=r"rank 0 ran out of memory at C 1\.1 "):
        stack(x)


@pytest.mark.long
def test_a_collective_outside_of_the_scheduler_ends_with_its_own_error():
    with RankPool(2) as ranks:
        ranks.run(check_foreign, 5)


def check_unheard():
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    step(stack, x)
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=5))
    if dist.get_rank() == 1:
        failure.monitor_of(dist.group.WORLD).stop()
        # Gloo's time for a collective is what ends its wait, and then it finds the failure.
        with pytest.raises(FailedRankMemoryError, match=r"rank 0 ran out of memory at F 1\.1") as caught:
            step(stack, x)
        assert "rank 1 waited for all_reduce of F 1." in str(caught.value.__cause__)
    else:
        stack.blocks[1].plan = ["partial", 2, out_of_memory()]
        with pytest.raises(FailedRankMemoryError):
            step(stack, x)


@pytest.mark.long
def test_a_rank_whose_thread_has_ended_finds_the_failure_later():
    with RankPool(2) as ranks:
        ranks.run(check_unheard)


def check_end(path):
    """Groups that are made anew, in the same processes, know of no earlier failure."""
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    expected = step(stack, x)
    rank = dist.get_rank()
    for turn in range(2):
        dist.destroy_process_group()
        names = [thread.name for thread in threading.enumerate()]
        assert "oases-failure-monitor" not in names, names
        dist.init_process_group("gloo", init_method=f"file://{path}-{turn}", rank=rank, world_size=2)
        for a, b in zip(step(stack, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        dist.barrier()
        if rank == 1:
            stack.blocks[1].plan = ["combine", 2, out_of_memory()]  # no collective is left under way
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            repeat(lambda: stack(x))
        stack.blocks[1].plan = None


@pytest.mark.long
def test_the_thread_ends_with_its_group(tmp_path):
    with RankPool(2) as ranks:
        ranks.run(check_end, str(tmp_path / "store"))


def test_a_group_of_one_names_the_op():
    stack = make_stack(plain_blocks(2), None, Fragile, recompute="full")
    stack.blocks[1].plan = ["partial", 2, RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")]
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 0 ran out of memory at F 1\.1 .*use more than 2 sub_b"):
        stack(x)
    stack.blocks[1].plan = None
    step(stack, x)


# --- failures that are no exceptions of an op ---


def check_interruption(kind):
    """An interrupt or exit in a block keeps its type on its rank; the other hears of it."""
    stack = make_stack(plain_blocks(2), dist.group.WORLD, Fragile)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    step(stack, x)
    if dist.get_rank() == 0:
        stack.blocks[1].plan = ["partial", 2, kind("enough")]
        with pytest.raises(kind, match="enough"):
            stack(x)
    else:
        with pytest.raises(FailedRankError, match=rf"rank 0 failed at F 1\.1 .*{kind.__name__}: enough"):
            step(stack, x)
    assert f"{kind.__name__}: enough" in refuses(stack, x)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_block_is_told_to_all(two_ranks, kind):
    two_ranks.run(check_interruption, kind)


def two_steps(stack, x):
    """The first ends where there are no collectives after the failed hook."""
    step(stack, x)
    step(stack, x)


def check_hook(block, after_accumulation):
    """A hook of a parameter fails on one rank, in the middle of the backward pass or after its last collective."""
    stack = make_stack(plain_blocks(3), dist.group.WORLD)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    step(stack, x)

    def fail(_):
        raise ValueError("a hook's")

    weight = stack.blocks[block].up.weight
    if dist.get_rank() == 1:
        register = weight.register_post_accumulate_grad_hook if after_accumulation else weight.register_hook
        register(fail)
        with pytest.raises(ValueError, match="a hook's"):
            step(stack, x)
    else:
        with pytest.raises(FailedRankError, match=r"rank 1 failed at the backward pass around stack .* in a hook"):
            two_steps(stack, x)
    assert "in a hook" in refuses(stack, x)


@pytest.mark.parametrize(("block", "after_accumulation"), [(2, False), (1, True), (0, True)])
def test_a_failed_hook_is_told_to_all(two_ranks, block, after_accumulation):
    two_ranks.run(check_hook, block, after_accumulation)
