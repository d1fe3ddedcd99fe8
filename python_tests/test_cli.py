"""The command line: every mistake exits with 2 and one line that names the value and the remedy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import fails
from plotly.offline import get_plotlyjs

from oases import cli, testbed
from oases.cli.options import COMMANDS
from oases.core.schedule import format_schedule, generate


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "--tp", "3"], ["heads 8", "--tp 3", "degrees that do: 1, 2, 4, 8"]),
        (["train", "--hidden", "100"], ["--tp 2", "heads 1", "or change --heads"]),
        (["train", "--clip-grad", "1"], ["--clip-grad 1 (did you mean --clip?); see 'oases train --help'"]),
        (["train", "--lr", "1"], ["did you mean --learning-rate?"]),
        (["train", "--bf16"], ["did you mean --precision bfloat16?"]),
        (["train", "--recompute-activations"], ["did you mean --recompute full?"]),
        (["bench", "overlap", "--iters", "3"], ["did you mean --iterations?", "'oases bench overlap --help'"]),
        (["train", "--hidden", "96", "--heads", "5"], ["hidden 96", "5 heads"]),
        (["train", "--tp", "0"], ["--tp", "got 0"]),
        (["train", "--schedule", "oases", "--batch", "1"], ["batch of 1", "2 sub-batches", "--batch"]),
        (["train", "--schedule", "oases@4", "--batch", "3"], ["batch of 3", "4 sub-batches"]),
        (["train", "--schedule", "nosuch"], ["'nosuch'", "fine_grained, oases"]),
        (["bench", "gpu"], ["sees none", "where there is one"]),
        (["bench", "overlap", "--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["train", "--schedule", "atuo"], ["'atuo'", "auto to choose by measuring"]),
        (["train", "--device", "tpu"], ["'tpu'", "'cpu', 'cuda'"]),
        (["train", "--device", "cuda"], ["'cuda'", "--device cpu"]),
        (["train", "--steps", "0"], ["steps", "got 0"]),
        (["train", "--steps", "many"], ["--steps", "'many'"]),
        (["train", "--learning-rate", "nan"], ["--learning-rate", "got nan"]),
        (["train", "--backend", "mpi"], ["'mpi'", "gloo"]),
        (["train", "--backend", "staged", "--link", "1gbit"], ["--link 1gbit", "--backend staged uses none"]),
        (["train", "--timeout", "0"], ["--timeout", "got 0"]),
        (["train", "--resume", "/nowhere"], ["'/nowhere'", "--checkpoint"]),
        (["train", "--json", "/dev/null/x.json"], ["'/dev/null'", "a file is in the way"]),
        (["train", "--seed", "99999999999999999999"], ["seed", str(2**63 - 1)]),
        (["train", "--learning-rate", "inf"], ["--learning-rate", "finite"]),
        (["train", "--timeout", "inf"], ["--timeout", "got inf"]),
        (["train", "--backend", "nccl"], ["nccl", "--device cuda"]),
        (["train", "--backend", "sim:alpha=99999999999s,bandwidth=1gbit"], ["alpha", "out of range"]),
        (["train", "--hidden", "192", "--heads", "3", "--tp", "3"], ["vocabulary 256", "degrees that do: 1\n"]),
        (["train", "--hidden", "1000000", "--heads", "2"], ["1000000", "GB for blocks"]),
        (["train", "--schedule", "oases@4000"], ["4000 sub-batches"]),
        (["train", "--schedule", "x" * 300], ["xxx"]),
        (["train", "--data", ""], ["data path ''"]),
        (["train", "--json", "/tmp"], ["'/tmp' is a folder"]),
        (["train", "--link", "99999999999999gbit"], ["out of range", "100gbit"]),
        (["train", "--nodes", "2"], ["--nodes 2", "--link 500mbit"]),
        (["train", "--nodes", "0"], ["--nodes", "got 0"]),
        (["train", "--nodes", "999", "--tp", "2"], ["--nodes", "got 999"]),
        (["train", "--link", "1gbit", "--tp", "4", "--nodes", "3"], ["4 ranks", "--nodes 3", "1, 2, 4"]),
        (["demo", "--nodes", "2", "--backend", "sim:alpha=1us,bandwidth=1gbit"], ["--nodes 2", "--backend sim"]),
        (["train", "--nosuch"], ["--nosuch", "--help"]),
        (["train", "--data", "/nowhere"], ["'/nowhere'", "does not exist"]),
        (["bench", "overlap", "--link", "fast"], ["'fast'", "500mbit"]),
        (["bench", "overlap", "--link", "0gbit"], ["'0gbit'"]),
        (["bench", "overlap", "--schedules", "sync,nosuch"], ["'nosuch'"]),
        (["bench", "overlap", "--schedules", "sync,auto@4"], ["'auto@4'", "write auto alone"]),
        (["bench", "overlap", "--tp", "1"], ["--tp 1", "at least 2"]),
        (["bench", "overlap", "--tp", "5"], ["heads 12", "--tp 5", "1, 2, 4"]),
        (["bench", "overlap", "--recompute", "some"], ["'some'"]),
        (["bench", "overlap", "--iterations", "0"], ["iterations", "got 0"]),
        (["bench"], ["BENCHMARK"]),
        (["demo", "--out", "/dev/null"], ["'/dev/null'", "a file is in the way"]),
        (["demo", "--tp", "1"], ["--tp 1"]),
        (["nosuch"], ["nosuch"]),
        ([], ["COMMAND"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].islower() else "",
)
def test_mistakes(capsys, arguments, parts):
    error = fails(capsys, *arguments)
    for part in parts:
        assert part in error


def test_data_of_every_bad_kind(capsys, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "short.txt").write_text("too short")
    assert "is empty" in fails(capsys, "train", "--data", str(tmp_path / "empty.txt"))
    assert "is not UTF-8 text" in fails(capsys, "train", "--data", str(tmp_path / "binary"))
    assert "too few" in fails(capsys, "demo", "--data", str(tmp_path / "short.txt"))


def test_a_checkpoint_replaces_nothing_but_checkpoints(capsys, tmp_path):
    precious = tmp_path / "home" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("x")
    for path in (precious.parent, precious, tmp_path / "home" / ".."):
        error = fails(capsys, "train", *SMALL, "--checkpoint", str(path))
        assert "holds other files" in error or "is a file" in error
    assert precious.read_text() == "x"


def test_a_link_cannot_be_shaped_between_a_launchers_ranks(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave out torchrun" in fails(capsys, "train", "--link", "1gbit")
    assert "--link 1gbit --nodes 2 cannot" in fails(capsys, "train", "--link", "1gbit", "--nodes", "2")


def test_a_schedule_text_with_a_mistake_names_line_and_column(capsys, tmp_path):
    path = tmp_path / "mine.schedule"
    text = format_schedule(generate("oases", 8, 2))
    path.write_text(text.replace("wait F 0.0", "await F 0.0"))
    error = fails(capsys, "train", "--schedule", str(path))
    assert "unknown op 'await'" in error
    assert "line 6, column 1" in error
    path.write_text(text.replace("wait F 0.0\n", ""))
    assert "uses the result of F 0.0 before 'wait F 0.0'" in fails(capsys, "train", "--schedule", str(path))
    path.write_text("schedule x blocks=999999 sub_batches=1\nF 0.0\n")
    assert "line 2, where the file ends: 'all_reduce F 0.0' is missing" in fails(
        capsys, "train", "--schedule", str(path)
    )
    path.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in fails(capsys, "train", "--schedule", str(path))
    path.write_text(text)
    assert "is for 8 blocks, but 4 are required" in fails(capsys, "train", "--layers", "2", "--schedule", str(path))


def test_a_link_that_cannot_be_had(capsys, monkeypatch):
    monkeypatch.setattr(
        testbed, "why_impossible", lambda rate, nodes=1: "'tc' is missing; install the package iproute2"
    )
    for command in (["train"], ["bench", "overlap"]):
        error = fails(capsys, *command, "--link", "1gbit")
        assert "--link 1gbit is not available: 'tc' is missing; install the package iproute2" in error
    error = fails(capsys, "demo", "--link", "1gbit", "--nodes", "2")
    assert "--link 1gbit --nodes 2 is not available: 'tc' is missing" in error
    assert "leave out --link --nodes 2" in error


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "hidden size, features (default: 512)" in text
    assert "--micro-batches N" in text


SMALL = ["--hidden", "64", "--layers", "1", "--heads", "2", "--sequence", "32", "--batch", "4"]


@pytest.mark.long
def test_bench_writes_its_json(ranks_at_hand, capfd, tmp_path):
    path = tmp_path / "o.json"
    cli.main(["bench", "overlap", *SMALL, "--tp", "2", "--iterations", "2", "--json", str(path)])
    result = json.loads(path.read_text())
    seconds = {f"{name}_seconds" for name in ("compute", "communication", "ideal", "side_by_side")}
    assert set(result) >= {"config", "schedules", *seconds}
    assert result["config"]["hidden"] == 64
    row = result["schedules"]["oases"]
    assert row["all_reduces_per_layer"] == 4
    assert 0 <= row["max_relative_gradient_error"] <= 1e-5
    assert row["step_seconds"] > 0
    assert 0 < row["kept_bytes"] < row["peak_bytes"]
    assert row["kept_units"] == row["kept_bytes"] / (4 * 32 * 64 * 4)
    assert row["formula_units"] is None
    output = capfd.readouterr()
    spent = result["core_seconds"]  # None where the kernel does not count the time of threads
    assert spent is None or list(spent) == ["compute alone", "side by side", "sync", "oases"]
    assert "compute alone" in output.out
    assert "profiler" not in output.err


@pytest.mark.long
@pytest.mark.parametrize("link", [[], ["--link", "1gbit"]], ids=["plain", "link"])
def test_the_result_alone_is_on_standard_output(tmp_path, link):
    if link and (reason := testbed.why_impossible("1gbit", 1)):
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "oases",
        "train",
        *SMALL,
        "--steps",
        "3",
        "--json",
        "-",
        *link,
    ]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=120, check=True)
    assert len(json.loads(done.stdout)["losses"]) == 3
    assert "training 3/3" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_train_saves_and_resumes(capfd, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    cli.main(["train", *SMALL, "--steps", "4", "--checkpoint", checkpoint])
    path = tmp_path / "t.json"
    assert "hidden under compute" in capfd.readouterr().out
    cli.main(["train", *SMALL, "--steps", "6", "--tp", "1", "--resume", checkpoint, "--json", str(path)])
    assert len(json.loads(path.read_text())["losses"]) == 2
    for change, message in (
        (["--layers", "2"], "layers is 1 there and 2 here"),
        (["--heads", "4"], "heads is 2 there and 4 here"),
    ):
        error = fails(capfd, "train", *SMALL, "--steps", "6", "--resume", checkpoint, *change)
        assert message in error
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *SMALL, "--steps", "4", "--resume", checkpoint])
    assert caught.value.code == 2
    assert "nothing is left to do" in capfd.readouterr().err


@pytest.mark.long
def test_demo_runs_without_a_shaped_link(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(testbed, "why_impossible", lambda rate, nodes=1: "user namespaces are off")
    path = tmp_path / "d.json"
    cli.main(["demo", *SMALL, "--steps", "3", "--out", str(tmp_path / "new" / "out"), "--json", str(path)])
    output = capfd.readouterr()
    assert "no shaped link here: user namespaces are off" in output.err
    assert "over a simulated link of 1gbit" in output.out
    result = json.loads(path.read_text())
    assert result["largest_loss_difference"] < 1e-4
    page = (tmp_path / "new" / "out" / "oases-report.html").read_text()
    assert "Where the time went" in page
    own = page.replace(get_plotlyjs(), "")
    assert "http" not in own, "the page must open without a network"
    assert json.loads((tmp_path / "new" / "out" / "oases-trace.json").read_text())["traceEvents"]


def test_version_and_help_import_no_torch():
    code = (
        "import sys; from oases.cli import main\n"
        "for each in ('--version', '--help', 'plan --help', 'simulate --help'):\n"
        "    try: main(each.split())\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        "    assert 'torch' not in sys.modules, each"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if re.match(r"    \w", line)] == list(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_options_and_choices(capsys, shell):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as caught:
        cli.main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    for word in ("--learning-rate-schedule", "wsd", "bfloat16", "--cluster", "overlap"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_completion_without_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install shtab" in fails(capsys, "--print-completion", "bash")


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (["train", "--precision", "int8"], "'float32', 'bfloat16'"),
        (["train", "--bad-loss", "ignore"], "'stop', 'skip', 'off'"),
        (["bench", "overlap", "--recompute", "some"], "'none', 'full'"),
        (["plan", "--dtype", "int8"], "'float32'"),
    ],
)
def test_an_invalid_choice_lists_the_choices(capsys, arguments, choices):
    error = fails(capsys, *arguments)
    assert arguments[-2] in error
    assert choices in error
