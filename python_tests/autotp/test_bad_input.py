"""Wrong models, meshes, plans and optimizers: an error with the value and the remedy, before anything trains."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from autotp.comparison import said
from autotp.staged import mesh_of, sizes
from autotp.zoo import batch, build

import oases
from oases.autotp import preconditions
from oases.planner import model_of
from oases.plans.plan import Plan, Segment, Stage


def stages():
    oases.parallelize(build("llama", **sizes("llama", 2)), mesh=mesh_of(2, 1, 1), pipeline="interleaved")


def heads():
    oases.parallelize(build("llama", hidden_size=36, num_attention_heads=3, num_key_value_heads=3))


def optimizer():
    model = build("llama")
    early = torch.optim.AdamW(model.parameters())
    oases.parallelize(model)(**batch("llama")).loss.backward()
    early.step()


def planned_for(**changes):
    """Parallelize a model on meta with the plan of one of other sizes."""
    with torch.device("meta"):
        planned, model = build("llama", **changes), build("llama")
    traced = model_of(planned, 12)
    plan = Plan(traced, 2, 2, 8, 1, (Stage((Segment(traced.num_blocks, 2, "sync", 1),)),))
    try:
        oases.parallelize(model, plan=plan, weights={})
    finally:
        assert all(parameter.is_meta for parameter in model.parameters())


def layers_of_another():
    planned_for(num_hidden_layers=3)


def width_of_another():
    planned_for(hidden_size=64)


def inner_width_of_another():
    planned_for(intermediate_size=96)


def heads_of_another():
    planned_for(num_key_value_heads=4)


ERRORS = {
    layers_of_another: "plan: it is for 3 layers, the model has 2 in lists; plan for LlamaForCausalLM by oases.plan",
    width_of_another: "plan: it is for layers of width 64, the model's have 32; plan for LlamaForCausalLM by",
    inner_width_of_another: "plan: layer 0 of LlamaForCausalLM has 12352 parameters there, model.layers.0 has 9280; ",
    heads_of_another: "plan: layer 0 of LlamaForCausalLM has 10304 parameters there, model.layers.0 has 9280; plan",
    stages: "has 2 layers, too few for 4 parts of a pipeline; give at most 2 stages",
    heads: "the tensor-parallel degree 2 does not divide .*3.*; degrees that fit this model: 1",
    optimizer: r"AdamW was made before parallelize\(\), .* of its 21 parameters, .*; make it afterwards",
}


@pytest.mark.parametrize("function", ERRORS)
def test_wrong_input_is_told(two_ranks, function):
    for text in two_ranks.run(said, function):
        assert re.search(f"UsageError: .*{ERRORS[function]}", text), text


@pytest.mark.parametrize(
    ("backend", "ranks", "priority", "told"),
    [
        ("cpu:gloo,cuda:nccl", 2, False, True), ("cuda:nccl", 2, True, False), ("cuda:nccl", 1, False, False),
        ("gloo", 2, False, False),
    ],
)  # fmt: skip
def test_a_nccl_group_of_normal_priority_is_warned_of(monkeypatch, backend, ranks, priority, told):
    options = SimpleNamespace(is_high_priority_stream=priority)
    group = SimpleNamespace(size=lambda: ranks, _get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preconditions.warn_of_slow_collectives(group)
    assert ["oases.nccl_options()" in str(each.message) for each in caught] == [True] * told
