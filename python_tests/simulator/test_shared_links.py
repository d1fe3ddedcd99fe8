"""Ranks that share a link: with nothing shared it is the engine, with a shared link each gets its part."""

import pytest

from oases.planner import Plan, Predictor, Segment, Stage
from oases.plans.gpt import gpt
from oases.plans.pipelines import chunks_of
from oases.simulator.cluster import cluster_called
from oases.simulator.engine import DeadlockError, run
from oases.simulator.program import Compute, Contention, Program, Receive, Send, Start, Wait, replicated

MODEL = gpt(hidden=256, layers=4, heads=4, sequence=128, vocabulary=512)
HARDWARE, _ = cluster_called("64x3090")


@pytest.mark.parametrize("pipeline", ["one_f_one_b", "shifted_critical_path", "interleaved", "zb_h1", "zb_v"])
def test_with_nothing_shared_it_is_the_engine(pipeline):
    parts = chunks_of(pipeline)
    stage = Stage((Segment(4 // parts, 2, "oases", 2, 1),) * parts)
    plan = Plan(MODEL, 8, 4, 32, 4, (stage,) * 2, pipeline=pipeline)
    program = Predictor(HARDWARE).program(plan, every_op=True)
    one, other = run(program), run(program, {"no link of it"})
    assert other.total_seconds == pytest.approx(one.total_seconds, rel=1e-9)
    for stage in range(2):
        assert other.exposed(stage) == pytest.approx(one.exposed(stage), rel=1e-6, abs=1e-12)
        assert other.bubble(stage) == pytest.approx(one.bubble(stage), rel=1e-6, abs=1e-12)
        assert other.peak_bytes(stage) == one.peak_bytes(stage)


def test_contention_is_the_engine_s():
    ranks = ((Start("a", "link", 2.0), Compute("F 0.1", 3.0), Wait("a"), Compute("B 0.1", 1.0)),)
    program = Program("", ranks, {"link": Contention(1.5, 1.25)})
    assert run(program, {"no link of it"}).total_seconds == pytest.approx(run(program).total_seconds)


def test_two_on_a_link_take_twice_as_long_while_both_are_there():
    def rank(late):
        return (Compute("F 0.1", late), Start("a", "link", 2.0), Wait("a"))

    program = Program("", (rank(0.0), rank(1.0)))
    assert run(program).total_seconds == pytest.approx(3.0)
    # One second alone, then both at half the pace: the first ends at 3, the second has one left of its two.
    shared = run(program, {"link"})
    assert [(span.rank, span.end) for span in shared.spans if span.lane == "link"] == [(0, 3.0), (1, 4.0)]


def test_replicas_that_are_not_in_step_share_a_link_better():
    rank = (
        Compute("F", 3.0),
        Start("a", "link", 2.0),
        Wait("a"),
        Compute("B", 3.0),
        Start("b", "link", 2.0),
        Wait("b"),
    )
    program = Program("", (rank,), held=(5,))
    two = replicated(program, 2, {"link"})
    assert len(two.ranks) == 2
    assert two.held == (5, 5)
    assert two.ranks[1][0] == Compute("replica 1 begins", 2.0), "a collective later"
    # Each sends alone: the second one's wait for the first is none, and it ends as much later as it began.
    assert run(two, {"link"}).total_seconds == pytest.approx(12.0)
    in_step = Program("", (rank, rank))
    assert run(in_step, {"link"}).total_seconds == pytest.approx(14.0)
    assert replicated(program, 1, {"link"}).ranks[0][0].name == "replica 0 F"


def test_a_message_that_nobody_sends_is_named():
    with pytest.raises(DeadlockError, match=r"rank 1 waits for the message Receive\(name=.b.\), which no rank sends"):
        run(Program("", ((Send("a", 1.0),), (Receive("a"), Receive("b")))), {"link"})
