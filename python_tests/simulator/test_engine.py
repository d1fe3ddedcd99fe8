"""The engine against programs worked out by hand."""

import pytest

from oases.simulator.engine import DeadlockError, run
from oases.simulator.program import Compute, Contention, Program, Receive, Send, Start, Wait


def simulated(*instructions, contention=None, held=()):
    return run(Program("", (instructions,), contention or {}, held))


def ends(timeline):
    """(start, end) by lane and name."""
    return {(span.lane, span.name): (span.start, span.end) for span in timeline.spans}


def test_compute_follows_compute():
    timeline = simulated(Compute("a", 2.0), Compute("b", 3.0))
    assert ends(timeline) == {("compute", "a"): (0, 2), ("compute", "b"): (2, 5)}
    assert timeline.total_seconds == 5


def test_a_collective_hides_under_compute_and_what_is_left_is_waited_for():
    timeline = simulated(Start("x", "link", 5.0), Compute("a", 2.0), Wait("x"), Compute("b", 1.0))
    assert ends(timeline)["link", "x"] == (0, 5)
    assert ends(timeline)["compute", "wait x"] == (2, 5)
    assert timeline.exposed(0) == 3
    assert timeline.total_seconds == 6


def test_a_wait_for_what_has_ended_takes_nothing():
    timeline = simulated(Start("x", "link", 1.0), Compute("a", 2.0), Wait("x"))
    assert timeline.total_seconds == 2
    assert ("compute", "wait x") not in ends(timeline)


def test_a_link_carries_one_collective_after_another():
    timeline = simulated(Start("x", "link", 2.0), Start("y", "link", 3.0), Wait("y"), Wait("x"))
    assert ends(timeline)["link", "x"] == (0, 2)
    assert ends(timeline)["link", "y"] == (2, 5)
    assert timeline.total_seconds == 5


def test_two_links_carry_side_by_side():
    timeline = simulated(Start("x", "one", 2.0), Start("y", "other", 3.0), Wait("x"), Wait("y"))
    assert timeline.total_seconds == 3


def test_what_nobody_waits_for_still_ends():
    assert simulated(Start("x", "link", 4.0), Compute("a", 1.0)).total_seconds == 4


def test_compute_and_link_slow_each_other_down():
    """While both run 1 s of compute takes 2 s and 1 s of the link 4 s; alone each runs at its own pace."""
    both = {"link": Contention(compute=2.0, link=4.0)}
    timeline = simulated(Start("x", "link", 1.0), Compute("a", 3.0), Wait("x"), contention=both)
    # The link ends after 4 s, in which 2 s of the compute are done; the last one runs alone.
    assert ends(timeline) == {("link", "x"): (0, 4), ("compute", "a"): (0, 5)}
    timeline = simulated(Start("x", "link", 2.0), Compute("a", 1.0), Wait("x"), contention=both)
    # The compute ends after 2 s, in which 0.5 s of the link are done; the other 1.5 s run alone.
    assert ends(timeline)["compute", "a"] == (0, 2)
    assert ends(timeline)["link", "x"] == (0, 3.5)


def test_of_two_busy_links_the_worse_slows_the_compute():
    both = {"one": Contention(compute=2.0), "other": Contention(compute=3.0)}
    timeline = simulated(
        Start("x", "one", 9.0), Start("y", "other", 3.0), Compute("a", 2.0), Wait("x"), Wait("y"), contention=both
    )
    # 3 s beside both do 1 s of it; then "one" alone slows the other second to 2 s.
    assert ends(timeline)["compute", "a"] == (0, 5)


def test_a_message_arrives_when_the_link_before_it_is_free():
    sender = (Compute("a", 1.0), Send("m", 2.0), Send("n", 2.0), Compute("b", 1.0))
    receiver = (Receive("m"), Compute("c", 1.0), Receive("n"), Compute("d", 1.0))
    timeline = run(Program("", (sender, receiver)))
    found = {(span.rank, span.name): (span.start, span.end) for span in timeline.spans}
    assert found[0, "send m"] == (1, 3)
    assert found[0, "send n"] == (3, 5)
    assert found[0, "b"] == (1, 2), "sending costs the sender no compute"
    assert found[1, "c"] == (3, 4)
    assert found[1, "d"] == (5, 6)
    assert timeline.bubble(1) == 4
    assert timeline.bubble(0) == 4, "nothing to do after its last work"
    assert timeline.exposed(1) == 0, "waiting for another stage is no exposed communication"


def test_a_collective_goes_on_while_a_message_is_waited_for():
    sender, receiver = (Compute("a", 4.0), Send("m", 0.0)), (Start("x", "link", 2.0), Receive("m"), Wait("x"))
    timeline = run(Program("", (sender, receiver)))
    assert ends(timeline)["link", "x"] == (0, 2)
    assert timeline.total_seconds == 4


def test_memory_over_time():
    timeline = simulated(
        Compute("a", 1.0, allocates=10), Compute("b", 1.0, allocates=5, frees=12), Start("x", "link", 1.0),
        Wait("x", frees=3), held=(100,),
    )  # fmt: skip
    assert [(held.time, held.num_bytes) for held in timeline.held] == [
        (0, 100),
        (0, 110),
        (1, 115),
        (2, 103),
        (3, 100),
    ]
    assert timeline.peak_bytes(0) == 115


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((Wait("x"),),), "waits for 'x', which was not started"),
        (((Start("x", "l", 1.0), Start("x", "l", 1.0)),), "'x' is started twice"),
        (((Start("x", "l", 0.0), Wait("x"), Start("x", "l", 1.0)),), "'x' is started twice"),
        (((Receive("m"),), ()), "rank 0 waits for the message .*'m'.*, which no rank sends"),
        (((Send("m", 1.0), Send("m", 1.0)),), "'m' is sent twice"),
        (((Receive("n"), Send("m", 1.0)), (Receive("m"), Send("n", 1.0))), "which no rank sends"),
    ],
)
def test_programs_that_cannot_go_on(ranks, message):
    with pytest.raises(DeadlockError, match=message):
        run(Program("", ranks))
