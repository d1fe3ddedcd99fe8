"""The benchmark's result: memory beside the paper's formula, and "auto" among the contestants."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from oases.errors import UsageError
from oases.parallel import autotune
from oases.profile.overlap import OverlapBench
from oases.testing import RankPool
from oases_bench import overlap
from oases_bench.harness import Ranks
from oases_bench.overlap import OverlapBenchConfig, bench_of, run_overlap_bench, shown

CONFIG = OverlapBenchConfig(
    hidden=32, heads=4, layers=2, sequence=8, batch=4, iterations=2, recompute="full", schedules="auto,oases,sync"
)
CANDIDATES = ["fine_grained 1", "oases 2", "oases 4"]


def run_with_cache_at(path: Path) -> dict[str, Any]:
    autotune.cache_path = lambda: path
    return run_overlap_bench(CONFIG, Ranks(), False)


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
    (table,) = shown(result)
    assert table.row_count == 3


def choose() -> tuple[list[str], str]:
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(CONFIG, group)
    seen: list[str] = []
    bench.choose(lambda done: seen.append(autotune.label(bench.schedules["auto"])))
    return seen, autotune.label(bench.schedules["auto"])


def test_every_candidate_has_its_turns_before_the_choice(two_ranks: RankPool) -> None:
    (seen, first), (_, second) = two_ranks.run(choose)
    assert seen[:4] == CANDIDATES[:2] * 2  # four sub-batches only if two are worth it
    assert len(seen) <= len(CANDIDATES) * (autotune.ROUNDS + 1)
    assert first == second
    assert first in CANDIDATES


SUFFIXES = "sync,oases:bfloat16,oases@4:sequence,oases@4:sequence:float16,oases:int8:rotated"


def run_suffixes() -> dict[str, Any]:
    config = replace(CONFIG, schedules=SUFFIXES)
    config.check(2)
    return run_overlap_bench(config, Ranks(), False)


def test_contestants_by_suffix(two_ranks: RankPool) -> None:
    rows = two_ranks.run(run_suffixes)[0]["schedules"]
    assert list(rows) == SUFFIXES.split(",")
    assert rows["oases@4:sequence"]["max_relative_gradient_error"] < 1e-5
    assert 1e-5 < rows["oases:bfloat16"]["max_relative_gradient_error"] < 0.1
    assert 1e-4 < rows["oases:int8:rotated"]["max_relative_gradient_error"] < 0.2
    assert rows["oases@4:sequence"]["all_reduces_per_layer"] == 4


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ("oases:nosuch", "unknown suffix 'nosuch'; valid suffixes: sequence, bfloat16, float16"),
        ("oases:none", "unknown suffix 'none'"),
        ("oases:int8:bfloat16", "unknown suffix 'int8:bfloat16'"),
        ("oases:fp8:rotated", "unknown suffix 'fp8:rotated'"),
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


def rates_for(ratio: float, least: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rates tried where compute takes 0.4 s, and communication `least` seconds and those of 40 MB at the rate."""
    rates: list[float] = []
    alone = SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=lambda *_, **__: None)
    monkeypatch.setattr(overlap, "dist", alone)
    monkeypatch.setattr(overlap, "set_rate", lambda bits: rates.append(bits) or f"{bits / 1e6:g}mbit")
    monkeypatch.setattr(overlap, "_measured_ratio", lambda _, rounds: (least + 3.2e8 / rates[-1]) / 0.4)
    overlap.set_ratio(cast(OverlapBench, SimpleNamespace(group=None)), ratio)
    return rates


def test_the_rate_is_found_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rates_for(2.0, 0.0, monkeypatch) == pytest.approx([1e9, 4e8])
    assert 0.1 + 3.2e8 / rates_for(0.5, 0.1, monkeypatch)[-1] == pytest.approx(0.2, rel=0.03)
    with pytest.raises(UsageError, match=r"--ratio 0.5 is not reached: communication took 0.76 of compute"):
        rates_for(0.5, 0.3, monkeypatch)
