"""Imports at run time: the runtime never loads the search; benchmarks and classifiers have one entry point each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "what", ["oases.parallelize", "oases.parallel.OverlappedStack", "oases.models.GPT", "oases.Trainer"]
)
def test_the_runtime_loads_no_planner(what):
    code = f"""
import sys, oases, oases.models, oases.parallel
{what}
print([name for name in sys.modules if name.startswith("oases.planner")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "imported", "doors"),
    [
        ("oases", "oases_bench", ["cli/bench.py"]),
        ("oases", "oases_svm", ["svm.py"]),
        ("oases_svm", "oases", ["vertex.py"]),
        ("oases_svm", "oases_bench", []),
    ],
)
def test_packages_meet_at_their_doors(package, imported, doors):
    root = Path(__file__).parents[1] / package
    line = re.compile(rf"^\s*(from|import) {imported}(\.[\w.]+)?\b", re.MULTILINE)
    assert sorted({str(p.relative_to(root)) for p in root.rglob("*.py") if line.search(p.read_text())}) == doors
