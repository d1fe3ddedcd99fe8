"""Random streams: which numbers differ and which are equal, by call, op and rank."""

import itertools

import torch
import torch.nn.functional as F

from oases.core.blocks.randomness import Extent, Randomness
from oases.layers.dropout import masked

CPU = torch.device("cpu")


def two_dropouts(draw, *, seed=5, call=1, rank=0, method="partial", block=0, sub_batch=0, again=False):
    """Two masks [2, 64] that one op draws with `draw`."""
    randomness = Randomness(seed, call, rank, CPU, {}, size=2)
    run = randomness.again if again else randomness.run
    masks = run(method, block, sub_batch, lambda s: Extent(2 * s, 2), lambda: torch.stack([draw(), draw()]))
    return list(masks)


def plain():
    """Draw from torch's default generator."""
    return F.dropout(torch.ones(2, 64))


def by_sample():
    """Draw the part of the whole batch's mask."""
    return masked(torch.ones(2, 64), 0.5, "whole")


OTHERS = ({"seed": 6}, {"call": 2}, {"method": "combine"}, {"block": 1}, {"sub_batch": 1})


def test_every_dropout_has_a_mask_of_its_own():
    for draw in (plain, by_sample):
        masks = [mask for other in ({}, *OTHERS) for mask in two_dropouts(draw, **other)]
        for one, other in itertools.combinations(masks, 2):
            assert not torch.equal(one, other), draw.__name__
        for mask in masks:
            assert not torch.equal(mask[0], mask[1]), f"{draw.__name__}: equal samples"


def test_recomputation_draws_the_same_masks():
    for draw in (plain, by_sample):
        for other in ({}, *OTHERS):
            first, again = two_dropouts(draw, **other), two_dropouts(draw, **other, again=True)
            assert torch.equal(torch.stack(first), torch.stack(again)), draw.__name__


def test_ranks_agree_after_the_all_reduce_alone():
    def masks(rank, method):
        return torch.stack(two_dropouts(plain, rank=rank, method=method))

    assert torch.equal(masks(0, "combine"), masks(1, "combine"))
    assert not torch.equal(masks(0, "partial"), masks(1, "partial"))
