"""Examples with other tools, on 2 and 4 ranks, against the same script with plain models in one process."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from script_ranks import ScriptRanks

# Without their imports, which take seconds.
MISSING = [each for each in ("accelerate", "lightning", "peft", "trl") if find_spec(each) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN = "oases.parallelize = lambda model, **_: model\n"
RUN = """
import runpy, sys, oases
from accelerate.state import AcceleratorState, GradientState
{}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
AcceleratorState._reset_state(reset_partial_state=True)  # it would keep the group of this script
GradientState._reset_state()
"""


@pytest.fixture(scope="module")
def run():
    """Function that runs a script on a number of ranks; one rank has plain models, as a reference."""
    pools = {ranks: ScriptRanks(ranks) for ranks in (1, 2, 4)}

    def run(ranks, script, *arguments, folder):
        (folder / f"run{ranks}.py").write_text(RUN.format(PLAIN if ranks == 1 else ""))
        return pools[ranks].run(folder / f"run{ranks}.py", [EXAMPLES / script, *arguments], folder=folder)

    yield run
    for each in pools.values():
        each.close()


def logged(folder, step):
    """Losses, norms and evaluations that a Trainer logged up to a step."""
    history = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    kinds = ("loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens")
    return [
        (each["step"], kind, pytest.approx(each[kind], rel=1e-4))
        for each in history
        for kind in kinds
        if kind in each
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "number"),
    [
        ("trainer.py", 18),
        ("lora.py", 16),
        ("sft.py", 40),
    ],
)
def test_examples_with_the_trainer(run, tmp_path, script, number):
    """Two ranks train; four, in two replicas, resume from their checkpoint in the middle."""
    for ranks in (1, 2):
        run(ranks, script, ranks, folder=tmp_path)
    expected = logged(tmp_path / "1", 8)
    assert len(expected) == number
    assert logged(tmp_path / "2", 8) == expected
    assert {each.name for each in (tmp_path / "1").iterdir()} == {each.name for each in (tmp_path / "2").iterdir()}
    shutil.rmtree(tmp_path / "2" / "checkpoint-8")
    run(4, script, 2, folder=tmp_path)
    resumed = logged(tmp_path / "2", 8)
    if script == "sft.py":  # TRL counts tokens anew after resuming
        expected, resumed = ([each for each in found if each[1] != "num_tokens"] for found in (expected, resumed))
    assert resumed == expected


def steps(printed):
    """Numbers, losses and norms of the steps that a script printed."""
    found = re.findall(r"^step (\d+) loss (\S+) norm (\S+)$", printed, re.MULTILINE)
    return [(int(step), *(pytest.approx(float(each), rel=1e-4) for each in numbers)) for step, *numbers in found]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("script", ["accelerated.py", pytest.param("lightning_module.py", marks=pytest.mark.slow)])
def test_examples_with_a_loop(run, tmp_path, script):
    """Two ranks train and save in the middle; four, in two replicas, resume from there."""
    expected, two = (steps(run(ranks, script, ranks, folder=tmp_path)) for ranks in (1, 2))
    assert len(expected) == 8
    assert two == expected
    assert steps(run(4, script, 2, folder=tmp_path)) == expected[4:]


@pytest.mark.slow
def test_fsdp2(run, tmp_path):
    """Two and four ranks train, and resume what they left; FSDP2 saves shards of this number of ranks."""
    expected = steps(run(1, "fsdp2.py", 1, folder=tmp_path))
    assert len(expected) == 8
    for ranks in (2, 4):
        assert steps(run(ranks, "fsdp2.py", ranks, folder=tmp_path)) == expected
        assert steps(run(ranks, "fsdp2.py", ranks, folder=tmp_path)) == expected[4:]
