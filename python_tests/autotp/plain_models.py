"""Plain modules with transformer layers in many spellings, and what compares one with its parallelized twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from autotp.comparison import gradients_apart
from torch import nn

import oases
from oases.autotp import ParallelSpec

WIDTH, HEADS, ROWS = 16, 4, 50


class Attention(nn.Module):
    """Fused queries, keys and values in one of several layouts, of as many heads of keys as asked."""

    def __init__(self, layout: str = "3hd", keys: int = HEADS, drop: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.layout, self.keys, self.head, self.drop = layout, keys, WIDTH // HEADS, drop
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * self.head, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        fused, head = self.qkv(x), self.head
        if self.layout == "3hd":
            q, k, v = fused.view(batch, length, 3, HEADS, head).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.layout == "h3d":
            q, k, v = fused.view(batch, length, HEADS, 3, head).permute(3, 0, 2, 1, 4)
        elif self.layout == "hd3":
            q, k, v = fused.view(batch, length, HEADS, head, 3).permute(4, 0, 2, 1, 3).unbind(0)
        elif self.layout == "interleaved":  # of each head of keys its queries, its key and its value
            parts = fused.view(batch, length, self.keys, HEADS // self.keys + 2, head)
            q, k, v = parts.split([HEADS // self.keys, 1, 1], dim=3)
            q, k, v = (each.reshape(batch, length, -1, head).transpose(1, 2) for each in (q, k, v))
        else:  # "q|k|v"
            sizes = [HEADS * head, self.keys * head, self.keys * head]
            q, k, v = (part.view(batch, length, -1, head).transpose(1, 2) for part in fused.split(sizes, -1))
        k, v = (each.repeat_interleave(HEADS // k.shape[1], 1) for each in (k, v))
        drop = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """A pre-norm layer. options: those of Attention."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(**options), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm(x), mask)
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """A language model of any layers. block: makes layer `index`."""

    def __init__(self, block=Block, layers: int = 2, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        made = [block(**options) for _ in range(layers)]
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(samples: int = 4, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, ROWS, (samples, length), generator=torch.Generator().manual_seed(seed))


def made(kind, *args, seed: int = 0, **options) -> nn.Module:
    """A model in double precision, with nothing at its initial zeros and ones."""
    torch.manual_seed(seed)
    model = kind(*args, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def spec(data=None, **options) -> ParallelSpec:
    return ParallelSpec(inputs=((tokens() if data is None else data,), {}), **options)


def loss_of(result) -> torch.Tensor:
    """A number that all of a result matters to."""
    found = result if isinstance(result, torch.Tensor) else result[0]
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    return (found * found * weights).sum() + (found * weights.flip(-1)).sum()


def apart(model, parallel, data, call=None) -> float:
    """The largest relative difference of results and gradients of a model and its parallelized twin."""
    model.zero_grad()
    parallel.zero_grad()
    call = call or (lambda each, given: each(given))
    expected, got = call(model, data), call(parallel, data)
    first = [x if isinstance(x, torch.Tensor) else x[0] for x in (expected, got)]
    worst = float((first[0] - first[1]).abs().max() / first[0].abs().max())
    loss_of(expected).backward()
    loss_of(got).backward()
    return max(worst, gradients_apart(model, parallel)[0])


def beside_itself(kind, args=(), options=None, given=None, data=None, call=None):
    """The difference of a model and its parallelized twin, and the report of the twin."""
    model, parallel = made(kind, *args), made(kind, *args)
    oases.parallelize(parallel, spec=given or spec(data), **(options or {}))
    worst = apart(model, parallel, tokens() if data is None else data, call)
    return worst, parallel.oases_partition.json()
