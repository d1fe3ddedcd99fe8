"""Unedited models in pipeline stages, alone and with data and tensor parallelism: losses, gradients, wrong use."""

import math

import pytest
import torch
from autotp.comparison import said
from autotp.staged import apart, mesh_of, shares, sizes, trained_in_stages
from autotp.zoo import batch, build, config
from planner.plan_kinds import KINDS, plans_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.autotp.costs import trace_layers
from oases.planner import Space, rank_plans
from oases.plans.gpt import gpt
from oases.plans.plan import Plan
from oases.plans.segment import Segment, Stage
from oases.simulator.cluster import cluster_called
from oases.testing import RankPool

FLOAT32_LOSS = 3e-7
"""Models of transformers compute the loss in float32, also in float64."""


@pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "gemma3", "vit", "olmoe", "bert"))],
)
def test_two_stages_train_as_one_process(two_ranks, name):
    found = two_ranks.run(trained_in_stages, name, (2, 1, 1), {})
    assert apart(found) < (1e-5 if name == "olmoe" else FLOAT32_LOSS)
    assert all(0.2 < held < 0.8 for _, held, _ in found)  # each rank has its stage, and tied tables


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("llama", (2, 1, 2), {"recompute": "full", "pipeline": "shifted_critical_path", "micro_batches": 4}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("gpt2", (2, 2, 1), {"pipeline": "gpipe"}),
                ("t5", (2, 1, 2), {"pipeline": "zb_h1"}),
                ("qwen3", (1, 2, 2), {}),
                ("phi", (4, 1, 1), {"micro_batches": 4}),
                ("phi", (2, 1, 2), {"compile": "aot_eager"}),
                ("llama", (2, 1, 2), {"pipeline": "interleaved"}),
                ("llama", (2, 1, 2), {"pipeline": "zb_v", "recompute": "full", "micro_batches": 4}),
                ("gpt2", (2, 2, 1), {"pipeline": "zb_v"}),
                ("gpt2", (2, 2, 1), {"pipeline": "zb_v", "fsdp": True}),
                ("gpt2", (2, 2, 1), {"fsdp": True}),
                ("t5", (1, 2, 2), {"fsdp": True}),
                ("llama", (1, 2, 2), {"fsdp": True, "recompute": "full"}),
                ("llama", (2, 2, 1), {"fsdp": True, "pipeline": "interleaved"}),
                ("gpt2", (1, 2, 2), {"zero": True}),
                ("t5", (2, 2, 1), {"zero": True, "pipeline": "zb_h1"}),
            )
        ),
    ],
)
def test_all_dimensions_train_as_one_process(four_ranks, name, shape, options):
    found = four_ranks.run(trained_in_stages, name, shape, options)
    assert apart(found) < FLOAT32_LOSS
    if options.get("fsdp") or options.get("zero"):
        assert all(held < 0.4 for _, held, _ in found)
    if shape[2] > 1 and name == "llama":
        assert all(ran == "across layers" for *_, runs in found for ran, *_ in runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("gpt2", (2, 2, 1), {"fsdp": True}),
        pytest.param("llama", (1, 2, 2), {"zero": True, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("t5", (2, 1, 2), {}, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_with_float32_masters_and_gradients(four_ranks, name, shape, options):
    low = {"dtype": torch.bfloat16, **options}
    found = four_ranks.run(trained_in_stages, name, shape, low, 4, 3, torch.float32)
    assert 1e-5 < apart(found) < 0.02
    shards = 0.4 if options else 0.8
    assert all(held < shards for _, held, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["zero", "fsdp"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_ten_steps_with_shared_state(shape, way):
    """Largest differences of losses and norms from one process in float32, in float32 and in bfloat16."""
    with RankPool(math.prod(shape)) as pool:
        for name in ("llama", "gpt2", "t5"):
            exact, near = (
                apart(pool.run(trained_in_stages, name, shape, {way: True, "dtype": dtype}, 4, 10, torch.float32))
                for dtype in (torch.float32, torch.bfloat16)
            )
            print(f"{name} {shape} {way}: {exact:.0e}, bfloat16 {near:.1e}")
            assert exact < 1e-5
            assert near < 0.02


def recomputation_of(pipeline):
    model = build("llama", **sizes("llama", 4))
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=2, pipeline=pipeline, recompute="full")
    model.oases_pipeline.close()
    return [each.runner.stack.schedule.recompute for each in model.oases_partition.layers]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "last"), [("one_f_one_b", "full"), ("last_no_recompute", "none")])
def test_the_last_stage_recomputes_as_the_pipeline_says(two_ranks, pipeline, last):
    assert two_ranks.run(recomputation_of, pipeline) == [["full"], [last]]


def reads_hidden_states():
    """Loss and gradients of a loss of hidden states of both stages, beside those of one process."""
    plain, model = (build("llama", **sizes("llama", 4)).double() for _ in range(2))
    data = {"input_ids": batch("llama", samples=4)["input_ids"], "output_hidden_states": True}

    def loss_of(result):
        assert len(result.hidden_states) == 5
        return sum(result.hidden_states[at].pow(2).mean() for at in (1, 4))

    expected = loss_of(plain(**data))
    expected.backward()
    spec = oases.ParallelSpec(inputs=((), data), loss=loss_of)
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=2, spec=spec)
    found = float(model.train_step(**data))
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        if not parameter.is_meta and wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)
    return found, float(expected)


@pytest.mark.slow
def test_a_loss_may_read_hidden_states_of_other_stages(two_ranks):
    for found, expected in two_ranks.run(reads_hidden_states):
        assert found == pytest.approx(expected, rel=1e-12)


def planned(pipeline, *stages, along=False):
    """A plan for four ranks; segments as (layers, schedule, recomputed layers)."""
    shape = gpt(hidden=32, layers=sum(each[0] for stage in stages for each in stage), heads=4, sequence=10,
                       vocabulary=90)  # fmt: skip
    made = tuple(
        Stage(tuple(Segment(2 * layers, 2, name, 2, again, along) for layers, name, again in stage))
        for stage in stages
    )
    return Plan(shape, 4, 2, 8, 4 if len(stages) > 1 else 2, made, pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "runs"),
    [
        (
            "llama",
            planned("shifted_critical_path", [(1, "oases", 1), (2, "cross_pass", 0)], [(1, "sync", 0)]),
            [[("across layers", "oases", 1), ("across layers", "cross_pass", 2)], [("across layers", "sync", 1)]],
        ),
        pytest.param(
            "t5",  # an encoder and a decoder of four layers each
            planned("one_f_one_b", [(3, "oases", 0)], [(5, "oases", 3)]),
            [[("across layers", "oases", 3)], [("across layers", "oases", 1), ("across layers", "oases", 4)]],
            marks=pytest.mark.slow,
        ),
        (
            "llama",  # one stage, two replicas, two micro-batches
            planned("one_f_one_b", [(3, "oases", 2), (1, "sync", 0)]),
            [[("across layers", "oases", 3), ("across layers", "sync", 1)]] * 2,
        ),
        (
            "gpt2",  # on parts of the sequence between blocks
            planned("one_f_one_b", [(3, "oases", 2)], [(1, "sync", 0)], along=True),
            [[("across layers", "oases", 3)], [("across layers", "sync", 1)]],
        ),
    ],
)
def test_plans_are_executed(four_ranks, name, plan, runs):
    found = four_ranks.run(trained_in_stages, name, (len(plan.stages), 2 // len(plan.stages), 2), {"plan": plan})
    assert apart(found) < FLOAT32_LOSS
    assert [found[0][2], found[2][2]] == runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "olmoe"])
def test_every_kind_of_plan_that_is_found_is_executed(four_ranks, name):
    """Printed by kind: the largest difference of a loss or gradient norm from one process."""
    hardware, world = cluster_called("4x3090")
    heads = {"num_key_value_heads": 4} if name in ("llama", "olmoe") else {}
    traced = trace_layers(build(name, **sizes(name, 4), **heads), sequence=10)
    for kind, (options, _) in KINDS.items():
        if kind.startswith("experts") and name != "olmoe":
            continue
        found = plans_of(rank_plans(traced, hardware, world, 8, space=Space(**options)), kind)
        # T5's layers are of several kinds; a norm over all heads keeps OLMoE's attention whole.
        if (kind, name) in (("interleaved", "t5"), ("zb_v", "t5"), ("sequence-parallel", "olmoe")):
            assert not found
            continue
        plan = found[0]
        shape = (len(plan.stages), world // len(plan.stages) // plan.uniform_tp, plan.uniform_tp)
        how = {"plan": plan}
        worst = apart(four_ranks.run(trained_in_stages, name, shape, how, 4, 3, torch.float64, heads))
        print(f"{name}, {kind}, {plan.text()}: {worst:.0e}")
        assert worst < (0.02 if kind == "bfloat16 sums" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (1, 2, 2), (4, 1, 1)], ids=str)
def test_ten_steps_of_adamw(shape):
    """Largest differences from one process, by model. Others than ViT compute norms in float32, also in float64."""
    with RankPool(math.prod(shape)) as pool:
        for name in ("llama", "qwen3", "gpt2", "gemma3", "phi", "olmoe", "t5", "vit"):
            exact, near = (
                apart(pool.run(trained_in_stages, name, shape, options, 4, 10, torch.float32))
                for options in ({}, {"dtype": torch.bfloat16})
            )
            print(f"{name} {shape}: {exact:.0e}, bfloat16 {near:.1e}")
            assert exact < 1e-5
            assert near < 0.02
        assert apart(pool.run(trained_in_stages, "vit", shape, {}, 4, 10, torch.float64)) < 1e-10


class Chain(nn.Module):
    """A model of no library: layers with a skip from the first to the last, a scale of its own, and a loss inside."""

    def __init__(self, layers=4, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.scale = nn.Parameter(torch.full((width,), 0.7))
        self.last = nn.Linear(width, 1)

    def forward(self, x, labels=None):
        start = self.first(x)
        h = start * self.scale
        for layer in self.layers:
            h = layer(h) + h
        return (self.last(h * self.scale + start) - x.sum(-1, keepdim=True)).square().mean()


def chain(shape):
    """Gradients of a step, by name, and those of one process; a second step adds to them."""
    torch.manual_seed(0)
    plain, model = Chain().double(), Chain().double()
    model.load_state_dict(plain.state_dict())
    spec = oases.ParallelSpec(inputs=((torch.empty(3, 8, dtype=torch.float64),), {}))
    oases.parallelize(model, mesh=mesh_of(*shape), micro_batches=2, spec=spec)
    x = torch.randn(8, 8, dtype=torch.float64)
    for _ in range(2):
        expected = plain(x)
        expected.backward()
        replica = model.oases_pipeline.mesh.replica(shape[2])
        loss = model.train_step(x.chunk(shape[1])[replica])
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    return [name for name, _ in model.named_parameters()]


@pytest.mark.long
def test_results_that_skip_stages_and_weights_between_modules(four_ranks):
    for shape in ((4, 1, 1), (2, 2, 1)):
        names = four_ranks.run(chain, shape)
        assert all("scale" in each for each in (names[0], names[3]))
        assert set().union(*names) == {name for name, _ in Chain().named_parameters()}


def from_meta(folder):
    """A stage loads its weights alone, and both stages together have all of them."""
    with torch.device("meta"):
        model = type(build("gpt2"))(config("gpt2", **sizes("gpt2", 4)))
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), weights=folder, micro_batches=2)
    loss = model.train_step(**batch("gpt2"))
    model.oases_pipeline.close()
    return float(loss), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_weights_of_a_stage_alone_are_read(two_ranks, tmp_path):
    model = build("gpt2", **sizes("gpt2", 4))
    model.save_pretrained(tmp_path)
    (loss, first), (other, second) = two_ranks.run(from_meta, str(tmp_path))
    table = model.transformer.wte.weight.numel()
    assert first + second == sum(parameter.numel() for parameter in model.parameters()) + table
    assert loss == other
    assert loss == pytest.approx(float(model(**batch("gpt2")).loss.detach()), rel=1e-6)


def wrong(kind):
    model = build("llama", **sizes("llama", 4))
    options, mesh = {"micro_batches": 2}, None
    if kind == "more stages than layers":
        model = build("llama", num_hidden_layers=1)
    elif kind == "no list":
        model = build("albert")
    elif kind in ("interleaved", "zb_v"):
        model, options = build("llama", **sizes("llama", 2)), {"micro_batches": 2, "pipeline": kind}
    elif kind == "parts of one stage":
        mesh, options = mesh_of(1, 2, 1), {"micro_batches": 2, "pipeline": "zb_v"}
    elif kind == "other dimensions":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "cp"))
    elif kind == "no pp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    elif kind == "replicas alone":
        mesh, options = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), {}
    elif kind == "pipeline":
        options = {"pipeline": "1f1b"}
    return said(lambda: oases.parallelize(model, mesh=mesh or mesh_of(2, 1, 1), **options))


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("more stages than layers", "LlamaForCausalLM has 1 layer, too few for 2 parts of a pipeline"),
        ("no list", "no list of layers to divide into stages; train it without 'pp'"),
        ("interleaved", "has 2 layers, too few for 4 parts of a pipeline; give at most 2 stages"),
        ("zb_v", "has 2 layers, too few for 4 parts of a pipeline; give at most 2 stages"),
        ("parts of one stage", "zb_v needs at least 2 stages, got 1; take one_f_one_b"),
        ("other dimensions", "a mesh with 'pp' may have pp, dp, tp alone"),
        ("no pp", "micro_batches 2 needs a mesh with the dimension 'pp'"),
        ("replicas alone", "mesh has the dimensions ('dp',); name the tensor-parallel one 'tp', of size 1"),
        ("pipeline", "unknown pipeline '1f1b'; known are"),
    ],
)
def test_meshes_and_models_that_do_not_divide(two_ranks, kind, message):
    for text in two_ranks.run(wrong, kind):
        assert message in text


def misused():
    model = build("llama", **sizes("llama", 4))
    oases.parallelize(model, mesh=mesh_of(2, 1, 1), micro_batches=2)
    data = batch("llama")
    ignored = {**data, "labels": torch.full_like(data["labels"], -100)}
    calls = {
        "direct": lambda: model(**data),
        "samples": lambda: model.train_step(**{key: value[:3] for key, value in data.items()}),
        "no tensor": lambda: model.train_step(),
        "no loss": lambda: model.train_step(input_ids=data["input_ids"]),
        "no label": lambda: model.train_step(**ignored),
    }
    texts = {name: said(call) for name, call in calls.items()}
    loss = float(model.train_step(**shares(data, (2, 1, 1), model)))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    texts["order"] = said(lambda: torch.nn.utils.get_total_norm(gradients, 1.0))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    texts["other norm"] = said(lambda: torch.nn.utils.get_total_norm([torch.ones(2)]))
    model.oases_pipeline.close()
    return texts, loss, norm


@pytest.mark.slow
def test_wrong_calls_are_errors_with_the_remedy_on_all_ranks_and_the_model_goes_on(two_ranks):
    model = build("llama", **sizes("llama", 4))
    expected = model(**batch("llama")).loss
    expected.backward()
    expected, whole = (
        float(expected.detach()),
        float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])),
    )
    for texts, loss, norm in two_ranks.run(misused):
        assert "call model.train_step(**batch) on all ranks" in texts["direct"]
        assert "3 samples do not divide into 2 micro-batches" in texts["samples"]
        assert "pass it the arguments of the model's forward" in texts["no tensor"]
        assert "no loss of one number in it; pass labels" in texts["no loss"]
        assert "micro-batches have no label but -100" in texts["no label"]
        assert "with norm_type=1.0; give norm_type=2.0" in texts["order"]
        assert texts["other norm"] == "nothing was raised"
        assert norm == pytest.approx(whole, rel=1e-5)
        assert loss == pytest.approx(expected, rel=1e-6)
