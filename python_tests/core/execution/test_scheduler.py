"""OverlapScheduler on a group whose collectives end at once: totals of tickets, and what a failure stops."""

import pytest
import torch
from logged_group import logged_group

from oases.core.execution.group import scheduler_of
from oases.extension import OverlapScheduler


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


def test_a_failure_stops_every_scheduler_until_the_process_goes_on(scheduler):
    ticket = scheduler.all_reduce(torch.zeros(4), "old")
    OverlapScheduler.halt("rank 1 failed")
    OverlapScheduler.halt("rank 0 failed, later")
    try:
        for call in (lambda: scheduler.wait(ticket), lambda: scheduler.all_reduce(torch.zeros(4), "new")):
            with pytest.raises(RuntimeError, match=r"rank 0 stopped at all_reduce of .*: rank 1 failed"):
                call()
    finally:
        OverlapScheduler.go_on()
    scheduler.wait(scheduler.all_reduce(torch.zeros(4), "new"))


def test_a_lack_of_memory_stays_one(scheduler):
    OverlapScheduler.halt("rank 1 ran out of memory", True)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="rank 1 ran out of memory"):
            scheduler.all_reduce(torch.zeros(4), "new")
    finally:
        OverlapScheduler.go_on()
