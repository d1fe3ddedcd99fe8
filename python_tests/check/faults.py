"""Models and ways to shard them, right ones and replicas of faults that were found in libraries."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

HIDDEN, EXPERTS, VOCABULARY = 16, 4, 32


class _Sum(torch.autograd.Function):
    """All-reduce in the forward pass (g), or in the backward pass (f)."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_pass = forward
        if forward:
            x = x.clone()
            dist.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.forward_pass:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient, None


def summed(x):
    return _Sum.apply(x, True)


def entered(x):
    return _Sum.apply(x, False)


class Block(nn.Module):
    """Norm, MLP and experts. fault: what is wrong on ranks; ranks of 1: the unsharded model."""

    def __init__(self):
        super().__init__()
        self.ranks, self.rank, self.fault = 1, 0, ""
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.k_pe = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts_up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * HIDDEN**-0.5)
        self.experts_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.1)

    def forward(self, x):
        f = entered if self.ranks > 1 else (lambda x: x)
        g = summed if self.ranks > 1 else (lambda x: x)
        normed = self.norm(x)
        inside = normed if self.fault == "norm" else f(normed)
        # A key that all heads share: a rank's heads give it a part of its gradient.
        shared = self.k_pe(normed)
        shared = shared if self.fault == "k_pe" else f(shared)
        heads = shared.repeat(1, 1, 4).chunk(self.ranks, -1)[self.rank]
        y = F.linear(F.gelu(self.up(inside)) * heads, self.down.weight)
        # Divided before the sum, which has one bias then: its gradient is 1/tp.
        y = g(y + self.down.bias / self.ranks) if self.fault == "row bias" else g(y) + self.down.bias
        gates = torch.softmax(self.router(x), -1)
        entered_gates = gates if self.fault == "router" else f(gates)
        mine = slice(self.rank * EXPERTS // self.ranks, (self.rank + 1) * EXPERTS // self.ranks)
        made = torch.einsum("bsh,ehk->bsek", f(x), self.experts_up)
        bias = self.experts_bias * (self.ranks if self.fault == "expert bias" else 1)
        out = torch.einsum("bsek,bse->bsk", made + bias, entered_gates[..., mine])
        if self.fault == "rounded" and out.dtype == torch.float32:
            return x + y + g(out.bfloat16()).float()
        return x + y + g(out)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def build():
    return Model()


def batch(step):
    return {"tokens": torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))}


def sharded(model, fault=""):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for layer in model.layers:
        layer.ranks, layer.rank, layer.fault = ranks, rank, fault
        for holder, name, dim in (
            (layer.up, "weight", 0), (layer.up, "bias", 0), (layer.down, "weight", 1), (layer, "experts_up", 0),
            (layer, "experts_bias", 0),
        ):  # fmt: skip
            setattr(holder, name, nn.Parameter(getattr(holder, name).detach().chunk(ranks, dim)[rank].clone()))
        if fault == "experts doubled":
            layer.experts_up.register_hook(lambda gradient: gradient * ranks)
    return model


class Sharded:
    """Picklable: sharded with a fault."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, model):
        return sharded(model, self.fault)


def replicated(model):
    """Data parallelism without an average."""
    return model


def averaged(model):
    return nn.parallel.DistributedDataParallel(model)


def nothing():
    return None


def with_dropout():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1), Total())


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


def floats(step):
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(step)),)


def of_rank(step):
    return (torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank())),)


def unseeded():
    import random

    model = nn.Sequential(nn.Linear(4, 1), Total())
    with torch.no_grad():
        model[0].weight.fill_(random.SystemRandom().random())
    return model


def no_loss():
    return nn.Linear(4, 2)


def linear():
    return nn.Sequential(nn.Linear(4, 4), Total())


def forgetful(model):
    return None


def broken(model):
    raise KeyError("no such layer")


def waiting(model):
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        import time

        time.sleep(100)
    return model
