"""Tests of the kernels whose tensors are on the virtual device: order of streams, freed memory, autograd's thread."""

import os
import re
import subprocess
import sys

import device
import pytest

from build_tools import gpu_day, objects


@pytest.mark.long
@device.virtual_only
def test_kernels_run_on_the_virtual_device(virtual_device):
    """In a process of its own: an accelerator that torch knows of is that of all tests."""
    here = objects.ROOT / "python_tests"
    paths = os.pathsep.join([str(objects.ROOT), str(here / "virtual_device")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow",
         "-k", gpu_day.FEW, str(here / "kernels")],
        cwd=objects.ROOT, env=os.environ | {"OASES_TEST_VIRTUAL": "1", "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 60
