"""Schedules over the sequence: counts, order, and what their validation refuses."""

import sys
from dataclasses import replace

import pytest
from block_examples import sums_per_layer

from oases.core.schedule import (
    GENERATORS,
    Op,
    ScheduleError,
    along_sequence,
    format_schedule,
    generate,
    parse_schedule,
    sequence_parallel,
    validate,
)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sub_batches", [1, 2, 3, 8])
def test_both_halves_of_every_all_reduce(name, recompute, sub_batches):
    whole = generate(name, 6, sub_batches, recompute)
    cut = sequence_parallel(whole)
    assert cut.sequence_parallel
    assert not whole.sequence_parallel
    kinds = [op.kind for op in cut.collectives]
    places = 6 * cut.num_sub_batches
    # A recomputed layer's last output is not gathered again: nothing reads it.
    spared = places // 2 if Op("all_reduce", 0, 0, "R") in whole.ops else 0
    assert kinds.count("reduce_scatter") == len(whole.collectives)
    assert kinds.count("all_gather") == len(whole.collectives) - spared
    assert cut.overlaps == whole.overlaps
    assert parse_schedule(format_schedule(cut)) == cut
    assert sequence_parallel(cut) is cut


def test_both_halves_are_hidden_from_three_sub_batches_on():
    """In the steady state one heavy op runs under the reduce-scatter and one under the all-gather."""
    ops = list(sequence_parallel(generate("oases", 4, 3)).ops)
    for block in (1, 2):
        for s in range(3):
            for start, end in (
                (Op("reduce_scatter", block, s, "F"), Op("wait", block, s, "F")),
                (Op("all_gather", block, s, "C"), Op("wait", block, s, "C")),
            ):
                between = ops[ops.index(start) : ops.index(end)]
                assert [op.kind for op in between].count("F") == 1


@pytest.mark.parametrize("joint", [(), (0, 2), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_along_sequence(joint, recompute):
    schedule = along_sequence(4, 3, joint, recompute)
    validate(schedule)
    assert sums_per_layer(schedule) == 4
    for kind in ("F", "B", "W"):
        for b in range(4):
            count = sum(op.kind == kind and op.block == b for op in schedule)
            assert count == (1 if b in joint else 3)
    assert schedule.overlaps
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_an_mlp_hides_the_sums_of_the_attention_before_it():
    ops = list(along_sequence(2, 2, (0,)).ops)
    assert ops.index(Op("F", 1, 0)) < ops.index(Op("wait", 0, 1, "F"))


BASE = sequence_parallel(generate("oases", 2, 2))
JOINT = along_sequence(2, 2, (0,))


def without(schedule, text):
    return replace(schedule, ops=tuple(op for op in schedule if str(op) != text))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (without(BASE, "wait C 0.1"), r"\(F 1.1\): uses the result of C 0.1 before 'wait C 0.1'"),
        (without(BASE, "all_gather BC 1.0"), r"\(wait BC 1.0\): waits for a collective that was not started"),
        (without(BASE, "BC 1.0"), r"\(all_gather BC 1.0\): its input is missing; 'BC 1.0'"),
        (without(BASE, "wait C 1.1"), "'wait C 1.1' is missing"),
        (
            replace(BASE, ops=(*BASE.ops[:1], Op("all_reduce", 0, 0, "F"), *BASE.ops[2:])),
            "sequence-parallel, so sums are scattered",
        ),
        (replace(BASE, ops=(BASE.ops[0], Op("all_gather", 0, 0, "F"))), "only C, RC and BC leave sequence shards"),
        (replace(BASE, ops=(*BASE.ops, Op("all_gather", 0, 0, "F"))), "the result of F 0.0 is carried twice"),
        (replace(BASE, along="sequence"), "cannot be combined with sequence parallelism"),
        (without(JOINT, "BC 0.1"), r"\(B 0.0\): its input is missing; 'BC 0.1'"),
        (without(JOINT, "C 0.0"), r"\(F 1.0\): its input is missing; 'C 0.0'"),
        (replace(JOINT, ops=(*JOINT.ops, Op("F", 0, 1))), "block 0 is joint, so its F runs once"),
        (replace(JOINT, along="batch"), "joint blocks are for sub-batches along=sequence"),
        (replace(JOINT, joint=frozenset({0, 7})), "joint block 7 is beyond the 2 blocks"),
    ],
)
def test_what_cannot_run_is_named(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


def lines_run(num_blocks):
    """Count the lines of Python that `sequence_parallel` runs for a list of so many blocks."""
    lines, length = 0, 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    whole = generate("oases", num_blocks, 4, "full")
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        length = len(sequence_parallel(whole))
    finally:
        sys.settrace(before)
    assert length == num_blocks * 4 * 14
    return lines


def test_long_lists_take_work_in_proportion():
    """Where every move of an op searched the list, four times the blocks would be sixteen times the work."""
    assert lines_run(48) < 6 * lines_run(12)
