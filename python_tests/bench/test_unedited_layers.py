"""The benchmark of an unedited model's layers: its result beside the built-in GPT's, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from oases import cli
from oases.core.execution.communication import NullScheduler
from oases.errors import UsageError
from oases.launch.ranks import RankOptions, run_ranks
from oases.testbed import Backend
from oases_bench.harness import Ranks
from oases_bench.overlap import OverlapBenchConfig, bench_of, run_overlap_bench, shown
from oases_bench.unedited_layers import UneditedLayers, of_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
GPTJ = {"model_type": "gptj", "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "vocab_size": 90}
VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
TWO_AS_ONE = RankOptions(2, Backend("sim", 0.0, math.inf, single_process=True))
"""Two ranks that this process represents, where what they compute is not compared."""
SMALL = OverlapBenchConfig(sequence=8, batch=4, iterations=2, schedules="sync,oases,cross_pass", malloc="trim")


def config_of(folder, data, given=(), **options):
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return replace(SMALL, model=str(path), **options).prepared(Ranks(2, given=frozenset(given)))


def run(config):
    return run_overlap_bench(config, Ranks(), False)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_llama_beside_the_gpt_of_its_sizes(two_ranks, tmp_path, recompute):
    config = config_of(tmp_path, LLAMA, beside_gpt=True, recompute=recompute)
    assert (config.layers, config.hidden, config.heads) == (2, 32, 4)
    result = two_ranks.run(run, config)[0]
    model, gpt = result["model"], result["gpt"]
    assert {name: model[name] for name in ("class", "list", "layers", "blocks_per_layer", "activation")} == {
        "class": "LlamaForCausalLM", "list": "model.layers", "layers": 2, "blocks_per_layer": 2,
        "activation": [4, 8, 32],
    }  # fmt: skip
    assert set(gpt) | {"model", "gpt"} == set(result)
    for name, row in result["schedules"].items():
        assert set(gpt["schedules"][name]) | {"speedup_over_gpt"} == set(row)
        assert row["max_relative_gradient_error"] < 1e-5
        assert row["all_reduces_per_layer"] == gpt["schedules"][name]["all_reduces_per_layer"]
        assert row["speedup_over_gpt"] == row["speedup"] / gpt["schedules"][name]["speedup"]
    assert json.loads(json.dumps(result)) == result
    table, *_ = shown(result)
    assert table.row_count == 2 * 3


@pytest.mark.slow
def test_balanced_experts(two_ranks, tmp_path):
    config = config_of(tmp_path, MIXTRAL, schedules="sync,oases", experts_mode="balanced")
    result = two_ranks.run(run, config)[0]
    assert result["config"]["experts_mode"] == "balanced"
    for row in result["schedules"].values():
        assert row["max_relative_gradient_error"] < 1e-5
        assert row["all_reduces_per_layer"] == 4


@pytest.mark.slow
def test_layers_of_one_block(two_ranks, tmp_path):
    config = config_of(tmp_path, GPTJ, recompute="full")
    result = two_ranks.run(run, config)[0]
    assert result["model"]["blocks_per_layer"] == 1
    assert "gpt" not in result
    for name, row in result["schedules"].items():
        again = name in ("sync", "cross_pass")  # their recomputation carries sums
        assert row["all_reduces_per_layer"] == (3 if again else 2)
        assert row["max_relative_gradient_error"] < 1e-5


@pytest.mark.long
def test_auto_and_pictures(tmp_path):
    config = config_of(tmp_path, VIT, schedules="auto")
    result = run_ranks(run, (config,), TWO_AS_ONE)
    assert result["model"]["activation"] == [4, 17, 32]
    assert "chosen" in result["schedules"]["auto"]


def replayed(config):
    """The layers as the benchmark calls them, on what the embedding gives, beside the model's own run."""
    bench = bench_of(config, dist.group.WORLD)
    layers = bench.layers
    assert isinstance(layers, UneditedLayers)
    tokens = torch.arange(32).reshape(4, 8)
    seen = {}
    model = layers.model.model
    first = model.layers[0].register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    last = model.norm.register_forward_pre_hook(lambda module, args: seen.update(out=args[0]))
    layers.model(tokens)
    first.remove(), last.remove()
    with torch.no_grad():
        again = layers.run(seen["x"], NullScheduler())
        mine = layers.run(seen["x"], bench.scheduler)
    return bool(torch.equal(mine, seen["out"])), float((again - mine).abs().max())


@pytest.mark.long
def test_what_is_timed_are_the_layers(two_ranks, tmp_path):
    config = config_of(tmp_path, LLAMA)
    for same, silent in two_ranks.run(replayed, config):
        assert same
        assert silent > 0  # without sums it is something else


def test_more_layers_than_the_configuration_has(tmp_path):
    """`test_the_command` runs them."""
    assert config_of(tmp_path, LLAMA, given=("layers",), layers=4, schedules="oases").layers == 4


@pytest.mark.parametrize(
    ("data", "given", "options", "message"),
    [
        (LLAMA, ("hidden",), {"hidden": 96}, "--hidden 96: it is the model's; change it in "),
        (LLAMA, ("heads",), {"heads": 8}, "--heads 8: it is the model's"),
        (LLAMA, (), {"sequence": 17}, "sequence 17 is longer than the 16 positions"),
        (LLAMA, (), {"schedules": "oases:sequence"}, "'oases:sequence': an unedited model is not cut along its"),
        (LLAMA, (), {"peers": "torch"}, "--peers torch run the built-in GPT"),
        ({**LLAMA, "layer_types": ["full_attention"] * 2}, ("layers",), {"layers": 3}, "lists layer_types layer by"),
        ({**LLAMA, "model_type": "mine", "auto_map": {"AutoModel": "a.py"}}, (), {}, "'mine' is not one of"),
        (VIT, ("sequence",), {}, "ViT.* takes no tokens"),
        ({"model_type": "swin"}, (), {}, "gives no number num_attention_heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured(tmp_path, data, given, options, message):
    with pytest.raises(UsageError, match=message):
        config_of(tmp_path, data, given, **options)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(UsageError, match=r"--model: .* is not a file; give a config\.json"):
        of_model(replace(SMALL, model=str(tmp_path)), (), 2)
    with pytest.raises(UsageError, match="--beside-gpt runs the built-in GPT beside a model; give it with --model"):
        replace(SMALL, beside_gpt=True)


def refusal(config):
    with pytest.raises(UsageError, match="one list of layers, and of this model run 2 across layers"):
        run(config)


@pytest.mark.slow
def test_models_of_two_lists_are_refused(tmp_path):
    t5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 90}
    run_ranks(refusal, (config_of(tmp_path, t5),), TWO_AS_ONE)


@pytest.mark.slow
def test_the_command(ranks_at_hand, capfd, tmp_path):
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(json.dumps(LLAMA))
    given = ["bench", "overlap", "--model", str(tmp_path), "--sequence", "8", "--iterations", "1"]
    cli.main([*given, "--layers", "3", "--beside-gpt", "--json", str(result)])
    found = json.loads(result.read_text())
    assert (found["model"]["layers"], found["gpt"]["config"]["layers"]) == (3, 3)
    said = capfd.readouterr().out
    assert "the 3 layers model.layers of an unedited LlamaForCausalLM" in said
    assert "speed-up over the built-in GPT's of its sizes: sync 1.000, oases" in said
    for more, message in (
        (["--hidden", "64"], "--hidden 64: it is the model's"),
        (["--simulate", "p.json"], "'p.json' cannot be read"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*given, *more])
        assert message in capfd.readouterr().err
