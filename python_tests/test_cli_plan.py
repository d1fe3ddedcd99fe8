"""The commands plan and simulate: what they write, and mistakes, which exit with 2 and name the value."""

import json
import re
import subprocess
import sys

import pytest
from command_line import GIVEN, MODEL, fails
from plotly.offline import get_plotlyjs

from benchmarks.papers.oases_objective import from_published
from oases import cli
from oases.core.schedule import format_schedule
from oases.core.schedule.pipeline import one_f_one_b
from oases.planner import choose
from oases.plans.check import check
from oases.plans.plan import PLANNED, Plan, read_plan
from oases.simulator.hardware_file import to_json

PROFILE = {
    "sequence": 128, "dtype": "float32", "device": "RTX 3090 24 GiB", "gpus": 4, "gpus_per_server": 4,
    "rows": [
        {
            "hidden": 256, "tp": tp, "batch": batch, "attention_forward_ms": batch / tp,
            "attention_backward_ms": 2 * batch / tp, "mlp_forward_ms": batch / tp, "mlp_backward_ms": 2 * batch / tp,
            "all_reduce_ms": 0.1 * batch, "runtime_memory_mib": 100,
        }
        for tp in (1, 2, 4) for batch in (1, 2, 4, 8, 16)
    ],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "STEPS", 40)
        yield


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(to_json(from_published(PROFILE, "profile")))
    return str(path)


@pytest.fixture(scope="module")
def planned(quick, tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    cli.main(["plan", *GIVEN, "--json", str(path)])
    return str(path)


def test_a_dash_is_standard_output_and_all_else_goes_to_standard_error(quick, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["plan", *GIVEN, "--json", "-"])
    output = capfd.readouterr()
    assert Plan.from_json(output.out).world == 4
    assert "tokens/s" in output.err
    assert "written to" not in output.err
    assert not list(tmp_path.iterdir())
    cli.main(["simulate", *GIVEN, "--degrees", "2"])
    assert "tokens/s" in capfd.readouterr().out  # as before


@pytest.mark.long
def test_plan_writes_what_train_executes(capsys, tmp_path):
    path = tmp_path / "plan.json"
    cli.main(["plan", *GIVEN, "--json", str(path)])
    plan = Plan.from_json(path.read_text())
    assert (plan.world, plan.global_batch, plan.model.hidden) == (4, 16, 256)
    assert plan.prediction.step_seconds > 0
    text = capsys.readouterr().out
    for part in (
        "tokens/s",
        "samples/s",
        "exposed communication",
        "bubbles",
        "model FLOPs utilisation",
        "recomputed",
    ):
        assert part in text
    assert f"oases train --plan {path}" in " ".join(text.split())


@pytest.mark.long
def test_explain_says_what_others_lose(capsys):
    cli.main(["plan", *GIVEN, "--explain"])
    text = capsys.readouterr().out
    assert "the same, synchronous" in text
    assert re.search(r"\d ms|next to nothing", text)


def test_plan_for_a_profile_and_within_limits(profile, tmp_path):
    path = tmp_path / "plan.json"
    sizes = ["--hidden", "256", "--heads", "4", "--layers", "2", "--sequence", "128"]
    cli.main(
        ["plan", *sizes, "--profile", profile, "--world", "4", "--global-batch", "16", "--degrees", "2",
         "--micro-batches", "1,2", "--no-zero", "--no-recompute", "--memory", "23GiB", "--json", str(path)]
    )  # fmt: skip
    plan = read_plan(path)
    assert plan.uniform_tp == 2
    assert plan.micro_batches in (1, 2)
    assert not plan.zero
    assert all(segment.recomputed_layers == 0 for segment in plan.stages[0].segments)


def test_simulate_a_plan(planned, tmp_path, capsys):
    path = tmp_path / "result.json"
    cli.main(["simulate", "--plan", planned, "--cluster", "4x3090", "--json", str(path)])
    result, plan = json.loads(path.read_text()), read_plan(planned)
    assert result["step_seconds"] == plan.prediction.step_seconds
    assert result["memory_bytes"] == max(plan.prediction.memory_bytes)
    assert result["fits"]
    assert tuple(stage["memory_bytes"] for stage in result["stages"]) == plan.prediction.memory_bytes
    busiest = min(result["stages"], key=lambda stage: stage["exposed_seconds"] + stage["bubble_seconds"])
    assert busiest["exposed_seconds"] == result["exposed_seconds"] == plan.prediction.exposed_seconds
    assert busiest["bubble_seconds"] == result["bubble_seconds"] == plan.prediction.bubble_seconds
    assert result["tokens_per_second"] == pytest.approx(128 * 16 / result["step_seconds"])
    assert "stage 0 compute |" in capsys.readouterr().out


def test_simulate_by_hand_with_page_and_trace(tmp_path, capsys):
    page, trace, result = (tmp_path / name for name in ("page.html", "trace.json", "result.json"))
    cli.main(
        ["simulate", *GIVEN, "--tp", "2", "--stages", "2", "--micro-batches", "4", "--schedule", "cross_pass",
         "--sub-batches", "2", "--recompute", "full", "--zero", "--pipeline", "gpipe", "--html", str(page), "--trace",
         str(trace), "--json", str(result)]
    )  # fmt: skip
    plan = json.loads(result.read_text())["plan"]
    assert plan["pipeline"] == "gpipe"
    segment = {"num_blocks": 2, "tp": 2, "schedule": "cross_pass", "sub_batches": 2, "recomputed_layers": 1}
    segment["sequence_parallel"] = False
    assert plan["stages"] == [{"segments": [segment]}] * 2
    assert len(json.loads(result.read_text())["stages"]) == 2
    text = page.read_text()
    assert "stage 1 compute" in text
    assert "memory" in text
    assert "http" not in text.replace(get_plotlyjs(), ""), "the page must open without a network"
    assert json.loads(trace.read_text())["traceEvents"]
    assert "stage 1 compute |" in capsys.readouterr().out


def test_simulate_searches_pipelines(tmp_path):
    path = tmp_path / "result.json"
    cli.main(["simulate", *GIVEN, "--degrees", "1", "--memory", "60MiB", "--json", str(path)])
    result = json.loads(path.read_text())
    assert len(result["plan"]["stages"]) == 2, "one device holds no whole model of this size"
    assert result["fits"]


@pytest.mark.few(4)
@pytest.mark.parametrize("pipeline", PLANNED)
def test_simulate_every_pipeline(pipeline, tmp_path, capsys):
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    cli.main(
        ["simulate", *MODEL[:4], "--layers", "8", *MODEL[6:], *GIVEN[10:], "--stages", "4", "--micro-batches", "8",
         "--pipeline", pipeline, "--recompute", "full", "--json", str(result), "--html", str(page)]
    )  # fmt: skip
    found = json.loads(result.read_text())
    assert found["plan"]["pipeline"] == pipeline
    assert len(found["stages"]) == 4
    text = " ".join(capsys.readouterr().out.split())
    assert f"4 pipeline stages ({pipeline})" in text
    drawn = next(line for line in text.split("stage ") if line.startswith("0 compute"))
    early = pipeline in ("pre_recompute", "last_no_recompute", "shifted_critical_path")
    assert (drawn.count("R") >= 3) == early, "what is recomputed early is drawn apart"
    assert "stage 3 compute" in page.read_text()


@pytest.mark.parametrize("pipeline", ["interleaved", "a list"])
def test_many_micro_batches_are_drawn_in_numbers_that_the_pipeline_has(pipeline, tmp_path, capsys):
    """Fewer are drawn than there are: of interleaved a multiple of the stages, of a list all."""
    given, page = [*MODEL[:4], "--layers", "8", *MODEL[6:], "--cluster", "4x3090"], tmp_path / "page.html"
    stages = "4" if pipeline == "interleaved" else "2"
    if pipeline == "a list":
        path = tmp_path / "list.txt"
        path.write_text(format_schedule(one_f_one_b(2, 200)))
        pipeline = str(path)
    sizes = ["--global-batch", "800", "--stages", stages, "--micro-batches", "200", "--pipeline", pipeline]
    cli.main(["simulate", *given, *sizes, "--html", str(page)])
    assert "stage 1 compute" in page.read_text()
    assert ("of the 200 micro-batches" in capsys.readouterr().out) == (stages == "4")


def test_simulate_what_fits_on_each_stage(tmp_path, capsys):
    given = [*MODEL[:4], "--layers", "8", *MODEL[6:], *GIVEN[10:], "--stages", "4", "--micro-batches", "8"]
    layers, path = {}, tmp_path / "result.json"
    for policy in ("none", "fits", "merak:0.5", "full"):
        cli.main(["simulate", *given, "--recompute", policy, "--memory", "36MiB", "--json", str(path)])
        stages = json.loads(path.read_text())["plan"]["stages"]
        layers[policy] = [sum(s["recomputed_layers"] for s in stage["segments"]) for stage in stages]
    assert layers["none"] == [0] * 4
    assert layers["merak:0.5"] == [1, 1, 0, 0]
    assert sum(layers["full"]) == 8
    assert layers["fits"][0] >= layers["fits"][-1]
    assert 0 < sum(layers["fits"]) < 8
    error = fails(capsys, "simulate", *given, "--recompute", "fits", "--memory", "2MiB")
    assert "recompute fits: stage 0 needs at least" in error


def test_the_pipelines_to_choose_from(tmp_path, capsys):
    path = tmp_path / "result.json"
    given = [*GIVEN, "--degrees", "1", "--memory", "60MiB"]
    cli.main(["simulate", *given, "--pipelines", "zb_h1", "--json", str(path)])
    assert json.loads(path.read_text())["plan"]["pipeline"] == "zb_h1"
    capsys.readouterr()
    assert "unknown 'nosuch'; known are gpipe" in fails(capsys, "plan", *given, "--pipelines", "nosuch")
    assert "leave out --pipelines" in fails(capsys, "simulate", *GIVEN, "--tp", "2", "--pipelines", "zb_h1")


@pytest.mark.long
def test_neither_command_needs_torch():
    code = (
        "import sys; from oases.cli import main\n"
        f"main(['plan', *{GIVEN!r}]); main(['simulate', *{GIVEN!r}, '--tp', '2'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.few(24)
@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "gpt-0", *GIVEN[10:]], ["'gpt-0'", "gpt-1.3b", "--hidden"]),
        (["--model", "gpt-125m", "--hidden", "64", *GIVEN[10:]], ["leave out --hidden"]),
        (["--hidden", "64", *GIVEN[10:]], ["--layers, --sequence is missing"]),
        ([*GIVEN, "--hidden", "250"], ["hidden 250", "4 heads"]),
        (["--hidden", "250", *GIVEN[4:]], ["--hidden 250", "give --heads"]),
        ([*GIVEN, "--layers", "0"], ["layers", "got 0"]),
        ([*GIVEN, "--dtype", "int8"], ["'int8'", "bfloat16"]),
        ([*MODEL, "--cluster", "4xnosuch", "--global-batch", "8"], ["'nosuch'", "3090"]),
        ([*MODEL, "--cluster", "many", "--global-batch", "8"], ["'many'", "COUNTxNAME"]),
        ([*MODEL, "--cluster", "10x3090", "--global-batch", "8"], ["10 ranks", "nodes of 4", "8x3090 or 12x3090"]),
        ([*MODEL, "--global-batch", "8"], ["--cluster", "neither is given"]),
        ([*GIVEN, "--profile", "x"], ["both are given"]),
        ([*GIVEN, "--world", "4"], ["leave out --world 4"]),
        (
            [*MODEL, "--profile", "/nowhere", "--world", "2", "--global-batch", "8"],
            ["'/nowhere' cannot be read: No such file"],
        ),
        ([*MODEL, "--cluster", "4x3090"], ["--global-batch N"]),
        ([*GIVEN, "--global-batch", "0"], ["--global-batch", "got 0"]),
        ([*GIVEN, "--global-batch", "x"], ["--global-batch", "'x'"]),
        ([*GIVEN, "--memory", "24"], ["--memory", "'24'", "24GiB"]),
        ([*GIVEN, "--memory", "lots"], ["--memory", "'lots'", "24GiB"]),
        ([*GIVEN, "--memory", "24Gbit"], ["'24Gbit'"]),
        ([*GIVEN, "--memory", "0GiB"], ["'0GiB'", "below 1 MiB"]),
        ([*GIVEN, "--degrees", "1,x"], ["--degrees", "'1,x'"]),
        ([*GIVEN, "--degrees", "0"], ["--degrees must be at least 1, got 0"]),
        ([*GIVEN, "--degrees", "3"], ["16 samples", "4 ranks", "degrees that the model allows are 1, 2, 4"]),
        ([*GIVEN, "--micro-batches", "-1"], ["--micro-batches"]),
        pytest.param(
            [*GIVEN, "--memory", "2MiB"],
            ["no plan fits", "MiB may be filled", "It would fit with", "MiB per device"],
            marks=pytest.mark.long,  # the search for what would fit
        ),
        ([*GIVEN, "--json", "/dev/null/x.json"], ["'/dev/null'", "a file is in the way"]),
    ],
)
def test_mistakes(capsys, command, arguments, parts):
    error = fails(capsys, command, *arguments)
    for part in parts:
        assert part in error


def test_an_infeasible_budget_names_the_smallest_changes(capsys):
    error = fails(capsys, "plan", *GIVEN, "--degrees", "1", "--memory", "19MiB", "--no-recompute")
    assert "recomputation (leave out --no-recompute)" in error
    cli.main(["plan", *GIVEN, "--degrees", "1", "--memory", "19MiB"])
    enough = re.search(r"([\d.]+ MiB) per device", error)[1].replace(" ", "")
    cli.main(["plan", *GIVEN, "--degrees", "1", "--memory", enough, "--no-recompute"])


def test_profiles_that_do_not_do(capsys, profile, tmp_path):
    given = [*MODEL[:8], "--profile", profile, "--global-batch", "8"]
    assert "give --world N" in fails(capsys, "plan", *given)
    assert "--world", "got 0" in fails(capsys, "plan", *given, "--world", "0")
    assert "do not fill nodes of 4" in fails(capsys, "plan", *given, "--world", "6")
    assert "--ranks-per-node" in fails(capsys, "plan", *given, "--world", "4", "--ranks-per-node", "0")
    assert "cannot divide" in fails(capsys, "plan", *given, "--hidden", "512", "--world", "4")
    (tmp_path / "bad.json").write_text("{")
    error = fails(capsys, "simulate", *MODEL, "--profile", str(tmp_path / "bad.json"), "--world", "2", *GIVEN[12:])
    assert "is not JSON" in error


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--plan", "/nowhere", "--cluster", "4x3090"], ["'/nowhere'", "cannot be read"]),
        (["--plan", "PLAN", "--cluster", "8x3090"], ["is for 4 devices", "the cluster has 8"]),
        (["--plan", "PLAN", "--cluster", "4x3090", "--tp", "2"], ["leave out --tp"]),
        (["--plan", "PLAN", *GIVEN[10:]], ["leave out --global-batch"]),
        (["--plan", "PLAN", "--cluster", "4x3090", "--vocabulary", "0"], ["leave out --vocabulary"]),
        ([*GIVEN, "--tp", "0"], ["--tp", "got 0"]),
        ([*GIVEN, "--tp", "3"], ["--tp 3", "4 devices"]),
        ([*GIVEN, "--tp", "2", "--no-zero"], ["--tp", "leave out --no-zero"]),
        ([*GIVEN, "--tp", "2", "--expert-parallel", "2"], ["--tp", "leave out --expert-parallel"]),
        (["--plan", "PLAN", "--cluster", "4x3090", "--expert-parallel", "4"], ["leave out --expert-parallel"]),
        (["--schedule", "block_wise", "--expert-parallel", "2"], ["without a model", "leave out --expert-parallel"]),
        ([*GIVEN, "--stages", "3"], ["--stages 3", "4 devices"]),
        ([*GIVEN, "--stages", "4"], ["--stages 4", "2 layers"]),
        ([*GIVEN, "--stages", "2", "--micro-batches", "3"], ["3 micro-batches", "not an integer"]),
        ([*GIVEN, "--stages", "2", "--micro-batches", "2,4"], ["2,4", "one number"]),
        ([*GIVEN, "--stages", "2", "--micro-batches", "1"], ["--micro-batches 1: one_f_one_b needs", "for 2 stages"]),
        ([*GIVEN, "--schedule", "nosuch"], ["'nosuch'", "oases"]),
        ([*GIVEN, "--sub-batches", "0"], ["--sub-batches", "got 0"]),
        ([*GIVEN, "--sub-batches", "64"], ["64 sub-batches"]),
        ([*GIVEN, "--schedule", "sync", "--sub-batches", "2"], ["--sub-batches 2", "sync runs a micro-batch whole"]),
        ([*GIVEN, "--recompute", "some"], ["'some'", "none, full"]),
        ([*GIVEN, "--recompute", "merak:2"], ["share of layers must be from 0 to 1", "2"]),
        ([*GIVEN, "--pipeline", "interleaved", "--stages", "2"], ["--stages 2 of 2 model chunks each", "2 layers"]),
        ([*GIVEN, "--recompute", "3"], ["recomputed_layers", "got 3"]),
        ([*GIVEN, "--recompute", "1234567890"], ["'1234567890'", "number of layers"]),
        ([*GIVEN, "--pipeline", "nosuch"], ["'nosuch'", "gpipe"]),
        ([*GIVEN, "--html", "/dev/null/x.html"], ["--html", "a file is in the way"]),
        ([*GIVEN, "--trace", "/dev/null/x.json"], ["--trace", "a file is in the way"]),
    ],
)
def test_mistakes_of_simulate(capsys, planned, arguments, parts):
    capsys.readouterr()
    error = fails(capsys, "simulate", *(planned if each == "PLAN" else each for each in arguments))
    for part in parts:
        assert part in error


@pytest.mark.parametrize("option", ["--schedule", "--recompute", "--pipeline"])
def test_an_empty_value_is_not_the_default(option, capsys):
    assert "''" in fails(capsys, "simulate", *GIVEN, option, "")


def test_an_empty_path_or_a_huge_batch_is_refused(capsys):
    assert "hardware profile" in fails(capsys, "plan", *GIVEN[:-4], "--profile", "", "--global-batch", "16")
    assert "--global-batch must be at most" in fails(capsys, "plan", *GIVEN[:-1], str(10**20))
    assert "do not nest" in fails(capsys, "plan", *GIVEN, "--degrees", "2,3")


@pytest.mark.long
def test_a_plan_in_bfloat16_can_be_executed_and_one_in_float16_cannot(capsys, tmp_path):
    path = tmp_path / "plan.json"
    cli.main(["plan", *GIVEN, "--dtype", "bfloat16", "--json", str(path)])
    check(read_plan(path))
    error = fails(capsys, "plan", *GIVEN, "--dtype", "float16")
    assert "dtype float16 cannot be trained, only float32, bfloat16; oases simulate predicts it" in error


def test_chunks_of_a_model_with_one_block_per_layer(tmp_path):
    """GPT-NeoX adds attention and MLP in one sum: its parts are whole layers too."""
    pytest.importorskip("transformers")
    config, found = tmp_path / "config.json", tmp_path / "found.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    config.write_text(json.dumps({"model_type": "gpt_neox", "vocab_size": 256, **sizes}))
    given = ["--model", str(config), "--sequence", "64", "--cluster", "2x3090", "--global-batch", "4"]
    by_hand = ["--stages", "2", "--micro-batches", "4", "--pipeline", "interleaved"]
    cli.main(["simulate", *given, *by_hand, "--json", str(found)])
    stages = json.loads(found.read_text())["plan"]["stages"]
    assert [[segment["num_blocks"] for segment in stage["segments"]] for stage in stages] == [[3, 3], [3, 3]]
