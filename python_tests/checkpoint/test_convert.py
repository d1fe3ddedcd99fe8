"""Checkpoints of formats 1 to 3, with a pickled index: refused by name, and converted without running a pickle."""

import dataclasses
import json
import os
import pickle
import shutil

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from oases import TrainConfig, Trainer
from oases.checkpoint.integrity import CHECKSUMS, checksums, write_checksums
from oases.checkpoint.metadata import FORMAT, RECORD, Metadata
from oases.checkpoint.state import state
from oases.cli import main
from oases.errors import UsageError
from oases_train.convert import convert

CONFIG = TrainConfig(
    hidden=16, layers=2, heads=4, sequence=8, batch=16, steps=6, warmup=1, validation_batches=1, learning_rate=1e-2,
)  # fmt: skip


def sign(folder):
    files = [file for file in sorted(folder.iterdir()) if file.name != CHECKSUMS]
    write_checksums(folder, checksums(files))


def saved_as_before(corpus, folder, version):
    """Two steps, saved as formats 1 to 3 did; returns the losses of two more."""
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus))
    losses = [trainer.step() for _ in range(2)]
    tensors = state(trainer.model, trainer.optimizer, trainer.group)
    if version < 3:
        tensors = {name: each for name, each in tensors.items() if not name.endswith(".step")}
    dcp.save(tensors, checkpoint_id=folder, no_dist=trainer.group is None)
    record = dataclasses.asdict(trainer.checkpoint_metadata()) | {"format": version, "losses": [2.5]}
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / RECORD).write_text(json.dumps(record))
        sign(folder)
    losses = [trainer.step() for _ in range(2)]
    trainer.close()
    return losses


def two_more(corpus, folder):
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus, resume=str(folder)))
    losses = [trainer.step() for _ in range(2)]
    trainer.close()
    return losses


@pytest.mark.parametrize("version", [2, 3])
def test_a_converted_checkpoint_goes_on_equal_to_the_bit(two_ranks, corpus, tmp_path, capsys, version):
    old, new = tmp_path / "old" / "step-000002", tmp_path / "new" / "step-000002"
    expected = two_ranks.run(saved_as_before, corpus, old, version)
    with pytest.raises(UsageError, match=rf"format {version}, .* run `oases export --convert .*step-000002 NEW/step"):
        two_more(corpus, old)
    with pytest.raises(UsageError, match=f"is of format {version}"):  # not skipped: steps would be lost
        two_more(corpus, old.parent)
    main(["export", "--convert", str(old.parent), str(new)])
    assert "tensors in" in capsys.readouterr().out
    assert Metadata.read(new).format == FORMAT
    assert two_ranks.run(two_more, corpus, new) == expected
    assert two_more(corpus, new) == pytest.approx(expected[0], rel=1e-4)
    with pytest.raises(UsageError, match=f"is of format {FORMAT} already; use it as it is"):
        convert(new, tmp_path / "again")
    convert(old, old)  # in its place
    assert two_ranks.run(two_more, corpus, old) == expected


class Command:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.fixture(scope="module")
def old(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("old") / "step-000002"
    saved_as_before(corpus, folder, 3)
    return folder


def test_nothing_runs_and_nothing_else_is_read(old, tmp_path):
    folder = shutil.copytree(old, tmp_path / "old")
    index = pickle.loads((folder / ".metadata").read_bytes())
    place = next(iter(index.storage_data.values()))
    place.relative_path = "../elsewhere"
    for content, said in (
        (Command(tmp_path / "hacked"), r"refers to posix\.system"),
        (index, "is not the name of a file in the checkpoint"),
        (7, "cannot be read"),
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        sign(folder)
        with pytest.raises(UsageError, match=said):
            convert(folder, tmp_path / "new")
    (folder / ".metadata").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="is not as it was written"):
        convert(folder, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} <= {"old", ".new.part"}


def test_what_is_in_the_way_stays(old, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        convert(old, tmp_path)
