import os

import numpy as np
import pytest
import torch

from oases.checkpoint.metadata import Metadata
from oases.errors import UsageError
from oases_train.data import TextCorpus
from oases_train.resume import differences


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_files_are_joined_in_order_and_binaries_skipped(tmp_path):
    write(tmp_path, b=b"second", a=b"first", c__d="dritte Ä".encode(), e=b"bin\0ary", f=b"\xff\xfe latin")
    corpus = TextCorpus(tmp_path)
    assert bytes(corpus.read(0, corpus.num_tokens)) == b"firstseconddritte \xc3\x84"
    assert bytes(corpus.read(3, 4)) == b"stse"
    assert [file.name for file in corpus.files] == ["a", "b", "d"]


def test_a_character_cut_by_the_probe_is_still_text(tmp_path):
    write(tmp_path, a=b"x" * 4095 + "Ä".encode() + b"y")
    assert len(TextCorpus(tmp_path / "a").files) == 1


def test_batches_are_deterministic_and_targets_are_one_byte_ahead(tmp_path):
    write(tmp_path, a=bytes(range(32, 127)) * 300)
    arguments = {"split": "train", "step": 3, "batch": 4, "sequence": 16, "seed": 1}
    tokens, targets = TextCorpus(tmp_path).batch(**arguments)
    again, _ = TextCorpus(tmp_path).batch(**arguments)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens, again)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for change in ({"step": 2}, {"step": 4}, {"seed": 2}):
        other, _ = TextCorpus(tmp_path).batch(**arguments | change)
        assert not torch.equal(tokens, other)


@pytest.mark.parametrize("size", [3_000, 400_000, 3_000_000])
def test_no_training_window_touches_a_held_out_byte(tmp_path, size):
    # Every byte position is recoverable: the corpus is a counter in base 95, five digits each.
    numbers = np.arange(size // 5)
    digits = np.stack([numbers // 95**k % 95 for k in range(4)], 1) + 32
    text = np.concatenate([digits, np.full((len(numbers), 1), ord("\n"))], 1).astype(np.uint8)
    write(tmp_path, a=text.tobytes())
    corpus = TextCorpus(tmp_path)
    seen = {"train": set(), "validation": set()}
    for split, places in seen.items():
        for step in range(60):
            tokens, _ = corpus.batch(split=split, step=step, batch=16, sequence=20, seed=0)
            for row in tokens.numpy():
                start = int(np.argmax(row == ord("\n"))) + 1
                if start + 4 < len(row):
                    number = sum((int(row[start + k]) - 32) * 95**k for k in range(4))
                    places.add(number)
    assert len(seen["train"]) > len(seen["validation"]) > 5
    assert not seen["train"] & seen["validation"]


def test_the_default_is_python_source():
    corpus = TextCorpus()
    assert corpus.num_tokens > 1_000_000
    assert b"def " in bytes(corpus.read(0, 100_000))


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nowhere", "does not exist"),
        ({}, ".", r"holds no text file \(it is empty\)"),
        ({"a": b""}, "a", "is empty"),
        ({"a": b"\0\1\2"}, "a", "is not UTF-8 text"),
        ({"a": b"\0\1\2", "b": b""}, ".", r"holds no text file \(1 not UTF-8 text, 1 empty\)"),
    ],
)
def test_bad_paths_are_named(tmp_path, files, path, message):
    write(tmp_path, **files)
    with pytest.raises(UsageError, match=message) as caught:
        TextCorpus(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)


def test_unreadable_file(tmp_path, monkeypatch):
    write(tmp_path, a=b"text")
    (tmp_path / "a").chmod(0)
    if os.access(tmp_path / "a", os.R_OK):  # root reads everything: refuse in its stead

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied", str(tmp_path / "a"))

        monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        TextCorpus(tmp_path / "a")


def test_too_little_text_for_a_window(tmp_path):
    write(tmp_path, a=b"short")
    with pytest.raises(UsageError, match=r"has 5 bytes, too few for a train window of 17"):
        TextCorpus(tmp_path).batch(split="train", step=0, batch=1, sequence=16, seed=0)


def test_data_of_another_kind_are_told():
    record = Metadata(step=1, updates=1, sizes={}, data={"seed": 0, "tokens": 9, "tokenizer": "t", "next_step": 1})
    assert differences(record, {"seed": 0, "tokens": 9, "tokenizer": "t"}, "", 0.0) == []
    found = differences(record, {"seed": 0, "bytes": 5}, "", 0.0)[0]
    assert found.endswith(
        ": bytes none there and 5 here, tokens 9 there and none here, tokenizer t there and none here"
    )
