"""Checkpoints made to read other files, to wait for ever or to load what they do not hold, with right checksums."""

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from oases import TrainConfig, Trainer
from oases.checkpoint import retention
from oases.checkpoint.files import export
from oases.checkpoint.integrity import CHECKSUMS, checksums, write_checksums
from oases.checkpoint.metadata import RECORD
from oases.checkpoint.writer import SaveError
from oases.cli import main
from oases.errors import UsageError

CONFIG = TrainConfig(
    hidden=16, layers=1, heads=2, sequence=8, batch=4, steps=4, warmup=1, validation_batches=1,
)  # fmt: skip
SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    trained(corpus, checkpoint=str(folder), checkpoint_every=2)
    return folder


@pytest.fixture
def newest(saved, tmp_path):
    """The newer checkpoint of a copy of the folder."""
    return shutil.copytree(saved, tmp_path / "copy") / "step-000004"


def trained(corpus, **changes):
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus, **changes))
    return trainer.steps_done, trainer.train()["losses"]


def sign(folder):
    """Write checksums of the files as they are."""
    names = [file.name for file in folder.iterdir() if file.name != CHECKSUMS]
    write_checksums(folder, checksums([folder / name for name in sorted(names)]))


def lists_another_file(folder):
    write_checksums(folder, checksums([folder / SHARD, folder / RECORD]) | {"../other": "0"})


def without_a_checksum_of_the_shard(folder):
    write_checksums(folder, checksums([folder / RECORD]))


def with_a_pipe(name):
    def make(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def with_a_link(folder):
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def with_a_file(name, data):
    def make(folder):
        (folder / name).write_bytes(data)
        sign(folder)

    return make


def with_a_field(**fields):
    def make(folder):
        record = json.loads((folder / RECORD).read_text())
        (folder / RECORD).write_text(json.dumps(record | fields))
        sign(folder)

    return make


def with_offsets(change):
    """change: of the text that says where parts belong."""

    def make(folder):
        with safe_open(folder / SHARD, "pt") as file:
            said, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        said["DCP_SHARDING_INFO"] = change(said["DCP_SHARDING_INFO"])
        save_file(tensors, folder / SHARD, metadata=said)
        sign(folder)

    return make


HOSTILE = {
    "offsets": (with_offsets(lambda text: text.replace("[0", "[1", 1)), "do not cover it once"),
    "deep offsets": (with_offsets(lambda text: "[" * 100_000), "maximum recursion depth"),
    "no offsets": (with_offsets(lambda text: '{"a": 1}'), "tensors cannot be read"),
    "header": (with_a_file(SHARD, b"\xff" * 8), "tensors cannot be read"),
    "format": (with_a_field(format="4"), "format must be a whole number, got '4'"),
    "step": (with_a_field(step=True), "step is True"),
    "learning rate": (with_a_field(learning_rate="x"), "learning_rate must be a number, got 'x'"),
    "large learning rate": (with_a_field(learning_rate=10**400), "learning_rate is a number of 401 digits"),
    "step of another": (with_a_field(step=400), "step is 400 in step-000004"),
    "config": (with_a_field(config=[1]), "config must be"),
    "optimizer": (with_a_field(optimizer={"class": 5, "groups": "x"}), "optimizer is"),
    "checksum of another file": (lists_another_file, r"lists .\.\./other., which is no file"),
    "pipe for a shard": (with_a_pipe(SHARD), "is not a regular file"),
    "pipe for checksums": (with_a_pipe(CHECKSUMS), "is not a regular file"),
    "link": (with_a_link, "cannot be read"),
    "deep record": (with_a_file(RECORD, b"[" * 100_000), RECORD),
    "list for a record": (with_a_file(RECORD, b"[]"), RECORD),
    "no checksum of the shard": (without_a_checksum_of_the_shard, f"does not list {SHARD}"),
}


@pytest.mark.long
@pytest.mark.few(10)
@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_and_skipped(corpus, newest, tmp_path, capsys, name):
    attack, said = HOSTILE[name]
    attack(newest)
    with pytest.raises(UsageError, match=r"is corrupt") as refused:
        trained(corpus, resume=str(newest))
    assert str(newest) in str(refused.value)
    file = tmp_path / "model.safetensors"
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(newest), str(file)])
    assert "is corrupt" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["copy"]
    with pytest.warns(UserWarning, match=said):
        steps, _ = trained(corpus, resume="auto", checkpoint=str(newest.parent))
    assert steps == 2


def test_links_among_old_checkpoints_are_removed_and_not_followed(corpus, newest, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(newest, elsewhere)
    folder = newest.parent
    for name in (".step-000001.old", ".step-000009.part", "step-000001"):
        (folder / name).symlink_to(elsewhere)
    steps, _ = trained(corpus, resume="auto", checkpoint=str(folder), steps=6, checkpoint_every=2, keep=2)
    assert steps == 4
    assert sorted(os.listdir(folder)) == ["step-000004", "step-000006"]
    assert len(os.listdir(elsewhere)) == len(os.listdir(newest))


def test_what_cannot_be_tidied_is_told(corpus, newest, monkeypatch):
    left = newest.parent / ".step-000009.part"
    left.mkdir()

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(retention.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"step-000009\.part' cannot be removed: Permission denied"):
        assert trained(corpus, resume="auto", checkpoint=str(newest.parent))[0] == 4


@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_that_cannot_be_replaced_stays(corpus, tmp_path, monkeypatch, killed):
    """Also one that has not its name: an earlier run was killed between the two renames."""
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus))
    path, old, rename = tmp_path / "best", tmp_path / ".best.old", Path.rename
    trainer.save(str(path))
    before = (path / "checksums.json").read_bytes()

    def failing(source, target):
        if source.name == ".best.part":
            raise OSError(errno.EIO, "Input/output error")
        return rename(source, target)

    if killed:
        path.rename(old)
    monkeypatch.setattr(Path, "rename", failing)
    for _ in range(2):
        with pytest.raises(SaveError, match="Input/output error"):
            trainer.save(str(path))
        assert (path / "checksums.json").read_bytes() == before
    monkeypatch.undo()
    trainer.save(str(path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best"]


def test_an_interrupted_export_leaves_nothing(newest, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(newest, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["copy"]
