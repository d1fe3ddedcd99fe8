"""Logits that are cut over the vocabulary behave as whole ones, whatever is done with them."""

import copy
import io
import operator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import oases
from oases.autotp.logits import LABEL, VocabularyLogits
from oases.core.blocks.sharding import Cut

VOCABULARY = 13
SHAPE = (2, 5, VOCABULARY)
CUT = Cut(-1, (VOCABULARY,))


def gathers():
    return sum(row.collectives for row in oases.report().others if row.where == LABEL)


def mine(whole):
    return CUT.take(whole, dist.get_rank(), dist.get_world_size())


def pair():
    """Whole logits, their leaf; this rank's part of the same, its leaf."""
    torch.manual_seed(0)
    whole = torch.randn(SHAPE, requires_grad=True)
    part = mine(whole.detach()).clone().requires_grad_()
    return whole * 3, whole, VocabularyLogits.of(part * 3, VOCABULARY, dist.group.WORLD), part


# What leaves the vocabulary cut.
KEPT = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to type": lambda x: x.to(torch.float64),
    "to device": lambda x: x.to(x.device),
    "to tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "type": lambda x: x.type(torch.float64),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "shift": lambda x: x[..., :-1, :],
    "shift by slice": lambda x: x[:, 1:, :],
    "first": lambda x: x[0],
    "last position": lambda x: x[:, -1],
    "last position, dots": lambda x: x[:, -1, ...],
    "all": lambda x: x[...],
    "nothing": lambda x: x[()],
    "one row": lambda x: x[1, 2],
    "new dimension": lambda x: x[:, None],
    "named whole": lambda x: x[:, :, 0:VOCABULARY],
    "indices": lambda x: x[torch.tensor([1, 0, 1])],
    "pairs of indices": lambda x: x[torch.arange(2), torch.tensor([4, 0])],
    "a mask": lambda x: x[torch.tensor([[True, False, True, True, False]] * 2)],
    "view": lambda x: x.view(-1, x.size(-1)),
    "view of a size": lambda x: x.view(torch.Size([10, VOCABULARY])),
    "reshape": lambda x: x.reshape(5, 2, -1),
    "torch.reshape": lambda x: torch.reshape(x, (10, VOCABULARY)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten, from the end": lambda x: torch.flatten(x, end_dim=-2),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "softcap": lambda x: 30 * torch.tanh(x / 30.0),
    "scale": lambda x: x * 0.5 + 1 - 2,
    "scale by a tensor": lambda x: torch.mul(torch.tensor(0.5), x),
    "negative": lambda x: -(1 - x),
    "clamp": lambda x: x.clamp(min=-1.0, max=1),
    "scale by row": lambda x: x * torch.tensor([[[2.0]], [[3.0]]]),
    "bias": lambda x: x + torch.arange(13.0),
    "bias of a type": lambda x: torch.add(other=torch.ones(1, 13, dtype=torch.float64), input=x, alpha=2),
    "no padding tokens": lambda x: x.masked_fill(mask=torch.arange(13) > 10, value=-9.0),
}

# What needs the whole.
WHOLE = {
    "softmax": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: x.log_softmax(-1).gather(-1, torch.zeros(2, 5, 1, dtype=torch.long)),
    "max": lambda x: x.max(-1).values,
    "sum": lambda x: x.sum(),
    "a token": lambda x: x[..., 3],
    "a token, by position": lambda x: x[0, 0, 3, ...],
    "some tokens": lambda x: x[:, :, 2:9],
    "tokens by index": lambda x: x[:, :, torch.tensor([0, 12])],
    "a mask of all": lambda x: x[torch.ones(SHAPE, dtype=torch.bool)],
    "new last dimension": lambda x: x[..., None],
    "a list": lambda x: x[[0, 1]],
    "transpose": lambda x: x.transpose(1, 2),
    "flat": lambda x: x.view(-1),
    "unsqueeze behind": lambda x: x.unsqueeze(-1),
    "sum of two": lambda x: x + x,
    "more dimensions": lambda x: x + torch.ones(3, 1, 1, 1),
    "join": lambda x: torch.cat([x, x], 0),
    "tokens": lambda x: list(x)[1],
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 5, dtype=torch.long)),
    "weights of classes": lambda x: F.cross_entropy(x[0], torch.arange(5), weight=torch.arange(1.0, 14)),
    "probabilities": lambda x: F.cross_entropy(x[0], torch.full((5, 13), 1 / 13)),
    "in place": lambda x: operator.itruediv(x, 2.0),
}


def check_function(name, kept):
    function = (KEPT if kept else WHOLE)[name]
    whole, leaf, logits, part = pair()
    before = gathers()
    expected, result = function(whole), function(logits)
    assert isinstance(result, VocabularyLogits) == kept
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    weights = torch.rand(expected.shape, dtype=expected.dtype)
    if kept:
        assert gathers() == before
        torch.testing.assert_close(result.part, mine(expected))
        assert result.requires_grad
    (expected * weights).sum().backward()
    (result * weights).sum().backward()
    assert gathers() == before + 1
    torch.testing.assert_close(result.detach(), expected.detach())
    torch.testing.assert_close(part.grad, mine(leaf.grad))


@pytest.mark.few(10)
@pytest.mark.parametrize("name", KEPT)
def test_the_vocabulary_stays_cut(two_ranks, name):
    two_ranks.run(check_function, name, True)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", WHOLE)
def test_anything_else_takes_the_whole(two_ranks, name):
    two_ranks.run(check_function, name, False)


def check_losses(options):
    whole, leaf, logits, part = pair()
    targets = torch.arange(10) + 3
    targets[3:6] = options.get("ignore_index", -100)
    before = gathers()
    expected = F.cross_entropy(whole.view(-1, VOCABULARY), targets, **options)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets, **options)
    torch.testing.assert_close(loss, expected)
    expected.sum().backward()
    loss.sum().backward()
    torch.testing.assert_close(part.grad, mine(leaf.grad))
    one, other = (torch.nn.CrossEntropyLoss()(x[0, 0], torch.tensor(7)) for x in (logits, whole))
    torch.testing.assert_close(one, other)
    assert gathers() == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 4},
        {"reduction": "sum"},
        {"reduction": "none", "label_smoothing": 0.2},
    ],
)
def test_the_loss_gathers_nothing(two_ranks, options):
    two_ranks.run(check_losses, options)


def check_metadata():
    _, _, logits, _ = pair()
    before = gathers()
    assert logits.shape == logits.size() == SHAPE
    assert (logits.size(-1), len(logits), logits.dim(), logits.ndim, logits.numel()) == (13, 2, 3, 3, 130)
    assert (logits.dtype, logits.device.type, logits.is_cuda) == (torch.float32, "cpu", False)
    assert logits.is_floating_point()
    assert torch.is_floating_point(logits)
    assert logits.requires_grad
    assert logits.grad_fn is not None
    assert not logits.is_leaf
    assert {logits: 1}[logits] == 1
    assert logits.type() == "torch.FloatTensor"
    assert gathers() == before


def test_metadata_gathers_nothing(two_ranks):
    two_ranks.run(check_metadata)


def check_looking():
    whole, _, logits, _ = pair()
    before = gathers()
    assert torch.allclose(logits, whole)
    assert logits.argmax(-1).equal(whole.argmax(-1))
    assert (logits.detach().numpy() == whole.detach().numpy()).all()
    assert logits[1, 2, 3].item() == whole[1, 2, 3].item()
    assert logits.tolist() == whole.tolist()
    assert "grad_fn" in repr(logits)
    assert f"{logits}" == str(logits)
    assert type(logits.cpu()) is torch.Tensor
    with torch.no_grad():
        assert torch.add(logits, 1.0, out=torch.empty(SHAPE)).equal(whole + 1.0)
    assert gathers() == before + 1
    file = io.BytesIO()
    torch.save({"logits": logits.detach()}, file)
    file.seek(0)
    assert torch.load(file)["logits"].equal(whole.detach())
    with torch.no_grad():
        quiet = VocabularyLogits.of(mine(whole.detach()), VOCABULARY, dist.group.WORLD)
    file = io.BytesIO()
    torch.save({"logits": quiet}, file)
    file.seek(0)
    assert torch.load(file)["logits"].equal(whole.detach())
    assert copy.deepcopy(quiet).equal(whole.detach())
    assert gathers() == before + 2


def test_looking_at_them_gathers_them_once(two_ranks):
    two_ranks.run(check_looking)


def check_no_grad_first():
    whole, leaf, logits, part = pair()
    with torch.no_grad():
        assert not logits.softmax(-1).requires_grad
    F.softmax(logits, -1)[..., 2].sum().backward()
    F.softmax(whole, -1)[..., 2].sum().backward()
    torch.testing.assert_close(part.grad, mine(leaf.grad))


def test_a_look_without_gradients_leaves_them_differentiable(two_ranks):
    two_ranks.run(check_no_grad_first)


def check_backward():
    whole, leaf, logits, part = pair()
    grad = torch.rand(SHAPE)
    whole.backward(grad)
    logits.backward(grad)
    torch.testing.assert_close(part.grad, mine(leaf.grad))


def test_backward_from_logits(two_ranks):
    two_ranks.run(check_backward)


def check_writing():
    whole, leaf, logits, part = pair()
    targets = torch.arange(10)
    for x in (whole, logits):
        x[..., 10:] = -5.0
        x[0].mul_(1.0)
        x.div_(2.0)
    expected, loss = (F.cross_entropy(x.view(-1, VOCABULARY), targets) for x in (whole, logits))
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(part.grad, mine(leaf.grad))


def test_what_is_written_counts_for_the_loss(two_ranks):
    two_ranks.run(check_writing)


def check_inference():
    targets = torch.arange(10)
    with torch.inference_mode():
        whole, logits = pair()[::2]
        torch.testing.assert_close(logits.softmax(-1), whole.softmax(-1))
        torch.testing.assert_close(logits.max(-1), whole.max(-1))
        for x in (whole, logits):
            x[..., 10:] = -5.0
        expected, loss = (F.cross_entropy(x.view(-1, VOCABULARY), targets) for x in (whole, logits))
        torch.testing.assert_close(loss, expected)


def test_in_inference_mode(two_ranks):
    two_ranks.run(check_inference)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad.unsqueeze(-1)


def through(name, x):
    if name == "same":
        return F.cross_entropy(Same.apply(x).float().flatten(0, 1), torch.arange(10))
    return Squares.apply(x).sum()


def check_functions(name):
    whole, leaf, logits, part = pair()
    expected, result = through(name, whole), through(name, logits)
    torch.testing.assert_close(result, expected)
    expected.backward()
    result.backward()
    torch.testing.assert_close(part.grad, mine(leaf.grad))


@pytest.mark.parametrize("name", ["same", "squares"])
def test_autograd_functions_of_others(two_ranks, name):
    two_ranks.run(check_functions, name)


def check_checkpoint(reentrant):
    whole, leaf, _, part = pair()

    def head(x):
        return VocabularyLogits.of(x * 3, VOCABULARY, dist.group.WORLD) / 2

    logits = checkpoint(head, part, use_reentrant=reentrant)
    expected, loss = (F.cross_entropy(x.view(-1, VOCABULARY), torch.arange(10)) for x in (whole / 2, logits))
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(part.grad, mine(leaf.grad))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_head(two_ranks, reentrant):
    two_ranks.run(check_checkpoint, reentrant)


def check_refusals():
    _, _, logits, part = pair()
    for call in (logits.retain_grad, lambda: logits.register_hook(print)):
        with pytest.raises(RuntimeError, match=r"would miss the gradient of the loss.*use logits\.part"):
            call()
    with pytest.raises(ValueError, match="do not fit a vocabulary of 26"):
        VocabularyLogits.of(part, 26, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        logits.view(7, VOCABULARY)
    with pytest.raises(IndexError, match="target 13 is out of range for a vocabulary of 13"):
        F.cross_entropy(logits[0], torch.full((5,), 13))


def test_what_cannot_be_is_refused(two_ranks):
    two_ranks.run(check_refusals)


def check_a_scale_that_learns():
    whole, leaf, logits, part = pair()
    scales = [torch.tensor(0.5, requires_grad=True) for _ in range(2)]
    for x, scale in zip((whole, logits), scales, strict=True):
        F.cross_entropy((x * scale).flatten(0, 1), torch.arange(10)).backward()
    torch.testing.assert_close(scales[1].grad, scales[0].grad)
    torch.testing.assert_close(part.grad, mine(leaf.grad))


def test_a_scale_that_learns_has_its_whole_gradient(two_ranks):
    two_ranks.run(check_a_scale_that_learns)


def test_four_ranks(four_ranks):
    four_ranks.run(check_losses, {})
    four_ranks.run(check_function, "softmax", False)
    four_ranks.run(check_function, "shift", True)
