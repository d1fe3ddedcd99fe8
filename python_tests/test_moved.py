"""Old module paths: each warns, and leads to the module that has moved."""

import subprocess
import sys

from oases.moved import MOVED

CODE = """
import importlib, warnings
from oases.moved import MOVED
for old, (home, modules) in MOVED.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    said = [str(each.message) for each in caught if each.category is FutureWarning and old in str(each.message)]
    assert said == [f"{old} is {home} now; the old path goes with oases 0.4"], (old, said)
    for name, place in modules.items():
        assert importlib.import_module(f"{old}.{name}") is importlib.import_module(place), (old, name)
    for name in getattr(importlib.import_module(home), "__all__", ()):
        assert getattr(found, name) is getattr(importlib.import_module(home), name), (old, name)
    print(old)
"""


def test_every_old_path_warns_and_works():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(MOVED)
