"""A traced model's layers for the planner: parameters, FLOPs, kinds, blocks and degrees, against other sources."""

import functools
import os

import pytest
import torch

import oases
from oases.autotp.costs import layered_model, trace_layers
from oases.autotp.model_graph import trace
from oases.errors import UsageError
from oases.planner import model_of
from oases.plans.layered import Model
from oases.plans.plan import Plan

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

S = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 160}
GATED = {**S, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **S, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_heads": 4, "vocab_size": 96}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 96}, (0,) * 4, [2], 4),
    "llama": ("LlamaForCausalLM", GATED, (0,) * 4, [2], 4),
    "qwen3": ("Qwen3ForCausalLM", {**GATED, "head_dim": 32, "tie_word_embeddings": True}, (0,) * 4, [2], 4),
    "phi3": ("Phi3ForCausalLM", {**GATED, "pad_token_id": 0}, (0,) * 4, [2], 2),
    "phi": ("PhiForCausalLM", S, (0,) * 4, [1], 4),
    "bert": ("BertForMaskedLM", S, (0,) * 4, [2], 4),
    "vit": ("ViTForImageClassification", {**S, "image_size": 32, "patch_size": 8}, (0,) * 4, [2], 4),
    "olmoe": ("OlmoeForCausalLM", {**GATED, **EXPERTS}, (0,) * 4, [1], 4),
    "olmo2": ("Olmo2ForCausalLM", GATED, (0,) * 4, [1], 160),
    "t5": ("T5ForConditionalGeneration", T5, (0, 1, 1, 2, 3, 3), [2, 2, 3, 3], 4),
    "deepseek": ("DeepseekV3ForCausalLM", DEEPSEEK, (0, 1, 1, 1), [2, 2], 4),
}  # fmt: skip
"""Class, sizes; kinds of layers in order, blocks of a layer of each kind, largest degree."""


def built(name, **more):
    kind, sizes = MODELS[name][:2] if name in MODELS else (name, {})
    kind = getattr(transformers, kind)
    with torch.device("meta"):
        return kind(kind.config_class(**{**sizes, **more}))


@functools.cache
def traced(name):
    return trace(built(name), sequence=16)


@functools.cache
def model(name):
    return trace_layers(built(name), sequence=16)


def all_kinds(found):
    return [kind for layer in found.layer_order for kind in found.layer_kinds[layer]]


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_flops_are_those_of_the_model(name):
    graph, found = traced(name), model(name)
    parameters = sum(found.block_parameters(kind, 1) for kind in all_kinds(found))
    tables = sum(p.size for p in graph.parameters if not p.buffer) - graph.num_parameters  # named twice, held once
    assert parameters + found.end_parameters(0, found.layers, 1) == graph.num_parameters
    assert graph.num_parameters == sum(p.numel() for p in built(name).parameters())
    assert tables >= sum(each.tied for each in found.outside)
    experts = 0
    if name in ("olmoe", "deepseek"):  # torch does not count grouped matmuls: 2 experts of 3 matmuls per token
        width, layers = (160, 4) if name == "olmoe" else (32, 3)
        experts = layers * 2 * 3 * 2 * 16 * 64 * width
        counted = [node.flops for node in graph.nodes if node.op.endswith(("grouped_mm", "grouped_mm_fallback"))]
        experts -= sum(counted)
    assert found.step_flops(1) == 3 * (sum(node.flops for node in graph.nodes) + experts)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_kinds_blocks_and_degrees(name):
    _, _, order, blocks, degree = MODELS[name]
    found = model(name)
    assert (found.order, [len(kinds) for kinds in found.layer_kinds], found.heads) == (order, blocks, degree)
    assert found.fits_degree(degree)
    assert not found.fits_degree(2 * degree)


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_kind_is_traced_once_and_tells_all(name):
    told = []
    found = trace_layers(built(name), sequence=16, on_layer=lambda done, total: told.append((done, total)))
    assert found == layered_model(traced(name))
    assert told == [(number, len(found.kinds)) for number in range(1, len(found.kinds) + 1)]


@pytest.mark.long
def test_keys_and_experts_may_be_whole():
    """2 heads of keys, and 4 experts, over 4 and 8 ranks."""
    llama = model("llama")
    keys = next(s for kinds in llama.kinds for b in kinds.blocks for s in b.shares if s.optional)
    assert (keys.units, keys.parameters, keys.ranks(2), keys.ranks(4)) == (2, 2 * 64 * 32, 2, 1)
    experts = [s for s in model("olmoe").kinds[0].blocks[0].shares if s.optional]
    assert [(each.units, each.parameters) for each in experts] == [(4, 4 * 3 * 64 * 160)]


@pytest.mark.long
def test_a_pair_with_a_norm_over_all_its_features_is_whole_and_part_of_the_next_block():
    for name in ("olmoe", "olmo2"):
        (block,) = model(name).kinds[0].blocks
        whole = next(s for s in block.shares if s.units == 1)
        projections = 64 * (64 + 32 + 32 + 64)
        router, norms = (4 * 64 if name == "olmoe" else 0), 2 * 64 + 64 + 32
        assert whole.parameters == projections + router + norms
        assert whole.column + whole.row == 2 * 16 * (projections + router)
        assert not model(name).token_wise


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("llama", {}),
        ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    ],
)
def test_kept_activations_are_those_that_torch_saves(name, options):
    """Bytes that autograd saves in a layer, from models of 1 and 3 layers, without dropout, whose masks differ."""
    kind = getattr(transformers, MODELS[name][0])
    found = []
    for layers in (1, 3):
        count = {"n_layer": layers} if name == "gpt2" else {"num_hidden_layers": layers}
        short = kind(kind.config_class(**{**MODELS[name][1], **options, **count})).train()
        weights = {p.data_ptr() for p in short.parameters()}
        saved = {}  # the tensors stay alive, so that no address is used twice

        def note(tensor, weights=weights, saved=saved):
            if tensor.untyped_storage().data_ptr() not in weights:
                saved[tensor.untyped_storage().data_ptr()] = tensor, tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            given = {} if name == "bert" else {"use_cache": False}
            short(torch.zeros(1, 16, dtype=torch.long), **given)
        found.append(sum(size for _, size in saved.values()))
    layered = trace_layers(short, sequence=16)
    counted = sum(layered.kept_bytes(each, 1, 1) for each in layered.layer_kinds[0])
    assert counted == pytest.approx((found[1] - found[0]) / 2, rel=0.1)


@pytest.mark.long
def test_what_crosses_between_layers():
    """T5's decoder reads the encoder's result in every layer, and hands the position bias of its first one on."""
    unit, bias = 16 * 64 * 4, 4 * 16 * 16 * 4
    assert model("t5").messages == (0, unit + bias, unit + bias, 2 * unit, 2 * unit + bias, 2 * unit + bias)
    assert model("llama").messages == (0, unit, unit, unit)
    assert [each.before for each in model("t5").outside] == [0, 3, 6]


@pytest.mark.long
def test_tied_tables_count_once_per_stage():
    tied, untied = model("gpt2"), model("llama")
    table = 96 * 64
    assert tied.end_parameters(0, 2, 1) + tied.end_parameters(2, 4, 1) == tied.end_parameters(0, 4, 1) + table
    assert untied.end_parameters(0, 2, 1) + untied.end_parameters(2, 4, 1) == untied.end_parameters(0, 4, 1)
    assert untied.end_parameters(1, 3, 1) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_it_is_data(name):
    plan = oases.plan(model(name), "4x3090", global_batch=8)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.prediction.step_seconds > 0
    layers = [layer for part in plan.parts for layer in plan.layers_of(part)]
    assert layers == list(range(model(name).layers))


@pytest.mark.long
def test_models_and_configurations_are_planned_alike(tmp_path):
    config = built("llama").config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    path = tmp_path / "config.json"
    wanted = model("llama")
    for given in (built("llama"), config, path, str(path), tmp_path):
        assert model_of(given, sequence=16) == wanted
    assert model_of(path, sequence=16, dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(UsageError, match="was traced for a sequence of 16, got 32; trace it again"):
        model_of(wanted, sequence=32)


@pytest.mark.long
def test_in_another_dtype_bytes_halve():
    half = model_of(built("llama"), sequence=16, dtype="bfloat16")
    assert isinstance(half, Model)
    assert half.kept_bytes((0, 1), 1, 1) == model("llama").kept_bytes((0, 1), 1, 1) // 2


def test_training_a_gpt_by_it_is_refused():
    from oases_train.config import config_for

    plan = oases.plan(model("llama"), "2x3090", global_batch=8)
    with pytest.raises(UsageError, match="'LlamaForCausalLM' is not the built-in GPT"):
        config_for(plan, {})


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: built("SwinForImageClassification", embed_dim=16, depths=[2, 2], num_heads=[2, 4], image_size=32,
                          patch_size=4, window_size=4),
            "its layers get activations of different sizes (swin.encoder.layers.0: 1x64x16",
        ),
        (lambda: torch.nn.Linear(4, 4), "is not a transformers model, so its inputs are unknown"),
    ],
    ids=["swin", "linear"],
)  # fmt: skip
def test_what_has_no_equal_layers_is_named(made, said):
    with pytest.raises(UsageError) as caught:
        trace_layers(made(), sequence=16)
    assert said in str(caught.value)
