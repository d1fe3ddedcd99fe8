"""Metrics of a step against numbers made by hand, on one process and on stages; measuring changes no bit."""

import dataclasses
import itertools
import json
import math
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from oases import Trainer
from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of
from oases.distributed.mesh import Mesh
from oases.plans.gpt import gpt
from oases.plans.plan import Plan, Segment, Stage
from oases.reporting import register
from oases.simulator import simulate
from oases.simulator.peaks import peak_flops
from oases_bench.pipeline import PipelineBenchConfig, _Contestant
from oases_train.config import config_for
from oases_train.meter import Meter, StepParts
from oases_train.metrics import Peak, StepReport

MODEL = gpt(hidden=16, layers=2, heads=4, sequence=8, vocabulary=256)
BATCH, STEPS = 16, 4
CPU = torch.device("cpu")
VALUES = {"steps": STEPS, "warmup": 1, "validation_batches": 1, "learning_rate": 1e-2, "clip": 0.5}
FLOPS = 3 * BATCH * 8 * 2 * (2 * 12 * 16 * 16 + 256 * 16) + 3 * BATCH * 2 * 4 * 8 * 8 * 16
"""6 N a token, for 12 h^2 weights a layer and the head; 12 s h in attention's two products, for each layer."""


def stages(num_stages, tp):
    segment = Segment(MODEL.num_blocks // num_stages, tp, "oases", 2)
    world = num_stages * tp
    return Plan(MODEL, world, world, BATCH, 2, tuple(Stage((segment,)) for _ in range(num_stages)))


def reports(corpus, text=None, *, watch=True, **changes):
    """Every step's report as plain data, the losses, and the result."""
    plan = stages(1, 1) if text is None else Plan.from_json(text)
    trainer = Trainer(config_for(plan, VALUES | {"data": corpus} | changes), plan=plan if text else None)
    found = []
    result = trainer.train(found.append if watch else None)
    trainer.close()
    parts = [dataclasses.astuple(each) for each in trainer.meter.history]
    return [each.values() for each in found], result, parts


@pytest.fixture(scope="module")
def alone(corpus):
    return reports(corpus)


# --- values ---


def test_flops_are_those_of_the_formula():
    weights = MODEL.layers * 12 * MODEL.hidden**2 + MODEL.vocabulary * MODEL.hidden
    tokens = BATCH * MODEL.sequence
    attention = 12 * MODEL.layers * MODEL.sequence * MODEL.hidden * tokens
    assert MODEL.step_flops(BATCH) == 6 * weights * tokens + attention == FLOPS


def test_a_step_tells_what_can_be_made_by_hand(alone):
    found, result, parts = alone
    peak = result["peak_flops"]["flops_per_second"]
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert [each["loss"] for each in found] == result["losses"]
    assert found[0]["learning_rate"] == 1e-2
    for each, (seconds, exposed, bubble, optimizer, _) in zip(found, parts, strict=True):
        assert each["seconds"] == seconds > optimizer > 0
        assert each["tokens_per_second"] == pytest.approx(BATCH * MODEL.sequence / seconds)
        assert each["flops_per_second"] == pytest.approx(FLOPS / seconds)
        assert each["utilisation"] == pytest.approx(FLOPS / seconds / peak)
        assert each["exposed"] == exposed == each["bubble"] == bubble == 0  # nobody to wait for
        assert each["gradient_norm"] > 0
        assert 1e7 < each["memory_bytes"] < 1e11
    assert result["utilisation"] == pytest.approx(FLOPS / result["step_seconds"] / peak)
    assert "measured on 1 ranks" in result["peak_flops"]["source"]
    assert result["prediction"] is None


def test_the_norm_is_that_of_the_whole_gradient(corpus, alone):
    trainer = Trainer(config_for(stages(1, 1), VALUES | {"data": corpus}))
    trainer.backward(0)
    squares = sum(float(parameter.grad.square().sum()) for parameter in trainer.model.parameters())
    assert alone[0][0]["gradient_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_stages_tell_the_same(four_ranks, corpus, alone):
    ranks = four_ranks.run(reports, corpus, stages(2, 2).to_json())
    found, result, _ = ranks[0]
    for others, _, _ in ranks:
        assert others == found
    for one, four in zip(alone[0], found, strict=True):
        for name in ("step", "learning_rate", "skipped"):
            assert four[name] == one[name]
        for name in ("loss", "gradient_norm"):
            assert four[name] == pytest.approx(one[name], rel=1e-4)
        assert four["tokens_per_second"] * four["seconds"] == pytest.approx(BATCH * MODEL.sequence)
        assert four["utilisation"] == pytest.approx(
            FLOPS / four["seconds"] / result["peak_flops"]["flops_per_second"]
        )
        assert four["exposed"] > 0
        assert four["bubble"] > 0
    for number in range(STEPS):
        rows = [StepParts(*parts[number]) for _, _, parts in ranks]
        assert found[number]["seconds"] == max(row.seconds for row in rows)
        assert found[number]["exposed"] == pytest.approx(sum(row.exposed / row.seconds for row in rows) / 4)
        assert found[number]["bubble"] == pytest.approx(sum(row.bubble / row.seconds for row in rows) / 4)
        assert found[number]["memory_bytes"] == max(row.memory_bytes for row in rows)
        assert all(row.compute > 0 for row in rows)


def losses_unmeasured(corpus, text):
    """Losses of steps without metrics, and of a run that one rank alone measures."""
    plan = Plan.from_json(text)
    trainer = Trainer(config_for(plan, VALUES | {"data": corpus}), plan=plan)
    unmeasured = [trainer.step() for _ in range(STEPS)]
    trainer.close()
    one_looks = reports(corpus, text, watch=dist.get_rank() == 3)
    nobody_looks = reports(corpus, text, watch=False)
    assert nobody_looks[0] == []
    assert nobody_looks[1]["step_seconds"] > 0
    return unmeasured, one_looks[1]["losses"], nobody_looks[1]["losses"], len(one_looks[0])


@pytest.mark.long
def test_measuring_changes_no_bit(four_ranks, corpus):
    for rank, (unmeasured, one_looks, nobody_looks, told) in enumerate(
        four_ranks.run(losses_unmeasured, corpus, stages(2, 2).to_json())
    ):
        assert unmeasured == one_looks == nobody_looks
        assert told == (STEPS if rank == 3 else 0)


# --- standing still ---


def waits_for_a_late_rank():
    meter = Meter(dist.group.WORLD, [dist.group.WORLD] * 2, None, CPU)
    from oases.distributed.collectives import all_reduce

    store = dist.distributed_c10d._get_default_store()
    for step in range(2):
        dist.barrier()
        with meter.step():
            if dist.get_rank() == 1:
                store.wait([f"rank 0 is at step {step} of a late rank"])
                time.sleep(0.3)
            else:
                store.set(f"rank 0 is at step {step} of a late rank", "")
            all_reduce(torch.ones(1), dist.group.WORLD, "loss")
    return [dataclasses.astuple(parts) for parts in meter.all_ranks(meter.medians())]


def test_what_a_rank_waited_is_exposed(two_ranks):
    told = two_ranks.run(waits_for_a_late_rank)
    assert told[0] == told[1]
    early, late = (StepParts(*row) for row in told[0])
    assert 0 < early.exposed <= early.seconds
    assert early.bubble == late.bubble == 0


def timed_stage(pipeline_name):
    """Seconds of this rank's step by its meter, and those its passes took; compute is emulated by sleeping."""
    config = PipelineBenchConfig(pipelines=pipeline_name, micro_batches=4, forward_ms=20.0, hidden=8, sequence=8)
    rank = dist.get_rank()
    meshes = [Mesh([1], stage=stage, num_stages=4) for stage in range(4)]
    pipeline, wire = config.chosen(4)[pipeline_name]
    contestant = _Contestant(config, pipeline, meshes[rank], wire)
    meter = Meter(dist.group.WORLD, [], contestant.messages, CPU)
    contestant.step()
    with meter.step():
        contestant.step()  # the barriers at its ends are none of the pipeline's
    parts, busy, step = meter.history[-1], contestant.busy[-1], contestant.seconds[-1]
    contestant.messages.close()
    timeline = simulate(contestant.pipeline, config.seconds())
    return parts.bubble, busy, step, timeline.bubble(rank), timeline.total_seconds


@pytest.mark.parametrize("name", [pytest.param("one_f_one_b", marks=pytest.mark.long), "zb_h1"])
def test_bubbles_are_near_the_simulators(four_ranks, name):
    told = four_ranks.run(timed_stage, name)
    for bubble, busy, step, predicted, total in told:
        assert step > 0.98 * total  # sleeps are lower bounds
        assert busy > 0.98 * (total - predicted)
        assert busy + bubble <= step
    # The first stage fills the pipeline and ends last, so all its bubbles are waits for messages.
    bubble, busy, _, predicted, total = told[0]
    assert bubble > 0.5 * predicted
    assert busy + bubble > 0.8 * total


class QueuedMark:
    """Event like that of a GPU's stream: readable once it was waited for."""

    def __init__(self, at):
        self.at, self.waited = at, False

    def record(self):
        pass

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return 1e3 * (end.at - self.at)


def test_a_gpus_update_is_told_when_it_is_done(monkeypatch):
    """The events of a GPU are stood for: its update takes 3, 4 and 5 seconds, whatever the host does."""
    ends = itertools.chain(*((10 * step, 10 * step + 3 + step) for step in range(3)))
    marks = []

    def event(device, enable_timing):
        marks.append(QueuedMark(next(ends)))
        return marks[-1]

    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    meter = Meter(None, [], None, torch.device("cuda"))
    for step in range(3):
        with meter.step(), meter.optimizing():
            pass
        assert meter.last.optimizer == 0  # not known yet, and nobody waits for it
        assert [mark.waited for mark in marks[1::2]] == [True] * step + [False]
    assert [parts.optimizer for parts in meter.history] == [3, 4, 5]
    assert meter.medians().optimizer == 4.5
    assert meter.medians().memory_bytes == 7
    meter.reset()
    assert list(meter.history) == []


def test_a_step_that_fails_is_not_counted():
    meter = Meter(None, [], None, CPU)
    with pytest.raises(InterruptedError), meter.step():
        raise InterruptedError
    with meter.optimizing():  # of nobody's step
        pass
    assert list(meter.history) == []


# --- the peak ---


def test_peaks_are_those_of_data_sheets():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H200", "float32") == 67e12
    assert peak_flops("NVIDIA A10G", "float16") is None


def measured_peak():
    found = Peak.of(CPU, torch.float32, dist.group.WORLD)
    return found.flops_per_second, found.source


def test_a_cpus_peak_is_measured_on_all_ranks_at_once(two_ranks):
    (flops, source), other = two_ranks.run(measured_peak)
    assert (flops, source) == other
    assert 1e8 < flops < 1e15
    assert source == "matmuls of 512 x 512 in float32, measured on 2 ranks at once"


# --- words ---


def test_a_report_in_a_line():
    report = StepReport(7, 2.3412, 1e-3, 0.5, 0.4123, 9930.2, 1e9, 0.314, 1_254_000_000, 0.042, 0.12, False)
    line = "loss 2.341  412 ms  9930 tokens/s  MFU 31 %  1.25 GB  exposed 4.2 %  bubble 12 %"
    assert report.text() == line
    assert dataclasses.replace(report, skipped=True).text() == f"{line}  skipped"


def test_the_log_has_what_the_reports_have(corpus, tmp_path):
    found, _, _ = reports(corpus, step_log=str(tmp_path / "log"))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == [each | {"stall_seconds": 0.0} for each in found]


def logged(corpus, log):
    return reports(corpus, stages(1, 2).to_json(), step_log=str(log))


def test_the_log_has_the_overlap_of_each_step(two_ranks, corpus, tmp_path):
    log = tmp_path / "log"
    (found, result, _), (others, *_) = two_ranks.run(logged, corpus, log)
    assert [each["overlap"] for each in others] == [None] * len(found)  # rank 0 writes the log
    lines = [json.loads(line)["overlap"] for line in log.read_text().splitlines()]
    (stack,) = (row for row in result["overlap"]["stacks"] if row["where"] in lines[0])  # others ran before
    places = [stack["where"], *(f"{stack['where']} layer {layer}" for layer in range(MODEL.layers))]
    expected = {*places, *(f"{place} all_reduce {name}" for place in places for name in ("forward", "backward"))}
    assert [set(line) for line in lines] == [expected] * len(found)
    for line in lines:
        layers = sum(line[place]["exposed_seconds"] for place in places[1:])
        assert line[places[0]]["exposed_seconds"] == pytest.approx(layers)
    assert 0 < sum(line[places[0]]["exposed_seconds"] for line in lines) <= stack["blocked_seconds"] * (1 + 1e-9)


class Sender:
    """Owner of a section of the ranks of a group."""

    title = "a sender"

    def __init__(self, group):
        self.ranks = tuple(dist.get_process_group_ranks(group))

    def section(self):
        return self

    def json(self):
        return {}


def check_whole_report(corpus):
    """A run's report has what was exempted from quantisation, and each sender once."""
    add_wire(dist.group.WORLD)  # before the run's groups, by whose number torch would name it
    plan = stages(1, 2)
    trainer = Trainer(config_for(plan, VALUES | {"data": corpus}), plan=plan)
    scheduler, sender = scheduler_of(trainer.group), Sender(trainer.group)
    register(sender)
    hard = torch.full((128,), 0.49)
    hard[0] = 127.0 * (-1) ** dist.get_rank()  # int8 loses the others, and the sum is theirs alone
    with warnings.catch_warnings(action="ignore"):
        for _ in range(64):
            scheduler.wait(scheduler.all_reduce(hard.clone(), "F 4.0 (stack 78, layer 2, MLP)", wire="int8"))
    found = trainer.overlap()
    assert found.exempted["F 4 (stack 78, layer 2, MLP)"] > 0.25
    assert found.sections.count(sender) == 1
    assert found.json()["exempted"] == found.exempted
    trainer.close()


def test_the_report_of_a_run_has_what_is_exempted_and_all_senders(two_ranks, corpus):
    two_ranks.run(check_whole_report, corpus)
