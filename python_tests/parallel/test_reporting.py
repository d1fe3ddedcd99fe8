"""oases.report(): counts, bytes and shares against what was sent and waited for."""

import time

import pytest
import torch
import torch.distributed as dist
from block_examples import WIDTH, make_stack, plain_blocks

import oases
from oases import OverlappedRowLinear
from oases.execution.group import scheduler_of
from oases.reporting import Report, Row, names_op


def check_report():
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
    stack = make_stack(plain_blocks(4), dist.group.WORLD)
    OverlappedRowLinear(8, 8, num_chunks=2)(torch.randn(4, 4))
    stack(torch.randn(4, 3, WIDTH, dtype=torch.float64)).sum().backward()
    found = oases.report()
    (row,) = found.stacks
    assert row.collectives == 4 * 2 * 2  # blocks x sub-batches x passes
    assert row.bytes == row.collectives * 2 * 3 * WIDTH * 8
    assert [layer.collectives for layer in found.layers] == [8, 8]
    assert found.layers[1].where == f"  stack {stack.number} layer 1"
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
        scheduler.reset_totals()
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


def test_nothing_sent():
    assert not oases.report().overlapping
    assert "overlap is off" in str(oases.report())
    assert Row("x").hidden is None
    assert Report([Row("x", 1, 8, 2.0, 0.5)], [], []).hidden == 0.75


def test_labels():
    assert names_op("B 12.1 (stack 0, line 3 of oases)")
    assert not names_op("row forward")
    assert names_op("F 3.0 (stack 2 decoder, layer 3, line 7 of sync)")


def check_layers():
    scheduler = scheduler_of(dist.group.WORLD)
    scheduler.reset_totals()
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


def test_bad_layers_and_names():
    with pytest.raises(ValueError, match="layer_of has 1 entries for 2 blocks"):
        make_stack(plain_blocks(2), None, layer_of=[0])
    with pytest.raises(ValueError, match=r"name must be of letters, .* got 'a, b'"):
        make_stack(plain_blocks(2), None, name="a, b")
