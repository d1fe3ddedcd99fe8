"""The benchmark of the executor's own CPU time: the same work both ways, and what it reports."""

import json
from pathlib import Path

import pytest

from oases.cli import main
from oases.errors import UsageError
from oases_bench import host
from oases_bench.host import HostBenchConfig, run_host_bench

CASES = [("oases", "none"), ("cross_pass", "full"), ("sync", "none")]
SLOW = [pytest.param(*case, "gpt,llama", "2,3", marks=pytest.mark.slow) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute", "models", "layers"),
    [("oases", "none", "gpt", "2,3"), ("cross_pass", "full", "gpt,llama", "2"), ("sync", "none", "gpt", "3"), *SLOW],
)
def test_both_ways_do_the_same_work(schedule: str, recompute: str, models: str, layers: str) -> None:
    config = HostBenchConfig(model=models, layers=layers, iterations=1, schedule=schedule, recompute=recompute)
    result = run_host_bench(config, shows=False)  # raises where outputs or gradients differ
    assert [(row["model"], row["layers"], row["blocks"]) for row in result["models"]] == [
        (model, int(depth), 2 * int(depth)) for model in models.split(",") for depth in layers.split(",")
    ]
    for row in result["models"]:
        assert row["step_seconds"] > 0
        assert row["plain_seconds"] > 0
    for found in result["forward_calls"].values():
        assert sum(found["by_file"].values()) == found["calls"] > 0
        assert len(found["by_file"]) == found["files"]
        assert not any(name.startswith("models") for name in found["by_file"])
    assert result["left_out"] == {}


@pytest.mark.long
def test_a_model_whose_library_is_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    path = tmp_path / "host.json"
    main(["bench", "host", "--layers", "2", "--iterations", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    assert [row["model"] for row in result["models"]] == ["gpt"]
    assert result["left_out"] == {"llama": "transformers is not installed"}
    assert "llama is left out: transformers is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "12,x"}, "must be positive numbers"),
        ({"layers": ""}, "must be positive numbers"),
        ({"layers": "1"}, "llama needs at least 2"),
        ({"hidden": 6}, "positive multiple of 4"),
        ({"model": "bert"}, "known are gpt, llama"),
        ({"sub_batches": 0}, "sub_batches must be at least 1"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"recompute": "some"}, "known are none, full"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HostBenchConfig(**options)  # type: ignore[arg-type]
