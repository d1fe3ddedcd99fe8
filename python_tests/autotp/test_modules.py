"""Plain modules, their layers spelt in many ways, under tensor parallelism against themselves in one process."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import ACROSS, CLOSE, INSIDE, WHOLE
from autotp.plain_models import (
    ROWS,
    WIDTH,
    Attention,
    Block,
    Plain,
    apart,
    beside_itself,
    made,
    spec,
    tokens,
)  # fmt: skip
from torch import nn

import oases

pytestmark = pytest.mark.usefixtures("shared_traces")


class Einsum(Block):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(4, 16, 4) * 0.1) for _ in range(4))
        del self.attn

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (torch.einsum("bsd,hdk->bhsk", h, w) for w in (self.q, self.k, self.v))
        x = x + torch.einsum("bhsk,hdk->bsd", F.scaled_dot_product_attention(q, k, v), self.o)
        return x + self.mlp(self.norm2(x))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16) * 0.1), nn.Parameter(torch.randn(16, 32) * 0.1)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return x + F.linear(F.silu(F.linear(x, self.up)), self.down, self.bias)


class WeightNorm(Block):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class TorchAttention(Block):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Convolution(Block):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return super().forward(x + self.conv(x.transpose(1, 2)).transpose(1, 2))


class Biased(Block):
    """A scale per head, slopes as a buffer, and two kinds of learned position biases."""

    def __init__(self):
        super().__init__()
        self.scale, self.places = nn.Parameter(torch.rand(4, 1, 1) + 0.5), nn.Parameter(torch.randn(4, 6, 6))
        self.distances = nn.Embedding(11, 4)
        self.register_buffer("slopes", torch.rand(4, 1, 1))

    def forward(self, x):
        batch, n, _ = x.shape
        q, k, v = (y.view(batch, n, 4, 4).transpose(1, 2) for y in self.attn.qkv(self.norm(x)).chunk(3, -1))
        apart = torch.arange(n)[None] - torch.arange(n)[:, None]
        scores = q @ k.transpose(-1, -2) * self.scale + self.slopes * apart + self.places[:, :n, :n]
        scores = scores + self.distances(apart + 5).permute(2, 0, 1)
        x = x + self.attn.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, n, WIDTH))
        return x + self.mlp(self.norm2(x))


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.b(self.a(x))


class Adapted(Block):
    def __init__(self):
        super().__init__()
        self.attn.qkv, self.attn.out = LowRank(self.attn.qkv), LowRank(self.attn.out)
        self.up, self.down = LowRank(self.up), LowRank(self.down)


class OneNorm(Block):
    """A norm before a sum and after it."""

    def forward(self, x):
        x = x + self.norm(self.attn(self.norm(x)))
        return x + self.norm(self.mlp(self.norm(x)))


class MixedBias(Block):
    def __init__(self):
        super().__init__(bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)


class BatchNorm(Block):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))


class Filtered(Block):
    """Weights of frequencies, whose gradients are complex sums over the ranks."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.cdouble) * 0.1)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.norm(x), n=6, dim=1) * self.weights
        return super().forward(x + torch.fft.irfft(spectrum, n=6, dim=1))


class RunningMean(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x) - self.mean


class InPlace(Block):
    """Writes into what it has a view of."""

    def forward(self, x):
        h = self.norm(x) * 1
        view = h.flatten(1)
        h.mul_(2)
        return x + self.mlp(h).add_(1) + view.view_as(h)


class SequenceFirst(Plain):
    """Layers with activations of [sequence, batch, width]."""

    class Layer(Block):
        def forward(self, x):
            x = x + self.attn(self.norm(x).transpose(0, 1)).transpose(0, 1)
            return x + self.mlp(self.norm2(x))

    def __init__(self):
        super().__init__(self.Layer)

    def forward(self, tokens):
        x = self.table(tokens).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1))


BLOCKS = {Einsum: ACROSS, Bare: ACROSS, WeightNorm: ACROSS, TorchAttention: INSIDE, Convolution: ACROSS,
          Biased: ACROSS, Adapted: ACROSS, OneNorm: ACROSS, MixedBias: ACROSS, BatchNorm: WHOLE,
          RunningMean: WHOLE, InPlace: ACROSS, Filtered: ACROSS}  # fmt: skip


def of_block(kind):
    return beside_itself(Plain, (kind,))


SLOW = {Bare, Convolution, MixedBias, RunningMean}
"""Found by the same rules as others, which the rest of the blocks show."""


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in BLOCKS]
)
def test_layers_in_many_spellings(two_ranks, kind):
    for worst, report in two_ranks.run(of_block, kind):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == BLOCKS[kind], report["layers"][0]["reason"]
        assert bool(report["layers"][0]["reason"]) == (BLOCKS[kind] != ACROSS)


def of_sequence_first():
    return beside_itself(SequenceFirst)


@pytest.mark.long
def test_a_sequence_in_the_place_of_samples_is_not_cut(two_ranks):
    for worst, report in two_ranks.run(of_sequence_first):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == INSIDE
        assert "relates elements along dimension 0" in report["layers"][0]["reason"]


def fused(layout, keys):
    return beside_itself(lambda: Plain(layout=layout, keys=keys))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("3hd", 4),
        pytest.param("h3d", 4, marks=pytest.mark.slow),
        pytest.param("hd3", 4, marks=pytest.mark.slow),
        ("interleaved", 2),
        ("q|k|v", 2),
        ("q|k|v", 1),
    ],
)
def test_fused_queries_keys_and_values(two_ranks, layout, keys):
    for worst, report in two_ranks.run(fused, layout, keys):
        assert worst < CLOSE
        found = report["layers"][0]
        assert found["runs"] == ACROSS
        cut = "attn.qkv.weight" in found["column"]
        assert cut == (keys > 1)  # a single key head in a fused linear is replicated, and the report gives the reason
        assert cut or "[16, 4, 4]" in found["refused"]["attn.out.weight"]


def chain():
    def kind():
        return nn.Sequential(Block(), Block(), Block())

    return beside_itself(kind, data=torch.randn(4, 6, WIDTH, dtype=torch.double, generator=_generator()))


def _generator():
    return torch.Generator().manual_seed(3)


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True)
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.table(tokens)))


def torch_encoder():
    model, parallel = made(TorchEncoder), made(TorchEncoder)
    oases.parallelize(parallel, spec=spec())
    found = [apart(model, parallel, tokens())]
    model.eval()
    parallel.eval()
    with torch.no_grad():  # where torch takes the layers' weights past their forward
        found.append(float((model(tokens()) - parallel(tokens())).abs().max()))
    return max(found), parallel.oases_partition.json()


@pytest.mark.few(1)
@pytest.mark.parametrize(("function", "runs"), [(chain, ACROSS), (torch_encoder, INSIDE)])
def test_models_of_torch(two_ranks, function, runs):
    for worst, report in two_ranks.run(function):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == runs


class Parity(Block):
    def forward(self, x):
        n = x.shape[1]
        x = super().forward(x)
        return x * 2 if n % 2 == 0 and n > 3 else x


class Distances(Block):
    """Reads [tokens, tokens] and [tokens], which are as long as the batch where it has as many samples."""

    def forward(self, x, mask, row):
        return super().forward(x, mask) + row[:, None]


class WithDistances(Plain):
    def __init__(self):
        super().__init__(Distances)

    def forward(self, tokens):
        x, place = self.table(tokens), torch.arange(tokens.shape[1])
        apart = (place[None] - place[:, None]).double()
        for layer in self.layers:
            x = layer(x, apart, apart[:, 0])
        return self.head(x)


def of_lengths(kind, args, sizes):
    model, parallel = made(kind, *args), made(kind, *args)
    oases.parallelize(parallel, spec=spec())
    return [apart(model, parallel, tokens(*size)) for size in sizes]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "args", "sizes"),
    [
        *((kind, (), [(4, 6), (4, 7), (1, 6), (4, 4), (2, 2), (3, 3), (2, 4), (1, 1), (16, 16), (5, 3), (4, 8)])
          for kind in (Plain, WithDistances)),
        (Plain, (Parity,), [(4, 6), (4, 7), (2, 2), (4, 8)]),
    ],
)  # fmt: skip
def test_lengths_that_change_and_coincide(two_ranks, kind, args, sizes):
    for found in two_ranks.run(of_lengths, kind, args, sizes):
        assert max(found) < CLOSE


def _before(model, way):
    if way == "frozen":
        model.table.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        model.layers[2].attn.requires_grad_(False)
    if way == "hooks":
        model.layers[0].attn.register_forward_hook(lambda module, given, result: result * 2)
    if way == "method":
        attention = model.layers[1].attn
        attention.forward = types.MethodType(_doubled, attention)


def _after(model, way):
    if way == "frozen later":
        model.layers[1].requires_grad_(False)
    if way == "eval":
        model.eval()
    if way == "part in eval":
        for layer in model.layers:
            layer.attn.eval()
    if way == "number":
        model.layers[1].norm.eps = 0.5
    if way == "state":
        model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def in_other_ways(way):
    model = made(Plain, layers=3, drop=0.5 * (way == "part in eval"))
    parallel = copy.deepcopy(model)
    for each in (model, parallel):
        _before(each, way)
    oases.parallelize(parallel, spec=spec())
    both = [model, parallel]
    if way == "copied":
        both[1] = copy.deepcopy(parallel)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
    for each in both:
        _after(each, way)
    return max(apart(*both, tokens(seed=seed)) for seed in range(2))


def _doubled(self, x, mask=None):
    return 2 * Attention.forward(self, x, mask)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "way",
    [
        *("frozen", "hooks", "copied", "part in eval", "number"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("frozen later", "method", "state", "eval")),
    ],
)
def test_what_is_done_to_models(two_ranks, way):
    assert max(two_ranks.run(in_other_ways, way)) < CLOSE
