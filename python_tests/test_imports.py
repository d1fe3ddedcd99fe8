"""Imports at run time: the runtime never loads the planner; benchmarks and classifiers are imported in one place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = ("oases.parallelize", "oases.layers.OverlappedStack", "oases.models.GPT", "oases.Trainer")
EACH_IN_A_FORK = f"""
import os, torch, torch._dynamo
for name in {RUNTIME}:
    if os.fork() == 0:
        import oases, oases.models, oases.layers
        eval(name)
        import sys
        print(name, [name for name in sys.modules if name.startswith("oases.planner")], flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.long
def test_the_runtime_loads_no_planner():
    done = subprocess.run([sys.executable, "-c", EACH_IN_A_FORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} []" for name in RUNTIME]


@pytest.mark.parametrize(
    ("package", "imported", "doors"),
    [
        ("oases", "oases_bench", ["cli/bench.py"]),
        ("oases", "oases_svm", ["svm.py"]),
        ("oases", "oases_sparse", ["__init__.py"]),
        ("oases", "oases_staged", ["__init__.py", "extension.py"]),
        ("oases", "oases_train", ["__init__.py"]),
        ("oases_sparse", "oases_train", []),
        ("oases_staged", "oases", []),
        ("oases_svm", "oases", ["vertex.py"]),
        ("oases_svm", "oases_bench", []),
    ],
)
def test_packages_meet_at_their_doors(package, imported, doors):
    root = Path(__file__).parents[1] / package
    line = re.compile(rf"^\s*(from|import) {imported}(\.[\w.]+)?\b", re.MULTILINE)
    assert sorted({str(p.relative_to(root)) for p in root.rglob("*.py") if line.search(p.read_text())}) == doors
