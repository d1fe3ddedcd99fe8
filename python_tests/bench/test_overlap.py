"""The benchmark's result: memory beside the paper's formula, and "auto" among the contestants."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from oases import cli
from oases.core.blocks.chooser import label
from oases.core.execution import autotune
from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.profile.overlap import OverlapBench
from oases.profile.overlap_result import CoreTime, Passes, core_clock, core_seconds
from oases.testing import RankPool
from oases_bench import overlap
from oases_bench import ratio as module
from oases_bench.harness import Ranks
from oases_bench.overlap import MALLOCS, OverlapBenchConfig, bench_of, measured_at, run_overlap_bench, shown
from oases_bench.ratio import RatioLink

CONFIG = OverlapBenchConfig(
    hidden=32, heads=4, layers=2, sequence=8, batch=4, iterations=2, recompute="full", schedules="auto,oases,sync",
    malloc="trim",
)  # fmt: skip
CANDIDATES = ["fine_grained 1", "oases 2", "oases 4"]


def run_with_cache_at(path: Path) -> dict[str, Any]:
    autotune.cache_path = lambda: path
    return run_overlap_bench(CONFIG, Ranks(), False)


@pytest.mark.long
def test_auto_is_a_contestant_and_leaves_the_cache_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "schedules.json"
    result = two_ranks.run(run_with_cache_at, path)[0]
    assert not path.exists()
    rows = result["schedules"]
    assert list(rows) == ["auto", "oases", "sync"]
    assert rows["auto"]["chosen"] in CANDIDATES
    assert rows["auto"]["slower_than_sync"] == rows["auto"]["step_seconds"] / rows["sync"]["step_seconds"]
    assert rows["auto"]["formula_units"] == 4, "of the schedule chosen"
    assert "chosen" not in rows["oases"]
    assert [rows[name]["formula_units"] for name in ("oases", "sync")] == [4, 1]
    unit = 4 * 8 * 32 * 4
    assert rows["oases"]["kept_units"] == rows["oases"]["kept_bytes"] / (unit * 2)
    assert rows["sync"]["kept_bytes"] < rows["oases"]["kept_bytes"]
    table, *cores = shown(result)
    assert table.row_count == 3
    assert [each.row_count for each in cores] == [5] * (result["core_seconds"] is not None)


def choose() -> tuple[list[str], str]:
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(CONFIG, group)
    seen: list[str] = []
    bench.choose(lambda done: seen.append(label(bench.schedules["auto"])))
    return seen, label(bench.schedules["auto"])


@pytest.mark.long
def test_every_candidate_has_its_turns_before_the_choice(two_ranks: RankPool) -> None:
    (seen, first), (_, second) = two_ranks.run(choose)
    assert seen[:4] == CANDIDATES[:2] * 2  # four sub-batches only if two are worth it
    assert len(seen) <= len(CANDIDATES) * (autotune.ROUNDS + 1)
    assert first == second
    assert first in CANDIDATES


def run_beside_a_peer_in_bfloat16() -> dict[str, Any]:
    config = replace(CONFIG, schedules="sync,oases@2", dtype="bfloat16", peers="torch")
    return run_overlap_bench(config, Ranks(), False)


def test_a_peer_has_the_type_of_the_layers(two_ranks: RankPool) -> None:
    found = two_ranks.run(run_beside_a_peer_in_bfloat16)[0]
    assert found["peers"]["torch"]["step_seconds"] > 0


SUFFIXES = "sync,oases:bfloat16,oases@4:sequence,oases@4:sequence:float16,oases:int8"


def run_suffixes() -> dict[str, Any]:
    config = replace(CONFIG, schedules=SUFFIXES)
    config.check(2)
    return run_overlap_bench(config, Ranks(), False)


@pytest.mark.slow
def test_contestants_by_suffix(two_ranks: RankPool) -> None:
    rows = two_ranks.run(run_suffixes)[0]["schedules"]
    assert list(rows) == SUFFIXES.split(",")
    assert rows["oases@4:sequence"]["max_relative_gradient_error"] < 1e-5
    assert 1e-5 < rows["oases:bfloat16"]["max_relative_gradient_error"] < 0.1
    assert 1e-4 < rows["oases:int8"]["max_relative_gradient_error"] < 0.2
    assert rows["oases@4:sequence"]["all_reduces_per_layer"] == 4


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ("oases:nosuch", "unknown suffix 'nosuch'; valid suffixes: sequence, bfloat16, float16"),
        ("oases:none", "unknown suffix 'none'"),
        ("oases:int8:bfloat16", "unknown suffix 'int8:bfloat16'"),
        ("oases:int8:rotated", "unknown suffix 'int8:rotated'; valid suffixes: sequence, bfloat16, float16, int8"),
        ("nosuch:sequence", "unknown schedule 'nosuch'"),
        ("auto:sequence", "auto takes no suffix"),
    ],
)
def test_unknown_suffix(schedules: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, schedules=schedules).check(2)


def test_a_sequence_that_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="9 tokens do not divide by --tp 2"):
        replace(CONFIG, schedules="oases:sequence", sequence=9).check(2)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"ratio": "2,fast"}, Ranks(), "--ratio '2,fast': 'fast' is not a ratio from 0.01 to 100"),
        ({"ratio": "0"}, Ranks(), "'0' is not a ratio"),
        ({"ratio": "1"}, Ranks(link="1gbit"), "leave out --link"),
        ({"ratio": "1"}, Ranks(backend="sim:alpha=1us,bandwidth=1gbit"), "leave out --link, --backend"),
        ({"ratio": "1", "simulate": "profile.json"}, Ranks(), "--simulate profile.json knows one link"),
    ],
)
def test_ratios_that_cannot_be_set(changes: dict[str, str], ranks: Ranks, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes).prepared(ranks)


class Steps(NamedTuple):
    """Benchmark whose compute alone takes 0.4 s, and longer among others; communication `least` s and 40 MB."""

    rates: list[float]
    least: float = 0.0
    among_others: float = 0.4
    group: None = None

    def steps(self) -> dict[str, Callable[[], Passes]]:
        sent = lambda: (0.0, self.least + 3.2e8 / self.rates[-1])  # noqa: E731
        found = dict.fromkeys(("compute alone", "compute alone, cut", "sync"), lambda: (0.1, 0.3))
        return found | {"communication alone": sent}


def link_of(ratio: float, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> RatioLink:
    """Link whose rates are appended to those of the steps."""

    def run_round(_: None, each: dict[str, Any], times: dict[str, list[Passes]]) -> None:
        for name, run in each.items():
            slower = "sync" in each and name != "communication alone"
            times[name].append((0.0, steps.among_others) if slower else run())

    alone = SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=lambda *_, **__: None)
    monkeypatch.setattr(module, "dist", alone)
    monkeypatch.setattr(module, "run_round", run_round)
    monkeypatch.setattr(module, "set_rate", lambda bits: steps.rates.append(bits) or f"{bits / 1e6:g}mbit")
    return RatioLink(cast(ProcessGroup, None), ratio)


def rates_for(ratio: float, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    link_of(ratio, steps, monkeypatch).calibrate([cast(OverlapBench, steps)], lambda _: None)
    return steps.rates


def test_the_rate_is_found_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_for(2.0, Steps([]), monkeypatch) == pytest.approx([1e9, 4e8])
    assert 0.1 + 3.2e8 / rates_for(0.5, Steps([], 0.1), monkeypatch)[-1] == pytest.approx(0.2, rel=0.05)
    with pytest.raises(UsageError, match=r"--ratio 0.5 is not reached: communication took 0.7. of compute"):
        rates_for(0.5, Steps([], 0.3), monkeypatch)


def test_the_rate_is_that_of_compute_among_all_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 3.2e8 / rates_for(1.0, Steps([], among_others=0.5), monkeypatch)[-1] == pytest.approx(0.5)


def test_a_ratio_that_the_measurement_does_not_find_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, found, forgotten = Steps([]), [0.8, 1.02], []
    bench = SimpleNamespace(steps=steps.steps, group=None, forget_choice=lambda: forgotten.append(1))
    monkeypatch.setattr(overlap, "measured", lambda *_: [{"communication_over_compute": found.pop(0)}])
    results, said = measured_at(link_of(1.0, steps, monkeypatch), [cast(OverlapBench, bench)], False)
    assert results == [{"communication_over_compute": 1.02}]
    assert steps.rates == pytest.approx([1e9, 8e8, 6.4e8])
    assert said == {
        "ratio": 1.0, "link": "640mbit",
        "measurements": [{"link": "800mbit", "found": 0.8}, {"link": "640mbit", "found": 1.02}],
    }  # fmt: skip
    assert forgotten == [1], "auto chooses anew"


def sums_of_each_step() -> dict[str, tuple[int, int]]:
    """Sums that wait for nothing, and all collectives, of each contestant's step."""
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(replace(CONFIG, schedules="sync"), group)
    found = {}
    for name, step in bench.steps().items():
        bench.scheduler.reset_totals()
        step()
        totals = bench.scheduler.totals()
        found[name] = (totals["alone"].count if "alone" in totals else 0, sum(each.count for each in totals.values()))
    return found


def test_compute_and_sums_run_alone_and_side_by_side(two_ranks: RankPool) -> None:
    for found in two_ranks.run(sums_of_each_step):
        assert found == {
            "communication alone": (8, 8),
            "compute alone": (0, 0),
            "compute alone, cut": (0, 0),
            "side by side, compute alone": (8, 8),
            "side by side, compute alone, cut": (8, 8),
            "sync": (0, found["sync"][1]),
        }


def core_time(work: Callable[[], object]) -> CoreTime:
    before = core_clock()
    work()
    wall, on_core, displaced = (after - began for began, after in zip(before, core_clock(), strict=True))
    return CoreTime(on_core, displaced, wall - on_core - displaced)


@pytest.mark.skipif(math.isnan(core_clock()[1]), reason="this kernel does not count the time of threads")
def test_a_thread_that_sleeps_is_not_on_its_core() -> None:
    slept = core_time(lambda: time.sleep(0.2))
    assert slept.asleep > 0.1, "what a thread ran before is counted with the next tick of the kernel's clock"
    assert min(slept.on_core, slept.displaced) >= 0


def test_no_time_is_told_where_the_kernel_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("0 0 0\n", OSError()):
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=[said]))
        wall, *counted = core_clock()
        assert wall > 0
        assert all(math.isnan(each) for each in counted)


def test_parts_of_a_step_add_up() -> None:
    fast = ("compute alone", "side by side, compute alone, cut", "oases", "alone.txt", "peer torch")
    slow = ("compute alone, cut", "side by side, compute alone", "communication alone")
    times = {name: [(0.1 if name in fast else 0.2, 0.3)] for name in (*fast, *slow)}
    cores = {name: [CoreTime(1.0, 0.2, 0.0), CoreTime(2.0, 0.2, 0.4)] for name in times}
    found = core_seconds(cores, times)
    assert found is not None
    assert list(found) == ["compute alone", "side by side", "oases", "alone.txt", "torch"]
    assert found["oases"] == pytest.approx({"on_core": 1.5, "displaced": 0.2, "asleep": 0.2})
    assert core_seconds({name: [CoreTime(math.nan, math.nan, math.nan)] for name in times}, times) is None


@pytest.mark.long
def test_emulated_compute(ranks_at_hand: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    sizes = "--hidden 32 --heads 4 --layers 1 --sequence 8 --batch 4 --iterations 1".split()  # noqa: SIM905
    wanted = ["--schedules", "sync,oases,oases:int8", "--peers", "torch", "--flops", "1e9", "--malloc", "trim"]
    cli.main(["bench", "overlap", *sizes, *wanted, "--json", str(path)])
    found = json.loads(path.read_text())
    waits, rows = found["emulated_seconds"], found["schedules"]
    assert waits["torch"] == pytest.approx(waits["sync"]), "emulated alike"
    assert 0 < waits["sync"] < rows["sync"]["step_seconds"]
    assert rows["oases"]["max_relative_gradient_error"] < 1e-5
    said = capfd.readouterr().out
    assert "matmuls and attention are emulated, 1e+09 FLOP/s" in said
    assert "malloc: glibc's default" in said


@pytest.mark.long
def test_one_sample_is_cut_along_the_sequence(
    ranks_at_hand: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    sizes = "--hidden 32 --heads 4 --layers 1 --sequence 8 --batch 1 --iterations 1".split()  # noqa: SIM905
    cli.main(["bench", "overlap", *sizes, "--schedules", "oases,oases@4", "--json", str(path)])
    rows = json.loads(path.read_text())["schedules"]
    assert max(row["max_relative_gradient_error"] for row in rows.values()) < 1e-5
    for name, said in (("cross_pass", "a batch of 1 cannot be split into 2"), ("oases@9", "cannot be split into 9")):
        with pytest.raises(UsageError, match=said):
            replace(CONFIG, batch=1, sequence=8, schedules=name).check(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": 5.0}, "--flops must be 0 or between"),
        ({"flops": 1e9, "simulate": "x"}, "leave it out, or --flops 1e"),
    ],
)
def test_compute_that_is_not_emulated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes).prepared(Ranks())


TOUCH = """
import resource
import torch
from oases_bench.overlap import set_malloc

set_malloc({name!r})
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_kept_memory_has_no_page_faults() -> None:
    """64 MiB ten times are 163,840 pages."""
    faults = {
        name: int(
            subprocess.run([sys.executable, "-c", TOUCH.format(name=name)], capture_output=True, check=True).stdout
        )
        for name in MALLOCS
    }
    assert faults["keep"] < 1000
    assert faults["trim"] > faults["keep"]
