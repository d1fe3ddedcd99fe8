"""Old module paths: each warns, and leads to the module that has moved."""

import subprocess
import sys

import pytest

from oases.moved import MOVED

CODE = """
import importlib, sys, warnings
old, modules = sys.argv[1], sys.argv[2:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = importlib.import_module(old)
print([str(each.message) for each in caught if each.category is FutureWarning and old in str(each.message)])
for pair in modules:
    name, place = pair.split("=")
    assert importlib.import_module(f"{old}.{name}") is importlib.import_module(place), pair
for name in getattr(importlib.import_module(MOVED), "__all__", ()):
    assert getattr(found, name) is getattr(importlib.import_module(MOVED), name)
"""


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_warns_and_works(old):
    home, modules = MOVED[old]
    pairs = [f"{name}={place}" for name, place in modules.items()]
    code = CODE.replace("MOVED", repr(home))
    done = subprocess.run([sys.executable, "-c", code, old, *pairs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['{old} is {home} now; the old path goes with oases 0.4']\n"
