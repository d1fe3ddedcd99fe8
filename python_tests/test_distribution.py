"""Build backend: the torch that a build in isolation uses, and the files of an sdist."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from build_tools import backend, objects

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Names in the archive, without the leading folder, and the metadata."""
    folder = tmp_path_factory.mktemp("sdist")
    program = f"""
import sys
sys.modules["torch"] = None  # an sdist is made without torch
from build_tools import backend
backend.build_sdist({str(folder)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
        (metadata,) = (name for name in files.getnames() if name.count("/") == 1 and name.endswith("PKG-INFO"))
        return names, files.extractfile(metadata).read().decode()


def test_an_sdist_holds_all_that_a_build_needs_and_no_tests(sdist):
    names, _ = sdist
    needed = {
        str(path.relative_to(ROOT))
        for folder, kinds in {
            "csrc": (".cpp", ".h", ".cu"),
            "build_tools": (".py",),
            "oases": (".py", ".json"),
        }.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    }
    assert needed | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "oases/py.typed"} <= names
    surplus = [name for name in names if "test" in name.split("/")[0] or name.endswith((".so", ".o", ".pyc"))]
    assert surplus == []


def test_the_description_has_no_link_into_the_repository(sdist):
    _, metadata = sdist
    assert "Description-Content-Type: text/markdown" in metadata
    assert "](docs/" not in metadata


def test_a_build_takes_the_users_torch():
    assert str(Path(torch.__file__).parents[1]) in backend.users_path()
    assert backend.requirements() == []


def test_a_build_without_a_torch_asks_for_the_one_that_pip_will_install(monkeypatch, capsys):
    monkeypatch.setattr(backend, "users_path", lambda: None)
    assert backend.requirements() == [dependencies.TORCH]
    assert f"build against, {dependencies.TORCH}" in capsys.readouterr().err


def test_an_object_is_older_than_a_source_saved_while_it_compiles(tmp_path):
    source = tmp_path / "a.c"
    source.write_text("int a;\n")
    saving = tmp_path / "compiler"
    saving.write_text(f'#!/bin/sh\ncc "$@" && sleep 0.1 && touch {source}\n')
    saving.chmod(0o755)
    unit = objects.Unit(source, tmp_path / "a.o", (str(saving),))
    objects.compile_units([unit])
    assert unit.target.exists()
    assert not unit.up_to_date()
    other = objects.Unit(source, tmp_path / "a.o", ("cc",))
    objects.compile_units([other])
    assert other.up_to_date()
    source.write_text("int a\n")
    with pytest.raises(objects.CompileError, match=r"cc failed on .*a\.c: .*error"):
        objects.compile_units([other])
