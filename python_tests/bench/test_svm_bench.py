"""The benchmark of support vector machines: at or below reweighted linear programs, and the command."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")


from oases import cli
from oases.errors import UsageError
from oases_bench.svm import SvmBenchConfig, run_svm_bench
from oases_bench.svm_fits import DESIGNS, contestants, recovered, reweighted, synthetic
from oases_svm.penalties import Penalty


@pytest.mark.slow
def test_ours_is_at_or_below_reweighted_programs():
    result = run_svm_bench(SvmBenchConfig(repeats=1, penalties="l1,scad"), shows=False)
    assert len(result["objectives"]) == 4
    for row in result["objectives"]:
        assert row["at_or_below"]
        assert row["reweighted"]["complete"]
        assert max(row["ours"]["primal_residual"], row["ours"]["dual_residual"]) <= 1e-6


@pytest.mark.parametrize("kind", DESIGNS)
def test_designs_are_as_said(kind):
    split = synthetic(kind, 0, rows=60, columns=40)
    assert (split.x.shape, split.test[0].shape) == ((60, 40), (600, 40))
    found = recovered(contestants(["mcp"])[0]["ours mcp path"], split)
    assert 0 <= found["f1"] <= 1
    near = np.corrcoef(split.test[0].T)[0, 1]
    assert near == pytest.approx({"correlated": 0.5, "unbalanced": 0.5, "blocks": 0.7}.get(kind, 0.0), abs=0.15)


def test_a_program_cut_short_says_so():
    split = synthetic("independent", 0, rows=200, columns=800)
    found = reweighted(split.x, split.y, Penalty("mcp", 0.01), limit=1e-3)
    assert not found["complete"]


@pytest.mark.long
def test_the_command(tmp_path, capsys):
    path = tmp_path / "svm.json"
    cli.main(["bench", "svm", "--penalties", "l1", "--repeats", "1", "--json", str(path)])
    assert "reweighted linear programs" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["objectives"]) == 2
    with pytest.raises(UsageError, match="--large 'huge' is unknown"):
        SvmBenchConfig(large="huge")
