"""Tracing: the ops are the exported program's, FLOPs are those torch counts in a real run, nothing is copied."""

import functools
import os
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from resident_memory import peak, reset_peak, resident
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from oases.autotp import as_run
from oases.autotp.model_graph import layer_of, trace
from oases.errors import UsageError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

S = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 48}


def models():
    return {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**S, num_key_value_heads=2)),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32),
        ),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**S)),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64),
        ),
        "vit": (
            transformers.ViTForImageClassification,
            transformers.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32,
                patch_size=8,
            ),
        ),
    }  # fmt: skip


@pytest.fixture(params=["llama", "gpt2", "bert", "t5", "vit"])
def name(request):
    return request.param


def built(name, device):
    return _on(device, *models()[name])


@functools.cache
def traced(name):
    return trace(built(name, "meta"), batch=2, sequence=8)


def _on(device, kind, config):
    with torch.device(device):
        return kind(config)


def layers_of(graph):
    """Paths of the layers that the nodes are of."""
    return {layer for node in graph.nodes if (layer := layer_of(node.module))}


def given(model, batch, sequence):
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.zeros(batch, 3, 32, 32)}
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


@pytest.mark.few(2)
def test_flops_are_those_of_a_real_run(name):
    graph, model = traced(name), built(name, "cpu")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**given(model, 2, 8))
    assert sum(node.flops for node in graph.nodes) == counter.get_total_flops()
    assert graph.num_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.few(2)
def test_the_nodes_are_those_of_the_exported_program(name):
    model, graph = built(name, "meta"), traced(name)
    inputs = {name: value.to("meta") for name, value in given(model, 2, 8).items()}
    if "pixel_values" not in inputs:
        inputs["use_cache"] = False
    exported = torch.export.export(model, (), inputs, strict=False)

    def ops(module):
        """Ops of the program and of subgraphs that it runs under a context, read where they are called."""
        for node in module.graph.nodes:
            if "wrap_with" in str(node.target):
                inner = next(arg for arg in node.args if getattr(arg, "op", "") == "get_attr")
                yield from ops(getattr(module, inner.target))
            elif node.op == "call_function" and hasattr(node.target, "overloadpacket"):
                yield str(node.target.overloadpacket)

    plain = [op for op in ops(exported.graph_module) if "_assert" not in op]
    assert [node.op for node in graph.nodes if node.op != "getitem"] == plain
    shapes = {node.name: tuple(node.meta["val"].shape) for node in exported.graph.nodes if "aten.linear" in str(node)}
    assert all(graph.nodes[graph.place[name]].shapes == (shape,) for name, shape in shapes.items())


def test_layers_are_alike_and_named(name):
    graph = traced(name)
    kinds = Counter(layer.rpartition(".")[0] for layer in layers_of(graph))
    assert set(kinds.values()) == {2}
    read = {graph.table[name].identity for node in graph.nodes for name in node.parameters}
    unread = {each.name for each in graph.parameters if not each.buffer and each.identity not in read}
    assert not unread
    assert graph.nodes[-1].name in graph.trained


@pytest.mark.long
@pytest.mark.few(2)
def test_a_real_model_gives_the_same_products_and_is_left_alone(name):
    model = built(name, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    graph = trace(model, batch=2, sequence=8)
    twin = traced(name)
    # How attention lays its result out differs by device, and with it whether it is copied behind it: no more does.
    kept = [[replace(n, inputs=(), name="") for n in each.nodes if n.parameters or n.flops] for each in (graph, twin)]
    assert kept[0] == kept[1]
    assert (graph.inputs, graph.parameters) == (twin.inputs, twin.parameters)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("llama", False)])
def test_tied_tensors_share_an_identity(name, tied):
    graph = trace(_on("meta", *models()[name]), sequence=8)
    names = {}
    for each in graph.parameters:
        names.setdefault(each.identity, []).append(each.name)
    shared = [each for each in names.values() if len(each) > 1]
    assert shared == ([["transformer.wte.weight", "lm_head.weight"]] if tied else [])


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x, times=1):
        with torch.no_grad():
            mask = (x > 0).to(x.dtype) * self.scale
        y = self.first(x)
        for _ in range(times):
            y = y.view(-1, 6) * mask
        return {"out": self.second(y + x), "mask": mask}


def test_a_plain_module_with_its_own_inputs():
    graph = trace(Skips(), inputs=((torch.zeros(3, 6),), {"times": 2}))
    assert [node.op for node in graph.nodes] == [
        "aten.gt", "aten.to", "aten.mul", "aten.linear", "aten.view", "aten.mul", "aten.view", "aten.mul", "aten.add",
        "aten.linear",
    ]  # fmt: skip
    by_op = {node.op: node for node in graph.nodes[:5]}
    assert by_op["aten.mul"].parameters == ("scale",)
    assert by_op["aten.linear"].parameters == ("first.weight", "first.bias")
    assert (by_op["aten.linear"].module, by_op["aten.linear"].bytes_out, by_op["aten.linear"].flops) == (
        "first", 72, 2 * 3 * 6 * 6,
    )  # fmt: skip
    assert by_op["aten.view"].bytes_out == 0
    assert graph.num_parameters == 42 + 24
    assert [each.name for each in graph.inputs] == ["x"]


class Decides(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Picks(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


class Scales(nn.Module):
    def forward(self, x):
        return x * x.max().item()


def test_a_number_taken_from_a_tensor_is_an_edge():
    graph = trace(Scales(), inputs=((torch.zeros(2),), {}))
    assert [(node.op, node.inputs) for node in graph.nodes] == [
        ("aten.max", ("x",)), ("aten.item", ("max_1",)), ("aten.mul", ("x", "item")),
    ]  # fmt: skip


def test_what_cannot_be_traced_is_refused_with_a_remedy():
    with pytest.raises(UsageError, match=r"Picks cannot be traced: the output size of aten\.index depends"):
        trace(Picks(), inputs=((torch.zeros(2),), {}))
    with pytest.raises(UsageError, match=r"Branches cannot be traced: its forward branches or loops with cond"):
        trace(Branches(), inputs=((torch.zeros(2),), {}))
    with pytest.raises(
        UsageError, match=r"Decides cannot be traced: its forward branches on the values.*torch\.where"
    ):
        trace(Decides(), inputs=((torch.zeros(2),), {}))
    with pytest.raises(UsageError, match=r"Skips cannot be traced: .*give the arguments that its forward takes"):
        trace(Skips(), inputs=((), {}))
    with pytest.raises(UsageError, match=r"inputs must be \(args, kwargs\)"):
        trace(Skips(), inputs=torch.zeros(3, 6))
    with pytest.raises(UsageError, match=r"not a transformers model.* give its own with inputs"):
        trace(Skips())
    gpt2 = _on("meta", *models()["gpt2"])
    with pytest.raises(UsageError, match="sequence 33 is longer than the 32 positions"):
        trace(gpt2, sequence=33)
    with pytest.raises(UsageError, match="at least 1, got 0"):
        trace(gpt2, batch=0)


class Recurrent(nn.Module):
    """A layer with a loop over tokens, of three calls for each."""

    def forward(self, x):
        total, rows = 0, []
        for row in x.unbind(1):
            total = total * 0.5 + row
            rows.append(total.tanh())
        return torch.stack(rows, 1)


class Recurrence(nn.Module):
    """Two such layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Recurrent(), Recurrent()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_with_too_many_calls_is_refused_with_a_remedy():
    model, x = Recurrence(), torch.randn(2, 12, 4)
    why = "model Recurrence cannot be traced: its layer layers.0 calls more than 30 functions of torch"
    with (
        mock.patch.object(as_run, "MOST_CALLS", 30),
        pytest.raises(UsageError, match=f"^{why}.* make the loop one op"),
    ):
        trace(model, inputs=((x,), {}))
    assert len(trace(model, inputs=((x[:, :5],), {})).nodes) >= 2 * 3 * 5
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.mark.long
def test_layers_are_traced_as_they_run():
    """The form of Qwen3-Next for exporting has a loop over the 64 rows of a triangle, of some ten calls each."""
    sizes = {**S, "head_dim": 8, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4,
             "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
             "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
    config = transformers.Qwen3NextConfig(**sizes, layer_types=["linear_attention", "full_attention"])
    graph = trace(_on("meta", transformers.Qwen3NextForCausalLM, config), sequence=64)
    assert 50 < sum(node.module.startswith("model.layers.0") for node in graph.nodes) < 300


def test_other_products_are_counted():
    class Convolves(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 8, 3)

        def forward(self, x):
            y = self.conv(x)
            return F.softmax(torch.einsum("bct,bcs->bts", y, y), dim=-1)

    x = torch.zeros(2, 4, 10)
    model = Convolves()
    with FlopCounterMode(display=False) as counter:
        model(x)
    graph = trace(model, inputs=((x,), {}))
    assert sum(node.flops for node in graph.nodes) == counter.get_total_flops() > 0


@pytest.mark.long
@pytest.mark.parametrize("layers", [7, pytest.param(80, marks=pytest.mark.slow)])
def test_a_llama_of_70b_is_traced_without_memory_for_its_weights(layers):
    """One of its layers alone has 3.4 GB of weights."""
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    before = resident()
    reset_peak()
    graph = trace(_on("meta", transformers.LlamaForCausalLM, config), sequence=2048)
    assert graph.num_parameters == layers * 855_654_400 + 2_101_354_496
    assert len(layers_of(graph)) == layers
    assert peak() - before < 2**30
