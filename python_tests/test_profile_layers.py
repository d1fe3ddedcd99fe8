"""Traced models in profiles: their blocks and ends are measured, written, read, and used. Times say nothing here."""

import json
import os
from dataclasses import replace

import pytest

from oases.autotp.configuration import configured_model, with_layers
from oases.autotp.costs import trace_layers
from oases.errors import UsageError
from oases.planner import Plan, Predictor, Segment, Stage
from oases.profile.config import ProfileConfig
from oases.profile.links import contiguous
from oases.profile.run import layer_bench
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware_file import read_hardware, to_json

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64,
    "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0,
}  # fmt: skip


def measured(config):
    """Blocks and overheads of a model on this rank."""
    bench = layer_bench(config, contiguous(2))
    ends, overheads = bench.passes(2, 2)
    return bench.blocks(1), ends, overheads


@pytest.fixture(scope="module")
def found(two_ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("t5") / "config.json"
    path.write_text(json.dumps(T5))
    config = ProfileConfig(model=str(path), layers=2, sequence=8, batch=2, iterations=1)
    return two_ranks.run(measured, config)


@pytest.fixture(scope="module")
def model():
    return trace_layers(configured_model(T5), sequence=8)


@pytest.mark.slow
def test_every_kind_of_block_and_every_end_is_measured(found, model):
    """Measure two layers of each list, for a model of four."""
    blocks, ends, overheads = found[0]
    assert found[1] == found[0], "of the slowest rank, on all"
    kinds = {kind for kinds in model.layer_kinds for kind in kinds}
    assert {block.kind for block in blocks} == {model.block_name(kind) for kind in kinds}
    assert [block.kind for block in ends] == [model.end_name(before) for before in (0, 4, 8)]
    assert all(block.times.forward > 0 and block.times.backward > 0 for block in (*blocks, *ends))
    assert [(each.layers, each.sub_batches) for each in overheads] == [(4, 2)]


def test_a_profile_with_them_is_read_as_it_was_written(found):
    blocks, ends, overheads = found[0]
    hardware = replace(cluster_called("2x4090")[0], blocks=(*blocks, *ends), overheads=tuple(overheads))
    text = to_json(hardware)
    assert read_hardware(text) == hardware
    with pytest.raises(UsageError, match=r"blocks\[0\]: kind"):
        read_hardware(text.replace("block, ", "blocks, "))


def test_predictions_use_what_was_measured(found, model):
    blocks, ends, _ = found[0]
    slow = [replace(each, times=each.times.scaled(1e3)) for each in (*blocks, *ends)]
    hardware = cluster_called("2x4090")[0]
    plan = Plan(model, 2, 2, 2, 1, (Stage((Segment(model.num_blocks, 2, "oases", 2),)),))

    def seconds(blocks):
        return Predictor(replace(hardware, blocks=tuple(blocks))).predict(plan).step_seconds

    assert seconds(slow) > 100 * seconds((*blocks, *ends)) > 100 * seconds(())
    assert seconds((*blocks, *slow[len(blocks) :])) > 10 * seconds((*blocks, *ends))
    known = replace(hardware, blocks=tuple(blocks))
    assert [known.has_block(model, tp) for tp in (1, 2)] == [False, True], "degrees that were measured"
    assert known.end_times(model, 0, 2, 1) is None


def test_layers_change_with_those_of_a_decoder():
    changed = with_layers(T5, 3)
    assert (changed["num_layers"], changed["num_decoder_layers"]) == (3, 3)
    with pytest.raises(UsageError, match="layer by layer"):
        with_layers({"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, 3)
