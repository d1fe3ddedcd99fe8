"""Pipeline schedules: every pass once, in an order that runs, with as much in flight as the papers say."""

import itertools
from dataclasses import replace

import pytest

from oases.core.schedule import (
    PIPELINES,
    Op,
    ScheduleError,
    format_schedule,
    generate,
    generate_pipeline,
    parse_schedule,
    validate,
)
from oases.core.schedule.pipeline import interleaved, zb_h1, zb_v
from oases.core.schedule.schedule import stage_of
from oases.plans.pipelines import (
    StageReading,
    chunks_of,
    in_flight,
    name_of,
    passes,
    placement_of,
    read_stage,
    resolve_pipeline,
)
from oases.simulator import simulate

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 4, 7)))
CASES = [
    (name, *sizes)
    for name in sorted(PIPELINES)
    for sizes in SIZES
    if name != "interleaved" or not sizes[1] % sizes[0]
]
KEEPS_LAST = ("last_no_recompute", "shifted_critical_path")
MERAK = ("one_f_one_b", "pre_recompute", "last_no_recompute", "shifted_critical_path")


def flying_of(pipeline, stage):
    return StageReading.of(pipeline.stages[stage]).in_flight


@pytest.mark.few(100, 1000)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("name", "stages", "micro_batches"), CASES)
def test_every_pass_once_and_every_message_at_both_ends(name, stages, micro_batches, recompute):
    pipeline = generate_pipeline(name, stages, micro_batches, recompute)
    assert pipeline.num_stages == len(pipeline.stages) == stages
    validate(pipeline)
    assert parse_schedule(format_schedule(pipeline)) == pipeline
    parts, sent, received = pipeline.num_blocks, [], []
    turns = [*range(stages), *(reversed(range(stages)) if name == "zb_v" else range(stages))][:parts]
    for stage, ops in enumerate(pipeline.stages):
        mine = [part for part, of in enumerate(turns) if of == stage]
        kinds = "FB" + "R" * pipeline.recomputes(stage) + "W" * pipeline.has_weight_passes
        assert pipeline.recomputes(stage) == (recompute and not (stage == stages - 1 and name in KEEPS_LAST))
        done = [str(op) for op in ops]
        assert len(done) == len(set(done))
        for kind in kinds:
            places = [(op.block, op.sub_batch) for op in ops if op.kind == kind]
            assert sorted(places) == list(itertools.product(mine, range(micro_batches)))
        for part, m in itertools.product(mine, range(micro_batches)):
            order = [done.index(f"{kind} {part}.{m}") for kind in "FRBW" if kind in kinds]
            assert order == sorted(order)
        sent += [(op.of, op.sub_batch, op.block + (1 if op.of == "F" else -1)) for op in ops if op.kind == "send"]
        received += [(op.of, op.sub_batch, op.block) for op in ops if op.kind == "receive"]
    assert sorted(sent) == sorted(received)
    borders = sum(one != other for one, other in itertools.pairwise(turns))
    assert len(sent) == 2 * borders * micro_batches
    assert simulate(pipeline, {"F": 1.0, "R": 1.0, "B": 2.0}).total_seconds > 0  # and nobody waits forever


@pytest.mark.long
@pytest.mark.parametrize(
    "stages", [3, 4, 5, 8, *(pytest.param(p, marks=pytest.mark.slow) for p in (6, 7, *range(9, 17)))]
)
def test_makespans_of_merak_are_their_closed_forms(stages):
    p = stages
    for m, (f, r, b) in itertools.product(range(max(p, 4), 33), [(1, 1, 2), (1, 0.3, 1.5)]):
        expected = [(m + p - 1) * (f + r + b)]
        expected += [m * (f + r + b) + (p - 1) * (f + b) - early * r for early in (0, 2, 3)]
        for name, seconds in zip(MERAK, expected, strict=True):
            timeline = simulate(generate_pipeline(name, p, m), {"F": f, "R": r, "B": b})
            assert timeline.total_seconds == pytest.approx(seconds, rel=1e-9), (name, m, f, r, b)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4), (8, 16)])
def test_makespans_of_interleaved_and_zero_bubble(p, m):
    times = {"F": 1.0, "B": 1.0, "W": 1.0}
    assert simulate(zb_h1(p, m, False), times).total_seconds == pytest.approx(3 * m + (p - 1))
    for chunks in (1, 2, 3, 4):
        timeline = simulate(interleaved(p, m, False, chunks), {"F": 1.0, "B": 2.0})
        assert timeline.total_seconds == pytest.approx(3 * m + (p - 1) * 3 / chunks)


def held(pipeline, stage):
    """Most micro-batches at a time whose activations a stage holds, from the forward pass to the weight gradients."""
    now = [{"F": 1, "W": -1}.get(op.kind, 0) for op in pipeline.stages[stage]]
    return max(itertools.accumulate(now)) / pipeline.chunks


@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 4), (4, 7), (4, 8), (8, 16)])
def test_zb_v_takes_less_time_than_zb_h1_at_the_memory_of_its_first_stage(p, m):
    """Qi et al. (arXiv 2405.15362): no stage waits once it has begun, and all hold as much as 1F1B's first one."""
    times = {"F": 1.0, "B": 1.0, "W": 1.0}
    found, other = zb_v(p, m, False), zb_h1(p, m, False)
    timeline = simulate(found, times)
    assert timeline.total_seconds == pytest.approx(3 * m + (p - 1) / 2)
    assert timeline.total_seconds == pytest.approx(simulate(other, times).total_seconds - (p - 1) / 2)
    if (p, m) == (4, 8):
        assert (timeline.total_seconds, simulate(other, times).total_seconds) == (25.5, 27.0)
    assert [held(found, stage) for stage in range(p)] == [held(other, 0)] * p == [p] * p


def test_the_parts_of_a_v_turn_around():
    assert [stage_of(part, 3, "loop") for part in range(9)] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [stage_of(part, 3, "v") for part in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    text = format_schedule(zb_v(2, 3, False))
    assert text.splitlines()[0] == "pipeline zb_v stages=2 micro_batches=3 chunks=2 placement=v"
    assert [placement_of(each) for each in (text, "zb_v", "interleaved")] == ["v", "v", "loop"]
    parts = [[op.block for op in ops if op.kind in ("send", "receive")] for ops in zb_v(2, 3, False).stages]
    assert [set(each) for each in parts] == [{0, 3}, {1, 2}]
    assert not [op for op in zb_v(2, 3) if op in (Op("send", 1, 0, "F"), Op("receive", 2, 0, "F"))]


def test_micro_batches_in_flight():
    flying = {name: [flying_of(generate_pipeline(name, 4, 8), stage) for stage in range(4)] for name in PIPELINES}
    assert flying["one_f_one_b"] == flying["pre_recompute"] == flying["zb_h1"] == [4, 3, 2, 1]
    assert flying["zb_v"] == [8, 8, 8, 8]
    assert flying["shifted_critical_path"] == [4, 3, 3, 1]


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_keeps_no_more_in_flight_than_its_warm_up(chunks):
    """Narayanan et al. (arXiv 2104.04473): 2 (p - s - 1) + (v - 1) p forward passes, then one of each in turn."""
    pipeline = interleaved(4, 16, chunks=chunks)
    expected = [2 * (4 - 1 - stage) + (chunks - 1) * 4 + 1 for stage in range(4)]
    assert [flying_of(pipeline, stage) for stage in range(4)] == expected


@pytest.mark.parametrize(("name", "stages", "micro_batches"), CASES)
def test_in_flight_by_formula_is_what_the_lists_have(name, stages, micro_batches):
    pipeline = generate_pipeline(name, stages, micro_batches)
    for stage in range(stages):
        assert in_flight(name, stages, micro_batches, stage) == flying_of(pipeline, stage)


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_more_micro_batches_are_no_more_in_flight(name):
    for stages, stage in ((2, 0), (3, 1), (4, 2), (5, 0)):
        many = 9 * stages
        assert in_flight(name, stages, many, stage) == flying_of(generate_pipeline(name, stages, many), stage)


@pytest.mark.parametrize(("name", "stages", "micro_batches"), CASES)
def test_passes_are_those_of_the_lists(name, stages, micro_batches):
    """An R right before its backward pass is not early recomputation."""
    pipeline = generate_pipeline(name, stages, micro_batches)
    for stage, ops in enumerate(pipeline.stages):
        listed = [(op.kind, op.block, op.sub_batch) for op in ops if op.kind in "FRBW"]
        pairs = itertools.pairwise((op.kind, op.block, op.sub_batch) for op in ops)
        inside = {one for one, after in pairs if one[0] == "R" and after == ("B", *one[1:])}
        found = list(passes(name, stages, micro_batches, stage))
        assert found == [each for each in listed if each not in inside]
        reading = read_stage(name, stages, micro_batches, stage)
        assert reading == StageReading.of(pipeline.stages[stage])
        assert reading.early == {each[1:] for each in found if each[0] == "R"}
        assert found[-1] == reading.last
        assert reading.has_weights == name.startswith("zb_")
        if micro_batches >= stages and name != "zb_v":
            waiting = min(stage, micro_batches) if name == "zb_h1" else 0
            assert reading.held == ((reading.in_flight, waiting),)
        if micro_batches >= 2 * stages - 1 and name == "zb_v":
            # In the cool-down two deferred weight gradients take the place of two micro-batches in flight.
            assert reading.held[-1] == (2 * stages, 0)
            assert reading.held[0][1] == 2 * stage
            assert all(flying + waiting <= 2 * stages + 1 for flying, waiting in reading.held)


def test_one_forward_one_backward():
    def found(name, micro_batches, stage):
        return [f"{kind}{m}" for kind, _, m in passes(name, 3, micro_batches, stage)]

    assert found("one_f_one_b", 4, 0) == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert found("one_f_one_b", 4, 2) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert found("gpipe", 2, 1) == ["F0", "F1", "B1", "B0"]


def test_what_there_is_no_pipeline_of():
    with pytest.raises(ScheduleError, match="unknown pipeline 'nosuch'; known are gpipe, interleaved"):
        generate_pipeline("nosuch", 2, 2)
    with pytest.raises(ScheduleError, match="unknown pipeline 'nosuch'"):
        in_flight("nosuch", 2, 2, 0)
    with pytest.raises(ScheduleError, match="multiples of the 4 stages, got 2 and 6"):
        interleaved(4, 6)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ScheduleError, match="at least 1 stage and 1 micro-batch, got"):
            generate_pipeline("gpipe", *sizes)


def without(schedule, *texts):
    return replace(schedule, ops=tuple(op for op in schedule if str(op) not in texts))


def moved(schedule, text, before):
    ops = [op for op in schedule if str(op) != text]
    at = next(place for place, op in enumerate(ops) if str(op) == before)
    ops[at:at] = [op for op in schedule if str(op) == text]
    return replace(schedule, ops=tuple(ops))


PLAIN, SPLIT = generate_pipeline("one_f_one_b", 2, 3), generate_pipeline("zb_h1", 2, 3, False)
TWICE, BACK = generate_pipeline("interleaved", 2, 2), generate_pipeline("zb_v", 2, 3, False)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (without(PLAIN, "send F 0.1"), r"op \d+ \(receive F 1.1\): it has no send; 'send F 0.1' is missing"),
        (without(PLAIN, "receive B 0.1"), r"\(B 0.1\): its input is missing; 'receive B 0.1' must come before it"),
        (without(PLAIN, "receive B 0.1", "R 0.1", "B 0.1"), "'B 0.1' is missing: without it the step is incomplete"),
        (without(PLAIN, "F 0.1"), r"\(send F 0.1\): its input is missing; 'F 0.1' must come before it"),
        (without(PLAIN, "R 0.1"), "the header says recompute=full, but the list holds ops R of 5 of 6 passes"),
        (without(SPLIT, "W 1.2"), "'W 1.2' is missing"),
        (moved(SPLIT, "W 1.0", "B 1.0"), r"\(W 1.0\): its input is missing; 'B 1.0' must come before it"),
        (moved(PLAIN, "R 0.0", "F 0.0"), r"op 1 \(R 0.0\): its input is missing; 'F 0.0'"),
        (moved(PLAIN, "B 0.0", "R 0.0"), r"\(B 0.0\): its input is missing; 'R 0.0' must come before it"),
        (
            moved(PLAIN, "send F 0.2", "send F 0.1"),
            r"\(send F 0.2\): its input is missing; 'F 0.2' must come before it",
        ),
        (
            moved(moved(PLAIN, "F 0.2", "F 0.1"), "send F 0.2", "F 0.1"),
            r"op \d+ \(receive F 1.1\): stage 1 waits for receive F 1.1 where receive F 1.2 comes first",
        ),
        (
            moved(PLAIN, "receive B 0.0", "F 0.0"),
            r"op 1 \(receive B 0.0\): stage 0 waits for it forever, because stage 1, which sends it, waits at "
            r"op \d+ \(receive F 1.0\)",
        ),
        (replace(PLAIN, ops=(*PLAIN.ops, Op("F", 0, 3))), r"2 model parts and 3 micro-batches"),
        (replace(PLAIN, ops=(*PLAIN.ops, Op("B", 1, 0))), r"\(B 1.0\): duplicate of op"),
        (replace(PLAIN, ops=(*PLAIN.ops, Op("send", 1, 0, "F"))), "it has no part 2 to send to"),
        (replace(PLAIN, ops=(*PLAIN.ops, Op("C", 1, 0))), "C is not an op of pipeline stages"),
        (replace(PLAIN, ops=(*PLAIN.ops, Op("send", 1, 0, "R"))), "only the results of F and B go to another stage"),
        (
            replace(PLAIN, ops=(*PLAIN.stages[1], *PLAIN.stages[0])),
            "of stage 0, after ops of stage 1; sort ops by stage",
        ),
        (replace(PLAIN, num_stages=3), "2 model parts cannot be divided over 3 pipeline stages"),
        (without(TWICE, "F 2.1"), r"\(send F 2.1\): its input is missing"),
        (moved(BACK, "F 2.0", "F 1.0"), r"\(F 2.0\): its input is missing; 'F 1.0' must come before it"),
        (moved(BACK, "B 1.0", "B 2.0"), r"\(B 1.0\): its input is missing; 'B 2.0' must come before it"),
        (
            replace(BACK, ops=(*BACK.ops, Op("send", 1, 0, "F"))),
            r"parts 1 and 2 are both on stage 1, which needs no message between them; leave it out",
        ),
        (replace(BACK, placement="loop"), r"\(F 2.0\): its input is missing; 'receive F 2.0' must come before it"),
    ],
)
def test_what_cannot_run_is_named(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


def test_a_pipeline_is_read_off_its_text_as_off_its_name():
    for name, stages, micro_batches in (
        ("zb_h1", 3, 4),
        ("shifted_critical_path", 4, 8),
        ("interleaved", 2, 4),
        ("zb_v", 3, 5),
    ):
        text = format_schedule(generate_pipeline(name, stages, micro_batches))
        assert name_of(text) == name_of(name) == name
        assert chunks_of(text) == chunks_of(name)
        assert resolve_pipeline(text, stages, micro_batches) == resolve_pipeline(name, stages, micro_batches)
        for stage in range(stages):
            assert read_stage(text, stages, micro_batches, stage) == read_stage(name, stages, micro_batches, stage)
            both = (list(passes(each, stages, micro_batches, stage)) for each in (text, name))
            assert next(both) == next(both)
        with pytest.raises(ScheduleError, match=f"the list {name} is for {stages} stages and {micro_batches} micro"):
            resolve_pipeline(text, stages + 1, micro_batches)
    with pytest.raises(
        ScheduleError, match="a schedule of tensor-parallel blocks, but one of pipeline stages is required"
    ):
        resolve_pipeline(format_schedule(generate("oases", 2, 2)), 2, 2)
