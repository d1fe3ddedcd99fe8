"""Build backend: the torch that a build in isolation uses, and the files of an sdist."""

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
import torch

from build_tools import backend, dependencies, objects
from oases_staged.built import BUILT_AGAINST

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


@pytest.fixture
def no_build(monkeypatch):
    """Undo what `built_against` leaves for setup.py."""
    monkeypatch.setenv("OASES_BUILD_TORCH", "")
    monkeypatch.delenv("OASES_BUILD_TORCH")


def test_an_sdist_requires_a_range_of_torch_and_a_wheel_the_one_that_it_was_built_against(sdist, no_build):
    assert "Requires-Dist: torch<2.16,>=2.11" in sdist[1]
    dependencies.built_against("2.13.0+cpu")
    assert dependencies.dependencies() == ["torch==2.13.*", *dependencies.OTHERS]


def test_a_torch_that_is_too_old_is_refused_and_a_new_one_is_told(no_build, capsys):
    with pytest.raises(SystemExit, match=r"torch 2\.9\.1 is too old for oases; pip install 'torch>=2\.11,<2\.16'"):
        dependencies.built_against("2.9.1")
    assert "OASES_BUILD_TORCH" not in os.environ
    dependencies.built_against("2.16.0a0+git1")
    assert "torch 2.16.0a0+git1 is newer than 2.15" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_linked_for_another_torch_is_linked_again(tmp_path):
    """setuptools compares times alone, and that file may be newer than the objects for this torch."""
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = [tmp_path / package / name for package in ("oases", "oases_staged")]
    for library in libraries:
        library.parent.mkdir()
        library.write_bytes(b"")
        os.utime(library, (2**32, 2**32))
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path,
        "--build-temp",
        tmp_path / "temp",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for library in libraries:
        found = BUILT_AGAINST.search(library.read_bytes())
        assert found is not None
        assert found[1].decode() == torch.__version__


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
