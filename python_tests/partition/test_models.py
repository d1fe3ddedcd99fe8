"""Unedited models of transformers under tensor parallelism against themselves in one process."""

import pytest
import torch
from partition.comparison import gradients_apart
from partition.zoo import MODELS, OTHERS, batch, build

import oases


def trained_beside_itself(name, options, dtype=torch.float32):
    model, parallel = build(name).to(dtype), build(name).to(dtype)
    oases.parallelize(parallel, **options)
    report = parallel.oases_partition
    data = batch(name, dtype=dtype)
    expected, got = model(**data), parallel(**data)
    apart = float((got.logits - expected.logits).abs().max() / expected.logits.abs().max())
    expected.loss.backward()
    got.loss.backward()
    gradients = gradients_apart(model, parallel)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (parallel, model))
    losses = []
    for step in range(10):
        data = batch(name, seed=step, dtype=dtype)
        pair = []
        for each, optimizer in ((model, theirs), (parallel, ours)):
            optimizer.zero_grad()
            loss = each(**data).loss
            loss.backward()
            optimizer.step()
            pair.append(float(loss.detach()))
        losses.append(pair)
    rows = [(row.where, row.collectives, row.hidden) for row in oases.report().stacks]
    return {"logits": apart, "gradients": gradients, "losses": losses, "report": report.json(), "rows": rows}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_promise(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-5)
        lists = result["report"]["layers"]
        assert [each["runs"] for each in lists] == ["across layers"] * len(lists)
        assert all(each["schedule"] == "oases" for each in lists)
        for each in lists:  # the stack's own account of it: collectives were in flight while others computed
            assert any(each["name"] in where and collectives for where, collectives, _ in result["rows"])


@pytest.mark.parametrize("name", OTHERS)
def test_models_nobody_thought_of(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}, torch.float64):
        assert result["logits"] <= 1e-6  # heads and losses of some cast to float32
        assert result["gradients"][0] <= 1e-6, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "options", [{"schedule": "layers"}, {"recompute": "full"}, {"schedule": "sync"}, {"sub_batches": 3}]
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "phi"])
def test_other_ways_to_run(two_ranks, name, options):
    for result in two_ranks.run(trained_beside_itself, name, options):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
