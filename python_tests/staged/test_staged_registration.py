"""Imports: `staged` is known to torch once oases is imported after it, or oases_staged; torch asks for neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
USE = """
import sys, torch.distributed as dist
assert 'oases._C' not in sys.modules and 'oases_staged._C' not in sys.modules
dist.init_process_group('cpu:staged', store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(3); dist.all_reduce(t); assert t.sum() == 3; dist.destroy_process_group(); print('done')
"""
ALONE = "import sys; sys.modules['oases'] = None; import torch, oases_staged"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder with what an installation of this tree tells torch of itself, ahead of any that is installed."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("oases-*.dist-info"))
    return folder


def said(script: str, folder: Path, *path: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@pytest.mark.few(1, 4)
@pytest.mark.parametrize("imports", ["import torch, oases", "import oases, oases_staged, torch", ALONE])
def test_torch_knows_the_backend(installed, tmp_path, imports):
    assert said(imports + USE, tmp_path, installed, ROOT) == "done\n"


def test_torch_is_imported_beside_a_clone_and_beside_an_oases_that_is_broken(installed, tmp_path):
    """In the folder above a clone, `oases` is a folder without a module; after a move, the package is elsewhere."""
    clone, package = tmp_path / "oases", tmp_path / "broken" / "oases"
    for folder in (clone / "oases", package):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('broken')\n")
    script = "import sys, torch; assert 'oases' not in sys.modules; print('done')"
    assert said(script, tmp_path, installed) == "done\n"
    assert said(script, ROOT.parent, installed, package.parent) == "done\n"
