"""Causal attention in sub-batches of tokens, beside the whole sequence under plain autograd."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import oases
from oases import OverlappedStack
from oases.autotp.runner import is_causal_mask
from oases.core.schedule import along_sequence
from oases.models.gpt import GPTConfig, transformer_blocks

WIDTH, TOKENS, EXACT = 8, 7, {"rtol": 1e-12, "atol": 1e-12}


class TwoAttentions(nn.Module):
    """Two attentions whose four heads share two of keys, under a mask if one is given, and a frozen weight."""

    causal = True

    def __init__(self, mask=None):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(3))
        self.mask = mask
        self.kv.weight.requires_grad_(mask is None)

    def partial(self, x):
        for _ in range(2):
            q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
            k, v = self.kv(x).unflatten(-1, (2, 2, -1)).movedim(1, 3).unbind(2)
            x = oases.causal_attention(q, k, v, self.mask, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.out(x)

    def combine(self, x, y):
        return x + y


def trained(blocks, schedule, **options):
    stack = OverlappedStack(blocks, schedule=schedule, **options)
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    for parameter in stack.parameters():
        parameter.grad = None
    y = stack(x)
    y.square().sum().backward()
    schedule = stack.chooser.schedule_for(x, (), stack.blocks)
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters() if p.requires_grad)], schedule


def documents():
    """Documents of 3 and 4 tokens, and a fall of scores with the distance."""
    ids, at = torch.arange(TOKENS).ge(3).long(), torch.arange(TOKENS)
    allowed = (ids[:, None] == ids) & (at[:, None] >= at)
    return (at[None] - at[:, None]).double().masked_fill(~allowed, -torch.inf)[None, None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"sub_batches": 3}, {"recompute": "full"}, {"sub_batches": 3, "recompute": 1}]
)
def test_it_is_that_of_the_whole_sequence(options, masked):
    torch.manual_seed(1)
    blocks = [TwoAttentions(documents() if masked else None) for _ in range(4)]
    expected, whole = trained(blocks, "sync")
    got, cut = trained(blocks, "oases", **options)
    assert (whole.along, cut.along, cut.joint) == ("batch", "sequence", frozenset())
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, **EXACT)


def check_gpt(options):
    torch.manual_seed(5)  # other tests leave ranks' generators apart
    sizes = GPTConfig(hidden=32, heads=4, layers=2, sequence=24)
    x, found = torch.randn(1, 24, 32, dtype=torch.float64), []
    for each in ({"schedule": "sync"}, {"schedule": "oases", **options}):
        stack = OverlappedStack([block.double() for block in transformer_blocks(sizes, dist.group.WORLD)], **each)
        with torch.no_grad():
            inferred = stack(x)
        y = stack(x)
        assert torch.equal(y.detach(), inferred)
        y.square().sum().backward()
        found.append([y.detach(), *(parameter.grad for parameter in stack.parameters())])
        kinds = stack.chooser.schedule_for(x, (), stack.blocks)
    assert (kinds.along, kinds.joint) == ("sequence", frozenset())
    for mine, its in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, its, **EXACT)


@pytest.mark.parametrize("options", [{"sub_batches": 4}, {"recompute": "full"}])
def test_gpt_on_two_ranks(two_ranks, options):
    two_ranks.run(check_gpt, options)


class Wide(nn.Module):
    """A block that relates no tokens."""

    token_wise = True

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def partial(self, x):
        return self.down(self.up(x).relu())

    def combine(self, x, y):
        return x + y


@pytest.mark.long
def test_compiled_blocks_get_all_tokens():
    """A compiled block cannot read what other sub-batches have kept."""
    blocks = [TwoAttentions(), Wide(), TwoAttentions()]
    expected, _ = trained(blocks, "sync")
    compiled = [torch.compile(block, backend="eager") for block in blocks]
    got, cut = trained(compiled, "oases")
    assert (cut.along, cut.joint) == ("sequence", {0, 2})
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, **EXACT)


def test_a_schedule_that_runs_later_tokens_first():
    blocks = [TwoAttentions() for _ in range(2)]
    good = along_sequence(2, 2, ())
    swapped = {op: op._replace(sub_batch=1 - op.sub_batch) for op in good}
    forward = replace(good, ops=tuple(op if op.in_backward else swapped[op] for op in good))
    backward = replace(good, ops=tuple(swapped[op] if op.in_backward else op for op in good))
    trained(blocks, good)
    with pytest.raises(RuntimeError, match="sub-batch 1 of block 0 needs keys of sub-batch 0"):
        trained(blocks, forward)
    with pytest.raises(RuntimeError, match="sub-batch 0 of block 1 needs gradients of keys of sub-batch 1"):
        trained(blocks, backward)


def test_what_cannot_be_cut():
    blocks = [TwoAttentions(), TwoAttentions()]
    for block in blocks:
        block.partial = lambda x: oases.causal_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
    stack = OverlappedStack(blocks, schedule="oases")
    with pytest.raises(ValueError, match=r"dropout_p=0.5 and is_causal=True cannot be cut along"):
        stack(torch.randn(1, TOKENS, WIDTH))


def test_without_a_stack_it_is_that_of_torch():
    q, k, v = torch.randn(3, 2, 4, TOKENS, WIDTH)
    assert torch.equal(oases.causal_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    mask = documents().float()
    assert torch.equal(oases.causal_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


def test_masks():
    mask = documents()
    assert is_causal_mask(mask)
    assert is_causal_mask(mask == 0)
    assert is_causal_mask(mask.nan_to_num(neginf=torch.finfo(torch.float16).min))
    assert not is_causal_mask(torch.full((3, 3), -torch.inf)), "no row may exclude all tokens"
    assert not is_causal_mask(mask[..., :4, :])
    assert not is_causal_mask(mask[0, 0, 0])
    mask[0, 0, 2, 5] = -100.0
    assert not is_causal_mask(mask)
