"""Predictions: a pass simulated once stands for all that repeat it; sums of gradients; resharding; memory."""

import random
from dataclasses import replace

import pytest

from oases.core.schedule import Op, format_schedule, generate_pipeline
from oases.errors import UsageError
from oases.planner import Plan, Predictor, Segment, Stage, predict
from oases.planner.memory import end_parameters, shared_parameters, stage_parameters, stage_state_bytes
from oases.plans.gpt import gpt, resized
from oases.plans.pipelines import chunks_of
from oases.plans.plan import PLANNED
from oases.simulator.cluster import cluster_called
from oases.simulator.program import Contention

MODEL = gpt(hidden=1024, layers=4, heads=16, sequence=256, vocabulary=2048)


def cluster(compute=1.0, link=1.0):
    found, _ = cluster_called("64x3090")
    slow = Contention(compute, link)
    return replace(found, node=replace(found.node, contention=slow), cluster=replace(found.cluster, contention=slow))


def plan_of(*stages, world=4, micro_batches=1, batch=16, model=MODEL, **changes):
    named = [[(*segment, "oases")[: max(3, len(segment))] for segment in stage] for stage in stages]
    made = tuple(Stage(tuple(Segment(*segment) for segment in stage)) for stage in named)
    return Plan(model, world, 4, batch, micro_batches, made, **changes)


def drawn(rng):
    """A plan of any kind."""
    pipeline, stages, micro = rng.choice(PLANNED), rng.choice([1, 2, 3, 4]), rng.choice([2, 3, 5])
    if chunks_of(pipeline) == 2:
        stages, micro = max(2, stages), max(2, stages) * rng.choice([1, 2])
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
        if chunks_of(pipeline) == 2 and len(segments) % 2:
            at = next(at for at, segment in enumerate(segments) if segment[0] > 1)
            count, *how, again = segments[at]
            segments[at : at + 1] = [(1, *how, min(1, again)), (count - 1, *how, min(count // 2, again))]
        made.append(segments)
    model, batch = resized(MODEL, layers=layers), 2 * ranks * micro
    return plan_of(
        *made, world=stages * ranks, micro_batches=micro, batch=batch, model=model,
        zero=rng.random() < 0.5, pipeline=pipeline,
    )  # fmt: skip


@pytest.mark.few(16, 150)
@pytest.mark.parametrize("seed", range(150))
def test_pieces_say_what_every_op_says(seed, monkeypatch):
    plan, predictor = drawn(random.Random(seed)), Predictor(cluster(1.1, 1.3))
    whole = predictor.timeline(plan, every_op=True)
    monkeypatch.setattr(predict, "LARGEST_PROGRAM", 0)
    pieces, found = predictor.timeline(plan), predictor.pipeline_times(plan)
    assert len(pieces.spans) < len(whole.spans)
    for stage in range(len(plan.stages)):
        exact = (whole.total_seconds, whole.exposed(stage), whole.bubble(stage), whole.peak_bytes(stage))
        near = pytest.approx(exact, rel=1e-9, abs=1e-12)
        assert (pieces.total_seconds, pieces.exposed(stage), pieces.bubble(stage), pieces.peak_bytes(stage)) == near
        assert (found.seconds, found.exposed[stage], found.bubbles[stage], found.peak_bytes[stage]) == near


@pytest.mark.parametrize("pipeline", PLANNED)
def test_gradients_are_summed_once_behind_the_last_micro_batch(pipeline):
    first, second = ([(4 // chunks_of(pipeline), tp)] * chunks_of(pipeline) for tp in (1, 2))
    plan = plan_of(first, second, world=4, micro_batches=4, pipeline=pipeline)
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
    parameters = MODEL.layers * sum(MODEL.block_parameters(kind, 2) for kind in MODEL.layer_kinds[0])
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


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_contention_makes_a_step_longer(micro_batches):
    plan = plan_of([(8, 2, "oases", 2, 0)], micro_batches=micro_batches)
    seconds = [
        Predictor(cluster(*slowdowns)).predict(plan).step_seconds for slowdowns in [(1, 1), (1.5, 1), (1.5, 1.5)]
    ]
    assert seconds == sorted(set(seconds))


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


@pytest.mark.few(18, 108)
@pytest.mark.parametrize("name", ["sync", "fine_grained", "cross_pass", "oases", "sub_pipelined_1", "sub_pipelined"])
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("pipeline", ["one_f_one_b", "shifted_critical_path", "zb_h1"])
@pytest.mark.parametrize("along", [False, True])
def test_a_step_frees_what_it_allocates(name, layers, pipeline, along):
    stages = [[(4, 2, name, 2, layers, along)]] * 2
    plan = plan_of(*stages, micro_batches=4, batch=32, pipeline=pipeline)
    timeline = Predictor(cluster()).timeline(plan, every_op=True)
    for stage in (0, 1):
        held = [each.num_bytes for each in timeline.held if each.rank == stage]
        assert held[-1] == held[0] == min(held)


LAYERS = gpt(hidden=1024, layers=8, heads=16, sequence=256, vocabulary=2048)


@pytest.mark.parametrize("name", ["sync", "cross_pass", "oases"])
def test_recomputing_early_sends_what_the_backward_pass_would(name):
    """And computes it: the same ops, elsewhere."""

    def ops(pipeline):
        stages = [[(4, 2, name, 2, 2)]] * 3 + [[(4, 2, name, 2, 0)]]
        plan = plan_of(*stages, world=8, micro_batches=4, batch=16, model=LAYERS, pipeline=pipeline)
        spans = Predictor(cluster()).timeline(plan, every_op=True).spans
        return sorted((span.rank, span.lane, span.name) for span in spans if not span.waiting)

    assert ops("shifted_critical_path") == ops("pre_recompute") == ops("one_f_one_b")


@pytest.mark.parametrize("name", ["last_no_recompute", "shifted_critical_path", "zb_h1", "interleaved", "zb_v"])
def test_a_pipeline_in_text_form_is_predicted_by_its_list(name):
    """Its name may lie: what is split, computed ahead of time and kept is read off the list."""
    stages = [[(4, 2, "oases", 2, 2)]] * 3 + [[(4, 2, "oases", 2, 0)]]
    if chunks_of(name) == 2:
        stages = [[(4, 2, "oases", 2, 2), (4, 2, "oases", 2, 0)]] * 2
    sizes = {"world": 2 * len(stages), "micro_batches": 4, "batch": 16, "model": LAYERS}
    text = format_schedule(generate_pipeline(name, len(stages), 4)).replace(name, "one_f_one_b", 1)
    named, written = (plan_of(*stages, **sizes, pipeline=each) for each in (name, text))
    predictor = Predictor(cluster())
    assert predictor.pipeline_times(written) == predictor.pipeline_times(named)
    assert predictor.timeline(written, every_op=True).spans == predictor.timeline(named, every_op=True).spans
    assert "one_f_one_b" in written.text()
    assert Plan.from_json(written.to_json()) == written
    with pytest.raises(UsageError, match=r"plan: pipeline: the list one_f_one_b is for . stages and 4 micro-batches"):
        plan_of(*stages, **{**sizes, "micro_batches": 2}, pipeline=text)
    with pytest.raises(UsageError, match=r"plan: pipeline: op \d+ \(receive F"):
        plan_of(*stages, **sizes, pipeline=text.replace("send F 0.1\n", ""))


def test_a_pipeline_of_nobodys_making_is_predicted():
    """1F1B in which the first stage puts its weight gradients off to the end, which then hide nothing."""
    plain = generate_pipeline("zb_h1", 2, 4, False)
    first = [op for op in plain.stages[0] if op.kind != "W"]
    late = replace(plain, name="late", ops=(*first, *(Op("W", 0, m) for m in range(4)), *plain.stages[1]))
    stages = [[(8, 2, "oases", 2, 0)]] * 2
    sizes = {"world": 4, "micro_batches": 4, "batch": 16, "model": LAYERS}
    predictor = Predictor(cluster())
    courses = [
        predictor.pipeline_times(plan_of(*stages, **sizes, pipeline=each))
        for each in ("zb_h1", format_schedule(late))
    ]
    assert courses[1].peak_bytes[0] > courses[0].peak_bytes[0]
    assert courses[1].peak_bytes[1] == courses[0].peak_bytes[1]


def test_predicted_steps_are_the_closed_forms_of_merak():
    """Equal stages, free messages and no other communication."""
    found, p, m = cluster(), 4, 8
    free = replace(found.node, startup_seconds=0.0, bytes_per_second=1e30)
    predictor = Predictor(replace(found, node=free, cluster=free), stack_only=True)

    def plan(pipeline, last):
        stages = [[(4, 1, "fine_grained", 1, 2)]] * (p - 1) + [[(4, 1, "fine_grained", 1, last)]]
        return plan_of(*stages, micro_batches=m, model=LAYERS, pipeline=pipeline)

    pieces = predictor.stage_costs(plan("pre_recompute", 2), 1).parts[0]
    kept = predictor.stage_costs(plan("pre_recompute", 0), 3).parts[0]
    f, r, b = pieces.forward.seconds, pieces.recompute.seconds, pieces.backward_after.seconds
    assert (kept.forward.seconds, kept.backward.seconds) == pytest.approx((f, b))
    assert r <= f
    assert b >= f + r, "what the closed forms ask for"
    before = m * (f + r + b) + (p - 1) * (f + b)
    seconds = {"one_f_one_b": (m + p - 1) * (f + r + b), "pre_recompute": before}
    seconds |= {"last_no_recompute": before - 2 * r, "shifted_critical_path": before - 3 * r}
    for pipeline, expected in seconds.items():
        last = 0 if pipeline in ("last_no_recompute", "shifted_critical_path") else 2
        assert predictor.predict(plan(pipeline, last)).step_seconds == pytest.approx(expected), pipeline


def test_a_sharded_optimizer_holds_less_and_gathers_parameters():
    predictor = Predictor(cluster())
    whole, shared = plan_of([(8, 1)]), plan_of([(8, 1)], zero=True)
    assert predictor.predict(shared).memory_bytes[0] < predictor.predict(whole).memory_bytes[0]
    assert any(span.kind == "parameters" for span in predictor.timeline(shared).spans)


def test_a_step_pays_for_what_it_copies():
    """Weight gradients added to those of earlier micro-batches, copied to buckets and back; gradients of tables."""
    hardware, plan = cluster(), plan_of([(8, 2)], micro_batches=4)
    rate, timeline = hardware.device.bytes_per_second, Predictor(hardware).timeline(plan, every_op=True)

    def seconds(text):
        return sum(span.seconds for span in timeline.spans if text in span.name and not span.waiting)

    ((blocks, _), (ends, _)) = stage_parameters(plan, 0)
    num_bytes = 4 * (blocks + ends)
    assert seconds("accumulated gradients") == pytest.approx(3 * 3 * num_bytes / rate), "of micro-batches 1 to 3"
    assert seconds("copy of gradients") == pytest.approx(2 * num_bytes / rate)
    assert seconds("average of gradients") == pytest.approx(4 * num_bytes / rate)
    assert seconds("embedding backward") > 4 * 4 * ends / rate
    slow = replace(hardware, device=replace(hardware.device, update_seconds=1e-6))
    assert Predictor(slow).predict(plan).optimizer_seconds == pytest.approx(1e-6 * (blocks + ends))


def test_tied_tables_of_two_stages_are_summed():
    tied = plan_of([(4, 2)], [(4, 2)], micro_batches=4)
    apart = plan_of([(4, 2)], [(4, 2)], micro_batches=4, model=resized(MODEL, tied=False))
    table = MODEL.vocabulary * MODEL.hidden // 2
    assert [shared_parameters(tied, stage) for stage in (0, 1)] == [table, table]
    assert [shared_parameters(apart, stage) for stage in (0, 1)] == [0, 0]
    predictor, hardware = Predictor(cluster()), cluster()
    sums = [span for span in predictor.timeline(tied).spans if "shared parameters" in span.name and not span.waiting]
    assert sorted(span.rank for span in sums) == [0, 1]
    assert sums[0].seconds == pytest.approx(hardware.collective_seconds("all_reduce", 2, 4 * table, 2))
    assert not any("shared parameters" in span.name for span in predictor.timeline(apart).spans)


def test_messages_are_cut_over_ranks_of_one_node_alone():
    """Parts that come over the link between nodes would have to be joined over it (`StageMessages`)."""
    found, plan = cluster(), plan_of([(4, 2)], [(4, 2)], world=4, micro_batches=4)
    num_bytes = MODEL.unit_bytes(plan.samples(2))
    for per_node, share in ((2, 2), (1, 1)):
        hardware = replace(found, ranks_per_node=per_node)
        seconds = hardware.message_seconds(num_bytes / share, 0, 2, 2)
        joined = hardware.collective_seconds("all_gather", share, num_bytes)
        assert Predictor(hardware).stage_costs(plan, 0).parts[0].message_seconds == pytest.approx(seconds + joined)


def test_sharded_tables_are_gathered_and_summed_in_parts():
    """Once per step, as by `FsdpUnit`; of tied tables each replica sums its part (`local(tied.grad)`)."""
    hardware = cluster()

    def sent(text, **changes):
        plan = plan_of([(4, 1)], [(4, 1)], world=4, micro_batches=4, **changes)
        spans = Predictor(hardware).timeline(plan, every_op=True).spans
        found = [span for span in spans if text in span.name and span.lane != "compute"]
        assert len(found) in (0, 2), "on both stages"
        return plan, [span.seconds for span in sorted(found, key=lambda span: span.rank)] or [0.0, 0.0]

    table = 4 * MODEL.vocabulary * MODEL.hidden
    for changes, share in (({}, 1), ({"zero": True}, 2), ({"fsdp": True}, 2)):
        _, seconds = sent("shared parameters", **changes)
        assert seconds == pytest.approx([hardware.collective_seconds("all_reduce", 2, table // share, 2)] * 2)
    plan, seconds = sent("parameters outside of layers", fsdp=True)
    sizes = [4 * end_parameters(plan, stage) for stage in (0, 1)]
    assert seconds == pytest.approx([hardware.collective_seconds("all_gather", 2, size, 1) for size in sizes])
    assert sent("parameters outside of layers")[1] == sent("parameters outside of layers", zero=True)[1] == [0, 0]


def test_zero_bubble_defers_the_weight_gradients_of_any_schedule():
    """fine_grained has no W: a stack then leaves out what B would compute at its end."""
    predictor = Predictor(cluster())

    def pieces(pipeline, name="fine_grained"):
        return predictor.stage_costs(
            plan_of([(4, 1, name, 1)], [(4, 1, name, 1)], micro_batches=4, pipeline=pipeline), 0
        )

    together, apart, listed = (pieces(*each).parts[0] for each in (("one_f_one_b",), ("zb_h1",), ("zb_h1", "oases")))
    assert together.weights.seconds == 0
    assert apart.weights.seconds > 0
    assert apart.weights.seconds == pytest.approx(listed.weights.seconds)
    assert apart.backward.seconds + apart.weights.seconds == pytest.approx(together.backward.seconds)
    assert apart.backward.kept + apart.weights.kept == together.backward.kept


def test_compute_exposed_communication_and_bubble_of_one_stage():
    """Both waits are of the stage that computes most: with maxima over the stages, compute could be negative."""
    stages = [[(2, 1)], [(2, 1)], [(2, 1)], [(2, 1)]]
    plan = plan_of(*stages, world=8, micro_batches=8, batch=32)
    slow = replace(cluster(), node=replace(cluster().node, bytes_per_second=1e8))
    found, times = Predictor(slow).predict(plan), Predictor(slow).pipeline_times(plan)
    waits = [exposed + bubble for exposed, bubble in zip(times.exposed, times.bubbles, strict=True)]
    assert found.exposed_seconds + found.bubble_seconds == pytest.approx(min(waits))
    assert min(waits) < found.step_seconds < max(times.exposed) + max(times.bubbles)
