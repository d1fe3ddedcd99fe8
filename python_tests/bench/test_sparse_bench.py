"""The benchmark of sparse gradients: words, workloads, every mode on real ranks, the command line."""

import json

import numpy as np
import pytest
import torch

from oases import cli
from oases.errors import UsageError
from oases_bench.harness import Ranks
from oases_bench.sparse import SparseBenchConfig, run_sparse_bench
from oases_bench.sparse_modes import BASELINES, OURS
from oases_bench.sparse_workloads import (
    ClickWorkload,
    WordCorpus,
    WordLSTM,
    log_chances,
    log_uniform,
    write_words,
)

SIZES = {"width": 8, "batch": 2, "sequence": 5, "negatives": 9, "vocabulary": 1100, "tables": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + c for a in letters for b in letters for c in "aeiou"][:1200]
    picks = np.random.default_rng(0).zipf(1.2, 30_000) % 1200
    path.write_text(" ".join([*words, *(words[pick] for pick in picks)]))
    return path


def test_words_are_numbered_by_frequency(tmp_path):
    (tmp_path / "text.txt").write_text("One two TWO three3 two one_four\n" * 3)
    said = write_words(str(tmp_path / "text.txt"), 4, tmp_path / "words.npy")
    corpus = WordCorpus(tmp_path / "words.npy")
    assert "21 words, 4 of them different" in said
    assert corpus.read(0, 7).tolist()[:3] == [1, 0, 0]
    with pytest.raises(UsageError, match="has 4 different words, fewer than --vocabulary 5"):
        write_words(str(tmp_path / "text.txt"), 5, tmp_path / "words.npy")


@pytest.mark.long
@pytest.mark.parametrize("sparse", [False, True])
def test_the_sampled_softmax_learns_the_chances_of_words(sparse):
    """One context, with words drawn unlike the negatives: the whole softmax then gives their chances."""
    model = WordLSTM(20, 16, sparse=sparse)
    chances = torch.linspace(1, 5, 20).softmax(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        targets = torch.multinomial(chances, 256, replacement=True, generator=generator)[:, None]
        optimizer.zero_grad()
        model(torch.zeros(256, 1, dtype=torch.int64), targets, log_uniform(8, 20, generator)).backward()
        assert model.softmax.weight.grad.is_sparse == sparse
        optimizer.step()
    hidden = model.lstm(model.embedding(torch.zeros(1, 1, dtype=torch.int64)))[0][0, 0]
    found = (model.softmax.weight @ hidden).softmax(0).detach()
    assert float((found - chances).abs().sum()) < 0.25


def test_a_step_touches_the_rows_of_its_words_alone():
    model = WordLSTM(50, 16, sparse=False)
    inputs, targets = torch.randint(50, (2, 2, 3))
    model(inputs, targets, torch.tensor([3, 7])).backward()
    for table, words in (
        (model.embedding, inputs),
        (model.softmax, torch.cat([targets.flatten(), torch.tensor([3, 7])])),
    ):
        assert set(table.weight.grad.any(1).nonzero().flatten().tolist()) <= set(words.flatten().tolist())


def test_chances_are_zipfs():
    words = torch.arange(200)
    chances = log_chances(words, 200).exp()
    assert float(chances.sum()) == pytest.approx(1, abs=1e-5)
    drawn = torch.bincount(log_uniform(100_000, 200, torch.Generator().manual_seed(0)), minlength=200) / 100_000
    assert float((drawn - chances).abs().max()) < 0.01


def test_clicks_are_the_same_wherever_they_are_made():
    config = SparseBenchConfig(workload="dlrm", **SIZES)
    first, second = (ClickWorkload(config).batch(3, 4, 1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = ClickWorkload(config).model(0, True)(*first)
    assert loss.shape == ()


def run(workload, data, stored):
    config = SparseBenchConfig(
        workload=workload,
        data=data,
        stored=stored,
        modes=",".join([*OURS, *BASELINES]),
        steps=2,
        train_steps=6,
        **SIZES,
    )
    return run_sparse_bench(config, Ranks(), False)


@pytest.mark.long
@pytest.mark.parametrize(("workload", "stored"), [("lstm", "sparse"), ("dlrm", "dense")])
def test_every_mode_runs(two_ranks_of_gloo, text, workload, stored):
    result = two_ranks_of_gloo.run(run, workload, str(text), stored)[0]
    modes = result["modes"]
    assert set(modes) == {*OURS, *BASELINES}
    for name in ("dense", "packed", "gather", "ddp_sparse"):
        assert modes[name]["validation_loss"] == pytest.approx(modes["ddp"]["validation_loss"], rel=1e-2)
    tables = {name: row["table_bytes_per_step"] for name, row in modes.items()}
    assert tables["packed"] < 0.19 * tables["ddp"]
    assert tables["sketch"] < 0.5 * tables["packed"]
    assert tables["fp16"] == tables["ddp"] / 2
    assert tables["dense"] == tables["ddp"]
    for row in modes.values():
        assert row["bytes_per_step"] >= row["table_bytes_per_step"] > 0
        assert row["step_seconds"] > 0
        assert "loopback_bytes_per_step" not in row


@pytest.mark.long
def test_the_command(ranks_at_hand, text, tmp_path, capsys):
    path = tmp_path / "sparse.json"
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    given = ["--modes", "ddp,packed", "--data", str(text), "--steps", "1", "--train-steps", "2", "--seeds", "2"]
    cli.main(["bench", "sparse", *sizes, *given, "--kernels", "--json", str(path)])
    result = json.loads(path.read_text())
    assert set(result["modes"]["packed"]) >= {"bytes_per_step", "step_seconds", "validation_loss", "accounts"}
    assert len(result["modes"]["packed"]["validation_losses"]) == 2
    assert result["nonzeros_per_second"]["packed"] > 0
    assert "packed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modes", "ddp,zip"], "--modes has 'zip'; give some of dense,packed"),
        (["--rows", "2"], "argument --rows: invalid choice: 2 (choose from 1, 3, 5)"),
        (["--cells", "0"], "--cells must be above 0, got 0.0"),
        (["--stored", "csr"], "argument --stored: invalid choice: 'csr'"),
        (["--vocabulary", "0"], "--vocabulary must be at least 1, got 0"),
        (["--tp", "1"], "--tp 1 averages nothing"),
    ],
)
def test_bad_options_are_named(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "sparse", *given])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
