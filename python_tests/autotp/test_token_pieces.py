"""Sequence parallelism of unedited models beside the same models in one process."""

import pytest
import torch
from autotp.comparison import CLOSE, gradients_apart, said
from autotp.staged import apart, trained_in_stages
from autotp.zoo import batch, build

import oases

ALONG = {"sequence_parallel": True}
IN_FLOAT32 = ("qwen3", "gemma3", "glm4")
"""Models whose norms compute in float32."""


def loss_of(model, data):
    """A loss in the model's type; those of transformers are in float32."""
    out = model(**{name: value for name, value in data.items() if name != "labels"})
    return (out.logits**2).mean()


def built(name, changes=None):
    """A model in float64, and that of Llama in its norms, too."""
    model = build(name, **(changes or {})).double()
    for module in list(model.modules()):
        for child, norm in list(module.named_children()):
            if type(norm).__name__ == "LlamaRMSNorm":
                own = torch.nn.RMSNorm(len(norm.weight), norm.variance_epsilon, dtype=torch.float64)
                own.weight = norm.weight
                setattr(module, child, own)
    return model


def gradients(name, options, length=12, changes=None):
    model, parallel = (built(name, changes) for _ in range(2))
    oases.parallelize(parallel, **ALONG, **options)
    data = batch(name, length=length, dtype=torch.float64)
    expected, got = loss_of(model, data), loss_of(parallel, data)
    expected.backward()
    got.backward()
    kinds = {op.kind for each in parallel.oases_partition.layers for op in each.runner.stack.schedule}
    return abs(float((got / expected).detach()) - 1), gradients_apart(model, parallel), kinds


def check(results, recomputed=False, close=CLOSE):
    for loss, (worst, name), kinds in results:
        assert loss <= close
        assert worst <= close, name
        assert {"reduce_scatter", "all_gather"} <= kinds
        assert "all_reduce" not in kinds
        assert ("R" in kinds) is recomputed


@pytest.mark.few(1)
@pytest.mark.few(1, 5)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"sub_batches": 3}),
        ("gpt2", {"recompute": "full"}),
        ("phi", {"schedule": "cross_pass"}),  # attention and MLP share a sum
        ("opt", {"schedule": "sync"}),  # its MLP's sum is of [batch * sequence, hidden]
        ("gpt_neox", {}),  # two norms of one activation: both after the gather
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("qwen3", "gemma3", "bert", "modernbert", "glm4", "mpt")
        ),
    ],
)
def test_gradients_are_those_of_one_process(two_ranks, name, options):
    close = 1e-6 if name in IN_FLOAT32 else CLOSE
    check(two_ranks.run(gradients, name, options), "recompute" in options, close)


@pytest.mark.slow
def test_four_ranks(four_ranks):
    check(four_ranks.run(gradients, "gemma3", {"recompute": "full"}, 12, {"num_key_value_heads": 4}), True, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_stages_and_replicas(four_ranks, shape):
    assert apart(four_ranks.run(trained_in_stages, "llama", shape, ALONG)) <= 1e-6


def refusals():
    def called(length):
        model = oases.parallelize(build("llama"), **ALONG)
        return said(lambda: model(**batch("llama", length=length)))

    return [
        called(9),
        said(lambda: oases.parallelize(build("olmo2"), **ALONG)),
        said(lambda: oases.parallelize(build("llama"), schedule="layers", **ALONG)),
        said(lambda: oases.parallelize(build("albert"), **ALONG)),
    ]


@pytest.mark.slow
def test_refusals(two_ranks):
    for odd, whole_attention, inside, unlisted in two_ranks.run(refusals):
        assert "over 2 ranks; pad it to a multiple, or leave out sequence_parallel" in odd
        assert "Olmo2DecoderLayer cannot run on parts of a sequence" in whole_attention
        assert "of Olmo2Attention reads" in whole_attention
        assert "model.layers does not run across its layers (schedule='layers'" in inside
        assert "has no list of layers" in unlisted
