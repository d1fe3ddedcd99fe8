"""validate() accepts what can run and names the op that cannot."""

import random

import pytest
from block_examples import sums_per_layer

from oases.core.schedule import (
    GENERATORS,
    Op,
    Schedule,
    ScheduleError,
    format_schedule,
    generate,
    parse_schedule,
    recomputed_layers,
    validate,
)
from oases.core.schedule.validate import needs

BASE = list(generate("oases", 2, 2))


def without(text):
    return [op for op in BASE if str(op) != text]


def swapped(first, second):
    ops = list(BASE)
    i, j = (next(k for k, op in enumerate(ops) if str(op) == text) for text in (first, second))
    ops[i], ops[j] = ops[j], ops[i]
    return ops


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("blocks", [1, 2, 7])
@pytest.mark.parametrize("sub_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("recompute", ["none", 1, "full"])
def test_generated_schedules_can_run(name, blocks, sub_batches, recompute):
    schedule = generate(name, blocks, sub_batches, recompute)
    validate(schedule)
    assert parse_schedule(format_schedule(schedule)) == schedule
    if recompute == 1:
        assert schedule.recompute == ("some" if blocks > 2 else "full")
        assert recomputed_layers(schedule.recomputed_blocks, schedule.num_blocks) == 1
        return
    carries = recompute == "full" and name not in ("oases", "fine_grained")
    assert sums_per_layer(schedule) == (6 if carries else 4)
    assert schedule.forward + schedule.backward == schedule.ops


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (without("wait F 0.1"), r"op \d+ \(C 0.1\): uses the result of F 0.1 before 'wait F 0.1'"),
        (without("all_reduce F 0.0"), r"\(wait F 0.0\): waits for a collective that was not started"),
        (without("C 0.0"), r"\(F 1.0\): its input is missing; 'C 0.0' must come before it"),
        (without("F 0.0"), r"\(all_reduce F 0.0\): its input is missing; 'F 0.0'"),
        (without("wait B 1.0"), r"\(B 0.0\): uses the result of B 1.0 before"),
        (without("wait B 0.0"), r"'wait B 0.0' is missing: without it the step is incomplete"),
        ([*BASE, Op("F", 0, 0)], r"\(F 0.0\): duplicate of op 1"),
        ([*BASE, Op("F", 2, 0)], r"\(F 2.0\): the schedule has 2 blocks and 2 sub-batches"),
        ([*BASE, Op("all_reduce", 0, 0, "C")], r"the result of C is complete"),
        (swapped("C 1.1", "B 1.1"), r"\(B 1.1\): its input is missing; 'C 1.1'"),
        (BASE[:5], r"'C 0.0' is missing: without it the step"),
    ],
)
def test_what_cannot_run_is_named(ops, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule("x", 2, 2, tuple(ops)))


def test_no_forward_op_after_the_backward_pass_began():
    # Sub-batch 1's last forward op moved behind sub-batch 0's first backward op, which does not need it.
    ops = [op for op in BASE if str(op) not in ("C 1.1", "B 1.0", "B 1.1")]
    at = ops.index(Op("all_reduce", 1, 1, "B"))
    ops[at:at] = [Op("B", 1, 0), Op("C", 1, 1), Op("B", 1, 1)]
    with pytest.raises(ScheduleError, match=r"\(C 1.1\): a forward op after the backward pass began"):
        validate(Schedule("x", 2, 2, tuple(ops)))


def test_a_forward_pass_alone_is_whole():
    validate(Schedule("inference", 2, 2, tuple(op for op in BASE if not op.in_backward)))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_empty_sizes(sizes):
    with pytest.raises(ScheduleError, match="at least 1"):
        validate(Schedule("x", *sizes, ()))


def test_any_topological_order_is_valid_and_any_other_is_not():
    """Against an oracle: random orders are accepted exactly if each op's needs precede it."""
    rng = random.Random(0)
    base = generate("oases", 2, 2)
    for _ in range(300):
        ops = list(base.ops)
        for _ in range(rng.choice([1, 1, 2, 5])):
            i = rng.randrange(len(ops))
            op = ops.pop(i)
            ops.insert(min(len(ops), max(0, i + rng.randint(-2, 2))), op)
        schedule = Schedule("x", 2, 2, tuple(ops))
        place = {op: i for i, op in enumerate(ops)}
        runs = all(place[need] < place[op] for op in ops for need in needs(op, schedule))
        runs &= max(place[op] for op in base.forward) < min(place[op] for op in base.backward)
        try:
            validate(schedule)
            accepted = True
        except ScheduleError:
            accepted = False
        assert accepted == runs


def test_unknown_name():
    with pytest.raises(ScheduleError, match="unknown schedule 'nosuch'; known are cross_pass, fine_grained, oases"):
        generate("nosuch", 2, 2)
