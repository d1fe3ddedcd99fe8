"""Wrong models, meshes, plans and optimizers: an error with the value and the remedy, before anything trains."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from autotp.comparison import said
from autotp.staged import mesh_of, shares, sizes
from autotp.zoo import batch, build

import oases
from oases.autotp import checking
from oases.distributed.mesh import Mesh
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


def plan_of(*, micro_batches=1, stages=1, dtype="float32", **options):
    """A plan of two ranks for the tiny Llama, each with layers of its own."""
    traced = model_of(build("llama"), 10).in_dtype(dtype)
    stage = Stage((Segment(traced.num_blocks // stages, 1, "oases", 2),))
    return Plan(traced, 2, 2, 8, micro_batches, (stage,) * stages, **options)


def layers_of_another():
    planned_for(num_hidden_layers=3)


def width_of_another():
    planned_for(hidden_size=64)


def inner_width_of_another():
    planned_for(intermediate_size=96)


def heads_of_another():
    planned_for(num_key_value_heads=4)


def stages_with_other_batches():
    """At the first call, after which all is in order, and at the fourth."""
    model = oases.parallelize(build("llama"), mesh=mesh_of(2, 1, 1), micro_batches=2)
    stage = model.oases_pipeline.mesh.stage
    assert "different batches" in said(lambda: model.train_step(**batch("llama", seed=stage)))
    for seed in (0, 0, stage):
        model.train_step(**batch("llama", seed=seed))


def mesh_of_another_plan():
    plan = plan_of(micro_batches=2, stages=2)
    oases.parallelize(build("llama"), plan=plan, mesh=mesh_of(1, 2, 1))


def type_of_another_plan():
    oases.parallelize(build("llama"), plan=plan_of(dtype="bfloat16"), dtype=torch.float32)


def hidden_state_of_a_hook():
    kept, model = {}, build("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, result: kept.update(h=result))
    spec = oases.ParallelSpec(loss=lambda result: result.loss + kept["h"].mean())
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=2, spec=spec)
    model.train_step(**batch("llama"))


def compiled_by_true():
    oases.parallelize(build("llama"), compile=True)


ERRORS = {
    compiled_by_true: "unknown compile True; known are none, .*inductor",
    stages_with_other_batches: r"train_step\(\): ranks 0 and 1, of one replica, were given different batches; give",
    mesh_of_another_plan: "plan: it is for pp 2 x dp 1 x tp 1, the mesh has pp 1 x dp 2 x tp 1; leave mesh out",
    type_of_another_plan: "plan: it is for a model in torch.bfloat16, and dtype is torch.float32; leave dtype out",
    hidden_state_of_a_hook: r"spec.loss failed on the result of LlamaForCausalLM \(KeyError: 'h'\): it may read that",
    layers_of_another: "plan: it is for 3 layers, the model has 2 in lists; plan for LlamaForCausalLM by oases.plan",
    width_of_another: "plan: it is for layers of width 64, the model's have 32; plan for LlamaForCausalLM by",
    inner_width_of_another: "plan: layer 0 of LlamaForCausalLM has 12352 parameters there, model.layers.0 has 9280; ",
    heads_of_another: "plan: layer 0 of LlamaForCausalLM has 10304 parameters there, model.layers.0 has 9280; plan",
    stages: "has 2 layers, too few for 4 parts of a pipeline; give at most 2 stages",
    heads: "the tensor-parallel degree 2 does not divide .*3.*; degrees that fit this model: 1",
    optimizer: r"AdamW was made before parallelize\(\), .* of its 21 parameters, .*; make it afterwards",
}


@pytest.mark.long
@pytest.mark.few(3)
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
        checking.warn_of_slow_collectives(group)
    assert ["oases.nccl_options()" in str(each.message) for each in caught] == [True] * told


def one_step(options, how):
    """Loss and type of a step of a plan of one stage, and the largest relative difference of a gradient."""
    plain, model = build("llama"), build("llama")
    plan = plan_of(**options)
    mesh = {"none": lambda: None, "plan": lambda: Mesh.of(plan), "device": lambda: mesh_of(1, 2, 1)}[how]()
    oases.parallelize(model, plan=plan, mesh=mesh)
    data = batch("llama", samples=8)
    expected = plain(**data).loss
    expected.backward()
    found = model.train_step(**shares(data, (1, 2, 1), model))
    wanted, got = (each.model.norm.weight.grad for each in (plain, model))
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    apart = float((got.float() - wanted).abs().max() / wanted.abs().max()) if got.shape == wanted.shape else 0.0
    model.oases_pipeline.close()
    return float(expected.detach()), float(found), apart, str(next(model.parameters()).dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"),
    [({}, "none"), ({}, "plan"), ({}, "device"), ({"zero": True}, "none"), ({"fsdp": True}, "none"),
     ({"dtype": "bfloat16"}, "none")],
)  # fmt: skip
def test_plans_of_replicas_alone_train_in_whole_steps(two_ranks, options, how):
    near = 0.05 if "dtype" in options else 1e-5
    for expected, found, apart, dtype in two_ranks.run(one_step, options, how):
        assert found == pytest.approx(expected, rel=near)
        assert apart < near
        assert dtype == f"torch.{options.get('dtype', 'float32')}"
