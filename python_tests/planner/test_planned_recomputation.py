"""Recomputation per stage: Merak's closed form, as much as fits against every choice, and its gain."""

import itertools

import pytest

from oases.errors import UsageError
from oases.planner import Plan, Predictor, Segment, Space, Stage
from oases.planner.recomputation import Recomputation, as_much_as_fits, merak_shares, num_layers, recomputing
from oases.planner.search import SettingSearch
from oases.planner.space import Setting
from oases.planner.timings import StackTimings
from oases.plans.gpt import gpt, resized
from oases.plans.pipelines import chunks_of, in_flight
from oases.plans.plan import PLANNED
from oases.simulator.cluster import cluster_called

MODEL = gpt(hidden=512, layers=16, heads=8, sequence=512, vocabulary=512)
HARDWARE, _ = cluster_called("64x3090")


def plan_of(pipeline="one_f_one_b", model=MODEL, micro_batches=8, segments=1, stages=4, tp=1):
    each = model.num_blocks // stages // segments
    stage = Stage((Segment(each, tp, "oases", 2),) * segments)
    return Plan(model, stages * tp, 4, 4 * micro_batches, micro_batches, (stage,) * stages, pipeline=pipeline)


def any_plan(pipeline):
    return plan_of(pipeline, segments=chunks_of(pipeline))


def layers_of(plan):
    return [sum(segment.recomputed_layers for segment in stage.segments) for stage in plan.stages]


def test_merak_evens_out_what_is_kept():
    """The paper's example: what each stage keeps, in micro-batches."""
    shares = merak_shares(4, 0.8, shifted=True)
    assert shares == pytest.approx((0.8, 0.7, 0.7, 0.0))
    flying = [in_flight("shifted_critical_path", 4, 8, stage) for stage in range(4)]
    kept = [(1 - share) * many for share, many in zip(shares, flying, strict=True)]
    assert kept == pytest.approx([0.8, 0.9, 0.9, 1.0])
    assert merak_shares(4, 0.8) == pytest.approx((0.8, 0.7, 0.4, 0.0))
    assert merak_shares(4, 0.4) == pytest.approx((0.4, 0.1, 0.0, 0.0)), "what is below 0 is none"
    assert merak_shares(4, 1.0) == (1.0, 1.0, 1.0, 0.0)
    assert merak_shares(1, 0.5) == (0.5,)
    assert merak_shares(2, 0.5, shifted=True) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", [0, 0, 0, 0]),
        ("full", [4, 4, 4, 4]),
        ("3", [3, 3, 3, 3]),
        ("merak:0.5", [2, 1, 0, 0]),
        ("merak:0.75", [3, 3, 1, 0]),
        ("merak:0.8", [4, 3, 2, 0]),
    ],
)
def test_policies(text, layers):
    plan = Recomputation.parse(text).applied(plan_of(), 0, lambda *_: 1)
    assert layers_of(plan) == layers


def test_the_shifted_pipeline_takes_the_shifted_shares():
    plan = Recomputation.parse("merak:0.75").applied(plan_of("shifted_critical_path"), 0, lambda *_: 1)
    assert layers_of(plan) == [3, 3, 3, 0]


@pytest.mark.parametrize("pipeline", PLANNED)
def test_as_much_as_fits_is_the_best_of_every_choice(pipeline):
    predictor, plan = Predictor(HARDWARE), any_plan(pipeline)
    # A stage's peak depends on what it recomputes itself, so every choice is one of each stage's.
    peaks = [
        [predictor.peak_bytes(recomputing(plan, stage, layers), stage) for layers in range(5)] for stage in range(4)
    ]
    low, high = max(map(min, peaks)), max(map(max, peaks))
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = low + share * (high - low)
        found = as_much_as_fits(plan, budget, predictor.peak_bytes)
        best = [next(layers for layers in range(5) if of_stage[layers] <= budget) for of_stage in peaks]
        assert layers_of(found) == best
        assert max(predictor.predict(found).memory_bytes) <= budget
        assert list(predictor.predict(found).memory_bytes) == [
            of_stage[layers] for of_stage, layers in zip(peaks, best, strict=True)
        ]
    with pytest.raises(UsageError, match=r"stage \d needs at least .*, and .* may be filled; give more memory"):
        as_much_as_fits(plan, low - 2**21, predictor.peak_bytes)


def test_nothing_that_fits_is_faster():
    """Compares all 625 choices of a pipeline of four stages."""
    predictor, plan = Predictor(HARDWARE), plan_of()
    budget = predictor.peak_bytes(recomputing(plan, 0, 2), 0)
    found = as_much_as_fits(plan, budget, predictor.peak_bytes)
    best = None
    for layers in itertools.product(range(5), repeat=4):
        each = plan
        for stage, count in enumerate(layers):
            each = recomputing(each, stage, count)
        prediction = predictor.predict(each)
        if max(prediction.memory_bytes) <= budget and (best is None or prediction.step_seconds < best):
            best = prediction.step_seconds
    assert predictor.predict(found).step_seconds == pytest.approx(best)


def test_segments_are_recomputed_from_the_first():
    plan = plan_of(segments=2)
    assert num_layers(plan, 0) == 4
    assert [s.recomputed_layers for s in recomputing(plan, 1, 3).stages[1].segments] == [2, 1]
    assert recomputing(plan, 1, 3).stages[0] == plan.stages[0]
    with pytest.raises(UsageError, match=r"stage 1: recomputed_layers must be from 0 to the 4 layers .* got 5"):
        recomputing(plan, 1, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "'some' is not none, full, fits, merak:SHARE or a number"),
        ("", "'' is not none"),
        ("merak", "'merak' needs a share from 0 to 1, e.g. merak:0.8"),
        ("merak:x", "'merak:x' needs a share"),
        ("merak:1.5", "share of layers must be from 0 to 1, got 1.5"),
        ("merak:nan", "share of layers must be from 0 to 1, got nan"),
        ("-1", "'-1' is not none"),
    ],
)
def test_policies_that_are_none(text, message):
    with pytest.raises(UsageError, match=message):
        Recomputation.parse(text)


LONG = resized(MODEL, layers=96)


@pytest.mark.long
def test_memory_is_evened_out_and_the_step_is_faster():
    """Four stages of 24 layers each: the last within 10 % of the first, the step faster by what is not recomputed."""
    predictor, plan = Predictor(HARDWARE, stack_only=True), plan_of(model=LONG, micro_batches=32)
    everything, nothing = (
        predictor.with_prediction(Recomputation(kind).applied(plan, 0, predictor.peak_bytes))
        for kind in ("full", "none")
    )
    uneven = nothing.prediction.memory_bytes
    assert uneven[0] > 2.5 * uneven[-1], "without it the first stage holds far more"
    budget = 1.05 * uneven[-1]  # the last stage keeps all
    chosen = predictor.with_prediction(as_much_as_fits(plan, budget, predictor.peak_bytes))
    memory = chosen.prediction.memory_bytes
    assert layers_of(chosen)[-1] == 0
    assert max(memory) <= budget
    assert memory[-1] == pytest.approx(memory[0], rel=0.1)
    assert max(memory) <= 1.1 * min(memory)
    # The first stage recomputes most and sets the pace: it saves the recomputation of the layers that it keeps.
    passes = [predictor.stage_costs(each, 0).parts[0] for each in (everything, chosen, nothing)]
    all_again, some, none = (each.forward.seconds + each.backward.seconds for each in passes)
    keeping = 1 - layers_of(chosen)[0] / 24
    assert 0 < keeping < 1
    assert all_again - some == pytest.approx(keeping * (all_again - none), rel=0.02)
    # Every micro-batch takes so much less there, and the later stages, which fill and drain the pipeline, less still.
    saved = everything.prediction.step_seconds - chosen.prediction.step_seconds
    assert saved >= 32 * (all_again - some)
    assert saved <= (32 + 3) * (all_again - none)


@pytest.mark.long
def test_memory_is_evened_out_where_micro_batches_are_recomputed_early():
    """The last stage keeps all and has, as it is faster by that, more layers; the first holds a whole micro-batch."""
    predictor = Predictor(HARDWARE, stack_only=True)
    space = Space(degrees=(1,), schedules=("oases",), sub_batches=(2,))
    setting = Setting(4, 128, 4, 32, False, "shifted_critical_path")
    search = SettingSearch(setting, StackTimings(LONG, HARDWARE, space), 2**40, predictor)
    blocks = search.stage_blocks((1,), (1.0, 1.0, 1.0, 0.0))
    assert blocks[-1] > max(blocks[:-1])
    stages = tuple(Stage((Segment(count, 1, "oases", 2),)) for count in blocks)
    plan = Plan(LONG, 4, 4, 128, 32, stages, pipeline="shifted_critical_path")
    budget = 1.1 * predictor.peak_bytes(plan, 3)
    chosen = predictor.with_prediction(as_much_as_fits(plan, budget, predictor.peak_bytes))
    memory = chosen.prediction.memory_bytes
    assert memory[-1] == pytest.approx(memory[0], rel=0.1)
    assert layers_of(chosen)[-1] == 0
    even = plan_of("shifted_critical_path", LONG, micro_batches=32)
    full = predictor.with_prediction(Recomputation("full").applied(even, 0, predictor.peak_bytes))
    passes = predictor.stage_costs(full, 1).parts[0]
    f, r, b = passes.forward.seconds, passes.recompute.seconds, passes.backward_after.seconds
    # Stages cut by time take the harmonic mean of three that recompute and one that does not.
    share = 4 / (3 + (f + r + b) / (f + b))
    assert chosen.prediction.step_seconds <= 1.02 * share * full.prediction.step_seconds
