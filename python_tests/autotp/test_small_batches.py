"""Unedited models with a batch of one, cut along the sequence, beside the same models in one process."""

import pytest
import torch
from autotp.comparison import CLOSE, gradients_apart
from autotp.test_token_pieces import built, loss_of
from autotp.zoo import batch

import oases


def one_sample(name, length=11):
    return {key: value[:1] for key, value in batch(name, length=length, dtype=torch.float64).items()}


def packed(length=11):
    """Documents of 4 and 7 tokens in one sample: a mask of blocks, and positions that begin anew."""
    ids = torch.arange(length).ge(4).long()
    mask = (ids[:, None] == ids) & torch.ones(length, length, dtype=torch.bool).tril()
    positions = torch.cat([torch.arange(4), torch.arange(length - 4)])
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    return {"attention_mask": bias[None, None], "position_ids": positions[None]}


def schedules_of(model):
    """Schedules of the calls from now on."""
    found = []
    for each in model.oases_partition.layers:
        stack = each.runner.stack

        def run(x, inputs, stack=stack):
            y = stack(x, inputs)
            found.append(stack.chooser.schedule_for(x, inputs, stack.blocks))
            return y

        each.runner.run = run
    return found


def gradients(name, options, more=None, changes=None):
    model, parallel = (built(name, changes) for _ in range(2))
    oases.parallelize(parallel, **options)
    data = {**one_sample(name), **(more or {})}
    schedules = schedules_of(parallel)
    expected, got = loss_of(model, data), loss_of(parallel, data)
    expected.backward()
    got.backward()
    kinds = [(each.along, sorted(each.joint), each.extent) for each in schedules]
    return abs(float((got / expected).detach()) - 1), gradients_apart(model, parallel), kinds


def check(results, joint=(), extent="none", close=CLOSE):
    for loss, (worst, name), kinds in results:
        assert kinds == [("sequence", list(joint), extent)]
        assert loss <= close
        assert worst <= close, name


def bidirectional(length=11):
    """A mask in which the first four tokens see each other, as a prefix does."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:4, :4] = True
    return {"attention_mask": torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)[None, None]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "joint"),
    [
        ("llama", {"sub_batches": 3}, ()),
        ("gpt2", {"recompute": "full"}, ()),
        ("opt", {"sub_batches": 3, "recompute": "full"}, ()),  # its MLP's sum is of [batch * sequence, hidden]
        pytest.param("qwen3", {}, (), marks=pytest.mark.slow),  # few key heads
        pytest.param("mistral", {}, (), marks=pytest.mark.slow),  # a window in the mask
        pytest.param("gemma2", {}, (0, 2), marks=pytest.mark.slow),  # attention of matmuls
    ],
)
def test_gradients_are_those_of_one_process(two_ranks, name, options, joint):
    extent = options.get("recompute", "none")
    close = CLOSE if name in ("llama", "gpt2", "opt") else 1e-6  # norms that compute in float32
    check(two_ranks.run(gradients, name, {"schedule": "oases", **options}), joint, extent, close)


@pytest.mark.long
@pytest.mark.parametrize("sub_batches", [2, 3])
def test_packed_documents(two_ranks, sub_batches):
    check(two_ranks.run(gradients, "llama", {"schedule": "oases", "sub_batches": sub_batches}, packed()))


@pytest.mark.long
def test_a_mask_that_shows_later_tokens(two_ranks):
    check(two_ranks.run(gradients, "llama", {"schedule": "oases"}, bidirectional()), joint=(0, 2))


@pytest.mark.long
def test_four_ranks(four_ranks):
    check(four_ranks.run(gradients, "llama", {"schedule": "oases"}))
