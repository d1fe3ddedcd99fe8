"""Every number that a user gives is bounded before anything is built, started or allocated."""

import argparse
import dataclasses
import json

import pytest
from command_line import fails
from resident_memory import limited_memory

from oases import cli, testbed
from oases.core.schedule import PIPELINES, ScheduleError, generate_pipeline
from oases.core.schedule import generate as generate_schedule
from oases.errors import UsageError
from oases.launch import fork_server
from oases.launch.ranks import RankOptions
from oases.layers import OverlappedStack
from oases.limits import LIMITS, MOST_LOCAL_RANKS, MOST_PLACES, require_numbers
from oases.models import GPTConfig
from oases.models.gpt import transformer_blocks
from oases.models.options import Degrees
from oases.plans.expert_schedules import generate_experts
from oases.plans.plan import Plan
from oases.plans.shape import Experts, GPTSizes
from oases.profile.config import OverlapConfig, ProfileConfig
from oases.testbed import Backend
from oases_bench import command_line as bench_command_line
from oases_bench.loads import generate
from oases_train.config import TrainConfig
from oases_train.plan import Run, least_bytes, plan_from_degrees
from oases_train.traces import Recorder

MODEL = ["--cluster", "4x3090", "--hidden", "256", "--layers", "2", "--heads", "4", "--sequence", "128"]
GIVEN = {"plan": [*MODEL, "--global-batch", "8"], "simulate": [*MODEL, "--global-batch", "8", "--tp", "1"]}
"""Arguments of commands that need some."""
COMMANDS = ["demo", "train", "profile", "plan", "simulate"]
COMMANDS += [f"bench {name}" for name in bench_command_line.BENCHMARKS]
DIGITS = "9" * 5000


def starts(*_, **__):
    raise AssertionError("work began with a number beyond its limit")


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    monkeypatch.setattr("oases.launch.ranks.run_ranks", starts)
    monkeypatch.setattr(bench_command_line, "run_ranks", starts)
    monkeypatch.setattr(testbed, "relaunch", starts)
    monkeypatch.setattr(fork_server, "start", lambda modules: None)


def numeric_options(command):
    """(flag, name, type) of the options of a command that take numbers."""
    parser = cli._parser(command.split())
    for word in command.split():
        (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = commands.choices[word]
    return [(each.option_strings[0], each.dest, each.type) for each in parser._actions if each.type in (int, float)]


def numeric_fields(cls):
    return [item.name for item in dataclasses.fields(cls) if item.type in ("int", "float")]


def beyond(name):
    """Values that no use of the name allows."""
    least, most = LIMITS[name]
    whole = isinstance(most, int)
    return [least - 1, most + 1 if whole else 10 * most, *([] if whole else [float("nan"), float("inf")])]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_numeric_option_is_refused_beyond_its_limit(capsys, tmp_path, command):
    words, given = command.split(), GIVEN.get(command, [])
    for flag, name, kind in numeric_options(command):
        assert name in LIMITS, f"{flag} of oases {command} has no limit; give {name} one in oases/limits.py"
        values = [*map(str, beyond(name)), *(("0.5", DIGITS) if kind is int else ())]
        for value in values:
            with limited_memory(100):
                error = fails(capsys, *words, *given, f"{flag}={value}")
            assert flag in error or name in error, error
            assert len(error) < 6000


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--layers 1000000000", ["--layers must be at most 4096, got 1000000000"]),
        ("--layers 1e9", ["argument --layers: must be a whole number, got '1e9'"]),
        ("--batch 1000000000", ["--batch must be at most 4194304"]),
        (
            "--batch 4194304 --schedule oases@2",
            ["GB for activations (--batch, --sequence)", "GB for logits (--batch"],
        ),
        ("--micro-batches 50000000", ["--micro-batches must be at most 65536"]),
        ("--layers 1024 --hidden 65536", ["GB for blocks (--hidden, --layers)", "1024 layers of hidden 65536"]),
        ("--experts 1000000000", ["--experts must be at most 16384"]),
        ("--experts 16384 --expert-hidden 1048576", ["GB for blocks", "4 layers of 16384 experts"]),
        ("--dp 4096 --batch 65536 --tp 1", ["4096 ranks", f"up to {MOST_LOCAL_RANKS} on a machine", "torchrun"]),
        ("--schedule oases@4000000 --batch 4194304", [f"more than {MOST_PLACES} parts", "fewer sub-batches"]),
        ("--pp 4 --micro-batches 65536 --batch 65536 --schedule sync --tp 1", [f"more than {MOST_PLACES} forward"]),
    ],
)
def test_sizes_that_fit_no_machine_are_refused_before_ranks_start(capsys, words, parts):
    with limited_memory(100):
        error = fails(capsys, "train", "--max-restarts", "3", *words.split())
    for part in parts:
        assert part in error


def test_a_yaml_file_names_the_line_of_a_number_beyond_its_limit(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    for name in numeric_fields(TrainConfig):
        for value in beyond(name):
            path.write_text(f"# sizes\n{name}: {value}\n".replace("inf", ".inf").replace("nan", ".nan"))
            error = fails(capsys, "train", "--config", str(path))
            assert f"{str(path)!r}, line 2: {name} must be" in error
    path.write_text("degrees: {data: 1000000000}\n")
    assert "degrees: data must be at most 65536" in fails(capsys, "train", "--config", str(path))


@pytest.mark.parametrize("cls", [TrainConfig, OverlapConfig, ProfileConfig, GPTConfig])
def test_configurations_made_in_python_have_the_limits(cls):
    for name in numeric_fields(cls):
        for value in beyond(name):
            with pytest.raises(ValueError, match=f"{name} must be"):
                cls(**{name: value})
        if isinstance(LIMITS[name].most, int):
            with pytest.raises(ValueError, match=f"{name} must be .*, got 2.5"):
                cls(**{name: 2.5})


def test_plans_and_models_have_the_limits():
    plan = json.loads(plan_from_degrees(TrainConfig(), 2).to_json())
    for place, cls in (((), Plan), (("model",), GPTSizes), (("stages", 0, "segments", 0), None)):
        names = ["num_blocks", "tp", "sub_batches"] if cls is None else numeric_fields(cls)
        for name in names:
            for value in (10**9, 10**12, 10**400, -(10**400)):
                data = json.loads(json.dumps(plan))
                found = data
                for step in place:
                    found = found[step]
                found[name] = value
                with pytest.raises(UsageError, match=r"^(plan|model): "):
                    Plan.from_json(json.dumps(data))
    for name in numeric_fields(Experts):
        for value in beyond(name):
            with pytest.raises(UsageError, match=f"{name} must be"):
                Experts(**{"experts": 4, name: value})
    with pytest.raises(UsageError, match="degrees: data must be at most 65536, got 1000000000"):
        Degrees(data=10**9)


def test_a_stack_refuses_a_million_sub_batches():
    blocks = transformer_blocks(GPTConfig(hidden=64, layers=1, heads=1), None)
    with limited_memory(100), pytest.raises(UsageError, match="sub_batches must be at most 4096, got 1000000"):
        OverlappedStack(blocks, process_group=None, sub_batches=10**6)


def test_generators_of_lists_refuse_more_places_than_fit():
    with limited_memory(100):
        with pytest.raises(ScheduleError, match=f"more than {MOST_PLACES} parts; give fewer"):
            generate_schedule("oases", 2, 10**6)
        for name in PIPELINES:
            with pytest.raises(ScheduleError, match=f"{name} of .* give fewer micro-batches"):
                generate_pipeline(name, 2, 10**8)
        with pytest.raises(ScheduleError, match="give fewer"):
            generate_experts("plain", 10**8)


def test_ranks_of_a_launcher_and_of_a_simulation_are_not_limited(monkeypatch):
    assert RankOptions(4096, Backend("sim", 0.0, 1e9, single_process=True)).size == 4096
    with pytest.raises(UsageError, match=r"--tp 4096 needs 4096 ranks"):
        RankOptions(4096)
    monkeypatch.setenv("WORLD_SIZE", "4096")
    monkeypatch.setenv("RANK", "0")
    assert RankOptions(4096).size == 4096


def test_the_estimate_is_at_most_what_a_model_takes():
    """Counted by hand: state of each weight on its ranks, and the tensors that a step holds at once."""
    config = TrainConfig(hidden=64, layers=2, heads=2, sequence=16, batch=8)
    run = Run.of(config, 2)
    blocks, table, activations, logits = least_bytes(run.plan).values()
    weights = 12 * 64 * 64 + 13 * 64  # of a layer, with biases and norms
    assert 2 * 16 * weights <= blocks <= 2 * 16 * (weights + 2 * 64 * 5)
    assert table == 16 * (256 + 2 * (16 + 2)) * 64
    assert activations == 2 * 4 * (8 * 16 * 64 * 4)
    assert logits == 8 * 16 * 256 * 8


def test_values_that_are_no_numbers_are_left_to_others():
    require_numbers({"batch": None, "layers": "12,96", "degrees": (1, 2), "nosuch": 10**30, "zero": True})
    with pytest.raises(UsageError, match="plan: degrees must be at most"):
        require_numbers({"degrees": (1, 10**9)}, "plan: ")


def test_a_replay_takes_sizes_within_limits_only(capsys, tmp_path):
    path = tmp_path / "loads.jsonl"
    with Recorder(path) as recorder:
        recorder.write(0, 0, next(generate(experts=4, devices=2, tokens=64)))
    assert "--hidden must be at most" in fails(
        capsys, "bench", "loads", "--trace", str(path), "--hidden", "1000000000"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train", "--layers=1000000000"], "--layers must be at most 4096, got 1000000000"),
        (["train", "--hidden", "0.5"], "--hidden: must be a whole number, got '0.5'"),
        (["plan", "--layers=0"], "--layers must be at least 1, got 0"),
        (["bench", "overlap", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["train", "--layers", DIGITS], "--layers: must be a whole number, got '99"),
        (["bench", "loss", "--wires=,"], "--wires names nothing: ','"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_arguments_beyond_limits_are_named_in_a_line(capsys, given, said):
    error = fails(capsys, *given)
    assert said in error
    assert len(error) < 250
