"""A recomputation under a forward pass: a step before every wait for a sum, every op once, each list in its order."""

import itertools

import pytest

from oases.schedule import GENERATORS, generate, generate_pipeline, sequence_parallel
from oases.schedule.pipeline import KEEPS_LAST, SHIFTED, UNDER_FORWARD, turns
from oases.schedule.under import makes_room, steps, under


def tagged(ops, micro_batch):
    return [((micro_batch, op), op) for op in ops]


def again_of(schedule):
    return [op for op in schedule.backward if (op.of or op.kind) in ("R", "RC")]


@pytest.mark.parametrize("cut", [lambda schedule: schedule, sequence_parallel])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_both_lists_are_whole_and_in_their_order(name, cut):
    schedule = cut(generate(name, 4, 2, "full"))
    again = again_of(schedule)
    found = list(under(tagged(schedule.forward, 1), tagged(again, 0)))
    assert [op for m, op in found if m == 1] == list(schedule.forward)
    assert [op for m, op in found if m == 0] == again
    before_waits = [one for one, (m, op) in itertools.pairwise(found) if m == 1 and makes_room(op) and one[0] == 0]
    assert len(before_waits) == len(list(steps(tagged(again, 0)))) == 4 * schedule.num_sub_batches


def test_what_finds_no_room_follows():
    forward, again = generate("oases", 2, 1).forward, again_of(generate("oases", 4, 1, "full"))
    found = list(under(tagged(forward, 1), tagged(again, 0)))
    assert [str(op) for _, op in found[-2:]] == ["R 1.0", "R 0.0"]
    assert list(under(tagged(forward, 1), [])) == [(1, op) for op in forward]


@pytest.mark.parametrize("name", UNDER_FORWARD)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 7), (4, 8), (4, 1)])
def test_one_micro_batch_under_each_forward_pass(name, stages, micro_batches):
    """The passes are those of the pipeline it comes from; only where the R stand has changed."""
    base = "shifted_critical_path" if name in SHIFTED else "last_no_recompute"
    pipeline, plain = (generate_pipeline(each, stages, micro_batches) for each in (name, base))
    assert name in KEEPS_LAST
    for stage, (ops, others) in enumerate(zip(pipeline.stages, plain.stages, strict=True)):
        assert [op for op in ops if op.kind != "R"] == [op for op in others if op.kind != "R"]
        assert sorted(map(str, ops)) == sorted(map(str, others))
        pairs = list(itertools.pairwise(ops))
        over = [(op.sub_batch, after.sub_batch) for op, after in pairs if (op.kind, after.kind) == ("R", "F")]
        assert all(again < forward for again, forward in over)
        assert len({forward for _, forward in over}) == len(over)
        if stage == stages - 1:
            assert not over
    if micro_batches == 8:
        first = [f"{kind}{m}" for kind, m in turns(name, stages, 8, stages - 2)]
        shifted = ["F0", "F1", "R0", "F2", "B0", "R1", "B1", "R2", "F3", "B2", "R3", "F4", "B3"]
        assert first[:13] == (shifted if name in SHIFTED else ["F0", "R0", "F1", "B0", "R1", "F2", "B1", "R2", "F3",
                                                               "B2", "R3", "F4", "B3"])  # fmt: skip
