"""Code in layers that a traced graph does not hold as it was written: rewritten, or kept as the author's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import ACROSS, CLOSE, INSIDE, WHOLE, said
from autotp.plain_models import WIDTH, Attention, Block, Plain, apart, beside_itself, made, spec, tokens
from torch import fx, nn

import oases
from oases.autotp.rewrites import without_in_place
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


class AssignedRows(Block):
    """Sharded features of some tokens, assigned."""

    def mlp(self, x):
        x = self.up(x)
        y = x.square()
        y[:, 0] = x[:, 1]
        y[:, 2:4].mul_(2)
        return self.down(y)


class AssignedSamples(Block):
    """Sharded features of one sample, assigned."""

    def mlp(self, x):
        x = self.up(x)
        y = x.square()
        y[0] = x[1]
        return self.down(y)


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


def rows_in_turn(x):
    """Row after row from those before, as in the chunked delta rule of Qwen3-Next."""
    found = -(x @ x.T)
    for at in range(1, len(x)):
        row, before = found[at, :at].clone(), found[:at, :at].clone()
        found[at, :at] = row + (row[:, None] * before).sum(0)
    return found, found.sum()


def parts_and_whole(x):
    y = torch.zeros_like(x)
    y[1:3, ::2] += x[1:3, ::2]
    y.mul_(3)
    y[:, 0].add_(1)
    y[0] = x[1]
    y[:, ::2] = x[..., :2]
    return y


def in_place_of_a_new_tensor(x):
    y = x * 2
    low = y[0].exp()
    y += x
    return y + low


def an_earlier_view(x):
    y = x * 2
    low = y[0]
    y[0] = x[1]
    return low


def a_part_that_changes(x):
    y = x * 2
    low = y[0].add_(1)
    y.mul_(3)
    return low


def a_part_of_a_part(x):
    y = x * 2
    y[0].add_(1).mul_(3)
    return y


def through_a_transpose(x):
    y = x * 2
    y.T[0] = x[0]
    return y


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "rewritten"),
    [
        (rows_in_turn, True), (parts_and_whole, True), (in_place_of_a_new_tensor, True), (an_earlier_view, False),
        (a_part_that_changes, False), (a_part_of_a_part, False), (through_a_transpose, False),
    ],
)  # fmt: skip
def test_ops_in_place_become_new_values_or_are_left(function, rewritten):
    x = torch.randn(4, 4)
    program = torch.export.export(Calling(function), (x,), strict=False)
    graph = without_in_place(program.graph)
    assert (graph is not None) == rewritten
    if graph is not None:
        assert graph is not program.graph
        assert not [node for node in graph.nodes if "_." in str(node.target)]
        found = fx.Interpreter(nn.Module(), graph=graph).run(x)
        torch.testing.assert_close(tuple(found), tuple(torch.utils._pytree.tree_leaves(function(x))))


def test_a_graph_without_ops_in_place_stays():
    graph = torch.export.export(nn.Linear(4, 4), (torch.randn(4, 4),), strict=False).graph
    assert without_in_place(graph) is graph


def _with(attention):
    class With(Block):
        def __init__(self):
            super().__init__()
            self.attn = attention()

    return With


KINDS = {
    "assigned": (_with(Assigned), ACROSS, ""),
    "assigned rows": (AssignedRows, ACROSS, ""),
    "assigned samples": (AssignedSamples, INSIDE, "relates elements along dimension 0 of its activation"),
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


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_code(two_ranks, name):
    for worst, layers in two_ranks.run(of_kind, name):
        assert worst < CLOSE
        assert layers["runs"] == KINDS[name][1], layers["reason"]
        assert KINDS[name][2] in layers["reason"]
        if KINDS[name][1] != WHOLE:  # MLP and attention
            assert layers["row"] == ["attn.out.weight", "down.weight"]


class InTraining(Block):
    def mlp(self, x):
        return self.down(round_straight_through(self.up(x)) if self.training else self.up(x))


def used_in_another_mode():
    model = made(Plain, InTraining).eval()
    oases.parallelize(model, spec=spec())
    model(tokens())
    return said(lambda: model.train()(tokens()))


@pytest.mark.slow
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
    return [str(each.message) for each in told if "these layers are replicated" in str(each.message)]


def test_layers_that_stay_whole_are_told_of_once(two_ranks):
    first, second = two_ranks.run(told_of_whole_layers)
    assert len(first) == 1
    told = "these layers are replicated (no speed-up, no memory saved): layers (2 layers, 80% of"
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


@pytest.mark.long
def test_some_layers_that_stay_whole_are_told_of(two_ranks):
    found = two_ranks.run(told_of_some_whole_layers)
    assert max(worst for worst, _ in found) < CLOSE
    assert [any(told) for _, told in found] == [True, False]


def test_the_error_of_users_is_public():
    assert oases.UsageError is UsageError
