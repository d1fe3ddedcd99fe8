"""oases.report(): counts, bytes and shares against what was sent and waited for."""

import math
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, make_stack, plain_blocks, reset_all_totals
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases import OverlappedRowLinear
from oases.core.execution.group import scheduler_of
from oases.launch.ranks import RankOptions, run_ranks
from oases.reporting import Report, Row, StepOverlap, names_op
from oases.testbed.backend import Backend


def check_report():
    reset_all_totals()
    stack = make_stack(plain_blocks(4), dist.group.WORLD)
    OverlappedRowLinear(8, 8, num_chunks=2)(torch.randn(4, 4))
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64)).sum().backward()
    found = oases.report()
    (row,) = found.stacks
    assert row.collectives == 4 * 2 * 2  # blocks x sub-batches x passes
    assert row.bytes == row.collectives * 2 * 3 * WIDTH * 8
    assert [layer.collectives for layer in found.layers] == [8, 8]
    assert found.layers[1].where == f"  stack {stack.number} layer 1"
    assert [(each.where.split()[-1], each.collectives) for each in found.passes] == [("forward", 8), ("backward", 8)]
    assert sum(each.blocked_seconds for each in found.passes) == pytest.approx(row.blocked_seconds)
    assert {other.where: other.collectives for other in found.others}["row forward"] == 2
    assert 0 <= row.hidden <= 1
    assert f"stack {stack.number}" in str(found)
    assert found.json()["stacks"][0]["collectives"] == 16


def test_report_counts_what_was_sent(two_ranks):
    two_ranks.run(check_report)


def check_hidden():
    """Reported times of a collective under a sleep, and of one waited for at once, against its own record."""
    scheduler = scheduler_of(dist.group.WORLD)
    results = []
    for compute in (0.5, 0.0):
        reset_all_totals()
        dist.barrier()
        ticket = scheduler.all_reduce(torch.ones(1 << 20), "F 0.0 (stack 9, line 2 of x)")
        time.sleep(compute)
        scheduler.wait(ticket)
        (row,) = oases.report().stacks
        record = ticket.record
        results.append((row.hidden, 1 - record.blocked_for / (record.finished - record.issued)))
    return results


def test_hidden_share(two_ranks):
    for of_rank in two_ranks.run(check_hidden):
        for hidden, by_record in of_rank:
            assert 0 <= hidden <= 1
            assert hidden == pytest.approx(max(0.0, by_record), abs=1e-6)


DELAY = 0.25
"""Time of each collective on the simulated link, seconds."""


def over_sim():
    """Reports of a pass that is waited for at once and of one under compute, with the times of their records."""
    reset_all_totals()
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.set_recording(True)
    step = StepOverlap(oases.report)
    whole, part = torch.ones(2, 4), torch.ones(4)
    for (scattered, gathered), compute in ((("F", "C"), False), (("B", "BC"), True)):
        for start in (
            partial(scheduler.reduce_scatter, part, whole, f"{scattered} 2.0 (stack 7 top, layer 1, line 2 of x)"),
            partial(scheduler.all_gather, whole, part, f"{gathered} 3.0 (stack 7 top, layer 1, line 3 of x)"),
        ):
            ticket = start()
            while compute and not ticket.record.finished:
                time.sleep(0.01)
            scheduler.wait(ticket)
    times = [(each.blocked_for, each.finished - each.issued) for each in scheduler.take_records()]
    return oases.report(), step.take(), step.take(), times


def test_exposed_and_hidden_seconds_of_a_known_link():
    link = RankOptions(2, Backend("sim", DELAY, math.inf, single_process=True))
    found, step, after, times = run_ranks(over_sim, (), link)
    sent = [f"{name} {which}" for which in ("forward", "backward") for name in ("all_gather", "reduce_scatter")]
    assert [row.where for row in found.passes] == [f"  stack 7 top {name}" for name in sent]
    assert [row.where for row in found.collectives] == [f"  stack 7 top layer 1 {name}" for name in sent]
    in_order = [times[at] for at in (1, 0, 3, 2)]  # by name
    for rows in (found.passes, found.collectives):
        for row, (blocked, took) in zip(rows, in_order, strict=True):
            assert row.link_seconds == pytest.approx(took)
            assert took >= DELAY
            assert row.blocked_seconds == blocked
            assert row.hidden_seconds == pytest.approx(max(0.0, took - blocked), abs=1e-6)
    backward = found.passes[2:]
    assert all(row.hidden_seconds > 0 for row in backward)  # it had ended before it was waited for
    assert found.stacks[0].hidden_seconds + found.stacks[0].blocked_seconds >= 4 * DELAY
    assert found.json()["collectives"][2]["hidden_seconds"] == found.collectives[2].hidden_seconds
    assert f"{found.layers[0].hidden_seconds:.3f}" in str(found)
    assert set(step) == {row.where.strip() for row in found.stacks + found.layers + found.passes + found.collectives}
    assert step["stack 7 top layer 1"]["exposed_seconds"] == found.layers[0].blocked_seconds
    assert after == {}


def check_groups():
    """Tensor parallelism of two in each of two replicas, whose groups are not the default one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reset_all_totals()
    stack = make_stack(plain_blocks(4), mesh.get_group("tp"))
    for _ in range(2):
        stack(torch.randn(4, 3, WIDTH, dtype=torch.float64)).sum().backward()
    scheduler = scheduler_of(mesh.get_group("dp"))
    scheduler.wait(scheduler.all_reduce(torch.ones(4), "gradients"))
    found, of_tp = oases.report(), oases.report(mesh.get_group("tp"))
    assert [row.collectives for row in found.stacks] == [row.collectives for row in of_tp.stacks] == [32]
    assert "gradients" in [row.where for row in found.others]
    assert "gradients" not in [row.where for row in of_tp.others]
    assert not oases.report(dist.group.WORLD).stacks
    assert "overlap is off" not in str(found)


def test_all_groups_of_a_mesh_are_reported(four_ranks):
    four_ranks.run(check_groups)


def test_nothing_sent():
    reset_all_totals()
    assert not oases.report().overlapping
    assert "overlap is off" in str(oases.report())
    assert Row("x").hidden is None
    assert Report([Row("x", 1, 8, 2.0, 0.5)], [], []).hidden == 0.75


def check_serial(schedule, sequence_parallel):
    reset_all_totals()
    stack = make_stack(plain_blocks(4), dist.group.WORLD, schedule=schedule, sequence_parallel=sequence_parallel)
    for _ in range(4):
        stack(torch.randn(4, 4, WIDTH, dtype=torch.float64)).sum().backward()
    return oases.report()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", ["sync", "fine_grained"])
def test_what_is_waited_for_at_once_is_exposed(two_ranks, schedule, sequence_parallel):
    """However late the host begins to wait: no compute runs meanwhile."""
    for found in two_ranks.run(check_serial, schedule, sequence_parallel):
        assert not found.overlapping
        assert found.stacks[0].link_seconds > 0
        assert all(row.hidden_seconds == 0 for row in found.stacks + found.layers + found.collectives)


def test_labels():
    assert names_op("B 12.1 (stack 0, line 3 of oases)")
    assert not names_op("row forward")
    assert names_op("F 3.0 (stack 2 decoder, layer 3, line 7 of sync)")


def check_layers():
    reset_all_totals()
    torch.manual_seed(0)
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    named = make_stack(plain_blocks(3), dist.group.WORLD, layer_of=[0, 0, 1], name="t5 decoder")
    joint = make_stack(plain_blocks(2), dist.group.WORLD, layer_of=range(2))
    for stack in (named, joint, named):
        stack(x).sum().backward()
    found = oases.report()
    assert [row.where for row in found.stacks] == [f"stack {named.number} t5 decoder", f"stack {joint.number}"]
    return {row.where: row.collectives for row in found.layers}, named.number, joint.number


def test_layers_as_they_are_given(two_ranks):
    """Per block and step: two sub-batches, two passes."""
    for layers, named, joint in two_ranks.run(check_layers):
        assert layers == {
            f"  stack {named} t5 decoder layer 0": 2 * 2 * 4,
            f"  stack {named} t5 decoder layer 1": 2 * 4,
            f"  stack {joint} layer 0": 4,
            f"  stack {joint} layer 1": 4,
        }


def check_order():
    scheduler = scheduler_of(dist.group.WORLD)
    reset_all_totals()
    for number in (10, 9):
        scheduler.wait(scheduler.all_reduce(torch.ones(1), f"F 0.0 (stack {number}, line 2 of x)"))
    found = oases.report()
    return [row.where for row in found.stacks], [row.where for row in found.layers]


def test_stacks_and_layers_are_in_the_order_of_their_numbers(two_ranks):
    for stacks, layers in two_ranks.run(check_order):
        assert stacks == ["stack 9", "stack 10"]
        assert layers == ["  stack 9 layer 0", "  stack 10 layer 0"]


def test_bad_layers_and_names():
    with pytest.raises(ValueError, match="layer_of has 1 entries for 2 blocks"):
        make_stack(plain_blocks(2), None, layer_of=[0])
    with pytest.raises(ValueError, match=r"name must be of letters, .* got 'a, b'"):
        make_stack(plain_blocks(2), None, name="a, b")


def check_ends():
    """Sums by each collective, whose end is known before anybody waits for it."""
    scheduler, size = scheduler_of(dist.group.WORLD), dist.get_world_size()
    whole, part = torch.arange(4.0 * size).view(size, 4), torch.empty(4)
    gathered, mine = torch.empty(size, 4), torch.full((4,), float(dist.get_rank()))
    tickets = [
        scheduler.reduce_scatter(part, whole, "a"), scheduler.all_gather(gathered, mine, "b"),
        scheduler.all_reduce(mine.clone(), "c"),
    ]  # fmt: skip
    end = time.monotonic() + 60
    while not all(ticket.record.finished for ticket in tickets) and time.monotonic() < end:
        time.sleep(0.001)
    known = [ticket.record.finished > 0 for ticket in tickets]
    for ticket in tickets:
        scheduler.wait(ticket)
    torch.testing.assert_close(part, size * whole[dist.get_rank()])
    torch.testing.assert_close(whole, torch.arange(4.0 * size).view(size, 4))
    return known


def test_a_collective_ends_when_it_ends_and_not_when_it_is_waited_for(two_ranks):
    assert two_ranks.run(check_ends) == [[True] * 3] * 2
