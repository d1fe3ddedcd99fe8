"""The benchmark of validation losses by wire dtype: what it counts, and the kernels' rates."""

import json

import pytest

from oases.cli import main
from oases.errors import UsageError
from oases_bench.loss import LossBenchConfig

SMALL = ["--hidden", "128", "--layers", "1", "--sequence", "8", "--batch", "4", "--steps", "2", "--seeds", "1"]


def test_losses(tmp_path, capsys):
    path = tmp_path / "loss.json"
    main(["bench", "loss", "--wires", "none,int8", *SMALL, "--json", str(path)])
    found = json.loads(path.read_text())["wires"]
    exact, lossy = found["none"][0], found["int8"][0]
    assert lossy["validation_loss"] == pytest.approx(exact["validation_loss"], rel=0.01)
    assert lossy["bytes"] + lossy["saved_bytes"] == exact["bytes"]
    assert lossy["replicas_equal"]
    assert exact["saved_bytes"] == 0
    assert "int8" in capsys.readouterr().out


def test_unknown_wires():
    with pytest.raises(UsageError, match="--wires 'int7' is unknown; known are none, bfloat16"):
        LossBenchConfig(wires="none,int7")
