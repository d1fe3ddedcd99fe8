"""What loads what: the runtime never loads the search."""

import subprocess
import sys

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
