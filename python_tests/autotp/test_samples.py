"""Ops that relate the samples of a layer's activation, and layers that run without sub-batches because of them."""

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import ACROSS, CLOSE, INSIDE
from autotp.plain_models import WIDTH, Block, Plain, beside_itself
from torch import nn

from oases.autotp.export import export, twin_of, varying_shapes, without_data
from oases.autotp.tokens import relation_of_samples

RELATED = {
    "largest of all": lambda x: x / x.abs().max(),
    "largest": lambda x: x - x.max(0).values,
    "smallest": lambda x: x - x.min(dim=0, keepdim=True).values,
    "range": lambda x: x - torch.aminmax(x, dim=0).min,
    "deviation of all": lambda x: x / x.std(),
    "deviation": lambda x: x / x.std(0, unbiased=False),
    "variance": lambda x: x - torch.var_mean(x, dim=0)[1],
    "median": lambda x: x - x.median(0).values,
    "product": lambda x: x * x.prod(0),
    "any": lambda x: x * (x > 0).any(0),
    "all": lambda x: x * (x > 0).all(),
    "first of the largest": lambda x: x * x.argmax(0),
    "first of the smallest": lambda x: x * x.argmin(),
    "running product": lambda x: x.cumprod(0),
    "running maximum": lambda x: x.cummax(0).values,
    "order": lambda x: x.sort(0).values,
    "best": lambda x: x - x.topk(1, 0).values,
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "mixed": lambda x: x[torch.randperm(x.shape[0])],
    "put": lambda x: x.index_put((torch.zeros(1, dtype=torch.long),), x[:1] * 2),
    "halves": lambda x: x.unflatten(0, (2, -1)).sum(0).repeat(2, 1, 1),
    "chunks": lambda x: sum(x.chunk(2)).repeat(2, 1, 1),
    "joined": lambda x: torch.concat((x[1:], x[:1])),
    "parts": lambda x: torch.concat(x.tensor_split(2)[::-1]),
    "frequencies": lambda x: torch.fft.fftn(x).real,
    "convolution": lambda x: F.conv1d(x.permute(1, 2, 0), torch.ones(WIDTH, WIDTH, 3), padding=1).permute(2, 0, 1),
    "norm": lambda x: F.layer_norm(x, x.shape),
    "number of samples": lambda x: x / x.shape[0],
    "numbers of samples": lambda x: x * torch.arange(x.shape[0]).view(-1, 1, 1),
    "triangle": lambda x: x.transpose(0, 1).tril().transpose(0, 1),
    "unknown": lambda x: x - torch.quantile(x, 0.5),
    "distances": lambda x: x + torch.cdist(x.flatten(1), x.flatten(1)).sum(1).view(-1, 1, 1),
}
APART = {
    "largest": lambda x: x - x.max(-1, keepdim=True).values - x.max(1, keepdim=True).values,
    "larger": lambda x: torch.max(x, x * 2),
    "deviation": lambda x: x / x.std(-1, keepdim=True),
    "variance": lambda x: x - torch.var_mean(x, dim=(1, 2), keepdim=True)[1],
    "running product": lambda x: x.cumprod(1),
    "order": lambda x: x.sort().values + x.sort(1).values,
    "best": lambda x: x - x.topk(1).values,
    "batch norm": lambda x: F.batch_norm(
        x.transpose(1, 2), torch.zeros(WIDTH), torch.ones(WIDTH)
    ).transpose(1, 2),
    "tokens": lambda x: x[:, torch.tensor([1, 0, 3, 2, 4])],
    "joined": lambda x: torch.concat(x.tensor_split(2, -1)[::-1], -1),
    "broadcast": lambda x: torch.multiply(x, torch.broadcast_to(x[..., :1], x.shape)),
    "frequencies": lambda x: torch.fft.fft(x).real + torch.fft.fftn(x, dim=(1, 2)).imag,
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1) * x.split([8, 8], -1)[0].repeat(1, 1, 2),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH)
    .transpose(1, 2),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]) + F.rms_norm(x, (WIDTH,)) + F.group_norm(x, 1),
    "shapes": lambda x: (x.reshape(-1, WIDTH) + torch.zeros(x.shape[0] * x.shape[1], 1)).view_as(x),
    "triangle": lambda x: x.tril(),
    "solved": lambda x: torch.linalg.solve_triangular(x[..., :5], x, upper=False, unitriangular=True),
    "padded": lambda x: F.pad(x, (0, 0, 1, 0))[:, 1:],
    "rows": lambda x: F.embedding((x[..., 0] > 0).long(), torch.ones(2, WIDTH)) + F.one_hot(x[..., 0].long(), WIDTH),
    "gathered": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)).scatter(1, (x > 0).long(), 1.0),
}  # fmt: skip


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.function(x * self.weight)


def relation(function):
    layer = twin_of(Function(function))
    exported = export(layer, (without_data(torch.randn(4, 5, WIDTH)),), {}, varying_shapes)
    (name,) = exported.inputs
    return relation_of_samples(exported.graph, name, exported.outputs[0])


@pytest.mark.parametrize("name", RELATED)
def test_ops_that_relate_samples(name):
    assert relation(RELATED[name]).endswith("relates elements along dimension 0 of its activation")


@pytest.mark.parametrize("name", APART)
def test_ops_that_keep_samples_apart(name):
    assert relation(APART[name]) == ""


class Quantised(Block):
    """Rounds its activation to 255 levels between the extremes of all samples; rounding has the gradient of none."""

    def forward(self, x):
        step = x.detach().abs().max() / 127
        return super().forward(x + ((x / step).round() * step - x).detach())


class Normed(Block):
    """Norms features over all samples."""

    def __init__(self):
        super().__init__()
        self.over = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x):
        return super().forward(self.over(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "op"), [(Quantised, "max"), (Normed, "batch_norm")])
def test_layers_that_relate_samples_equal_themselves(two_ranks, kind, op):
    for worst, report in two_ranks.run(beside_itself, Plain, (kind,)):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == INSIDE
        assert f"aten.{op}." in report["layers"][0]["reason"]
        assert "relates elements along dimension 0" in report["layers"][0]["reason"]


class Solved(Block):
    """Heads whose tokens solve a triangular system, as those of the gated delta rule."""

    def forward(self, x):
        q, k, v = self.attn.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = torch.linalg.solve_triangular(q @ k.transpose(-1, -2), v, upper=False, unitriangular=True)
        x = x + self.attn.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@pytest.mark.long
def test_a_solve_is_sharded_by_heads(two_ranks):
    for worst, report in two_ranks.run(beside_itself, Plain, (Solved,)):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == ACROSS
        assert "attn.qkv.weight" in report["layers"][0]["column"]
