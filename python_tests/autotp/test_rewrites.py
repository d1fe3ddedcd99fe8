"""Code in layers that a traced graph does not hold as it was written: rewritten, or kept as the author's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import ACROSS, CLOSE, WHOLE, said
from autotp.plain_models import WIDTH, Attention, Block, Plain, apart, beside_itself, made, spec, tokens
from torch import nn

import oases
from oases.errors import OverlapError, UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")


class Assigned(Attention):
    """Heads put together by assignments, as in DeepSeek's and MiniCPM3's attention."""

    def __init__(self):
        super().__init__(layout="q|k|v")

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 4, 4).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        turned = k.new_empty(batch, 4, length, 4)
        turned[..., :1] = k[..., 3:]
        turned[..., 1:] = k[..., :3]
        y = F.scaled_dot_product_attention(q, turned, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Sinks(Attention):
    """Attention with a learned logit per head that takes a share of the weights, as in GPT-OSS."""

    def __init__(self):
        super().__init__(layout="q|k|v")
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 4, 4).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1))
        logits = torch.cat([q @ k.transpose(2, 3), self.sinks.view(1, 4, 1, 1).expand(batch, 4, length, 1)], -1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        y = logits.softmax(-1)[..., :-1] @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Extremes(Block):
    """Largest and smallest values of sharded features: along another dimension, and of two tensors."""

    def mlp(self, x):
        x = self.up(x)
        first = x.max(1)
        return self.down(torch.max(x, first.values[:, None]) * torch.minimum(x, x.min(1, keepdim=True).values))


class Detached(Block):
    """A scale that is computed without gradients."""

    def forward(self, x, mask=None):
        with torch.no_grad():
            scale = x.square().mean(-1, keepdim=True).rsqrt()
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return super().forward(x * scale * (high - low))


class Rounded(torch.autograd.Function):
    """Rounding with a gradient that no graph of its forward has."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


round_straight_through = Rounded.apply


class OwnBackward(Block):
    def mlp(self, x):
        return self.down(round_straight_through(self.up(x)))


class Squared(torch.autograd.Function):
    """A square with the gradient of a square."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.factor * ctx.saved_tensors[0] * grad, None


class DerivativeAsBackward(Block):
    def mlp(self, x):
        return self.down(Squared.apply(self.up(x), 0.5))


class HookOnActivation(Block):
    def mlp(self, x):
        x = self.up(x)
        if x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)
        return self.down(x)


def _with(attention):
    class With(Block):
        def __init__(self):
            super().__init__()
            self.attn = attention()

    return With


KINDS = {
    "assigned": (_with(Assigned), ACROSS, ""),
    "sinks": (_with(Sinks), ACROSS, ""),
    "extremes": (Extremes, ACROSS, ""),
    "without gradients": (Detached, ACROSS, ""),
    "derivative as backward": (DerivativeAsBackward, ACROSS, ""),
    "own backward": (OwnBackward, WHOLE, "calls the autograd function Rounded, whose backward is not in a traced"),
    "hook": (HookOnActivation, WHOLE, "calls Tensor.register_hook, whose backward is not in a traced graph"),
}


def of_kind(name):
    worst, report = beside_itself(Plain, (KINDS[name][0],))
    return worst, report["layers"][0]


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_code(two_ranks, name):
    for worst, layers in two_ranks.run(of_kind, name):
        assert worst < CLOSE
        assert layers["runs"] == KINDS[name][1], layers["reason"]
        assert KINDS[name][2] in layers["reason"]


class InTraining(Block):
    def mlp(self, x):
        return self.down(round_straight_through(self.up(x)) if self.training else self.up(x))


def used_in_another_mode():
    model = made(Plain, InTraining).eval()
    oases.parallelize(model, spec=spec())
    model(tokens())
    return said(lambda: model.train()(tokens()))


def test_code_of_another_mode_is_an_error_with_the_remedy(two_ranks):
    for text in two_ranks.run(used_in_another_mode):
        assert text.startswith("UsageError: InTraining calls the autograd function Rounded")
        assert "call model.train() or model.eval() before it" in text


def told_of_whole_layers():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        oases.parallelize(made(Plain, OwnBackward), spec=spec())
    model = made(Plain, OwnBackward)
    before = {name: parameter.shape for name, parameter in model.named_parameters()}
    with pytest.raises(OverlapError, match=r"layers \(2 layers, 80% .*\): OwnBackward calls the autograd function"):
        oases.parallelize(model, spec=spec(), require_overlap=True)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == before
    return [str(each.message) for each in told if "computes these layers whole" in str(each.message)]


def test_layers_that_stay_whole_are_told_of_once(two_ranks):
    first, second = two_ranks.run(told_of_whole_layers)
    assert len(first) == 1
    told = "every rank computes these layers whole, with no less time and memory: layers (2 layers, 80% of"
    assert told in first[0]
    assert second == []


class Every2nd(Plain):
    """A list with a layer that cannot be sharded."""

    def __init__(self):
        super().__init__(layers=2)
        self.layers = nn.ModuleList([Either(False), Either(True)])


class Either(OwnBackward):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def mlp(self, x):
        return super().mlp(x) if self.own else Block.mlp(self, x)

    def forward(self, x):
        return super().forward(x).tanh() if self.own else super().forward(x)


def told_of_some_whole_layers():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = oases.parallelize(made(Every2nd), spec=spec())
    with pytest.raises(OverlapError, match=r"layers \(1 of 2 layers, .*\): Either calls the autograd function"):
        oases.parallelize(made(Every2nd), spec=spec(), require_overlap=True)
    return apart(made(Every2nd), model, tokens()), ["1 of 2 layers" in str(each.message) for each in told]


def test_some_layers_that_stay_whole_are_told_of(two_ranks):
    found = two_ranks.run(told_of_some_whole_layers)
    assert max(worst for worst, _ in found) < CLOSE
    assert [any(told) for _, told in found] == [True, False]


def test_the_error_of_users_is_public():
    assert oases.UsageError is UsageError
