"""Configurations in files: read back as written, mistakes named with file, line and the nearest field."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

import oases
from oases import TrainConfig
from oases.cli import main
from oases.errors import UsageError
from oases.models.options import Degrees
from oases.moved import REMOVED
from oases_train.config_file import config_text, read_values
from oases_train.plan import Run

FIELDS = dataclasses.fields(TrainConfig)


def file_of(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(tmp_path, text, message, name="run.yaml"):
    with pytest.raises(UsageError, match=message):
        TrainConfig.from_yaml(file_of(tmp_path, text, name))


def test_a_configuration_is_read_back_as_it_was_written(tmp_path):
    made = TrainConfig(
        hidden=96, heads=3, batch=24, schedule="oases@3", learning_rate=1e-5, data="a folder: of #text",
        bad_loss="off", degrees={"data": 2, "pipeline": 2, "tensor": 2}, micro_batches=4, zero=True,
        precision="bfloat16",
    )  # fmt: skip
    for config in (TrainConfig(), made, dataclasses.replace(made, heads=1)):
        assert TrainConfig.from_yaml(file_of(tmp_path, config.to_yaml())) == config


def test_every_field_is_written_with_its_default_and_its_help(capsys):
    main(["train", "--write-config"])
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert list(values) == [item.name for item in FIELDS]
    for item in FIELDS:
        assert item.metadata["help"].split()[0] in text
        expected = dataclasses.asdict(item.default) if item.name == "degrees" else item.default
        assert values[item.name] == (False if values[item.name] is False else expected)
    main(["train", "--write-config", "--hidden", "96", "--dp", "2"])
    text = capsys.readouterr().out
    assert "hidden: 96\n" in text
    assert "degrees: {data: 2, pipeline: 1, tensor: 0}\n" in text


def test_values_are_those_of_yaml_1_2(tmp_path):
    text = "learning_rate: 3e-4\nclip: 1.5e+1\nkeep: 2\nbad_loss: off\ndata: no\nzero: true\nresume: ~\n"
    values = read_values(file_of(tmp_path, text), TrainConfig)
    assert values == {
        "learning_rate": 3e-4, "clip": 15.0, "keep": 2, "bad_loss": "off", "data": "no", "zero": True,
        "resume": None,
    }  # fmt: skip
    assert read_values(file_of(tmp_path, "# nothing\n"), TrainConfig) == {}


def test_mistakes_in_yaml_are_named_with_their_line(tmp_path):
    refused(
        tmp_path, "hidden: 64\n\nhiden: 32\n", r"run.yaml', line 3: unknown field 'hiden'; did you mean 'hidden'\?"
    )
    refused(tmp_path, "qqq: 1\n", "line 1: unknown field 'qqq'; oases train --write-config lists all")
    refused(tmp_path, "steps: many\n", "line 1: steps must be a whole number, got 'many'")
    refused(tmp_path, "steps: 2.5\n", "line 1: steps must be a whole number, got 2.5")
    refused(tmp_path, "batch: true\n", "line 1: batch must be a whole number, got True")
    refused(tmp_path, "zero: 1\n", "line 1: zero must be true or false, got 1")
    refused(tmp_path, "data: [a, b]\n", r"line 1: data must be a text, or null for none, got \['a', 'b'\]")
    refused(tmp_path, "steps: 5\nsteps: 6\n", "line 2: steps is given twice")
    refused(tmp_path, "- steps\n", "expected lines such as 'hidden: 512', got '- steps'")
    refused(tmp_path, "steps: [1\n", "line 2: invalid YAML: expected ',' or ']'")
    refused(tmp_path, "data: !!python/object:os.system x\n", "invalid YAML: could not determine a constructor")
    refused(tmp_path, "degrees: {tensors: 2}\n", "degrees: unknown field 'tensors'; did you mean 'tensor'")
    refused(tmp_path, "degrees: {data: 0}\n", "degrees: data must be at least 1, got 0")
    refused(tmp_path, "degrees: 8\n", "degrees must be an object, got 8")
    with pytest.raises(
        UsageError, match=r"nowhere.yaml' cannot be read: No such file .* write one with: oases train"
    ):
        TrainConfig.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UsageError, match="hidden must be a whole number, got '64'"):
        TrainConfig(hidden="64")


def test_options_of_before_are_refused_by_name_with_what_to_do_instead(tmp_path, capsys):
    fields = {item.name for item in FIELDS}
    for name, instead in REMOVED.items():
        assert name not in fields
        with pytest.raises(SystemExit) as caught:
            main(["train", f"--{name.replace('_', '-')}", "1"])
        assert caught.value.code == 2
        assert f"--{name.replace('_', '-')} is no option any more: {instead}" in capsys.readouterr().err
        refused(tmp_path, f"steps: 2\n{name}: 1\n", f"line 2: {name} is no option any more: {re.escape(instead)}")
    text = "from oases import TrainConfig\n\nconfig = TrainConfig(spike=2.0)\n"
    refused(tmp_path, text, r"run.py', line 3: spike is no option any more: --bad-loss skip", "run.py")


def test_a_python_file_defines_the_configuration(tmp_path):
    text = "from oases import TrainConfig\n\nconfig = TrainConfig(hidden=96, {}=3)\n"
    path = file_of(tmp_path, text.format("steps"), "run.py")
    assert read_values(path, TrainConfig) == {"hidden": 96, "steps": 3}
    assert TrainConfig.from_yaml(path) == TrainConfig(hidden=96, steps=3)
    refused(tmp_path, text.format("step"), r"run.py', line 3: unknown field 'step'; did you mean 'steps'\?", "run.py")
    refused(tmp_path, text.format("batch") + "1 / 0\n", "line 4: ZeroDivisionError: division by zero", "run.py")
    refused(tmp_path, "config = 5\n", r"must define config = TrainConfig\(\.\.\.\), got 5", "run.py")
    refused(tmp_path, "config = (\n", "line 1: SyntaxError", "run.py")


def test_degrees_become_a_plan_or_say_why_not(tmp_path):
    def planned(ranks=8, **values):
        values = {"degrees": {"data": 2, "pipeline": 2, "tensor": 2}, "micro_batches": 2, "batch": 16} | values
        return Run.of(TrainConfig(**values), ranks).plan

    plan = planned(pipeline_schedule="shifted_critical_path", layers=5, recompute="full")
    assert plan.text().startswith("stage 0: 6 blocks tp 2 x dp 2 (auto, 3 layers recomputed); stage 1: 4 blocks")
    inter = planned(pipeline_schedule="interleaved", layers=5)
    assert [[segment.num_blocks for segment in stage.segments] for stage in inter.stages] == [[4, 2], [2, 2]]
    assert (
        planned(degrees={"tensor": 8}, micro_batches=1, batch=8, schedule="oases").text()
        == "8 blocks tp 8 x dp 1 (oases@4); 1 micro-batch"
    )
    assert planned(schedule="auto").stages[0].segments[0].name == "auto"
    assert planned(degrees={"data": 2}, schedule="sync@2").stages[0].segments[0].tp == 4
    for values, message in (
        ({"ranks": 6}, "degrees data 2 x pipeline 2 x tensor 2 make 8 ranks, the run has 6; start that many"),
        ({"layers": 1}, "2 stages are more than the 1 layer; give fewer stages or more --layers"),
        (
            {"layers": 3, "pipeline_schedule": "interleaved"},
            "2 stages, each with 2 model chunks, are more than",
        ),
        ({"micro_batches": 1}, "one_f_one_b needs as many micro-batches as stages, got 1 for 2 stages"),
        (
            {"batch": 10},
            "a batch of 10 does not divide into 2 micro-batches for each of 2 replicas; give a multiple of 4",
        ),
        ({"batch": 4, "schedule": "oases@2"}, "cannot be split into 2 sub-batches"),
        ({"heads": 1}, "heads 1 does not divide by --tp 2"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            planned(**values)
    assert Degrees(2, 2).tensor_of(8) == 2


def test_the_command_line_goes_before_the_file(tmp_path, capsys):
    path = file_of(tmp_path, "hidden: 64\nbatch: 12\ndegrees: {data: 2, tensor: 2}\n")
    main(["train", "--config", str(path), "--batch", "16", "--pp", "2", "--micro-batches", "2", "--write-config"])
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["hidden"], values["batch"]) == (64, 16)
    assert values["degrees"] == {"data": 2, "pipeline": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "2", "--pp", "8", "--micro-batches", "8", "--batch", "16"], "8 stages are more than the 4 layers"),
        (["--pp", "2", "--batch", "8"], "needs as many micro-batches as stages, got 1 for 2 stages"),
        (["--precision", "float8"], "invalid choice: 'float8' (choose from 'float32', 'bfloat16')"),
        (["--plan", "nowhere.json"], "plan 'nowhere.json' cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_with_a_plan_a_file_leaves_to_it_what_it_has_at_its_default(tmp_path):
    plan = Run.of(TrainConfig(hidden=64, layers=2, degrees={"data": 2, "tensor": 1}, batch=4), 2).plan
    path = file_of(tmp_path, plan.to_json(), "plan.json")
    whole = config_text({"plan": str(path), "steps": 3}, FIELDS)
    config = TrainConfig.from_yaml(file_of(tmp_path, whole))
    assert (config.hidden, config.layers, config.batch, config.steps) == (64, 2, 4, 3)
    assert Run.of(config, 2).plan == plan
    refused(tmp_path, whole.replace("hidden: 512", "hidden: 96"), "plan: hidden is 64 there and 96 here")
    refused(tmp_path, whole.replace("\nschedule: auto", "\nschedule: sync"), "leave out --schedule")


def example():
    """The YAML of docs/training.md."""
    page = (Path(oases.__file__).parents[1] / "docs" / "training.md").read_text()
    return re.search(r"```yaml\n(.*?)```", page, re.DOTALL).group(1)


@pytest.mark.long
def test_the_example_of_the_docs_trains(ranks_at_hand, monkeypatch, tmp_path):
    text = file_of(tmp_path, "".join(f"{i} plus {i % 7} is {i + i % 7}.\n" for i in range(4000)), "text.txt")
    out = tmp_path / "out.json"
    small = [
        "--hidden",
        "16",
        "--layers",
        "2",
        "--heads",
        "2",
        "--sequence",
        "8",
        "--steps",
        "2",
        "--data",
        str(text),
    ]
    small += ["--dp", "1", "--batch", "16"]  # four ranks in place of eight
    small += ["--validation-batches", "1", "--evaluate-every", "1", "--warmup", "1", "--json", str(out)]
    monkeypatch.chdir(tmp_path)
    main(["train", "--config", str(file_of(tmp_path, example())), *small])
    result = json.loads(out.read_text())
    assert len(result["losses"]) == 2
    assert set(result["validation_losses"]) == {"1", "2"}
    assert result["plan"]["world"] == 4
    assert result["plan"]["pipeline"] == "shifted_critical_path"
    assert (tmp_path / "run").is_dir()
