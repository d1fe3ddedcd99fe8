"""Plain modules, their layers spelt in many ways, under tensor parallelism against themselves in one process."""

import copy
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from partition.plain_models import (
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
from oases.parallel.sharding import cuts

CLOSE = 1e-12
ACROSS, INSIDE, WHOLE = "across layers", "inside layers", "replicated"


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


BLOCKS = {Einsum: ACROSS, Bare: ACROSS, WeightNorm: ACROSS, TorchAttention: INSIDE, Convolution: ACROSS,
          Biased: ACROSS, Adapted: INSIDE, OneNorm: ACROSS, MixedBias: ACROSS, BatchNorm: WHOLE,
          RunningMean: WHOLE, InPlace: ACROSS}  # fmt: skip


def of_block(kind):
    return beside_itself(Plain, (kind,))


@pytest.mark.parametrize("kind", BLOCKS)
def test_layers_in_many_spellings(two_ranks, kind):
    for worst, report in two_ranks.run(of_block, kind):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == BLOCKS[kind], report["layers"][0]["reason"]
        assert bool(report["layers"][0]["reason"]) == (BLOCKS[kind] != ACROSS)


def fused(layout, keys):
    return beside_itself(lambda: Plain(layout=layout, keys=keys))


@pytest.mark.parametrize(
    ("layout", "keys"), [("3hd", 4), ("h3d", 4), ("hd3", 4), ("interleaved", 2), ("q|k|v", 2), ("q|k|v", 1)]
)
def test_fused_queries_keys_and_values(two_ranks, layout, keys):
    for worst, report in two_ranks.run(fused, layout, keys):
        assert worst < CLOSE
        found = report["layers"][0]
        assert found["runs"] == ACROSS
        cut = "attn.qkv.weight" in found["column"]
        assert cut == (keys > 1)  # one head of keys within a fused product stays whole, and the report says why
        assert cut or "[16, 4, 4]" in found["refused"]["attn.out.weight"]


class Loop(Plain):
    """A loop over the layers in one of many ways. Layers differ in what no shape shows."""

    def __init__(self, way):
        super().__init__({"reads two": TwoInputs, "first again": TwoInputs, "keywords": Keywords, "sets": Sets,
                          "functions": Functions, "places": Functions, "constants": Functions}.get(way, Block),
                         layers=3)  # fmt: skip
        self.way = way
        for place, layer in enumerate(self.layers):
            layer.place = place if way == "places" else 0
            layer.factor = torch.tensor(1.0 + place if way == "constants" else 1.0).double()
        first = self.layers[0]
        if way == "functions":
            self.layers[1].function = F.relu
        elif way == "shared":
            self.layers = nn.ModuleList([first] * 3)
        elif way == "tied":
            for layer in self.layers[1:]:
                layer.up.weight, layer.attn.qkv.weight = first.up.weight, first.attn.qkv.weight
                layer.norm.weight = first.norm.weight
        elif way == "tied outside":
            self.extra = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.extra.weight = first.up.weight
        elif way == "reversed":  # not alike, so a mistake in the order would show
            first.up, first.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, tokens):
        x = first = self.table(tokens)
        way, layers, seen = self.way, list(self.layers), [x, x]
        layers = {"twice": layers * 2, "reversed": layers[::-1], "skips": layers[::2]}.get(way, layers)
        for layer in layers:
            given = x * 0.9 if way == "code between" else x
            other = {"reads two": seen[-2], "first again": first}.get(way)
            if way == "keywords":
                x = layer(torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype), hidden=given)["hidden"]
            else:
                x = layer(given) if other is None else layer(given, other)
            seen.append(x)
        if way == "all results":
            x = sum(seen)
        if way == "returned":
            return self.head(x), seen
        if way == "part of a layer":
            x = x + self.layers[0].attn(first)
        if way == "weights":
            x = x * sum(layer.up.weight.norm() for layer in self.layers)
        if way == "tied outside":
            x = x * self.extra(first).mean(-1, keepdim=True)
        if way == "sets":
            x = x + sum(layer.found for layer in self.layers)
        return F.linear(x, self.table.weight) if way == "table" else self.head(x)


class TwoInputs(Block):
    def forward(self, x, y):
        return super().forward(x) + 0.1 * y


class Keywords(Block):
    def forward(self, mask, *, hidden):
        return {"hidden": super().forward(hidden, mask), "flag": 3}


class Sets(Block):
    def __init__(self):
        super().__init__()
        self.found = 0

    def forward(self, x):
        self.found = x.mean()
        return super().forward(x)


class Functions(Block):
    def __init__(self):
        super().__init__()
        self.function = F.gelu

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        x = x + self.down(self.function(self.up(self.norm2(x)))) * self.factor
        return x * 2 if self.place % 2 else x


WAYS = {
    "plain": (ACROSS, ""),
    "keywords": (ACROSS, ""),
    "first again": (ACROSS, ""),
    "functions": (ACROSS, ""),
    "places": (ACROSS, ""),
    "constants": (ACROSS, ""),
    "tied": (ACROSS, ""),
    "tied outside": (ACROSS, ""),
    "part of a layer": (ACROSS, ""),
    "weights": (ACROSS, ""),
    "table": (ACROSS, ""),
    "shared": (INSIDE, "more than once"),
    "twice": (INSIDE, "more than once"),
    "reversed": (INSIDE, "not every layer is called, in order"),
    "skips": (INSIDE, "not every layer is called, in order"),
    "code between": (INSIDE, "read by other code"),
    "all results": (INSIDE, "read by other code"),
    "returned": (INSIDE, "read by other code"),
    "reads two": (INSIDE, "several layers before"),
    "sets": (WHOLE, "Sets sets found in its forward"),
}


def looped(way):
    return beside_itself(Loop, (way,))


@pytest.mark.parametrize("way", WAYS)
def test_loops_over_layers(two_ranks, way):
    runs, reason = WAYS[way]
    for worst, report in two_ranks.run(looped, way):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == runs
        assert reason in report["layers"][0]["reason"]
        assert bool(report["layers"][0]["reason"]) == bool(reason)
        if way in ("weights", "tied outside"):  # who reads a weight by itself needs all of it
            assert "up.weight" in report["layers"][0]["replicated"]
        if way == "part of a layer":
            assert "attn.qkv.weight" in report["layers"][0]["replicated"]
        if way == "table":
            assert report["vocabulary"] == []
            assert "table.weight is read outside" in report["notes"][0]


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


@pytest.mark.parametrize(("kind", "args"), [(Plain, ()), (Plain, (Parity,)), (WithDistances, ())])
def test_lengths_that_change_and_coincide(two_ranks, kind, args):
    sizes = [(4, 6), (4, 7), (1, 6), (4, 4), (2, 2), (3, 3), (2, 4), (1, 1), (16, 16), (5, 3), (4, 8)]
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


@pytest.mark.parametrize(
    "way", ["frozen", "frozen later", "hooks", "method", "copied", "state", "eval", "part in eval"]
)
def test_what_is_done_to_models(two_ranks, way):
    assert max(two_ranks.run(in_other_ways, way)) < CLOSE


class Undone(nn.Module):
    """x = dropout(x), then x - x, in which one of both comes through a sum: zero if both saw one mask."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(x)
        return x - self.down(self.up(x))


def undone():
    model = made(Plain, Undone)
    with torch.no_grad():
        for layer in model.layers:
            layer.up.weight.copy_(torch.eye(WIDTH))
            layer.down.weight.copy_(torch.eye(WIDTH))
    oases.parallelize(model, spec=spec(vocabulary=""))
    model.head = nn.Identity()
    return float(model(tokens()).abs().max()), model.oases_partition.layers[0].reason


def test_a_mask_is_the_same_before_and_after_a_sum(two_ranks):
    for found, reason in two_ranks.run(undone):
        assert found == 0
        assert "needed before and after a sum" in reason


class Dropping(Block):
    """Attention, features and residuals all drop."""

    def __init__(self, **options):
        super().__init__(drop=0.2, **options)
        self.drop = nn.Dropout(0.2)

    def mlp(self, x):
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))

    def forward(self, x):
        return super().forward(x)


class DroppingModel(Plain):
    def forward(self, tokens):
        x = F.dropout(self.table(tokens), 0.2, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dropped(options, keys):
    """Gradients of what is whole, and the loss, after each rank took a seed of its own."""
    found = []
    model = made(DroppingModel, Dropping, layout="q|k|v", keys=keys)
    oases.parallelize(model, spec=spec(vocabulary=""), **options)
    known = cuts(model)
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        result = model(tokens())
        result.pow(2).sum().backward()
        whole = [p.grad for p in model.parameters() if id(p) not in known]
        found.append([result.detach(), *whole])
    return found


@pytest.mark.parametrize("keys", [2, 1])  # of one, attention is whole in front of a sum
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "layers"}])
def test_masks_of_what_is_whole_are_the_same_on_all_ranks(two_ranks, options, keys):
    one, other = two_ranks.run(dropped, options, keys)
    for step, theirs in zip(one, other, strict=True):
        for mine, its in zip(step, theirs, strict=True):
            assert torch.equal(mine, its)
    assert not torch.equal(one[0][0], one[1][0])  # steps draw anew


def recomputed(keys):
    plain, again = dropped({}, keys), dropped({"recompute": "full"}, keys)
    return max(
        float((a - b).abs().max()) for x, y in zip(plain, again, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_masks_are_recomputed(two_ranks):
    assert max(two_ranks.run(recomputed, 2)) < 1e-9


def over_two_dimensions():
    """2 x 2: what two replicas average is the gradient of the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, parallel = made(Plain), made(Plain)
    oases.parallelize(parallel, mesh=mesh, spec=spec())
    data = tokens(8)
    model(data).pow(2).mean().backward()
    wrapped = nn.parallel.DistributedDataParallel(parallel, process_group=mesh.get_group("dp"))
    wrapped(data.chunk(2)[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    known, worst = cuts(parallel), 0.0
    theirs = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        mine, gradient = theirs[name], parameter.grad
        if id(mine) in known:
            gradient = known[id(mine)].take(gradient, mesh.get_local_rank("tp"), 2)
        worst = max(worst, float((mine.grad - gradient).abs().max()))
    return worst


def test_data_parallel_around_it(four_ranks):
    assert max(four_ranks.run(over_two_dimensions)) < CLOSE
