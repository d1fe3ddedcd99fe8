"""Schedules of experts: whole, in an order that runs, with transfers under the compute that is to hide them."""

import itertools
from dataclasses import replace

import pytest

from oases.core.schedule import Op, ScheduleError, format_schedule, parse_schedule, validate
from oases.core.schedule.ops import OPS
from oases.plans.expert_schedules import EXPERT_SCHEDULES, generate_experts

CASES = list(itertools.product(EXPERT_SCHEDULES, (1, 2, 5), (False, True)))


@pytest.mark.parametrize(("name", "blocks", "recompute"), CASES)
def test_a_list_is_whole(name, blocks, recompute):
    schedule = generate_experts(name, blocks, recompute)
    kinds = ("D", "E", "F", "P", "B", "BE", "BF", "RD", "RE", "R")
    counts = {kind: sum(op.kind == kind for op in schedule) for kind in kinds}
    assert counts == {kind: blocks * (recompute or not kind.startswith("R")) for kind in kinds}
    sent = [op for op in schedule.collectives if op.kind == "all_to_all"]
    assert len(sent) == 4 * blocks, "there and back, twice"
    copies = [op.kind for op in schedule.collectives if op.kind != "all_to_all"]
    assert {kind: copies.count(kind) for kind in copies} == (
        {} if name == "plain" else dict.fromkeys(("share", "join", "split", "return"), blocks)
    )
    assert (*schedule.forward, *schedule.backward) == schedule.ops
    assert parse_schedule(format_schedule(schedule)) == schedule


def between(schedule, start):
    """The compute ops under a collective."""
    ops = list(schedule)
    begin = ops.index(start)
    end = next(at for at, op in enumerate(ops) if op.kind == "wait" and schedule.starts[op.carried] == start)
    return [str(op) for op in ops[begin:end] if OPS[op.kind].stream == "compute"]


def test_transfers_are_where_the_paper_has_them():
    schedule = generate_experts("block_wise", 4)
    for b in (1, 2, 3):
        before = [f"F {b - 2}.0"] if b > 1 else []
        assert between(schedule, Op("share", b, 0)) == [*before, f"D {b - 1}.0"]
        assert between(schedule, Op("join", b, 0))[0] == f"E {b - 1}.0"
        assert between(schedule, Op("split", b, 0)) == [f"BE {b - 1}.0"]
        below = [f"BF {b - 2}.0"] if b > 1 else []
        assert between(schedule, Op("return", b, 0)) == [f"B {b - 1}.0", *below]
    for b in range(4):
        assert between(schedule, Op("all_to_all", b, 0, "D")) == [f"P {b}.0"]
    blocking = generate_experts("blocking", 4)
    for b, kind in itertools.product(range(4), ("share", "join", "split", "return")):
        assert between(blocking, Op(kind, b, 0)) == []


@pytest.mark.parametrize("name", EXPERT_SCHEDULES)
def test_what_is_computed_again_hides_the_gradients_ways(name):
    schedule = generate_experts(name, 3, True)
    for b in range(3):
        assert between(schedule, Op("all_to_all", b, 0, "BF")) == [f"RE {b}.0"]
        below = [f"R {b - 1}.0"] if b else []
        assert between(schedule, Op("all_to_all", b, 0, "BE")) == [*below, f"RD {b}.0"]


@pytest.mark.parametrize("name", EXPERT_SCHEDULES)
def test_no_op_can_be_left_out_or_come_too_early(name):
    schedule = generate_experts(name, 2, True)
    for at, op in enumerate(schedule.ops):
        rest = schedule.ops[:at] + schedule.ops[at + 1 :]
        with pytest.raises(
            ScheduleError,
            match=r"must come before it|is missing|never waited for|before 'wait|not started|header says",
        ):
            validate(replace(schedule, ops=rest))
        with pytest.raises(ScheduleError, match="duplicate of op"):
            validate(replace(schedule, ops=(*schedule.ops, op)))
    with pytest.raises(ScheduleError, match=r"op 1 \(E 0\.0\): its input is missing; 'wait D 0\.0'"):
        validate(replace(schedule, ops=(Op("E", 0, 0), *schedule.ops)))
    with pytest.raises(ScheduleError, match="2 blocks of experts"):
        validate(replace(schedule, ops=(Op("E", 2, 0), *schedule.ops)))


def test_what_there_is_no_schedule_of():
    with pytest.raises(ScheduleError, match="unknown expert schedule 'nosuch'; known are plain, blocking"):
        generate_experts("nosuch", 2)
    with pytest.raises(ScheduleError, match="at least 1 block of experts, got 0"):
        generate_experts("plain", 0)
