"""SwiGLU, RMSNorm and GELU of unedited layers as one op each, beside the layers as they are written."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import gradients_apart
from autotp.zoo import batch, build
from called_ops import CalledOps, fused_on_cpu
from torch import fx, nn
from transformers.activations import NewGELUActivation
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import oases
from oases.autotp.lowering import fuse
from oases.autotp.rewrites import drop_asserts
from oases.layers.fused_norm import FUSED_ON

WIDTH = 24
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""That of the kernels' own tests."""


@pytest.fixture(autouse=True)
def on_cpu():
    with fused_on_cpu():
        yield


class Gated(nn.Module):
    """SwiGLU. form: of two linears, or how the halves of one are taken, and read."""

    def __init__(self, form="two"):
        super().__init__()
        self.form = form
        self.gate, self.up = nn.Linear(WIDTH, (1 + (form != "two")) * 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        if self.form == "two":
            return F.silu(self.gate(x)) * self.up(x)
        both = self.gate(x)
        if self.form == "slices":
            return F.silu(both[..., : 2 * WIDTH]) * both[..., 2 * WIDTH :]
        gate, up = both.split_with_sizes([2 * WIDTH, 2 * WIDTH], -1)
        if self.form == "uneven":
            gate, up = both.split_with_sizes([WIDTH, 3 * WIDTH], -1)
            return F.silu(gate) * up[..., :WIDTH]
        if self.form == "another reader":
            return F.silu(gate) * up + up
        return up * F.silu(gate) if self.form == "swapped" else F.silu(gate) * up


class Along(LlamaRMSNorm):
    """RMSNorm's chain along another dimension than the last."""

    def forward(self, x):
        scaled = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight * scaled


def rank_graph(module, x):
    """Graph of a module, marked as a rank's of a layer, and its parameters by placeholder."""
    program = torch.export.export(module, (x,), strict=False)
    drop_asserts(program.graph)  # as the trace of a layer does
    for node in program.graph.nodes:
        node.meta["like"] = node
    parameters = program.graph_signature.inputs_to_parameters
    return program.graph, [module.get_parameter(name) for name in parameters.values()]


def calls(graph):
    return Counter(
        getattr(node.target, "__name__", "").partition(".")[0] for node in graph.nodes if node.op == "call_function"
    )


def close(mine, expected):
    error = (mine.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[expected.dtype] * max(1.0, expected.double().abs().max())


def fused(module, dtype=torch.float32):
    """Ops of a module's graph once fused, after results and gradients are compared with the module's."""
    torch.manual_seed(3)
    for parameter in module.to(dtype).parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 5, WIDTH).to(dtype).requires_grad_()
    graph, parameters = rank_graph(module, x)
    fuse(graph)
    (out,), expected = fx.GraphModule(nn.Module(), graph)(*parameters, x), module(x)
    assert out.dtype == expected.dtype
    close(out, expected)
    grad, read = torch.randn(out.shape).to(out), [x, *(p for p in parameters if p.requires_grad)]
    mine, theirs = (torch.autograd.grad(y, read, grad, allow_unused=True) for y in (out, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)
    return calls(graph)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", ["two", "halves", "swapped"])
def test_swiglu(form, dtype):
    assert fused(Gated(form), dtype) == {"linear": 1 + (form == "two"), "swiglu": 1}


@pytest.mark.parametrize("form", ["slices", "uneven", "another reader"])
def test_halves_that_would_be_copied_stay(form):
    assert fused(Gated(form))["swiglu"] == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
def test_rms_norm(kind, dtype):
    assert fused(kind(WIDTH, 1e-5), dtype) == {"rms_norm": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_applied_in_float32_stays_so(dtype):
    ops = fused(Gemma3RMSNorm(WIDTH), dtype)
    assert ops["rms_norm"] == 1
    assert not {"pow", "mean", "rsqrt", "mul"} & set(ops)


def test_norms_along_another_dimension_stay():
    assert fused(Along(WIDTH))["rms_norm"] == 0


def test_float64_keeps_the_casts_of_the_model():
    torch.manual_seed(3)
    norm, x = LlamaRMSNorm(WIDTH).double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    graph, parameters = rank_graph(norm, x)
    fuse(graph)
    (out,) = fx.GraphModule(nn.Module(), graph)(*parameters, x)
    assert calls(graph)["to"] == 2, "it is computed in float32"
    torch.testing.assert_close(out, norm(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gelu(dtype):
    assert fused(NewGELUActivation(), dtype) == {"gelu": 1}


def test_other_devices_run_the_layer_as_it_is_written():
    FUSED_ON.discard("cpu")
    assert fused(LlamaRMSNorm(WIDTH))["pow"] == 1


def fused_beside_itself(name, options):
    model, parallel = build(name), build(name)
    with fused_on_cpu():
        oases.parallelize(parallel, **options)
        data = batch(name)
        expected = model(**data)
        parallel(**data)  # which traces
        with CalledOps() as called:
            got = parallel(**data)
            got.loss.backward()
    expected.loss.backward()
    apart = float((got.logits - expected.logits).detach().abs().max() / expected.logits.detach().abs().max())
    return apart, gradients_apart(model, parallel), dict(called.ops)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "op"),
    [
        ("llama", {"schedule": "oases"}, "oases::swiglu"),
        ("llama", {"schedule": "layers"}, "oases::swiglu"),
        ("phi3", {"schedule": "oases", "recompute": "full"}, "oases::swiglu"),
        ("gpt2", {"schedule": "oases"}, "aten::gelu"),
        ("qwen3", {"schedule": "oases", "sequence_parallel": True}, "oases::swiglu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_on_two_ranks(two_ranks, name, options, op):
    for logits, (gradients, whose), ops in two_ranks.run(fused_beside_itself, name, options):
        assert logits <= 1e-5
        assert gradients <= 1e-5, whose
        assert ops[op] > 0
        assert ops[f"{op}_backward"] > 0
        assert not {"aten::silu", "aten::tanh"} & set(ops)
