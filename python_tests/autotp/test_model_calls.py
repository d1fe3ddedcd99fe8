"""Parallelized models of transformers, called in the many ways they are called, against themselves in one process."""

import re

import pytest
import torch
import transformers
from autotp.comparison import gradients_apart, said
from autotp.zoo import OTHERS, batch, build

import oases

pytestmark = pytest.mark.usefixtures("shared_traces")


def pair(name="llama", **options):
    model, parallel = build(name).double(), build(name).double()
    oases.parallelize(parallel, **options)
    return model, parallel


def inputs(model):
    data = batch("llama")
    tokens, labels, n = data["input_ids"], data["labels"], data["input_ids"].shape[1]
    mask = torch.zeros(4, 1, n, n).double().masked_fill(~torch.ones(n, n).tril().bool(), -1e9)
    mask[1, :, 1:, 0] = -1e9
    return [
        {**data, "position_ids": torch.arange(n).repeat(4, 1) + torch.arange(4)[:, None]},
        {"inputs_embeds": model.model.embed_tokens(tokens).detach(), "labels": labels},
        {"input_ids": tokens, "labels": tokens, "attention_mask": mask},
        {"input_ids": tokens, "labels": tokens, "attention_mask": mask[:1]},
        {"input_ids": tokens[:1], "labels": tokens[:1]},
        {"input_ids": tokens[:4, :4], "labels": tokens[:4, :4]},
    ]


def in_many_ways():
    model, parallel = pair()
    worst = []
    for data in inputs(model):
        model.zero_grad()
        parallel.zero_grad()
        expected, got = model(**data), parallel(**data)
        worst.append(float((expected.logits - got.logits).abs().max()))
        expected.loss.backward()
        got.loss.backward()
        worst.append(gradients_apart(model, parallel)[0])
    model.eval()
    parallel.eval()
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
    tokens = batch("llama")["input_ids"]
    assert torch.equal(model.generate(tokens, **options), parallel.generate(tokens, **options))
    return max(worst)


def test_masks_positions_and_embeddings(two_ranks):
    assert max(two_ranks.run(in_many_ways)) < 1e-6  # the loss is of float32


def hidden_states():
    model, parallel = pair(schedule="layers")
    data = batch("llama")
    expected, got = (each(**data, output_hidden_states=True).hidden_states for each in (model, parallel))
    apart = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    parallel.zero_grad()
    parallel(**data).loss.backward()  # what transformers hooked for that stays
    return apart


def test_hidden_states_of_layers_that_run_by_themselves(two_ranks):
    assert max(two_ranks.run(hidden_states)) < 1e-6


def of_hidden_states():
    parallel = build("llama")
    oases.parallelize(parallel)
    return parallel(**batch("llama"), output_hidden_states=True).hidden_states[1] + 1


def cached():
    _, parallel = pair()
    return parallel.generate(batch("llama")["input_ids"], max_new_tokens=2)


def attentions():
    _, parallel = pair()
    return parallel(**batch("llama"), output_attentions=True)


def checkpointing_before():
    model = build("llama")
    model.gradient_checkpointing_enable()
    return oases.parallelize(model)


def checkpointing_after():
    _, parallel = pair()
    parallel.gradient_checkpointing_enable()
    return parallel(**batch("llama"))


def quantised():
    model = build("llama")
    model.config.quantization_config = {"bits": 4}
    return oases.parallelize(model)


def layers_dropped():
    config = transformers.BartConfig(**OTHERS["bart"][1], encoder_layerdrop=0.1)
    return oases.parallelize(transformers.BartForConditionalGeneration(config).train())


ERRORS = {
    of_hidden_states: "RuntimeError: model.layers.0 has no result of its own.*schedule='layers'",
    cached: "UnsplittableError: a DynamicCache was passed; call the model with use_cache=False",
    attentions: "UsageError: output_attentions=True .* leave it out",
    checkpointing_before: "UsageError: .*gradient_checkpointing_disable.*recompute='full'",
    checkpointing_after: "RuntimeError: .*gradient_checkpointing_disable.*recompute='full'",
    quantised: "UsageError: .*quantised weights.*load it unquantised",
    layers_dropped: "UsageError: .*layers dropped at random",
}


def message(function):
    torch.manual_seed(0)
    return said(function)


@pytest.mark.parametrize("function", ERRORS)
def test_a_clear_error_of_a_call(two_ranks, function):
    for text in two_ranks.run(message, function):
        assert re.search(ERRORS[function], text), text


def plans(name):
    parallel = build(name)
    oases.parallelize(parallel)
    report = parallel.oases_partition
    return report.plan_agrees, report.plan_differs, str(report)


@pytest.mark.parametrize(
    ("name", "entries"), [("llama", 9), ("qwen3", 11), ("mistral", 9), ("gemma3", 11), ("gpt2", 0)]
)
def test_transformers_own_plan_agrees(two_ranks, name, entries):
    for agree, differ, text in two_ranks.run(plans, name):
        assert (len(agree), differ) == (entries, {})
        assert (f"transformers' own plan: {entries} of {entries} entries" in text) == (entries > 0)


def other_plan():
    parallel = build("llama")
    parallel._tp_plan = {"model.layers.*.self_attn.q_proj": "rowwise", "model.norm": "colwise", "lm_head": "colwise"}
    oases.parallelize(parallel)
    return parallel.oases_partition.plan_agrees, parallel.oases_partition.plan_differs


def test_where_the_plan_differs_the_report_says_so(two_ranks):
    for agree, differ in two_ranks.run(other_plan):
        assert agree == ["lm_head"]
        assert differ == {
            "model.layers.*.self_attn.q_proj": "transformers' plan says rowwise, the graph colwise",
            "model.norm": "transformers' plan says colwise, the graph whole",
        }
