"""`generate` with a key-value cache, of parallelized models on two ranks, against one process."""

import functools
import re
from unittest import mock

import pytest
import torch
from autotp.comparison import said
from autotp.zoo import batch, build

import oases
from oases.autotp import signatures

pytestmark = pytest.mark.usefixtures("shared_traces")

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
MODELS = {
    "llama": {}, "gpt2": {"num_beams": 2}, "qwen3": {"schedule": "layers"},
    "mistral": {},  # with a window shorter than its prompts
    "bloom": {},  # whose layers merge batch and heads
}  # fmt: skip


def prompts(name):
    """Two prompts, the second one padded at its left."""
    tokens = batch(name)["input_ids"][:2, :7]
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generated(name, schedule="oases", num_beams=1):
    """Tokens, and the heads of the first layer that the rank's cache has."""
    model = oases.parallelize(build(name), schedule=schedule).eval()
    found = model.generate(**prompts(name), **OPTIONS, num_beams=num_beams, return_dict_in_generate=True)
    return found.sequences, found.past_key_values.layers[0].keys.shape[1]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_gives_the_tokens_of_one_process(two_ranks, name):
    beams, plain = MODELS[name].get("num_beams", 1), build(name).eval()
    expected = plain.generate(**prompts(name), **OPTIONS, num_beams=beams, return_dict_in_generate=True)
    heads = expected.past_key_values.layers[0].keys.shape[1]
    for tokens, held in two_ranks.run(functools.partial(generated, name, **MODELS[name])):
        assert torch.equal(tokens, expected.sequences)
        assert held == heads // 2


def traces_of_tokens():
    """Number of traces after a few tokens, and after more."""
    model = oases.parallelize(build("bloom", hidden_size=48)).eval()  # no other test has its traces
    with mock.patch.object(signatures, "export", wraps=signatures.export) as export:
        counts = []
        for tokens in (2, 5):
            model.generate(**prompts("bloom"), **{**OPTIONS, "max_new_tokens": tokens})
            counts.append(export.call_count)
    return counts


@pytest.mark.slow
def test_layers_for_one_batch_size_are_not_traced_for_every_token(two_ranks):
    for few, more in two_ranks.run(traces_of_tokens):
        assert 0 < few == more


def of_fixed_length():
    model = oases.parallelize(build("llama")).eval()
    return model.generate(**prompts("llama"), **OPTIONS, cache_implementation="static", disable_compile=True)


def of_another_model():
    plain, model = build("llama").eval(), oases.parallelize(build("llama")).eval()
    filled = plain(**prompts("llama"), use_cache=True).past_key_values
    return model(batch("llama")["input_ids"][:2, :1], past_key_values=filled, use_cache=True)


ERRORS = {
    of_fixed_length: "UsageError: .*StaticCache is not a DynamicCache; .* use_cache=False",
    of_another_model: "UsageError: .*cache of another model",
}


@pytest.mark.long
@pytest.mark.parametrize("function", ERRORS)
def test_a_cache_that_is_not_cut_is_refused(two_ranks, function):
    for text in two_ranks.run(said, function):
        assert re.search(ERRORS[function], text), text
