"""A graph's sizes for the planner: parameters and FLOPs of its layers are kept, what does not fit is named."""

import functools
import os
from dataclasses import replace

import pytest
import torch

import oases
from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph
from oases.graph.shape import shape_of_graph
from oases.graph.trace import trace
from oases.planner import shape_of
from oases.plans.shape import KINDS, ModelShape
from oases.simulator.cluster import cluster_called

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

S = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 160}


def built(name, **more):
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**more))


def gpt2():
    return built("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, vocab_size=96)


@functools.cache
def traced_gpt2():
    return trace(gpt2(), sequence=16)


def llama():
    return built("LlamaForCausalLM", **S, num_key_value_heads=2)


@pytest.fixture(scope="module")
def planned():
    graph = trace(llama(), sequence=32)
    return graph, oases.plan(graph, "2x3090", global_batch=8)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (gpt2, ModelShape(64, 2, 4, 16, 96, name="GPT2LMHeadModel")),
        (
            llama,
            ModelShape(
                64, 2, 4, 16, 96, name="LlamaForCausalLM", kv_heads=2, intermediate=160, gated=True, tied=False
            ),
        ),
        (
            lambda: built("Qwen3ForCausalLM", **S, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
            ModelShape(
                64, 2, 4, 16, 96, name="Qwen3ForCausalLM", head_size=32, kv_heads=2, intermediate=160, gated=True
            ),
        ),
        (
            lambda: built("LlamaForCausalLM", **S, attn_implementation="eager"),
            ModelShape(64, 2, 4, 16, 96, name="LlamaForCausalLM", intermediate=160, gated=True, tied=False),
        ),
        (
            lambda: built("BertForMaskedLM", **S),
            ModelShape(64, 2, 4, 16, 96, name="BertForMaskedLM", intermediate=160),
        ),
        (
            lambda: built("GPTNeoXForCausalLM", **S),
            ModelShape(64, 2, 4, 16, 96, name="GPTNeoXForCausalLM", intermediate=160, tied=False),
        ),
    ],
    ids=["gpt2", "llama", "qwen3", "eager", "bert", "gpt_neox"],
)
def test_sizes_products_and_flops(model, wanted):
    graph = trace(model(), sequence=16)
    shape = shape_of_graph(graph)
    assert shape == wanted
    layer = [node for node in graph.nodes if node.module.startswith(f"{graph.layers[0]}.")]
    assert sum(sum(shape.matmul_flops(kind, 1, 1)) for kind in KINDS) == sum(node.flops for node in layer)
    matrices = {p for node in layer for p in node.parameters if len(graph.table[p].shape) == 2}
    products = sum(shape.hidden * shape.inner_width(kind) for kind in KINDS)
    assert products == sum(graph.table[name].size for name in matrices)


def test_a_gpt_keeps_the_formulas_it_had():
    shape = shape_of_graph(traced_gpt2())
    plain = ModelShape(64, 2, 4, 16, 96, name="GPT2LMHeadModel")
    assert shape.is_gpt
    assert plain.block_parameters("attention", 1) == 4 * 64 * 64 + 6 * 64
    assert plain.block_parameters("mlp", 2) == (8 * 64 * 64 + 4 * 64) // 2 + 3 * 64
    assert plain.matmul_flops("attention", 1, 1) == (6 * 16 * 64 * 64, 4 * 16 * 16 * 64, 2 * 16 * 64 * 64)
    assert plain.kept_bytes("mlp", 2, 3) == 2 * 3 * 16 * 64 * 4 + 8 * 3 * 16 * 64 * 4 // 2


def test_llamas_parameters_are_within_a_percent():
    graph = trace(
        built(
            "LlamaForCausalLM", hidden_size=8192, intermediate_size=28672, num_hidden_layers=2,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=32000,
        ), sequence=2048,
    )  # fmt: skip
    shape = shape_of_graph(graph)
    assert shape.num_parameters == pytest.approx(graph.num_parameters, rel=0.01)
    assert not shape.fits_degree(16), "8 heads of keys and values cannot be cut over 16 ranks"
    assert shape.fits_degree(8)


def test_a_graph_and_a_model_are_planned(planned):
    graph, plan = planned
    assert plan.prediction.step_seconds > 0
    assert oases.plan(llama(), "2x3090", global_batch=8, sequence=32) == plan
    assert type(plan).from_json(plan.to_json()) == plan
    assert shape_of(LayerGraph.from_json(graph.to_json())) == plan.model


def test_training_a_gpt_by_it_is_refused(planned):
    from oases.train.config import config_for

    _, plan = planned
    with pytest.raises(UsageError, match="'LlamaForCausalLM' is not a GPT"):
        config_for(plan, {})


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda: built("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
            "its layers are in 2 lists: encoder.block, decoder.block",
        ),
        (
            lambda: built(
                "ViTForImageClassification", **{k: v for k, v in S.items() if k != "vocab_size"}, image_size=32
            ),
            "no token embedding",
        ),
        (
            lambda: built("AlbertForMaskedLM", **S, embedding_size=64),
            "attention ops",
        ),
    ],
    ids=["t5", "vit", "albert"],
)
def test_what_is_no_stack_is_named(model, said):
    with pytest.raises(UsageError) as caught:
        shape_of_graph(trace(model(), sequence=16))
    assert said in str(caught.value)
    assert "not a stack of equal transformer layers" in str(caught.value)


def test_unequal_layers_are_named():
    graph = traced_gpt2()
    linear = next(node for node in graph.nodes if node.module == "transformer.h.1.mlp.c_fc")
    nodes = tuple(replace(node, flops=1) if node == linear else node for node in graph.nodes)
    with pytest.raises(UsageError, match=r"layers transformer\.h\.0 and transformer\.h\.1 differ in parameters"):
        shape_of_graph(replace(graph, nodes=nodes))


@pytest.mark.parametrize("field", ["head_size", "kv_heads", "intermediate"])
def test_widths_are_checked(field):
    with pytest.raises(UsageError, match=field):
        ModelShape(64, 2, 4, 16, **{field: -1})
    with pytest.raises(UsageError, match="4 heads do not divide by kv_heads 3"):
        ModelShape(64, 2, 4, 16, kv_heads=3)


def test_a_measured_profile_is_of_gpts():
    from oases.simulator.cost import BlockTimes
    from oases.simulator.hardware import MeasuredBlock

    hardware, _ = cluster_called("2x3090")
    times = BlockTimes(1, 1, 1, 1, 1, 1, 1, 1)
    measured = replace(
        hardware, blocks=tuple(MeasuredBlock(kind, 64, 4, 16, "float32", 1, 1, times) for kind in KINDS)
    )
    assert measured.block_times(ModelShape(64, 2, 4, 16), "mlp", 1, 1) == times
    with pytest.raises(UsageError, match="measured blocks of GPTs, but 'gpt' has other widths"):
        measured.block_times(ModelShape(64, 2, 4, 16, intermediate=160, gated=True), "mlp", 1, 1)


def test_a_gated_mlp_keeps_four_results():
    plain = ModelShape(64, 2, 4, 16, intermediate=160)
    gated = replace(plain, gated=True)
    unit = 16 * 64 * 4
    assert plain.kept_bytes("mlp", 1, 1) == 2 * unit + 2 * 160 * 16 * 4
    assert gated.kept_bytes("mlp", 1, 1) == 2 * unit + 4 * 160 * 16 * 4
    assert gated.matmul_flops("mlp", 2, 1) == (4 * 16 * 64 * 160 / 2, 0, 2 * 16 * 64 * 160 / 2)
    assert gated.block_parameters("mlp", 1) == 3 * 64 * 160 + 4 * 64 + 3 * 64


def test_fused_gates_are_found():
    """Phi-3 makes queries, keys and values in one product, and the gate with what it multiplies in another."""
    shape = shape_of_graph(trace(built("Phi3ForCausalLM", **S, num_key_value_heads=2, pad_token_id=0), sequence=16))
    assert (shape.kv_heads, shape.intermediate, shape.gated) == (2, 160, True)
