"""Unedited models of transformers under tensor parallelism against themselves in one process, and docs/models.md.

`make test-all` runs a model of each kind of layer, `make test-slow` all of them.
"""

import pytest
import torch
from autotp.zoo import MODELS, OTHERS, batch, build
from autotp.zoo_runs import DOCS, trained_beside_itself

import oases

pytestmark = pytest.mark.usefixtures("shared_traces")

ALIKE = ("qwen3", "mistral", "gpt_neox", "opt")
"""Models whose layers compute nothing that those of llama, gemma3, phi and gpt2 do not."""
SOME = ("gptj", "bloom", "bitnet", "falcon", "albert")


def slow_unless(condition, name):
    return pytest.param(name, marks=[] if condition else pytest.mark.slow)


def lines_of_the_page():
    return (DOCS / "models.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [slow_unless(name not in ALIKE, name) for name in MODELS])
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
        assert set(result["table"]) <= set(lines_of_the_page()), "run python docs/models.py"


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", [slow_unless(name in SOME, name) for name in OTHERS])
def test_models_nobody_thought_of(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}, torch.float64):
        assert result["logits"] <= 1e-6  # heads and losses of some cast to float32
        assert result["gradients"][0] <= 1e-6, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-6)
        assert set(result["table"]) <= set(lines_of_the_page()), "run python docs/models.py"


def test_the_page_has_every_model():
    classes = [kind for kind, _ in (MODELS | OTHERS).values()]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines_of_the_page()]
    assert [cell for cell in cells if cell in classes] == classes


WAYS = ({"schedule": "layers"}, {"recompute": "full"}, {"schedule": "sync"}, {"sub_batches": 3})
ONCE = (("llama", WAYS[0]), ("gpt2", WAYS[1]), ("llama", WAYS[2]), ("phi", WAYS[3]))


@pytest.mark.long
@pytest.mark.few(2)
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


def in_bfloat16(name):
    model = build(name).bfloat16()
    given = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(name).items()}
    expected = model(**given).loss
    oases.parallelize(model, sub_batches=2)
    loss = model(**given).loss
    loss.backward()
    return float(expected), float(loss), [each.runs for each in model.oases_partition.layers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS if each != "llama")]
)
def test_layers_in_bfloat16_overlap_like_those_in_float32(two_ranks, name):
    """Norms cast to float32; the residual beside them does not: both are of one sum."""
    for expected, loss, runs in two_ranks.run(in_bfloat16, name):
        assert runs == ["across layers"] * len(runs)
        assert loss == pytest.approx(expected, rel=0.01)


def plans(name):
    parallel = build(name)
    oases.parallelize(parallel)
    report = parallel.oases_partition
    return report.plan_agrees, report.plan_differs, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entries"),
    [("llama", 9), ("gemma3", 11), ("gpt2", 0), ("qwen3", 11), ("mistral", 9)],
)
def test_transformers_own_plan_agrees(two_ranks, name, entries):
    for agree, differ, text in two_ranks.run(plans, name):
        assert (len(agree), differ) == (entries, {})
        assert (f"transformers' own plan: {entries} of {entries} entries" in text) == (entries > 0)
