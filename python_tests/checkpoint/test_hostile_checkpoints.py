"""Checkpoints made to run code, to read other files, to wait for ever or to fill the memory, with right checksums."""

import dataclasses
import errno
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from oases import TrainConfig, Trainer
from oases.checkpoint import reader, retention
from oases.checkpoint.coordination import SaveError
from oases.checkpoint.files import export
from oases.checkpoint.integrity import CHECKSUMS, INDEX, checksums, listed_files, write_checksums
from oases.checkpoint.metadata import RECORD
from oases.cli import main
from oases.errors import UsageError

CONFIG = TrainConfig(
    hidden=16, layers=1, heads=2, sequence=8, batch=4, steps=4, warmup=1, validation_batches=1,
)  # fmt: skip
SHARD = "__0_0.distcp"


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
    names = [name for name in listed_files(folder) if (folder / name).is_file()]
    write_checksums(folder, checksums([folder / name for name in names]))


def rewrite(folder, change):
    """Change the index of torch.distributed.checkpoint, with right checksums."""
    index = pickle.loads((folder / INDEX).read_bytes())
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    sign(folder)


class Command:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def runs_a_command(folder):
    (folder / INDEX).write_bytes(pickle.dumps(Command(folder / "hacked")))
    sign(folder)


def hides_a_command(folder):
    rewrite(folder, lambda index: setattr(index, "planner_data", Command(folder / "hacked")))


def names_a_builtin(folder):
    (folder / INDEX).write_bytes(b"cbuiltins\neval\n(S'1'\ntR.")
    sign(folder)


def takes_a_member(folder):
    (folder / INDEX).write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__new__'\ntR.")
    sign(folder)


def says_bytes(folder):
    """An object where a tensor is wanted, which torch would unpickle."""
    rewrite(folder, lambda index: index.state_dict_metadata.update({"model.tokens.weight": BytesStorageMetadata()}))


def refers_elsewhere(path):
    def change(index):
        for place in index.storage_data.values():
            place.relative_path = path

    return lambda folder: rewrite(folder, change)


def ends_later(folder):
    def change(index):
        next(iter(index.storage_data.values())).length = 1 << 40

    rewrite(folder, change)


def is_huge(folder):
    def change(index):
        next(iter(index.state_dict_metadata.values())).size = torch.Size([1 << 20, 1 << 20])

    rewrite(folder, change)


def lists_another_file(folder):
    write_checksums(folder, {**listed_files(folder), "../other": "0"})


def with_a_pipe(name):
    def make(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def with_a_link(folder):
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def with_a_record(text):
    def make(folder):
        (folder / RECORD).write_text(text)
        sign(folder)

    return make


def without_a_checksum_of_the_shard(folder):
    write_checksums(folder, {name: digest for name, digest in listed_files(folder).items() if name != SHARD})


def with_an_index(data):
    def make(folder):
        (folder / INDEX).write_bytes(data)
        sign(folder)

    return make


def with_chunks(change):
    return lambda folder: rewrite(
        folder, lambda index: change(next(each.chunks for each in index.state_dict_metadata.values()))
    )


def with_another_shard(folder):
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    old = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(old + buffer.getvalue())

    def change(index):
        place = next(iter(index.storage_data.values()))
        place.offset, place.length = len(old), len(buffer.getvalue())

    rewrite(folder, change)


def with_a_field(**fields):
    def make(folder):
        record = json.loads((folder / RECORD).read_text())
        (folder / RECORD).write_text(json.dumps(record | fields))
        sign(folder)

    return make


HOSTILE = {
    "costly key": (with_an_index(b"\x80\x02})" + b"2\x86" * 60 + b"Ns."), "has a tuple as a key"),
    "deep key": (with_an_index(b"\x80\x02})" + b"\x85" * 2_000_000 + b"Ns."), "has a tuple as a key"),
    "memo": (with_an_index(b"\x80\x02Nr\xff\xff\xff\x0f."), "is a NoneType"),
    "class": (
        with_an_index(b"\x80\x02cpathlib\nPosixPath\nN}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b."),
        "it changes",
    ),
    "no chunks": (with_chunks(lambda chunks: chunks.clear()), "do not cover it once"),
    "chunk twice": (with_chunks(lambda chunks: chunks.extend(chunks[:1])), "do not cover it once"),
    "many chunks": (with_chunks(lambda chunks: chunks.extend(chunks[:1] * 100_000)), "more than"),
    "another shard": (with_another_shard, "holds something else|cannot be read"),
    "format": (with_a_field(format="3"), "format is '3'"),
    "step": (with_a_field(step=True), "step is True"),
    "learning rate": (with_a_field(learning_rate="x"), RECORD),
    "large learning rate": (with_a_field(learning_rate=10**400), "learning_rate is 1000"),
    "step of another": (with_a_field(step=400), "step is 400 in step-000004"),
    "negative updates": (with_a_field(updates=-5), "updates is -5"),
    "config": (with_a_field(config=[1]), "config is"),
    "optimizer": (with_a_field(optimizer={"class": 5, "groups": "x"}), "optimizer holds"),
    "command": (runs_a_command, r"refers to posix\.system"),
    "hidden command": (hides_a_command, r"refers to posix\.system"),
    "builtin": (names_a_builtin, r"refers to builtins\.eval"),
    "member": (takes_a_member, r"takes '__new__' of"),
    "bytes": (says_bytes, "is no tensor"),
    "parent folder": (refers_elsewhere("../elsewhere"), "which the checksums do not list"),
    "absolute path": (refers_elsewhere("/etc/hostname"), "which the checksums do not list"),
    "beyond the end": (ends_later, "ends before byte"),
    "huge tensor": (is_huge, "is larger than all files"),
    "checksum of another file": (lists_another_file, r"\.\./other is not as it was written"),
    "pipe for a shard": (with_a_pipe(SHARD), "is not a regular file"),
    "pipe for the index": (with_a_pipe(INDEX), "is not a regular file"),
    "pipe for checksums": (with_a_pipe(CHECKSUMS), "is not a regular file"),
    "link": (with_a_link, "cannot be read"),
    "deep record": (with_a_record("[" * 100_000), RECORD),
    "long number": (with_a_record('{"format": 2, "step": ' + "9" * 5000 + "}"), "digits"),
    "list for a record": (with_a_record("[]"), RECORD),
    "wrong types": (with_a_record(json.dumps({"format": 2, "step": "x", "updates": 1, "sizes": {}})), RECORD),
    "no checksum of the shard": (without_a_checksum_of_the_shard, "which the checksums do not list"),
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
    assert not list(Path(tmp_path).rglob("hacked"))


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


def test_enums_are_read_as_python_3_11_2_writes_them():
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    text = b"cbuiltins\ngetattr\n(" + kind + b"S'TORCH_PRESERVE_FORMAT'\ntR."
    assert reader._Unpickler(io.BytesIO(text)).load() is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
