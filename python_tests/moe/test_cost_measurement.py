"""Measured costs of copies on a clock that the test moves: what nothing hides counts, what pauses hide does not."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from oases.moe import cost_measurement
from oases.moe.cost_measurement import BYTES, handling_seconds
from oases.moe.costs import Costs
from oases.moe.experts import ExpertWeights
from oases.moe.transfer import Transfer

LOCAL = 2
COSTS = Costs(token_seconds=1e-3, token_bytes=4, expert_bytes=1e6, bandwidth=2e6, both_ways=2e6, latency=0.5)
"""A round of both experts of each rank takes 2 s on the wire."""


class Time:
    """Stands in for `time` and the clock of a device. pauses: seconds slept."""

    def __init__(self):
        self.now, self.pauses, self.device = 0.0, [], torch.device("cpu")

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return end - start


def paced(time, packing, wire, placements):
    """Transfers of which each part packs for so many seconds, and what it sends is on the wire for so many."""

    class Paced(Transfer):
        due = 0.0

        def __init__(self, weights, placement, *rest):
            placements.append(placement.copies)
            super().__init__(weights, placement, *rest)

        def _start(self, *given, **options):
            super()._start(*given, **options)
            time.now += packing
            self.due = time.now + wire

        def _received(self, *given):
            time.now = max(time.now, self.due)
            return super()._received(*given)

    return Paced


def check_handling(packing, wire, expert_bytes):
    """Handling seconds as measured on this rank, its pauses, and the copies."""
    time, placements = Time(), []
    weights = ExpertWeights(torch.zeros(LOCAL, 3, 2), torch.zeros(LOCAL, 2, 3))
    with (
        mock.patch.object(cost_measurement, "time", time),
        mock.patch.object(cost_measurement, "Clock", return_value=time),
        mock.patch.object(cost_measurement, "Transfer", paced(time, packing[dist.get_rank()], wire, placements)),
    ):
        found = handling_seconds(weights, replace(COSTS, expert_bytes=expert_bytes), dist.group.WORLD, "test")
    return found, set(time.pauses), placements


@pytest.mark.parametrize("wire", [0.0, 2.0, 3.5])
def test_what_is_on_the_wire_while_a_rank_pauses_costs_nothing(two_ranks, wire):
    (found, pauses, placements), (other, _, _) = two_ranks.run(check_handling, (8.0, 6.0), wire, 1e6)
    assert pauses == {cost_measurement.PAUSE * 2.5}
    assert placements == [((1,), (1,), (0,), (0,))]
    # Four parts pack, of the slower and the faster rank, of two experts sent and two held.
    assert found == other == pytest.approx(4 * 7 / 4)


def test_a_link_slower_than_its_costs_say_is_waited_for(two_ranks):
    found = two_ranks.run(check_handling, (0.0, 0.0), 5.0, 1e6)[0][0]
    assert found == pytest.approx(4 * (5 - cost_measurement.PAUSE * 2.5) / 4)


def test_large_experts_are_measured_by_one(two_ranks):
    found, pauses, placements = two_ranks.run(check_handling, (8.0, 8.0), 1.0, float(BYTES))[0]
    assert placements == [((1,), (), (0,), ())]
    assert pauses == {cost_measurement.PAUSE * (2 * BYTES / 2e6 + 0.5)}
    assert found == pytest.approx(4 * 8 / 2)
