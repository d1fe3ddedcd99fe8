"""The table of ops, and lists spoilt at random: what is accepted runs to its end, what is not is named."""

import random
from dataclasses import replace
from typing import get_args

import pytest

from oases.core.schedule import OPS, Op, ScheduleError, generate, generate_pipeline, sequence_parallel, validate
from oases.core.schedule.ops import (
    BACKWARD,
    COMPUTE,
    STARTS,
    TRANSFERS,
    Collective,
    Compute,
    Kind,
    Message,
    Transfer,
    Unit,
)
from oases.core.schedule.sequence import along_sequence
from oases.plans.expert_schedules import exchanging, generate_experts


def test_types_and_sets_agree_with_the_table():
    assert set(get_args(Compute)) == set(COMPUTE) == {name for name, row in OPS.items() if row.stream == "compute"}
    assert (*get_args(Collective), *get_args(Transfer)) == STARTS
    assert get_args(Transfer) == TRANSFERS
    everything = {*COMPUTE, *STARTS, *get_args(Message), "wait"}
    assert everything == set(OPS)
    assert {name for part in get_args(Kind) for name in get_args(part) or (part,)} == everything
    assert {"R", "RC", "RD", "RE", "BC", "BF", "BE", "B", "W", "split", "return"} == BACKWARD
    for name, row in OPS.items():
        assert row.name == name
        assert row.about
        assert row.writes
        assert set(row.reads) <= set(get_args(Unit))
        assert all(OPS[carrier].stream == "link" for carrier in row.carried_by)
        for unit, reads in row.reads.items():
            for read in reads:
                for source in () if read.kind in ("of", "start") else read.kind.split("|"):
                    assert unit in OPS[source].reads, (name, read)


class StuckError(Exception):
    pass


def interpret(schedule):
    """Run a list by hand, each op on what the ones before it left, and raise StuckError where something is not there.

    Written from what the ops do, not from the table.
    """
    if schedule.unit == "stage":
        return run_stages(schedule)
    return run_experts(schedule) if schedule.unit == "experts" else run_blocks(schedule)


def take(held, *key):
    if key not in held:
        raise StuckError(key)
    return held.pop(key)


def read(held, *key):
    if key not in held:
        raise StuckError(key)
    return held[key]


def done_once(done, op):
    if op in done:
        raise StuckError(op)
    done.add(op)


def run_blocks(schedule):  # noqa: C901
    n, subs, gathered = schedule.num_blocks, range(schedule.num_sub_batches), schedule.sequence_parallel
    held = {("h", 0, s): 1 for s in subs}
    flying, done, backward = {}, set(), False
    again = {(op.kind, op.block, op.sub_batch) for op in schedule if op.kind in ("R", "RC")}
    apart = {(op.block, op.sub_batch) for op in schedule if op.kind == "BC"}
    pieces = {(op.block, op.sub_batch) for op in schedule if op.kind == "D"}
    for op in schedule:
        kind, b, s, of = op
        everyone = subs if b in schedule.joint else [s]
        done_once(done, op)
        if kind in ("R", "RC", "BC", "BF", "BE", "B", "W") or of in ("R", "RC", "BC", "BF", "BE", "B"):
            backward = True
        elif backward:
            raise StuckError("the loss")
        if kind in ("all_reduce", "reduce_scatter", "all_gather"):
            value = {"F": "y", "R": "y again", "B": "g", "C": "part", "RC": "part again", "BC": "part of g"}[of]
            if (kind == "all_gather") != value.startswith("part") or (kind == "all_reduce") == gathered:
                raise StuckError(op)
            flying[of, b, s] = take(held, value, b, s)
        elif kind == "all_to_all":
            flying[of, b, s] = take(held, f"sent by {of}", b, s)
        elif kind == "wait" and of in ("D", "E", "BF", "BE"):
            held[f"arrived from {of}", b, s] = take(flying, of, b, s)
        elif kind == "D":
            held["sent by D", b, s] = read(held, "h", b, s)
        elif kind == "E":
            held["sent by E", b, s] = read(held, "arrived from D", b, s)
        elif kind == "BE":
            held["sent by BE", b, s] = read(held, "arrived from BF", b, s)
        elif kind == "wait":
            take(flying, of, b, s)
            into = {
                "F": ("sum", b), "R": ("sum again", b), "B": ("sum of g", b), "C": ("h", b + 1),
                "RC": ("h again", b + 1), "BC": ("g of y", b),
            }[of]  # fmt: skip
            held[into[0], into[1], s] = 1
        elif kind == "F":
            for each in everyone:
                read(held, "h", b, each)
                if (b, s) in pieces:
                    read(held, "arrived from E", b, s)
                held["y", b, each] = held["F", b, each] = 1
        elif kind == "C":
            read(held, "sum", b, s)
            held["part" if gathered else "h", b if gathered else b + 1, s] = held["C", b, s] = 1
        elif kind == "R":
            read(held, "F", b, s)
            if (b, s) in schedule.recomputed_inputs and gathered:
                read(held, "h again", b, s)
            held["graph", b, s] = held["y again", b, s] = 1
        elif kind == "RC":
            read(held, "sum again", b, s)
            held["graph of C", b, s] = held["part again", b, s] = 1
        elif kind == "BC" or (kind in ("BF", "B") and not (gathered or b in schedule.joint or (b, s) in apart)):
            read(held, "graph of C" if ("RC", b, s) in again else "C", b, s)
            if b < n - 1:
                read(held, "sum of g", b + 1, s)
            held["part of g" if gathered else "g of y", b, s] = 1
        if kind == "BF":
            held["sent by BF", b, s] = read(held, "g of y", b, s)
        elif kind == "B":
            if (b, s) in pieces:
                read(held, "arrived from BE", b, s)
            for each in everyone:
                read(held, "g of y", b, each)
                read(held, "graph" if ("R", b, s) in again else "F", b, s)
                held["g", b, each] = held["B", b, each] = 1
        elif kind == "W":
            read(held, "B", b, s)
    everything = [("h", n, s) for s in subs]
    everything += [("sum of g", b, s) for b in range(n) for s in subs] if backward else []
    for key in everything:
        read(held, *key)
    if flying:
        raise StuckError(flying)


def run_experts(schedule):  # noqa: C901
    n, held, flying, done, backward = schedule.num_blocks, {}, {}, set(), False
    copies = any(op.kind in ("share", "join", "split", "return") for op in schedule)
    again = schedule.recompute == "full"
    for op in schedule:
        kind, b, _, of = op
        done_once(done, op)
        if (of or kind) in ("R", "RD", "RE", "B", "BF", "BE", "split", "return"):
            backward = True
        elif backward:
            raise StuckError("the loss")
        if kind == "wait":
            take(flying, of, b)
            held["arrived", of, b] = 1
        elif kind == "all_to_all":
            flying[of, b] = read(held, of, b)
        elif kind in ("share", "join", "split", "return"):
            before = {"join": ("arrived", "share", b), "split": ("BE", b), "return": ("arrived", "split", b)}
            if kind in before:
                read(held, *before[kind])
            flying[kind, b] = 1
        else:
            of_d, of_e, of_f = ("RD", "RE", "R") if again else ("D", "E", "F")
            reads = {
                "D": [("F", b - 1)] * (b > 0), "E": [("arrived", "D", b), *[("arrived", "join", b)] * copies],
                "F": [("arrived", "E", b)], "P": [("D", b)], "R": [("F", b)], "RE": [("E", b)],
                "RD": [("D", b), *[("R", b - 1)] * (b > 0)], "BF": [(of_f, b), *[("B", b + 1)] * (b + 1 < n)],
                "BE": [(of_e, b), ("arrived", "BF", b)], "B": [(of_d, b), ("arrived", "BE", b)],
            }  # fmt: skip
            for each in reads[kind]:
                read(held, *each)
            held[kind, b] = 1
    for b in range(n):
        read(held, "B", b)
        read(held, "P", b)
        if copies:
            read(held, "arrived", "return", b)
    if flying:
        raise StuckError(flying)


def place_of(schedule, part):
    """Stage of a part, of at most two on a stage."""
    after = 2 * schedule.num_stages - 1 - part if schedule.placement == "v" else part - schedule.num_stages
    return part if part < schedule.num_stages else after


def run_stages(schedule):  # noqa: C901
    last, lanes, at = schedule.num_blocks - 1, {}, [0] * schedule.num_stages
    places = [place_of(schedule, part) for part in range(last + 1)]
    held, done = {}, set()
    split = any(op.kind == "W" for op in schedule)
    again = {(op.block, op.sub_batch) for op in schedule if op.kind == "R"}
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.stages):
            while at[stage] < len(ops):
                op = ops[at[stage]]
                kind, p, m, of = op
                if kind == "receive":
                    other = p + (-1 if of == "F" else 1)
                    if not 0 <= other <= last or places[other] == stage:
                        raise StuckError(op)
                    lane = lanes.get((places[other], stage, of), [])
                    if not lane:
                        break
                    if lane.pop(0) != (other, m):
                        raise StuckError(op)
                    held["arrived", of, p, m] = 1
                elif kind == "send":
                    other = p + (1 if of == "F" else -1)
                    if not 0 <= other <= last or places[other] == stage:
                        raise StuckError(op)
                    read(held, of, p, m)
                    lanes.setdefault((stage, places[other], of), []).append((p, m))
                elif kind == "F":
                    if p and places[p - 1] == stage:
                        read(held, "F", p - 1, m)
                    elif p:
                        read(held, "arrived", "F", p, m)
                elif kind in ("R", "B"):
                    read(held, "F", p, m)
                    if kind == "B" and (p, m) in again:
                        read(held, "R", p, m)
                    if kind == "B" and p < last and places[p + 1] == stage:
                        read(held, "B", p + 1, m)
                    elif kind == "B" and p < last:
                        read(held, "arrived", "B", p, m)
                else:
                    read(held, "B", p, m)
                done_once(done, op)
                held[kind, p, m] = 1
                at[stage] += 1
                moved = True
    if any(place < len(ops) for place, ops in zip(at, schedule.stages, strict=True)) or any(lanes.values()):
        raise StuckError(at)
    for p in range(last + 1):
        for m in range(schedule.num_sub_batches):
            for kind in ("F", "B", "W") if split else ("F", "B"):
                read(held, kind, p, m)


LISTS = [
    generate("oases", 3, 2, "full"),
    generate("cross_pass", 3, 2, "full"),
    generate("sync", 4, 1),
    sequence_parallel(generate("oases", 3, 3, 1)),
    sequence_parallel(generate("sub_pipelined", 4, 2, "full")),
    along_sequence(3, 2, (0, 2), "full"),
    exchanging(generate("oases", 3, 2), (1,)),
    exchanging(generate("cross_pass", 2, 3), (0, 1)),
    generate_experts("plain", 3),
    generate_experts("blocking", 2, True),
    generate_experts("block_wise", 3, True),
    generate_pipeline("one_f_one_b", 3, 4),
    generate_pipeline("shifted_critical_path", 4, 5),
    generate_pipeline("interleaved", 2, 4),
    generate_pipeline("zb_h1", 3, 4, False),
    generate_pipeline("zb_v", 3, 5, False),
    generate_pipeline("zb_v", 2, 3),
]


NAMED = ("op ", "header", "is missing", "stages", "at least", "joint", "does not split the batch", "is complete")


def refused(schedule):
    """Error message of validate; "" if it accepts the list."""
    try:
        validate(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def spoilt(schedule, rng):
    """The list with an op dropped, doubled, moved or swapped, or for other sizes."""
    ops = list(schedule.ops)
    i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
    how = rng.choice(["drop", "double", "swap", "neighbours", "move", "rename", "sizes", "cut"])
    if how == "drop":
        del ops[i]
    elif how == "double":
        ops.insert(j, ops[i])
    elif how == "swap":
        ops[i], ops[j] = ops[j], ops[i]
    elif how == "neighbours":
        i = min(i, len(ops) - 2)
        ops[i], ops[i + 1] = ops[i + 1], ops[i]
    elif how == "move":
        op = ops.pop(i)
        ops.insert(max(0, min(len(ops), i + rng.randint(-4, 4))), op)
    elif how == "rename":
        ops[i] = ops[i]._replace(block=rng.randrange(schedule.num_blocks + 1), sub_batch=ops[j].sub_batch)
    elif how == "cut":
        del ops[i:]
    else:
        more = rng.choice([-1, 1])
        name = rng.choice(["num_blocks", "num_sub_batches"])
        return replace(schedule, ops=tuple(ops), **{name: max(1, getattr(schedule, name) + more)})
    return replace(schedule, ops=tuple(ops))


@pytest.mark.parametrize("schedule", LISTS, ids=lambda schedule: f"{schedule.unit}-{schedule.name}")
def test_what_is_accepted_runs_and_what_runs_is_accepted(schedule):
    validate(schedule)
    interpret(schedule)
    rng, accepted = random.Random(0), 0
    for _ in range(400):
        made = schedule
        for _ in range(rng.choice([1, 1, 1, 2])):
            made = spoilt(made, rng)
        refusal = refused(made)
        if refusal:
            assert any(text in refusal for text in NAMED), refusal
            continue
        accepted += 1
        interpret(made)
    assert accepted > 5, "some changes leave a list that runs"


@pytest.mark.parametrize("schedule", LISTS, ids=lambda schedule: f"{schedule.unit}-{schedule.name}")
def test_neighbours_change_places_exactly_where_it_runs(schedule):
    for i in range(len(schedule) - 1):
        ops = list(schedule.ops)
        ops[i], ops[i + 1] = ops[i + 1], ops[i]
        made = replace(schedule, ops=tuple(ops))
        if schedule.unit == "stage" and place_of(schedule, ops[i].block) != place_of(schedule, ops[i + 1].block):
            continue
        try:
            interpret(made)
            runs = True
        except StuckError:
            runs = False
        assert (refused(made) == "") == runs, f"{ops[i]} before {ops[i + 1]}"


def test_an_op_is_plain_data():
    op = Op("all_reduce", 3, 1, "F")
    assert str(op) == "all_reduce F 3.1"
    assert op.carried == Op("F", 3, 1)
    assert not op.in_backward
    assert Op("wait", 0, 0, "split").in_backward
    assert Op("share", 2, 0).carried == Op("share", 2, 0)
