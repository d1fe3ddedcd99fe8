"""Plans as files: what is written is read back; what is wrong is named."""

import json
from dataclasses import replace

import pytest

from oases.errors import UsageError
from oases.plans.gpt import gpt, resized
from oases.plans.plan import Plan, Prediction, Segment, Stage, read_plan

MODEL = gpt(hidden=64, layers=4, heads=4, sequence=32, vocabulary=256)
STAGES = (
    Stage((Segment(3, 2, "oases", 2, 1), Segment(1, 4, "sync", 1))),
    Stage((Segment(4, 1, "fine_grained", 1),)),
)
PLAN = Plan(MODEL, 8, 4, 16, 2, STAGES, True, "gpipe", Prediction(1.5, 0.5, 0.25, (100, 200)))


def test_a_model_agrees_with_its_sizes():
    assert resized(MODEL, layers=6) == MODEL.with_layers(6) == gpt(64, 6, 4, 32, 256)
    assert resized(MODEL, dtype="bfloat16") == MODEL.in_dtype("bfloat16")
    with pytest.raises(UsageError, match="sequence is 64 and 32 in its sizes; change it by"):
        replace(MODEL, sequence=64)


@pytest.mark.parametrize("plan", [PLAN, Plan(MODEL, 1, 1, 1, 1, (Stage((Segment(8, 1, "sync", 1),)),))])
def test_what_is_written_is_read_back(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert read_plan(path) == plan


def test_a_plan_in_a_line():
    assert PLAN.text() == (
        "stage 0: 3 blocks tp 2 x dp 2 (oases@2, 1 layers recomputed) -> 1 blocks tp 4 x dp 1 (sync); "
        "stage 1: 4 blocks tp 1 x dp 4 (fine_grained); 2 micro-batches; gpipe; sharded optimizer"
    )
    alike = Plan(MODEL, 4, 4, 8, 4, tuple(Stage((Segment(2, 1, "sync", 1),)) for _ in range(4)))
    assert alike.text() == "stages 0-3: 2 blocks tp 1 x dp 1 (sync); 4 micro-batches; one_f_one_b"


TWO = (Segment(2, 1, "sync", 1), Segment(2, 2, "oases", 2, 1))


def test_the_parts_of_an_interleaved_plan():
    plan = Plan(MODEL, 4, 4, 8, 2, (Stage(TWO), Stage(TWO)), pipeline="interleaved")
    assert [(part.number, part.first_block, part.first_degree) for part in plan.parts] == [
        (0, 0, 1), (1, 2, 1), (2, 4, 2), (3, 6, 2),
    ]  # fmt: skip
    assert plan.parts_of(1) == (plan.parts[1], plan.parts[3])
    assert [part.first_segment for part in plan.parts] == [0, 0, 1, 1]
    assert not plan.hands_on, "samples of tp 1 meet tp 2 between parts 1 and 2"
    assert Plan.from_json(plan.to_json()) == plan
    assert [part.number for part in PLAN.parts] == [0, 1]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "message"),
    [
        ((Stage((*TWO, *TWO)),), 2, "interleaved needs at least 2 stages, got 1; take one_f_one_b"),
        ((Stage(TWO), Stage(TWO)), 1, "micro-batches in multiples of the 2 stages, got 2 and 1"),
    ],
)
def test_what_cannot_be_interleaved(stages, micro_batches, message):
    with pytest.raises(UsageError, match=message):
        Plan(MODEL, 4, 4, 8, micro_batches, stages, pipeline="interleaved")


def without(name):
    def change(data):
        del data[name]

    return change


def put(*path_and_value):
    *path, name, value = path_and_value

    def change(data):
        for step in path:
            data = data[step]
        data[name] = value

    return change


SEGMENT = ("stages", 0, "segments", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "x"), "not an oases plan"),
        (put("version", 2), "version 2 is unknown"),
        (without("world"), "world"),
        (put("worlds", 3), "unknown field 'worlds'"),
        (put("world", "8"), "world must be a whole number, got '8'"),
        (put("zero", 1), "zero must be true or false, got 1"),
        (put("stages", {}), "stages must be a list"),
        (put("stages", []), "no stage"),
        (put("stages", 0, {}), "field 'segments' is missing; write one"),
        (put("model", None), "model must be an object"),
        (put("model", "heads", 5), "hidden 64 does not divide by 5 heads"),
        (put("model", "colour", "red"), "unknown field 'colour'"),
        (put(*SEGMENT, "tp", 3), "tp 3 does not fit its 4 ranks"),
        (put(*SEGMENT, "schedule", "nosuch"), "unknown schedule 'nosuch'"),
        (put(*SEGMENT, "num_blocks", 2), "its stages hold 7 blocks, the model has 8"),
        (put(*SEGMENT, "recomputed_layers", 3), "recomputed_layers must be from 0 to the 2 layers .*, got 3"),
        (put(*SEGMENT, "recomputed_layers", -1), "recomputed_layers .*, got -1"),
        (put(*SEGMENT, "sub_batches", 0), "sub_batches must be at least 1, got 0"),
        (put(*SEGMENT, "sub_batches", 9), "do not divide into 9 sub-batches"),
        (put("micro_batches", 0), "micro_batches must be at least 1, got 0"),
        (put("micro_batches", 3), "16 samples in 3 micro-batches do not divide"),
        (put("world", 9), "2 stages do not divide 9 ranks"),
        (put("world", -8), "world must be at least 1, got -8"),
        (put("pipeline", "nosuch"), "unknown pipeline 'nosuch'; known are gpipe, one_f_one_b, pre_recompute"),
        (put("pipeline", "interleaved"), "stage 1 has 1 segments; interleaved runs 2 parts of the model on each"),
        (put("stages", 1, "segments", []), "its stages hold 4 blocks, the model has 8"),
        (put("prediction", "memory_bytes", 3), "memory_bytes must be a list"),
        (put("prediction", "memory_bytes", [1]), r"memory_bytes must be .* each of 2 stages, got \[1\]"),
        (put("prediction", "memory_bytes", [1, "x"]), r"memory_bytes\[1\] must be a whole number"),
        (put("prediction", "step_seconds", float("nan")), "step_seconds must be finite, got nan"),
        (put("prediction", "exposed_seconds", -1), "exposed_seconds must be at least 0, got -1"),
        (put("prediction", [1]), r"prediction must be an object or null, got \[1\]"),
        (put("model", "sequence", 10**400), "sequence must be at most 16777216"),
        (put("model", "layers", 10**6), "layers must be at most 4096, got 1000000"),
        (put("global_batch", 10**400), "global_batch must be at most 4194304"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    data = json.loads(PLAN.to_json())
    change(data)
    with pytest.raises(UsageError, match=message):
        Plan.from_json(json.dumps(data))


def test_files_that_are_no_plan(tmp_path):
    for text, message in (("{", "not JSON"), ("[]", "not an oases plan"), ("3", "not an oases plan")):
        with pytest.raises(UsageError, match=message):
            Plan.from_json(text)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_plan(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_plan(tmp_path / "binary")


def test_what_never_ends_is_no_plan(tmp_path):
    with pytest.raises(UsageError, match="'/dev/zero' is not a file"):
        read_plan("/dev/zero")
    with pytest.raises(UsageError, match="plan is not JSON: it is nested too deeply"):
        Plan.from_json("[" * 200_000)


def test_a_file_of_version_0_1_0_is_read_or_refused_by_name():
    """It had no experts, and two pipelines more."""
    plan = plan_of_0_1_0()
    assert Plan.from_json(json.dumps(plan)).experts is None
    with pytest.raises(UsageError, match="unknown pipeline 'shifted_under_forward'; known are "):
        Plan.from_json(json.dumps(plan | {"pipeline": "shifted_under_forward"}))


def plan_of_0_1_0():
    model = {
        "hidden": 32, "layers": 2, "heads": 4, "sequence": 16, "vocabulary": 256, "dtype": "float32", "name": "gpt",
        "head_size": 0, "kv_heads": 0, "intermediate": 0, "gated": False, "tied": True,
    }  # fmt: skip
    segment = {
        "num_blocks": 4, "tp": 2, "schedule": "oases", "sub_batches": 2, "recomputed_layers": 0,
        "sequence_parallel": False,
    }  # fmt: skip
    return {
        "format": "oases plan", "version": 1, "model": model, "world": 2, "ranks_per_node": 2, "global_batch": 8,
        "micro_batches": 1, "stages": [{"segments": [segment]}], "zero": False, "pipeline": "one_f_one_b",
        "prediction": None, "fsdp": False,
    }  # fmt: skip
