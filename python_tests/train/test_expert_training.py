"""Training with experts: one curve on any ranks and with any placement, checkpoints over ranks, traces, refusals."""

import dataclasses
import json
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from plan_runs import EXPERTS

from oases import TrainConfig, Trainer
from oases.checkpoint.files import export
from oases.core.execution.group import group_size, resolve
from oases.errors import UsageError
from oases.models.options import Degrees
from oases.plans.check import check
from oases.plans.plan import Experts, Plan, Segment, Stage
from oases_train.config import config_for
from oases_train.load_balance import LoadBalance
from oases_train.plan import Run, num_ranks, plan_from_degrees, resolve_degrees
from oases_train.traces import Recorder, replay


def trained(corpus, **changes):
    trainer = Trainer(dataclasses.replace(EXPERTS, data=corpus, **changes))
    try:
        result = trainer.train()
        return {name: result[name] for name in ("losses", "validation_loss", "balance")}
    finally:
        trainer.close()


def by_plan(corpus, router, **changes):
    """Trained with options of the router and the experts that a plan alone has."""
    config = dataclasses.replace(EXPERTS, data=corpus, **changes)
    plan = Run.of(config, group_size(resolve(None))).plan
    trainer = Trainer(config, plan=dataclasses.replace(plan, experts=dataclasses.replace(plan.experts, **router)))
    try:
        result = trainer.train()
        return {name: result[name] for name in ("losses", "validation_loss", "balance")}
    finally:
        trainer.close()


def trained_with(corpus, changes):
    return trained(corpus, **changes)


@pytest.fixture(scope="module")
def alone(corpus):
    return trained(corpus)


def same(results, expected, first=0):
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"][first:], rel=1e-4)
        assert result["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-4)


def test_it_learns(alone):
    assert alone["losses"][-1] < alone["losses"][0] - 0.3


@pytest.mark.parametrize("placement", ["none", "prophet", "faster_moe"])
def test_two_ranks_train_like_one(two_ranks, corpus, alone, placement):
    results = two_ranks.run(trained_with, corpus, {"placement": placement})
    same(results, alone)
    assert results[0]["balance"] == results[1]["balance"]
    assert results[0]["balance"]["balance_before"] > 0
    if placement == "none":
        assert results[0]["balance"]["rb"] == 1
        assert results[0]["balance"]["copies"] == results[0]["balance"]["saved_seconds"] == 0


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"degrees": {"tensor": 2}},
        pytest.param({"degrees": {"data": 4}, "micro_batches": 2}, marks=pytest.mark.slow),
        {"recompute": "full", "zero": True},
        pytest.param({"fsdp": True, "degrees": {"data": 4}}, marks=pytest.mark.slow),
        {"fsdp": True, "degrees": {"data": 2, "tensor": 2}, "micro_batches": 2, "recompute": "full"},
        pytest.param({"compile": "aot_eager", "degrees": {"tensor": 2}}, marks=pytest.mark.slow),
        {"fsdp": True, "degrees": {"pipeline": 2, "data": 2}, "micro_batches": 2},
        pytest.param(
            {"compile": "aot_eager", "degrees": {"pipeline": 2, "data": 2}, "micro_batches": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_four_ranks_train_like_one(four_ranks, corpus, alone, changes):
    same(four_ranks.run(trained_with, corpus, changes), alone)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"degrees": {"pipeline": 2, "tensor": 1}, "micro_batches": 2}),
        (2, {"degrees": {"pipeline": 2, "data": 1, "tensor": 1}, "micro_batches": 4, "pipeline_schedule": "zb_h1"}),
        (4, {"degrees": {"pipeline": 2, "data": 2}, "micro_batches": 2, "recompute": "full"}),
        (4, {"degrees": {"pipeline": 2, "tensor": 2}, "micro_batches": 2, "pipeline_schedule": "pre_recompute",
             "recompute": "full", "zero": False}),
        (4, {"degrees": {"pipeline": 2, "data": 2}, "micro_batches": 4, "placement": "none", "layers": 4,
             "pipeline_schedule": "interleaved"}),
        (4, {"degrees": {"pipeline": 2, "data": 2}, "micro_batches": 4, "layers": 4, "pipeline_schedule": "zb_v"}),
    ],
)  # fmt: skip
def test_experts_on_pipeline_stages_train_like_one_process(two_ranks, four_ranks, corpus, alone, ranks, changes):
    expected = trained(corpus, layers=changes["layers"]) if "layers" in changes else alone
    results = (two_ranks if ranks == 2 else four_ranks).run(trained_with, corpus, changes)
    same(results, expected)
    assert all(result["balance"] == results[0]["balance"] for result in results)


def test_micro_batches_and_their_losses_add_up(corpus):
    router = {"z_weight": 1e-3}
    whole = by_plan(corpus, router, steps=4)
    same([by_plan(corpus, router, steps=4, micro_batches=4)], whole)
    assert whole["losses"] != trained(corpus, steps=4)["losses"]


@pytest.mark.long
def test_bfloat16_trains(two_ranks, corpus, alone):
    for result in two_ranks.run(trained_with, corpus, {"precision": "bfloat16", "placement": "prophet"}):
        assert result["losses"] == pytest.approx(alone["losses"], rel=0.05)


def trained_by_a_plan(corpus, text, folder):
    """By a plan of two stages: all steps, then the second half again, from the checkpoint after the first."""
    plan, curves = Plan.from_json(text), []
    values = {name: getattr(EXPERTS, name) for name in ("steps", "warmup", "validation_batches", "learning_rate")}
    values |= {"data": corpus, "checkpoint": f"{folder}/run", "record_loads": f"{folder}/trace"}
    for given in ({"checkpoint_every": 3}, {"resume": f"{folder}/run/step-000003", "checkpoint": None}):
        trainer = Trainer(config_for(plan, values | given), plan=plan)
        curves.append(trainer.train()["losses"])
        trainer.close()
    return curves


@pytest.mark.long
def test_a_plan_with_experts_is_a_file_that_trains_and_resumes(two_ranks, corpus, alone, tmp_path):
    asked = dataclasses.replace(EXPERTS, degrees={"pipeline": 2, "tensor": 1}, micro_batches=2, placement="none")
    text = Run.of(asked, 2).plan.to_json()
    assert Plan.from_json(text).experts.experts == 4
    assert "4 experts" in Plan.from_json(text).text()
    for whole, rest in two_ranks.run(trained_by_a_plan, corpus, text, str(tmp_path)):
        assert whole == pytest.approx(alone["losses"], rel=1e-4)
        assert rest == whole[3:]  # to the bit
    assert [(step, layer) for step, layer, _ in replay(tmp_path / "trace")] == [
        (s, n) for s in range(EXPERTS.steps) for n in (0, 1)
    ]
    with pytest.raises(UsageError, match="plan: experts is 4 there and 0 here"):
        Trainer(
            TrainConfig(
                **{name: getattr(EXPERTS, name) for name in ("hidden", "layers", "heads", "sequence")}, batch=8
            ),
            plan=Plan.from_json(text),
        )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"experts": Experts(3, top_k=2)}, "3 experts do not divide over 2 devices; numbers that divide: 1, 3"),
        ({"stages": (Stage((Segment(1, 1, "sync", 1), Segment(3, 1, "sync", 1))),)}, "part 0 splits a layer"),
    ],
)
def test_plans_of_experts_that_cannot_be_run_are_refused(changes, told):
    with pytest.raises(UsageError, match=told):
        check(dataclasses.replace(Run.of(EXPERTS, 2).plan, **changes))


# --- checkpoints ---

BIASED = {"bias_update_rate": 0.01, "shared_hidden": 16}


def half(corpus, path):
    config = dataclasses.replace(EXPERTS, data=corpus, placement="none")
    plan = Run.of(config, 2).plan
    trainer = Trainer(config, plan=dataclasses.replace(plan, experts=dataclasses.replace(plan.experts, **BIASED)))
    for _ in range(3):
        trainer.step()
    trainer.save(path)
    bias = trainer.model.layers[0].router.bias.clone()
    losses = [trainer.step() for _ in range(3)]
    trainer.close()
    return bias, losses


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_goes_on_with_any(two_ranks, four_ranks, corpus, tmp_path):
    path = str(tmp_path / "checkpoint")
    (bias, losses), (other, _) = two_ranks.run(half, corpus, path)
    assert bias.any()
    assert torch.equal(bias, other)
    for result in two_ranks.run(resumed, corpus, path):
        assert result["losses"] == losses  # to the bit
    for results in (four_ranks.run(resumed, corpus, path), [resumed(corpus, path)]):
        for result in results:
            assert result["losses"] == pytest.approx(losses, rel=1e-4)
    shapes = export(path, tmp_path / "model.safetensors")
    assert shapes["stack.blocks.0.experts.experts.up"] == (4, 48, 32)
    assert shapes["stack.blocks.1.experts.router.bias"] == (4,)
    dense = {"experts": 0, "expert_hidden": 0, "balance_weight": 0.01, "placement": "auto"}
    for changes, told in (
        (dense, "experts is 4 there and 0 here"),
        ({"expert_hidden": 32}, "expert_hidden is 48 there and 32 here"),
        ({}, "shared_hidden is 16 there and 0 here"),
    ):
        with pytest.raises(UsageError, match=told):
            Trainer(dataclasses.replace(EXPERTS, data=corpus, resume=path, **changes))


def resumed(corpus, path):
    return by_plan(corpus, BIASED, placement="none", resume=path)


def test_validation_changes_nothing(corpus):
    biased = {"bias_update_rate": 0.01}
    expected = by_plan(corpus, biased, steps=4)["losses"]
    assert by_plan(corpus, biased, steps=4, evaluate_every=1)["losses"] == expected


# --- loads ---


def recorded(corpus, folder):
    result = trained(corpus, steps=4, record_loads=f"{folder}/trace", step_log=f"{folder}/log", micro_batches=2)
    again = trained(corpus, steps=5, record_loads=f"{folder}/again", checkpoint=f"{folder}/run", checkpoint_every=2)
    return result, again


@pytest.mark.long
def test_recorded_loads_are_those_that_were(two_ranks, corpus, tmp_path):
    (result, _), _ = two_ranks.run(recorded, corpus, str(tmp_path))
    rows = list(replay(tmp_path / "trace"))
    assert [(step, layer) for step, layer, _ in rows] == [(s, n) for s in range(4) for n in range(2)]
    for _, _, counts in rows:
        assert counts.shape == (4, 2)
        assert (counts.sum(0) == 8 * 16 * 2 // 2).all()  # tokens times experts of each, of each rank
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(log) == 4
    for line in log:
        assert line["balance_before"] >= 0
        assert line["dropped"] == 0
        assert line["copies"] >= 0
    before = np.mean([line["balance_before"] for line in log])
    assert result["balance"]["balance_before"] == pytest.approx(before)


def test_a_step_whose_loads_could_not_be_written_is_not_repeated(corpus, tmp_path):
    """Its weights are updated already: a second update by the same batch would go unnoticed."""
    trainer = Trainer(dataclasses.replace(EXPERTS, data=corpus, record_loads=str(tmp_path / "trace")))
    full = mock.patch.object(Recorder, "write", side_effect=UsageError("the disk is full"))
    with full, pytest.raises(UsageError, match="full"):
        trainer.step()
    with pytest.raises(RuntimeError, match="step 0 has failed"):
        trainer.step()
    assert (trainer.steps_done, trainer.updates) == (0, 1)


def test_a_trace_is_cut_where_a_run_goes_on(corpus, tmp_path):
    options = {"record_loads": str(tmp_path / "trace"), "checkpoint": str(tmp_path / "run"), "checkpoint_every": 2}

    def stop(report):
        if report.step == 3:
            raise InterruptedError

    config = dataclasses.replace(EXPERTS, data=corpus, **options)
    with pytest.raises(InterruptedError):
        Trainer(config).train(stop)
    assert [step for step, _, _ in replay(tmp_path / "trace")] == [0, 0, 1, 1, 2, 2]
    config = dataclasses.replace(config, resume="auto", steps=4)
    Trainer(config).train()
    assert [step for step, _, _ in replay(tmp_path / "trace")] == [0, 0, 1, 1, 2, 2, 3, 3]
    whole = (tmp_path / "trace").read_bytes()
    with mock.patch.object(Recorder, "write", side_effect=InterruptedError), pytest.raises(InterruptedError):
        LoadBalance(None, 1, options["record_loads"], 2)
    assert (tmp_path / "trace").read_bytes() == whole, (
        "a process that is killed while it cuts the trace loses nothing"
    )
    with pytest.raises(UsageError, match="holds the loads of another run"):
        Run.of(dataclasses.replace(config, resume=None, checkpoint=None, checkpoint_every=0), 1).corpus()


def test_tokens_on_a_wire(two_ranks, corpus, alone):
    first, second = (result["losses"] for result in two_ranks.run(trained_with, corpus, {"wire_dtype": "int8"}))
    assert first == second != pytest.approx(alone["losses"], rel=1e-6)
    assert first == pytest.approx(alone["losses"], rel=1e-2)


def test_dropped_slots_are_told(corpus):
    assert by_plan(corpus, {"capacity_factor": 0.5}, steps=2)["balance"]["dropped"] > 0


# --- what cannot be ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence_parallel": True}, "sequence_parallel True and experts 4 cannot be combined"),
        ({"schedule": "sync"}, "unknown schedule 'sync'; known are auto, plain, blocking, block_wise; or give"),
        ({"wire_dtype": "auto:lossy"}, "wire_dtype 'auto:lossy' and experts 4"),
        ({"placement": "best"}, "unknown placement 'best'"),
        ({"schedule": "plain"}, "plain moves no experts, but placement is prophet"),
        ({"top_k": 5}, "top_k must be from 1 to the 4 experts, got 5"),
        ({"experts": -1}, "experts must be at least 0, got -1"),
        ({"experts": 0, "expert_hidden": 0}, "balance_weight 0.0 needs a mixture of experts"),
    ],
)
def test_what_does_not_go_together_is_named(changes, told):
    with pytest.raises(UsageError, match=told):
        dataclasses.replace(EXPERTS, **changes)


@pytest.mark.parametrize(
    ("degrees", "ranks", "told"),
    [
        ({"data": 3}, 3, "4 experts do not divide over 3 devices"),
        ({"data": 2, "tensor": 2}, 2, "make 4 ranks, the run has 2"),
        ({"tensor": 8}, 8, "heads 4 does not divide by --tp 8"),
    ],
)
def test_degrees_that_cannot_be_are_named(degrees, ranks, told):
    with pytest.raises(UsageError, match=told):
        plan_from_degrees(dataclasses.replace(EXPERTS, degrees=degrees), ranks)


def test_a_batch_has_to_divide():
    with pytest.raises(UsageError, match="a batch of 8 does not divide into 3 micro-batches for each of 4"):
        plan_from_degrees(dataclasses.replace(EXPERTS, micro_batches=3), 4)


def test_replicas_are_on_all_ranks_unless_they_are_given():
    assert resolve_degrees(EXPERTS, 4) == Degrees(4, 1, 1)
    assert resolve_degrees(dataclasses.replace(EXPERTS, degrees={"tensor": 2}), 4) == Degrees(2, 1, 2)
    assert resolve_degrees(dataclasses.replace(EXPERTS, degrees={"data": 2}), 4) == Degrees(2, 1, 2)
    assert num_ranks(EXPERTS, None) == 2
    assert num_ranks(EXPERTS, 4) == 4
    assert num_ranks(EXPERTS, 4, one_replica=True) == 1
    assert num_ranks(dataclasses.replace(EXPERTS, degrees={"data": 2, "tensor": 2}), 8) == 4


@pytest.mark.slow
def test_the_command_trains_and_tells(corpus, tmp_path):
    found, trace = tmp_path / "result.json", tmp_path / "trace"
    command = [
        sys.executable, "-m", "oases", "train", "--experts", "4", "--dp", "2", "--hidden", "32", "--layers", "2",
        "--heads", "4", "--sequence", "16", "--batch", "4", "--steps", "3", "--validation-batches", "1", "--data",
        corpus, "--json", str(found), "--record-loads", str(trace),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "balance degree" in done.stdout
    result = json.loads(found.read_text())
    assert result["balance"]["balance_before"] > 0
    assert result["config"]["degrees"] == {"data": 2, "pipeline": 1, "tensor": 1}
    assert len(list(replay(trace))) == 6
