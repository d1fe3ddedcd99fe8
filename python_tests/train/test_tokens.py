"""Tokenized corpora: windows of the tokenizer's tokens, kept in one file; trained on; refused where they must be."""

import dataclasses
import json
import multiprocessing
import sys

import numpy as np
import pytest

from oases import TrainConfig, Trainer
from oases.errors import UsageError
from oases.plans.gpt import resized
from oases_train.data import PIECE_CHARACTERS, TextCorpus
from oases_train.plan import Run
from oases_train.tokenizer import Bytes, load_tokenizer
from oases_train.tokens import TokenCorpus, open_corpus

tokenizers = pytest.importorskip("tokenizers")
TEXT = "".join(f"{i} plus {i % 7} is {i + i % 7}, naïve?\n" for i in range(3000))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OASES_CACHE", str(tmp_path / "cache" / "schedules.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer of 301 tokens, which no degree but 7 and 43 divides, and its end of a text."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=301, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return path


def test_tokens_are_those_of_the_tokenizer(folder, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text(TEXT[:5000])
    (tmp_path / "text" / "b").write_bytes(b"one\r\ntwo")
    tokenizer = load_tokenizer(str(folder))
    corpus = open_corpus(str(tmp_path / "text"), tokenizer)
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = plain.token_to_id("<end>")
    expected = [*plain.encode(TEXT[:5000]).ids, end, *plain.encode("one\r\ntwo").ids, end]
    assert corpus.read(0, corpus.num_tokens).tolist() == expected
    assert (tokenizer.size, corpus.num_tokens) == (301, len(expected))
    assert corpus.file.stat().st_size == 2 * len(expected)
    assert isinstance(corpus._tokens, np.memmap)
    tokens, targets = corpus.batch(split="train", step=1, batch=3, sequence=8, seed=0)
    assert tokens.shape == (3, 8)
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert "naïve" in plain.decode(corpus.read(0, 40).tolist())


def test_what_a_file_asks_for_inputs_is_not_done_to_texts(folder, tmp_path):
    """Truncation would lose the rest of each text, and padding put tokens of none between them."""
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [TEXT[:500], "one"]
    expected = [plain.encode(text).ids for text in texts]
    plain.enable_truncation(8)
    plain.enable_padding(length=12)
    plain.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode(texts) == expected


def test_long_text_is_read_in_pieces_that_end_with_a_line(folder, tmp_path):
    text = TEXT * (2 * PIECE_CHARACTERS // len(TEXT) + 1)
    (tmp_path / "long").write_text(text)
    (pieces,) = (list(document) for document in TextCorpus(tmp_path / "long").documents())
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert all(piece.endswith("\n") and len(piece) <= 2 * PIECE_CHARACTERS for piece in pieces)
    (tmp_path / "line").write_text("ä" * PIECE_CHARACTERS)
    (pieces,) = (list(document) for document in TextCorpus(tmp_path / "line").documents())
    assert "".join(pieces) == "ä" * PIECE_CHARACTERS


def tokens_at(path, tokenizer):
    corpus = open_corpus(path, load_tokenizer(tokenizer))
    return str(corpus.file), corpus.file.stat().st_mtime_ns, corpus.num_tokens


@pytest.mark.slow
def test_processes_that_ask_at_once_share_one_file(folder, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(tokens_at, [(str(tmp_path / "text"), str(folder))] * 2)
    assert first == second == tokens_at(str(tmp_path / "text"), str(folder))
    assert not list((tmp_path / "cache" / "tokens").glob("*.part"))
    (tmp_path / "text").write_text(TEXT + "more")
    assert tokens_at(str(tmp_path / "text"), str(folder))[0] != first[0]


class Failing(Bytes):
    fingerprint = "failing"

    def encode(self, texts):
        raise OSError(28, "No space left on device")


def test_what_fails_leaves_no_file(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    with pytest.raises(UsageError, match=r"tokens of data .*No space left on device; set OASES_CACHE to a file in"):
        TokenCorpus(TextCorpus(tmp_path / "text"), Failing())
    assert not [file for file in (tmp_path / "cache" / "tokens").iterdir() if file.suffix != ".lock"]


def losses(config):
    trainer = Trainer(config)
    return [trainer.step() for _ in range(3)], trainer.validate(), tuple(trainer.model.embedding.weight.shape)


def test_a_model_has_the_tokenizers_vocabulary(two_ranks, folder, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    config = TrainConfig(
        hidden=16, layers=1, heads=2, sequence=16, batch=4, steps=3, warmup=1, validation_batches=1,
        data=str(tmp_path / "text"), tokenizer=str(folder / "tokenizer.json"),
    )  # fmt: skip
    alone = losses(config)
    assert alone[2] == (320, 16)
    for curve, validation, shape in two_ranks.run(losses, config):
        assert shape == (160, 16)
        assert curve == pytest.approx(alone[0], rel=1e-4)
        assert validation == pytest.approx(alone[1], rel=1e-4)
    plan = Run.of(config, 1).plan
    small = dataclasses.replace(plan, model=resized(plan.model, vocabulary=300))
    with pytest.raises(UsageError, match=r"a vocabulary of 300 is too small; .*tokenizer.json has 301 tokens"):
        Trainer(config, plan=small)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere", "the path does not exist; give a tokenizer.json"),
        ("./nowhere", "the path does not exist"),
        ("", "tokenizer '' is empty"),
    ],
)
def test_tokenizers_that_are_none_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        load_tokenizer(name)


def test_broken_files_are_refused(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a file of the tokenizers library"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "text").write_bytes(b"a" * 5000 + b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8 before byte 5001: invalid start byte; convert the file"):
        open_corpus(str(tmp_path / "text"), load_tokenizer(str(folder)))


def test_what_is_not_installed_is_named_with_the_command(tmp_path, folder, monkeypatch):
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    for module in ("datasets", "tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    load_tokenizer.cache_clear()
    with pytest.raises(UsageError, match=r"needs the package 'datasets' .*; install it: pip install datasets"):
        open_corpus(str(tmp_path / "saved"), Bytes())
    with pytest.raises(UsageError, match="install it: pip install tokenizers"):
        load_tokenizer(str(folder))
    with pytest.raises(UsageError, match="install it: pip install 'transformers"):
        load_tokenizer("gpt2")


def test_a_saved_dataset_is_a_corpus(tmp_path, folder):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "", "two"], "n": [1, 2, 3]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    corpus = open_corpus(str(tmp_path / "both" / "train"), Bytes())
    assert bytes(corpus.read(0, corpus.num_tokens)) == b"one\ntwo\n"
    corpus = open_corpus(str(tmp_path / "both"), load_tokenizer(str(folder)))
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = plain.token_to_id("<end>")
    assert corpus.read(0, 99).tolist() == [*plain.encode("one").ids, end, *plain.encode("two").ids, end]
    for number, (columns, message) in enumerate(
        (
            ({"body": ["one"], "n": [1]}, r"has no column 'text'; rename one of body, n to it \(rename_column"),
            ({"text": [1, 2]}, "column 'text' holds a int, not text; rename the column with the text to it"),
        )
    ):
        datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / f"{number}"))
        with pytest.raises(UsageError, match=message):
            open_corpus(str(tmp_path / f"{number}"), Bytes())
