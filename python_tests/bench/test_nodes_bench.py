"""The benchmark over nodes: peers compute what ours compute, what it reports, bad input. Times say nothing here."""

from dataclasses import replace

import pytest
import torch

from oases.errors import UsageError
from oases.parallel.mesh import Mesh
from oases.testing import RankPool
from oases_bench.harness import Ranks
from oases_bench.nodes import NodesBenchConfig, _pipeline_groups, measured_axes, run_nodes_bench
from oases_bench.stage_baselines import TorchStage
from oases_bench.stage_steps import PlannedSteps

SMALL = NodesBenchConfig(
    hidden=128, sequence=4, layers=4, micro_batches=2, samples=2, iterations=1, flops=1e10,
    contestants="one_f_one_b/sync,shifted_critical_path/oases",
)  # fmt: skip


@pytest.fixture(scope="module")
def eight_ranks():
    with RankPool(8) as pool:
        yield pool


def check_equal(config):
    """Losses and gradients of ours, on two ways of placing ranks, and of torch's pipeline."""
    order = config.order(2)
    plans = config.plans(4)
    plan = plans["one_f_one_b/sync"]
    mesh = Mesh.of(plan, order=order)
    pairs = _pipeline_groups(config, order)
    hardware = measured_axes(config, 2, mesh, pairs, False)
    peer = TorchStage(config.peer_plan(4), hardware, mesh, pairs)
    losses, found = peer.backward(), peer.gradients()
    for plan in plans.values():
        steps = PlannedSteps(plan, hardware, mesh, split=config.across == "pipeline")
        torch.testing.assert_close(steps.backward(), losses)
        mine = steps.gradients()
        assert mine.keys() == found.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, found[name], msg=lambda m, n=name: f"{n}: {m}")
    return mesh.stage, [float(loss) for loss in losses]


def test_torch_s_pipeline_computes_what_ours_computes(eight_ranks):
    results = eight_ranks.run(check_equal, SMALL)
    assert sorted(stage for stage, _ in results) == [0] * 4 + [1] * 4
    assert all(len(losses) == 2 * stage for stage, losses in results)


def test_every_contestant_has_its_row(eight_ranks):
    result = eight_ranks.run(run_nodes_bench, replace(SMALL, peers="none"), Ranks(8, 2), False)[0]
    assert list(result["schedules"]) == SMALL.contestants.split(",")
    assert result["peers"] == {}
    for row in result["schedules"].values():
        assert {"step_seconds", "predicted_seconds", "bubble"} <= row.keys()
        assert len(row["peak_bytes_per_stage"]) == 2
    assert set(result["links"]) == {"tensor", "data", "pipeline"}


@pytest.mark.parametrize(
    ("across", "order"),
    [
        ("pipeline", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("data", [0, 1, 4, 5, 2, 3, 6, 7]),
        ("tensor", [0, 4, 1, 5, 2, 6, 3, 7]),
    ],
)
def test_the_axis_asked_for_joins_the_nodes(across, order):
    """order: ranks by their place: tensor parallelism first, then data, then stages. Nodes have 0-3 and 4-7."""
    assert NodesBenchConfig(across=across).order(2) == order


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 4, "are 8 ranks, and --tp asks for 4"),
        ({"across": "nosuch"}, 8, "--across must be one of data, pipeline, tensor"),
        ({"across": "data", "data": 1}, 4, "its degree 1 is not a multiple"),
        ({"contestants": "one_f_one_b"}, 8, "is not PIPELINE/SCHEDULE"),
        ({"contestants": "nosuch/oases"}, 8, "unknown pipeline"),
        ({"contestants": "one_f_one_b/nosuch"}, 8, "unknown schedule"),
        ({"layers": 3}, 8, "--layers 3 do not divide"),
        ({"peers": "nosuch"}, 8, "unknown peer 'nosuch'"),
        ({"iterations": 0}, 8, "--iterations must be at least 1"),
    ],
)
def test_bad_values_are_named(changes, ranks, message):
    with pytest.raises(UsageError, match=message):
        NodesBenchConfig(**changes).check(ranks, 2)
