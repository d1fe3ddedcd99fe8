"""Links: start-up and bandwidth as fitted, and as measured where it was measured."""

import pytest

from oases.simulator.links import COLLECTIVES, LinkModel, Sample, fit_link, hops, wire_bytes
from oases.simulator.program import Contention

LINK = LinkModel(1e-4, 1e8)


def sampled(ranks=4, collectives=COLLECTIVES, link=LINK):
    return [
        Sample(name, ranks, size, link.seconds(name, ranks, size))
        for name in collectives
        for size in (1 << 14, 1 << 17, 1 << 20)
    ]


def test_a_ring():
    assert wire_bytes("all_reduce", 4, 1000) == 1500
    assert wire_bytes("reduce_scatter", 4, 1000) == wire_bytes("all_gather", 4, 1000) == 750
    assert wire_bytes("send", 2, 1000) == 1000
    assert [hops(name, 4) for name in ("all_reduce", "all_gather", "send")] == [6, 3, 1]
    assert LINK.seconds("all_reduce", 1, 1e9) == 0


def test_fit_finds_what_was_put_in():
    fitted = fit_link(sampled(4) + sampled(8), Contention(1.5, 2.0))
    assert fitted.startup_seconds == pytest.approx(LINK.startup_seconds)
    assert fitted.bytes_per_second == pytest.approx(LINK.bytes_per_second)
    assert fitted.fit_error() == pytest.approx(0, abs=1e-9)
    assert fitted.contention == Contention(1.5, 2.0)


def test_fit_under_noise_stays_near():
    noisy = [
        Sample(s.collective, s.ranks, s.bytes, s.seconds * (1.1 if number % 2 else 0.9))
        for number, s in enumerate(sampled(4))
    ]
    fitted = fit_link(noisy, Contention())
    assert fitted.bytes_per_second == pytest.approx(LINK.bytes_per_second, rel=0.2)
    assert 0.05 < fitted.fit_error() < 0.15


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(ValueError, match="measure larger ones"):
        fit_link([Sample("send", 2, size, 1.0 / size) for size in (1 << 14, 1 << 20)], Contention())


def test_measured_sizes_are_taken_as_they_are_and_between_them_a_line():
    link = LinkModel(0, 1e12, samples=(Sample("send", 2, 1000, 1.0), Sample("send", 2, 3000, 2.0)))
    assert link.seconds("send", 2, 1000) == 1
    assert link.seconds("send", 2, 2000) == 1.5
    assert link.seconds("send", 2, 5000) == 3
    assert link.seconds("send", 2, 10) == 1, "start-up is what it takes at least"
    assert link.seconds("send", 4, 1000) < 1e-6, "of another number of ranks nothing was measured"


def test_noise_in_the_largest_size_does_not_make_larger_ones_free():
    samples = (Sample("all_reduce", 2, 1000, 0.01), Sample("all_reduce", 2, 4000, 0.002))
    link = LinkModel(0, 1e6, samples=samples)
    assert link.seconds("all_reduce", 2, 2500) == pytest.approx(0.006), "between them a line"
    assert link.seconds("all_reduce", 2, 16_000) == pytest.approx(0.002 + 0.012), "by the bandwidth; it was negative"


def test_of_several_times_of_one_size_the_median_counts():
    samples = [Sample("send", 2, 1000, t) for t in (1.0, 5.0, 2.0)]
    assert LinkModel(0, 1e12, samples=tuple(samples)).seconds("send", 2, 2000) == 4
    link = LinkModel(0, 1e12, samples=(*samples, Sample("send", 2, 2000, 3.0), Sample("send", 2, 2000, 5.0)))
    assert link.seconds("send", 2, 3000) == 6


def test_groups_that_share_a_link_wait_for_each_other():
    measured = LinkModel(1e-4, 1e8, samples=tuple(sampled(4, ("all_reduce",))))
    for link in (LINK, measured):
        one, two = (link.seconds("all_reduce", 4, 1 << 20, sharing) for sharing in (1, 2))
        assert two - one == pytest.approx(1.5 * (1 << 20) / 1e8)
