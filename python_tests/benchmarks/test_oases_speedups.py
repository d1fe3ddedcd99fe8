"""The paper's seven models: fits to the published times, and how near one set of assumptions comes to its charts."""

from dataclasses import replace

import pytest

from benchmarks.papers.oases_speedups import (
    SPEEDUPS,
    Assumptions,
    error,
    fitted_network,
    fitted_rates,
    report,
    simulated,
)


def test_rates_come_near_the_published_times():
    rates = fitted_rates()
    assert rates.error < 0.08
    # An RTX 3090 is sold with 35.6 TFLOP/s and 936 GB/s.
    assert rates.device.flops_per_second["float32"] == pytest.approx(35.6e12, rel=0.1)
    assert 0.5 * 936e9 < rates.device.bytes_per_second < 936e9
    assert 5e9 < fitted_network().bytes_per_second < 10e9


def test_one_set_of_assumptions_comes_near_the_charts():
    results = simulated()
    assert [(each.model.hidden, each.model.layers) for each in results] == 2 * list(SPEEDUPS)
    assert error(results) < 0.15
    assert all(each.simulated > 1 for each in results)
    assert {each.model.hidden for each in results if each.tp == 8} == {6144, 8192, 12288}


@pytest.mark.long
def test_bridges_make_less_to_hide():
    results = simulated()
    for bridged, plain in zip(results[:7], results[7:], strict=True):
        assert bridged.simulated < plain.simulated if plain.tp == 4 else bridged.simulated == plain.simulated


@pytest.mark.long
def test_without_its_faults_the_runtime_is_faster():
    for faulty, clean in zip(simulated(), simulated(replace(Assumptions(), published_runtime=False)), strict=True):
        assert clean.simulated > faulty.simulated


@pytest.mark.long
def test_the_report_states_its_assumptions():
    text = report()
    assert "| 12288/4 | no | 8 |" in text
    assert "no contention" in text
    assert text.count("\n|") == 2 + 14 + 2 + 6
