"""OverlapScheduler on a group whose collectives end at once: totals of tickets, and tickets from before a failure."""

import pytest
import torch
from logged_group import logged_group

from oases.core.execution.group import scheduler_of


@pytest.fixture
def scheduler():
    with logged_group() as group:
        found = scheduler_of(group)
        found.reset_totals()
        yield found


def test_totals_sum_up_tickets_by_label(scheduler):
    tickets = [scheduler.all_reduce(torch.zeros(size), label) for size, label in ((4, "a"), (6, "a"), (8, "b"))]
    for ticket in tickets:
        scheduler.wait(ticket)
    totals = scheduler.totals()
    assert {label: (each.count, each.bytes) for label, each in totals.items()} == {"a": (2, 40), "b": (1, 32)}
    blocked = sum(ticket.record.blocked_for for ticket in tickets[:2])
    assert totals["a"].blocked_seconds == pytest.approx(blocked, abs=1e-7)


def test_time_of_two_collectives_in_flight_counts_once(scheduler):
    first, second = (scheduler.all_reduce(torch.zeros(4), "a") for _ in range(2))
    scheduler.wait(first)
    scheduler.wait(second)
    third = scheduler.all_reduce(torch.zeros(4), "a")
    scheduler.wait(third)
    together = second.record.finished - first.record.issued
    alone = third.record.finished - third.record.issued
    assert first.record.issued < second.record.issued < first.record.finished < second.record.finished
    assert scheduler.totals()["a"].link_seconds == pytest.approx(together + alone, abs=1e-7)


def test_a_collective_from_before_a_failure_cannot_be_waited_for(scheduler):
    ticket = scheduler.all_reduce(torch.zeros(4), "old")
    assert scheduler.halt("rank 1 failed").newly
    assert scheduler.drain(1.0) == ""
    scheduler.resume()
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        scheduler.check()
    with pytest.raises(RuntimeError, match="all_reduce of old was given up when a rank failed"):
        scheduler.wait(ticket)
    scheduler.wait(scheduler.all_reduce(torch.zeros(4), "new"))
