"""Measured steps beside predicted ones, on two ranks and a profile of made-up times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oases import cli
from oases.errors import UsageError
from oases.plans.layered import Model
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock
from oases.simulator.hardware_file import write
from oases.simulator.links import LinkModel
from oases.testing import RankPool
from oases_bench.overlap import OverlapBenchConfig, bench_of, measured
from oases_bench.overlap_predictions import compare_predictions, model_of, require_predictable, write_comparison
from oases_bench.unedited_layers import of_model

CONFIG = OverlapBenchConfig(
    hidden=32, heads=4, layers=2, sequence=8, batch=4, iterations=1, schedules="sync,oases@2,sync:int8"
)
TIMES = BlockTimes(1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
LINK, FAST = LinkModel(0.0, 1e6), LinkModel(0.0, 1e8)
"""FAST: takes less for all-to-alls than any machine for compute and all-to-alls."""
HARDWARE = Hardware(
    "made up", Device("CPU", 2**30, {"float32": 1e9}, 1e9, packing_bytes_per_second=1e7), 2, LINK, LINK,
    tuple(MeasuredBlock(kind, 32, 4, 8, "float32", 2, 4.0, TIMES) for kind in ("attention", "mlp")),
)  # fmt: skip


def run():
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(CONFIG, group)
    (result,) = measured([bench], False)
    return result, compare_predictions(bench, result, HARDWARE, model_of(CONFIG))


@pytest.mark.long
def test_every_schedule_has_a_prediction_and_two_timelines(two_ranks: RankPool, tmp_path: Path) -> None:
    result, steps = two_ranks.run(run)[0]
    sent = 4 * 8 * 32 * 4 / 1e6  # seconds of an all-reduce
    assert result["schedules"]["sync"]["predicted_seconds"] == pytest.approx(4 * 3.0 + 8 * sent)
    at_speed = result["schedules"]["sync"]["predicted_at_speed_seconds"]
    assert at_speed == pytest.approx(result["compute_seconds"] + 8 * sent), (
        "compute as it was, the link of the profile"
    )
    assert result["compute_over_profile"] == pytest.approx(result["compute_seconds"] / (4 * 3.0))
    row = result["schedules"]["oases@2"]
    assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["step_seconds"] - 1)
    packed = (1 + 1 / 32) / 4 * sent + (1.5 - 0.5 / 2) * 4 * 8 * 32 * 4 / 1e7
    assert result["schedules"]["sync:int8"]["predicted_seconds"] == pytest.approx(4 * 3.0 + 8 * packed)
    assert [step.name for step in steps] == ["sync", "oases@2", "sync:int8"]
    for step in steps:
        assert {rank for rank, _ in step.measured.lanes} == {0, 1}
        assert step.predicted.lanes == [(0, "compute"), (0, "link")]
    path = tmp_path / "page.html"
    write_comparison(path, result, steps, HARDWARE)
    page = path.read_text()
    for part in ("oases@2, measured", "oases@2, predicted", "predicted from the profile made up"):
        assert part in page


def test_what_cannot_be_predicted() -> None:
    require_predictable(model_of(CONFIG), HARDWARE, 2, 4)
    with pytest.raises(UsageError, match=r"'made up' holds no attention block of hidden 64, .* measure it with"):
        require_predictable(model_of(replace(CONFIG, hidden=64)), HARDWARE, 2, 4)


MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def mixtral(folder: Path) -> tuple[OverlapBenchConfig, Model, Hardware]:
    """Two layers with balanced experts, and a profile that has their blocks."""
    path = folder / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    given = replace(CONFIG, schedules="sync,oases@2", model=str(path), experts_mode="balanced")
    config = of_model(given, (), 2)
    model = config.predicted_model(2)
    assert isinstance(model, Model)
    names = {model.block_name(model.kind_of(block)) for block in range(4)}
    assert len(names) == 2
    blocks = tuple(MeasuredBlock(each, 32, model.heads, 8, "float32", 2, 4.0, TIMES) for each in names)
    return config, model, replace(HARDWARE, blocks=blocks, node=FAST, cluster=FAST)


def run_balanced(config: OverlapBenchConfig, model: Model, hardware: Hardware) -> Any:
    """The benchmark's result with predictions."""
    group = dist.group.WORLD
    assert group is not None
    bench = bench_of(config, group)
    (result,) = measured([bench], False)
    compare_predictions(bench, result, hardware, model)
    return result


@pytest.mark.long
def test_balanced_experts_are_predicted_with_their_all_to_alls(two_ranks: RankPool, tmp_path: Path) -> None:
    config, model, hardware = mixtral(tmp_path)
    result = two_ranks.run(run_balanced, config, model, hardware)[0]
    sent, tokens = 4 * 8 * 32 * 4 / 1e8, 4 * 8 * 2 * 32 * 4 / 2 / 2 / 1e8
    row = result["schedules"]["sync"]
    assert row["predicted_seconds"] == pytest.approx(4 * 3.0 + 8 * sent + 2 * 4 * tokens), "two of four blocks send"
    assert row["prediction_error"] == pytest.approx(row["predicted_seconds"] / row["step_seconds"] - 1)
    assert 4 * 3.0 < result["schedules"]["oases@2"]["predicted_seconds"] < row["predicted_seconds"]
    computed = result["compute_seconds"] - 2 * 4 * tokens
    assert result["compute_over_profile"] == pytest.approx(computed / (4 * 3.0), rel=1e-3), "without all-to-alls"


def test_a_model_that_was_not_profiled_is_refused(tmp_path: Path) -> None:
    _, model, hardware = mixtral(tmp_path)
    require_predictable(model, hardware, 2, 4)
    for wrong in (HARDWARE, replace(hardware, blocks=hardware.blocks[:1])):
        with pytest.raises(
            UsageError, match=r"holds no Mixtral.* block, .* hidden 32, .* measure it with oases prof"
        ):
            require_predictable(model, wrong, 2, 4)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "overlap", *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.long
def test_the_command(ranks_at_hand, capfd, tmp_path) -> None:
    profile, result, page = (tmp_path / name for name in ("profile.json", "result.json", "page.html"))
    write(HARDWARE, profile)
    sizes = "--hidden 32 --heads 4 --layers 2 --sequence 8 --batch 4 --iterations 1".split()  # noqa: SIM905
    cli.main(["bench", "overlap", *sizes, "--simulate", str(profile), "--html", str(page), "--json", str(result)])
    assert json.loads(result.read_text())["schedules"]["oases"]["predicted_seconds"] > 0
    assert "predicted beside measured" in capfd.readouterr().out
    assert page.is_file()
    assert "give --simulate PROFILE" in fails(capfd, "--html", str(page))
    assert "'/nowhere' cannot be read: No such file" in fails(capfd, "--simulate", "/nowhere")
    assert "holds no attention block" in fails(capfd, "--simulate", str(profile))
