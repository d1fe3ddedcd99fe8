"""The pipeline benchmark: what it reports, and bad input. Its times say nothing on a shared machine."""

import json

import pytest

from oases.cli import main
from oases.errors import UsageError
from oases_bench.harness import Ranks
from oases_bench.pipeline import PipelineBenchConfig, run_pipeline_bench

# Activations are large enough to be seen beside the fixed size of a timed weight.
SMALL = PipelineBenchConfig(micro_batches=4, forward_ms=1.0, hidden=64, sequence=64, iterations=1)


@pytest.mark.slow
def test_every_pipeline_has_its_row(four_ranks):
    results = four_ranks.run(run_pipeline_bench, SMALL, Ranks(4), False)
    rows = results[0]["schedules"]
    assert list(rows) == SMALL.pipelines.split(",")
    for name, row in rows.items():
        assert row["step_seconds"] > 0.9 * row["predicted_seconds"], name  # waits are lower bounds
        assert 0 < row["bubble"] < 1
        assert len(row["peak_bytes_per_stage"]) == 4
    assert rows["one_f_one_b"]["predicted_seconds"] == pytest.approx(7 * 4e-3)
    for row in results[0]["peers"].values():
        assert row["step_seconds"] > 0.9 * 7 * 4e-3
    assert list(results[0]["peers"]) == ["torch_1f1b", "torch_gpipe"]
    # Four micro-batches in flight on the stage before the last, against two.
    assert rows["gpipe"]["peak_bytes_per_stage"][2] > rows["one_f_one_b"]["peak_bytes_per_stage"][2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipelines": "gpipe,nosuch"}, "unknown pipeline 'nosuch'"),
        (
            {"pipelines": "gpipe:int9"},
            "--pipelines gpipe:int9: the type of messages must be 'int8' or None, got 'int9'",
        ),
        ({"micro_batches": 3}, "--micro-batches 3 are fewer than the 4 stages"),
        ({"micro_batches": 6, "pipelines": "interleaved"}, "multiples of the 4 stages"),
        ({"forward_ms": 0.0}, "--forward-ms must be between"),
        ({"iterations": 0}, "--iterations must be at least 1"),
        ({"peers": "megatron"}, "unknown peer 'megatron'; known are torch_1f1b, torch_gpipe"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        PipelineBenchConfig(**changes).chosen(4)


@pytest.mark.long
def test_the_command_prints_and_writes(ranks_at_hand, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--micro-batches", "2", "--forward-ms", "1", "--iterations", "1", "--hidden", "4", "--sequence", "4"]
    main(["bench", "pipeline", "--tp", "2", "--pipelines", "one_f_one_b:int8,gpipe", "--json", str(out), *options])
    assert set(json.loads(out.read_text())["schedules"]) == {"one_f_one_b:int8", "gpipe"}
    with pytest.raises(SystemExit) as caught:
        main(["bench", "pipeline", "--tp", "4", "--micro-batches", "2"])
    assert caught.value.code == 2
    assert "are fewer than the 4 stages" in capsys.readouterr().err
