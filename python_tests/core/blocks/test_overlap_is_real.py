"""Overlap by the order of events: matmuls run between the start of a collective and the wait for it.

Neither exact gradients nor the list of ops show that: a collective waited for at once gives the same results.
"""

import pytest
import torch
from logged_group import logged_group
from torch import nn

from oases import OverlappedColumnLinear, OverlappedRowLinear, OverlappedStack
from oases.core.schedule import GENERATORS, generate
from oases.simulator import simulate

WIDTH, BLOCKS = 8, 4


@pytest.fixture
def group():
    with logged_group() as found:
        yield found


class Mlp(nn.Module):
    """Column- and row-parallel linear without replicated parameters, whose gradients would be summed, too."""

    def __init__(self, group):
        super().__init__()
        self.up = OverlappedColumnLinear(WIDTH, 16, bias=False, process_group=group)
        self.down = OverlappedRowLinear(16, WIDTH, bias=False, process_group=group)

    def partial(self, x):
        return self.down.partial(self.up.partial(x).relu())

    def combine(self, x, y):
        return x + y


def step(group, **options):
    """Log a forward and a backward pass; return the number of all-reduces."""
    stack = OverlappedStack([Mlp(group) for _ in range(BLOCKS)], process_group=group, **options)
    x = torch.randn(4, 4, WIDTH, requires_grad=True)
    stack(x)  # the first call agrees on the schedule
    with group.logging() as log:
        stack(x).sum().backward()
    return sum(event.kind == "start" for event in log)


PASS = 2 * BLOCKS
"""All-reduces of a pass: one per block and sub-batch."""


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_oases_exposes_the_last_all_reduce_of_the_forward_pass_alone(group, recompute):
    assert step(group, schedule="oases", recompute=recompute) == 2 * PASS
    assert group.exposed() == [PASS - 1]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_cross_pass_exposes_the_last_all_reduce_of_each_pass(group, recompute):
    total = step(group, schedule="cross_pass", recompute=recompute)
    assert total == (2 if recompute == "none" else 3) * PASS
    assert group.exposed() == [PASS - 1, total - 1]


@pytest.mark.parametrize("sub_batches", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full", 1])
@pytest.mark.parametrize("name", GENERATORS)
def test_as_many_are_exposed_as_the_simulator_says(group, name, recompute, sub_batches):
    total = step(group, schedule=name, sub_batches=sub_batches, recompute=recompute)
    schedule, seconds = generate(name, BLOCKS, sub_batches, recompute), 2**-10  # of a sum, less than any op's
    timeline = simulate(schedule, dict.fromkeys(("F", "R", "B", "W"), 1.0) | {"all_reduce": seconds})
    assert total == sum(span.lane == "link" for span in timeline.spans)
    assert len(group.exposed()) * seconds == timeline.exposed(0)


def test_required_overlap_adds_nothing_to_a_step(group, monkeypatch):
    """It is decided from the list and the shapes."""
    step(group)
    expected = [*group.log]
    for name in ("oases.core.blocks.call.mark", "oases.distributed.clock.synchronize"):
        monkeypatch.setattr(name, lambda device: pytest.fail("a call was timed"))
    step(group, require_overlap=True)
    assert group.log == expected


def test_sync_exposes_every_all_reduce(group):
    total = step(group, schedule="sync")
    assert group.exposed() == list(range(total))


def test_all_chunks_of_a_linear_start_before_the_first_wait(group):
    row = OverlappedRowLinear(16, WIDTH, bias=False, process_group=group, num_chunks=4)
    column = OverlappedColumnLinear(WIDTH, 16, process_group=group, num_chunks=4)
    x = torch.randn(8, WIDTH, requires_grad=True)
    with group.logging() as log:
        row(column(x)).sum().backward()
    kinds = [event.kind for event in log if event.kind != "matmul"]
    assert kinds == 2 * (["start"] * 4 + ["wait"] * 4)
