"""Unedited models of transformers under tensor parallelism against themselves in one process, and docs/models.md.

`make test` runs some of the models that nothing was written for, `make test-slow` all of them.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from autotp.comparison import gradients_apart
from autotp.zoo import MODELS, OTHERS, batch, build

import oases

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(report):
    """Rows of a model in docs/models.md."""
    spec = importlib.util.spec_from_file_location("tables_of_models", DOCS / "models.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables.rows(report)


def lines_of_the_page():
    return (DOCS / "models.md").read_text(encoding="utf-8").splitlines()


def trained_beside_itself(name, options, dtype=torch.float32, steps=4):
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
    for step in range(steps):
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
    found = {"logits": apart, "gradients": gradients, "losses": losses, "report": report.json(), "rows": rows}
    return found | {"table": rows_of(report) if not options else []}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_promise(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}, torch.float32, 10):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-5)
        lists = result["report"]["layers"]
        assert [each["runs"] for each in lists] == ["across layers"] * len(lists)
        assert all(each["schedule"] == "oases" for each in lists)
        for each in lists:  # the stack's own account of it: collectives were in flight while others computed
            assert any(each["name"] in where and collectives for where, collectives, _ in result["rows"])
        assert set(result["table"]) <= set(lines_of_the_page()), "run python docs/models.py"


SOME = ("qwen2", "gptj", "bloom", "falcon", "albert")


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
)
def test_models_nobody_thought_of(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}, torch.float64):
        assert result["logits"] <= 1e-6  # heads and losses of some cast to float32
        assert result["gradients"][0] <= 1e-6, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-6)


def documented(name):
    return rows_of(oases.parallelize(build(name)).oases_partition)


@pytest.mark.parametrize("name", ["phi3", "falcon", "albert"])
def test_their_rows_stand_on_the_page(two_ranks, name):
    for rows in two_ranks.run(documented, name):
        assert set(rows) <= set(lines_of_the_page()), "run python docs/models.py"


def test_the_page_has_every_model():
    classes = [kind for kind, _ in (MODELS | OTHERS).values()]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines_of_the_page()]
    assert [cell for cell in cells if cell in classes] == classes


WAYS = ({"schedule": "layers"}, {"recompute": "full"}, {"schedule": "sync"}, {"sub_batches": 3})
ONCE = (("t5", WAYS[0]), ("gpt2", WAYS[1]), ("llama", WAYS[2]), ("phi", WAYS[3]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, way, marks=[] if (name, way) in ONCE else pytest.mark.slow)
        for name in ("llama", "gpt2", "t5", "phi")
        for way in WAYS
    ],
)
def test_other_ways_to_run(two_ranks, name, options):
    for result in two_ranks.run(trained_beside_itself, name, options):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
