"""Predictions: a pass simulated once stands for all that repeat it; sums of gradients; resharding; memory."""

import random
from dataclasses import replace

import pytest

from oases.planner import Plan, Predictor, Segment, Stage, predict
from oases.planner.memory import stage_state_bytes
from oases.planner.plan import PLANNED
from oases.simulator.cluster import cluster_called
from oases.simulator.model import ModelShape
from oases.simulator.program import Contention

MODEL = ModelShape(hidden=1024, layers=4, heads=16, sequence=256, vocabulary=2048)


def cluster(compute=1.0, link=1.0):
    found, _ = cluster_called("64x3090")
    slow = Contention(compute, link)
    return replace(found, node=replace(found.node, contention=slow), cluster=replace(found.cluster, contention=slow))


def plan_of(*stages, world=4, micro_batches=1, batch=16, model=MODEL, **changes):
    made = tuple(Stage(tuple(Segment(*segment) for segment in stage)) for stage in stages)
    return Plan(model, world, 4, batch, micro_batches, made, **changes)


def drawn(rng):
    """A plan of any kind."""
    stages, micro = rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 5])
    ranks, layers = rng.choice([2, 4, 8]), stages * rng.choice([1, 2])
    made = []
    for _ in range(stages):
        segments, left = [], 2 * layers // stages
        while left:
            count = rng.randint(1, left)
            tp = rng.choice([tp for tp in (1, 2, 4, 8) if tp <= ranks])
            name = rng.choice(["oases", "sync", "cross_pass", "fine_grained", "sub_pipelined"])
            segments.append((count, tp, name, 2, rng.randint(0, (count + 1) // 2)))
            left -= count
        made.append(segments)
    model, batch = replace(MODEL, layers=layers), 2 * ranks * micro
    return plan_of(
        *made, world=stages * ranks, micro_batches=micro, batch=batch, model=model,
        zero=rng.random() < 0.5, pipeline=rng.choice(PLANNED),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_pieces_say_what_every_op_says(seed, monkeypatch):
    plan, predictor = drawn(random.Random(seed)), Predictor(cluster(1.1, 1.3))
    whole = predictor.timeline(plan, every_op=True)
    monkeypatch.setattr(predict, "LARGEST_PROGRAM", 0)
    pieces, found = predictor.timeline(plan), predictor.course(plan)
    assert len(pieces.spans) < len(whole.spans)
    for stage in range(len(plan.stages)):
        exact = (whole.total_seconds, whole.exposed(stage), whole.bubble(stage), whole.peak_bytes(stage))
        near = pytest.approx(exact, rel=1e-9, abs=1e-12)
        assert (pieces.total_seconds, pieces.exposed(stage), pieces.bubble(stage), pieces.peak_bytes(stage)) == near
        assert (found.seconds, found.exposed[stage], found.bubbles[stage], found.peak_bytes[stage]) == near


@pytest.mark.parametrize("pipeline", PLANNED)
def test_gradients_are_summed_once_behind_the_last_micro_batch(pipeline):
    plan = plan_of([(4, 1)], [(4, 2)], world=4, micro_batches=4, pipeline=pipeline)
    timeline = Predictor(cluster(), stack_only=True).timeline(plan, every_op=True)
    sums = [span for span in timeline.spans if span.kind == "gradients" and span.rank == 0]
    assert len({span.name for span in sums}) == len(sums) > 0
    backward = [span for span in timeline.spans if span.rank == 0 and span.kind == "backward"]
    assert len(backward) == 4 * 4 * 2, "blocks, micro-batches and sub-batches"
    assert min(span.start for span in sums) >= sorted(span.end for span in backward)[-8]
    assert not [span for span in timeline.spans if span.rank == 1 and span.kind == "gradients"], "one replica"


def test_the_sums_carry_every_parameter():
    hardware, plan = cluster(), plan_of([(8, 2)])
    timeline = Predictor(hardware, stack_only=True).timeline(plan)
    taken = sum(span.seconds for span in timeline.spans if span.kind == "gradients")
    parameters = MODEL.layers * sum(MODEL.block_parameters(kind, 2) for kind in ("attention", "mlp"))
    alone = hardware.collective_seconds("all_reduce", 2, parameters * MODEL.element_bytes, 2)
    assert taken == pytest.approx(alone, rel=0.05), "but for what starts each bucket"


def test_a_degree_that_grows_gathers_and_one_that_shrinks_does_not():
    predictor = Predictor(cluster())

    def gathers(*segments):
        timeline = predictor.timeline(plan_of(segments), every_op=True)
        return [span.name.split()[1:] for span in timeline.spans if span.kind == "reshard"]

    assert gathers((8, 2)) == []
    # Going up costs the forward pass, coming back the backward pass; the head has the first segment's degree.
    assert len(gathers((4, 1), (4, 2))) == 2
    assert len(gathers((4, 2), (4, 1))) == 2
    hardware, plan = cluster(), plan_of([(4, 1), (4, 2)])
    timeline = predictor.timeline(plan, every_op=True)
    seconds = hardware.collective_seconds("all_gather", 2, MODEL.unit_bytes(plan.samples(2)), 1)
    assert all(span.seconds == pytest.approx(seconds) for span in timeline.spans if span.kind == "reshard")


def test_memory_is_state_and_activations():
    predictor = Predictor(cluster())
    plan = plan_of([(8, 2, "oases", 2, 0)])
    kept = sum(MODEL.kept_bytes(MODEL.kind_of(b), 2, plan.samples(2)) for b in range(8))
    (peak,) = predictor.predict(plan).memory_bytes
    assert peak >= stage_state_bytes(plan, 0) + kept
    again = plan_of([(8, 2, "oases", 2, 4)])
    assert predictor.predict(again).memory_bytes[0] < peak
    assert predictor.predict(again).step_seconds > predictor.predict(plan).step_seconds
    timeline = predictor.timeline(plan)
    assert timeline.held[-1].num_bytes == stage_state_bytes(plan, 0), "a step frees what it allocates"


@pytest.mark.parametrize("name", ["sync", "fine_grained", "cross_pass", "oases", "sub_pipelined_1", "sub_pipelined"])
@pytest.mark.parametrize("layers", [0, 1, 4])
def test_a_step_frees_what_it_allocates(name, layers):
    plan = plan_of([(8, 2, name, 2, layers)], micro_batches=2, batch=32)
    timeline = Predictor(cluster()).timeline(plan, every_op=True)
    assert timeline.held[-1].num_bytes == timeline.held[0].num_bytes


def test_a_sharded_optimizer_holds_less_and_gathers_parameters():
    predictor = Predictor(cluster())
    whole, shared = plan_of([(8, 1)]), plan_of([(8, 1)], zero=True)
    assert predictor.predict(shared).memory_bytes[0] < predictor.predict(whole).memory_bytes[0]
    assert any(span.kind == "parameters" for span in predictor.timeline(shared).spans)
