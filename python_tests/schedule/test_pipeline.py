"""Pipeline schedules: every pass once, in an order that runs, with as much in flight as the papers say."""

import itertools

import pytest

from oases.schedule import PIPELINES, ScheduleError, generate_pipeline
from oases.schedule.pipeline import in_flight, turns

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 4, 7)))


@pytest.mark.parametrize("name", sorted(PIPELINES))
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_pass_once_and_every_message_at_both_ends(name, stages, micro_batches):
    pipeline = generate_pipeline(name, stages, micro_batches)
    assert pipeline.num_stages == len(pipeline.stages) == stages
    sent, received = [], []
    for stage, ops in enumerate(pipeline.stages):
        for kind in "FRB":
            assert sorted(op.sub_batch for op in ops if op.kind == kind) == list(range(micro_batches))
        assert {op.block for op in ops} == {stage}
        done = [str(op) for op in ops]
        for m in range(micro_batches):
            assert done.index(f"F {stage}.{m}") < done.index(f"R {stage}.{m}") < done.index(f"B {stage}.{m}")
        sent += [(op.of, op.sub_batch, stage + (1 if op.of == "F" else -1)) for op in ops if op.kind == "send"]
        received += [(op.of, op.sub_batch, stage) for op in ops if op.kind == "receive"]
    assert sorted(sent) == sorted(received)
    assert len(sent) == 2 * (stages - 1) * micro_batches


@pytest.mark.parametrize("name", sorted(PIPELINES))
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight_by_formula_is_what_the_lists_have(name, stages, micro_batches):
    pipeline = generate_pipeline(name, stages, micro_batches)
    for stage in range(stages):
        assert in_flight(name, stages, micro_batches, stage) == pipeline.in_flight(stage)


def test_one_forward_one_backward():
    passes = [f"{kind}{m}" for kind, m in turns("one_f_one_b", 3, 4, 0)]
    assert passes == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    passes = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    assert [f"{kind}{m}" for kind, m in turns("one_f_one_b", 3, 4, 2)] == passes
    assert [f"{kind}{m}" for kind, m in turns("gpipe", 3, 2, 1)] == ["F0", "F1", "B1", "B0"]


def test_what_there_is_no_pipeline_of():
    with pytest.raises(ScheduleError, match="unknown pipeline 'nosuch'; known are gpipe, one_f_one_b"):
        generate_pipeline("nosuch", 2, 2)
    with pytest.raises(ScheduleError, match="unknown pipeline 'nosuch'"):
        in_flight("nosuch", 2, 2, 0)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ScheduleError, match="at least 1 stage and 1 micro-batch, got"):
            generate_pipeline("gpipe", *sizes)
