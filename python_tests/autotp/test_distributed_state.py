"""torch.distributed.checkpoint of parallelized models: shards are saved as shards, for any degree, or refused."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from autotp.zoo import batch, build
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import oases
from oases.distributed.state_shards import StateShard
from oases.errors import UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")

NAMES = ("gpt2", "llama")
"""Queries, keys and values in one tensor and a vocabulary that two do not divide; and a plain one."""


def started(name, seed, group=None):
    model = oases.parallelize(build(name, seed), mesh=group)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, data, number):
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_and_loaded(name, folder, options, at_once=True):
    options = StateDictOptions(**options)
    data = batch(name)
    model, optimizer = started(name, 0)
    steps(model, optimizer, data, 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    sharded = [key for key, value in state["model"].items() if isinstance(value, StateShard)]
    if at_once:
        dcp.save(state, checkpoint_id=folder)
        expected = steps(model, optimizer, data, 2)
    else:
        written = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        expected = steps(model, optimizer, data, 2)
        written.result()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = []
    for group in (None, alone):
        model, optimizer = started(name, 1, group)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        assert all(type(value) is torch.Tensor for each in optimizer.state.values() for value in each.values())
        found.append(steps(model, optimizer, data, 2))
    return expected, found, sharded


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {}), ("llama", {"cpu_offload": True}), ("llama", {"flatten_optimizer_state_dict": True})],
)
def test_a_run_goes_on_at_the_same_and_at_another_degree(two_ranks, tmp_path, name, options):
    for expected, (same, alone), sharded in two_ranks.run(saved_and_loaded, name, str(tmp_path / "saved"), options):
        assert same == expected
        assert alone == pytest.approx(expected, rel=1e-4)
        assert any("embed" in key or "wte" in key for key in sharded)


@pytest.mark.long
def test_a_run_that_saves_while_it_trains(two_ranks, tmp_path):
    for expected, (same, alone), _ in two_ranks.run(saved_and_loaded, "llama", str(tmp_path / "saved"), {}, False):
        assert same == expected
        assert alone == pytest.approx(expected, rel=1e-4)


def check_refusals(folder):
    model, optimizer = started("llama", 0)
    message = r"this rank's shard of a tensor .*get_state_dict\(model, optimizer\)"
    with pytest.raises(UsageError, match=message):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(UsageError, match=message):
        dcp.save({"model": model}, checkpoint_id=folder)
    for state in (model.state_dict(), model):
        with pytest.raises(UsageError, match=message):
            dcp.async_save({"model": state}, checkpoint_id=folder)
    with pytest.raises(UsageError, match=message):
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    with pytest.raises(UsageError, match=r"full_state_dict=True is not available .*oases\.full_state_dict"):
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    state, _ = get_state_dict(model, optimizer)
    shard = state["model.layers.0.mlp.up_proj.weight"]
    assert shard.shape == (64, 32)
    with pytest.raises(UsageError, match=r"aten\.add.*oases\.full_state_dict"):
        shard + 1
    with pytest.raises(UsageError, match=r"torch\.save model\.state_dict\(\) on every rank"):
        torch.save(state, f"{folder}.pt")


@pytest.mark.long
def test_shards_are_refused_where_they_would_pass_for_replicas(two_ranks, tmp_path):
    two_ranks.run(check_refusals, str(tmp_path / "saved"))
