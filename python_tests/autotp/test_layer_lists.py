"""Lists of layers: of a single one, of several classes; parts of layers that stay whole."""

import sys
import warnings
from unittest import mock

import pytest
import torch
from autotp.comparison import ACROSS, CLOSE, INSIDE
from autotp.plain_models import Block, Plain, beside_itself, spec
from autotp.staged import apart, trained_in_stages
from autotp.zoo import build
from autotp.zoo_runs import trained_beside_itself
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import oases
from oases.autotp import signatures
from oases.autotp.export import export, twin_of
from oases.autotp.layers import example_inputs, observe
from oases.errors import OverlapError

TOLD = "these layers are replicated"


class Bent(Block):
    """A layer of another class."""

    def forward(self, x, mask=None):
        return super().forward(x, mask).tanh()


class Towers(nn.Module):
    """A list of one module that holds the layers."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([Plain()])

    def forward(self, tokens):
        return self.towers[0](tokens)


class Mixed(Plain):
    """Layers of two classes. called: their numbers, in the order in which they are called."""

    def __init__(self, called=(0, 1)):
        super().__init__()
        self.layers, self.called = nn.ModuleList([Block(), Bent()]), called

    def forward(self, tokens):
        x = self.table(tokens)
        for number in self.called:
            x = self.layers[number](x)
        return self.head(x)


class Alternating(Plain):
    """Layers of two kinds in turn, in which another part has the layer's number as an attribute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([(Bent if place % 2 else Block)() for place in range(4)])
        for place, layer in enumerate(self.layers):
            (layer.up if place % 2 else layer.attn).number = place


@pytest.mark.parametrize(
    ("kind", "args", "names"),
    [
        (Plain, (Block, 1), ["layers"]),
        (Towers, (), ["towers.0.layers"]),
        (Mixed, (), ["layers"]),
        (Mixed, ((1, 0),), []),
        (Mixed, ((0, 1, 1),), []),
    ],
)
def test_lists_of_layers(kind, args, names):
    assert [each.name for each in observe(twin_of(kind(*args)), spec().inputs).lists] == names


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "args", "layers", "runs"),
    [(Plain, (Block, 1), 1, ACROSS), (Mixed, (), 2, ACROSS), (Mixed, ((1, 0),), 1, INSIDE)],
)
def test_models_equal_themselves(two_ranks, kind, args, layers, runs):
    for worst, report in two_ranks.run(beside_itself, kind, args):
        assert worst < 1e-12
        (found,) = report["layers"]
        assert (found["layers"], found["runs"]) == (layers, runs)


def traced_of_alternating():
    """Layers that `parallelize` traces, and how far apart the models are."""
    with mock.patch.object(signatures, "export", wraps=signatures.export) as traces:
        worst, report = beside_itself(Alternating)
    return [type(call.args[0]).__name__ for call in traces.call_args_list], worst, report["layers"][0]["runs"]


@pytest.mark.long
def test_layers_of_a_kind_are_traced_once(two_ranks):
    for traced, worst, runs in two_ranks.run(traced_of_alternating):
        assert traced == ["Block", "Bent"]  # for lengths that vary; what is sharded is found in the same graphs
        assert worst < CLOSE
        assert runs == ACROSS


@pytest.mark.long
def test_a_layer_is_traced_as_it_runs_and_not_in_its_form_for_exporting():
    """The gated delta rule solves a triangular system, which Qwen3-Next exports as a loop of 63 rows."""
    model = build("qwen3_next")
    asks = vars(sys.modules[type(model).__module__])["is_torchdynamo_exporting"]
    (layers,) = observe(twin_of(model), example_inputs(model)).lists
    call = layers.calls[0]
    ops = [str(node.target) for node in export(call.module, call.args, call.kwargs).graph.nodes]
    assert ops.count("aten.linalg_solve_triangular.default") == 2
    assert len(ops) < 300
    assert vars(sys.modules[type(model).__module__])["is_torchdynamo_exporting"] is asks


def hybrid(name, dtype):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained_beside_itself(name, {}, dtype)
    with pytest.raises(OverlapError, match=TOLD):
        oases.parallelize(build(name), require_overlap=True)
    return found, [str(each.message) for each in told if TOLD in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "close", "part"),
    [
        pytest.param("jamba", torch.float32, 1e-5, "mamba", marks=pytest.mark.slow),
        ("lfm2", torch.float64, 1e-6, "conv"),
        # Its own gradient of dt_bias is 1.8e-5 from that of its rule computed in float64.
        ("qwen3_next", torch.float32, 4e-5, "linear_attn"),
    ],
)
def test_parts_of_hybrids_that_stay_whole_are_told_of(two_ranks, name, dtype, close, part):
    """Mamba's scan, the gated delta rule and the losses are in float32 whatever the model's type."""
    for rank, (found, told) in enumerate(two_ranks.run(hybrid, name, dtype)):
        assert found["logits"] <= close
        assert found["gradients"][0] <= close, found["gradients"]
        for expected, got in found["losses"]:
            assert got == pytest.approx(expected, rel=close)
        assert [each["name"] for each in found["report"]["layers"]] == ["model.layers"]
        assert len(told) == (rank == 0)
        assert all(f"{part} of model.layers (1 of 2 layers, " in text for text in told)
        assert not any("self_attn" in text or "feed_forward" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [("llama", (1, 1, 2), 1), ("jamba", (2, 1, 1), 2)],
)
def test_training_in_whole_steps(two_ranks, name, shape, layers):
    assert apart(two_ranks.run(trained_in_stages, name, shape, {}, layers, 2, torch.float32)) <= 1e-5


def told_of_olmoe():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        oases.parallelize(build("olmoe"))
        oases.parallelize(build("llama"))
    return [str(each.message) for each in told if TOLD in str(each.message)]


class Attentions(TorchDispatchMode):
    """Counts forward passes of attention."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.calls += "scaled_dot_product" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def attentions_of_olmo(recompute):
    model = oases.parallelize(
        build("olmo2", num_hidden_layers=4), schedule="oases", sub_batches=2, recompute=recompute
    )
    tokens = torch.arange(24).reshape(4, 6)
    with Attentions() as forward:
        loss = model(input_ids=tokens, labels=tokens).loss
    with Attentions() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 8)])
def test_what_every_rank_computes_in_full_runs_once(two_ranks, recompute, again):
    """Between two layers; in the first layer, behind none, before its sum and after it."""
    assert two_ranks.run(attentions_of_olmo, recompute) == [(2 * (2 + 3), again)] * 2


CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}


@pytest.mark.long
def test_a_convolution_behind_another_layer_trains_as_in_one_process(two_ranks):
    """It runs between the two; that of the first layer does not."""
    for found in two_ranks.run(trained_beside_itself, "lfm2", {}, torch.float64, 3, CONVOLUTIONS):
        assert found["logits"] <= 1e-6
        assert found["gradients"][0] <= 1e-6, found["gradients"]
        for expected, got in found["losses"]:
            assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_what_stays_whole_beside_experts_is_told_of(two_ranks):
    """Attention that norms all heads at once; neither the MLP beside it nor its router."""
    for rank, told in enumerate(two_ranks.run(told_of_olmoe)):
        assert len(told) == (rank == 0)
        assert all("self_attn of model.layers (2 layers, " in text and "mlp" not in text for text in told)
