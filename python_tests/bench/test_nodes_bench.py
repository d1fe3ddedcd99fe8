"""The benchmark over nodes: contestants compute what one process computes, what it reports, bad input.

Times say nothing here.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from oases.errors import UsageError
from oases.testing import RankPool
from oases_bench.emulation import emulated_device
from oases_bench.harness import Ranks
from oases_bench.nodes import NodesBenchConfig, contestants_of, run_nodes_bench

SMALL = NodesBenchConfig(
    hidden=64, sequence=16, layers=4, micro_batches=2, samples=2, iterations=1, flops=1e10,
    contestants="one_f_one_b/sync,shifted_critical_path/oases",
)  # fmt: skip


@pytest.fixture(scope="module")
def eight_ranks():
    with RankPool(8) as pool:
        yield pool


def shard_like(whole, shard, rank):
    """This rank's part of `whole`, cut where `shard` is smaller."""
    for dim, size in enumerate(shard.shape):
        if size != whole.shape[dim]:
            return whole.chunk(whole.shape[dim] // size, dim)[rank]
    return whole


def beside_one_process(config, steps=2):
    """Largest error of each contestant's gradients, its losses and those of one process, by name; parameters seen."""
    mesh, found = config.mesh(2), {}
    samples = torch.cat([config.shape.tokens(replica) for replica in range(config.data)])
    for name, make in contestants_of(config, mesh):
        contestant, plain = make(), config.shape.model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        errors, losses = [], []
        for _ in range(steps):
            loss = contestant.backward()
            expected = plain(input_ids=samples, labels=samples).loss
            expected.backward()
            gradients = contestant.gradients()
            for path, gradient in gradients.items():
                whole = plain.get_parameter(path).grad
                part = shard_like(whole, gradient, mesh.get_local_rank("tp"))
                errors.append(float((gradient - part).abs().max() / whole.abs().max()))
            shares = [None] * config.data
            dist.all_gather_object(shares, None if loss is None else float(loss.detach()), group=mesh.get_group("dp"))
            losses.append((shares, float(expected.detach())))
            contestant.update()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = max(errors), losses, len(gradients)
    return mesh.get_local_rank("pp"), found


@pytest.mark.slow
@pytest.mark.parametrize("across", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_contestants_compute_what_one_process_computes(eight_ranks, across):
    config = replace(SMALL, across=across, peers="all")
    results = eight_ranks.run(beside_one_process, config)
    names = set(SMALL.contestants.split(",")) | set(config.chosen_peers())
    count = 3 + 9 * SMALL.layers  # parameters of the model: of the embedding, norm and head, and of each layer
    for name in names:
        held = {stage: found[name][2] for stage, found in results}
        assert sum(held.values()) == count
        for stage, found in results:
            error, losses, _ = found[name]
            assert error < 1e-4, (name, error)
            for shares, expected in losses:
                if stage == SMALL.stages - 1:
                    assert sum(shares) / len(shares) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.slow
def test_every_contestant_has_its_row(eight_ranks):
    # A placement of its own: DTensor caches groups by the ranks of a mesh, and the pool has destroyed the others.
    names = [*SMALL.contestants.split(","), "one_f_one_b/oases:int8"]
    config = replace(SMALL, across="data", peers="torch", memory=True, contestants=",".join(names))
    result = eight_ranks.run(run_nodes_bench, config, Ranks(8, 2), False)[0]
    assert list(result["contestants"]) == [*names, "torch"]
    for row in result["contestants"].values():
        assert {"step_seconds", "compute_seconds", "host_seconds", "speedup"} <= row.keys()
        assert len(row["peak_bytes_per_stage"]) == 2
    assert all(result["contestants"][name]["predicted_seconds"] > 0 for name in names)
    assert result["contestants"]["torch"]["speedup"] == 1
    # Recomputed row-parallel products are left out of ours.
    computes = {name: row["compute_seconds"] for name, row in result["contestants"].items()}
    assert computes["shifted_critical_path/oases"] <= computes["one_f_one_b/sync"] <= computes["torch"] * 1.1


def test_emulated_matmuls_wait_and_real_ones_come_back():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    q, k = torch.randn(1, 4, 8, 2, requires_grad=True), torch.randn(1, 2, 8, 2, requires_grad=True)
    with emulated_device(1e9) as device:
        y = F.linear(x, weight)
        y.sum().backward()
        assert device.seconds == pytest.approx(3 * 2 * 3 * 4 * 5 / 1e9)
        attended = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        attended.sum().backward()
    assert y.count_nonzero() == x.grad.count_nonzero() == weight.grad.count_nonzero() == attended.count_nonzero() == 0
    assert (attended.shape, q.grad.shape, k.grad.shape) == (q.shape, q.shape, k.shape)
    assert F.linear(x, weight).count_nonzero() == 15


def test_emulated_products_of_experts_wait_for_their_rows():
    x, weights = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    with emulated_device(1e9) as device:
        y = F.grouped_mm(x, weights, offs=ends)
        y.sum().backward()
        assert device.seconds == pytest.approx(3 * 2 * 6 * 4 * 5 / 1e9)
    assert (y.shape, x.grad.shape, weights.grad.shape) == ((6, 5), x.shape, weights.shape)
    assert y.count_nonzero() == x.grad.count_nonzero() == weights.grad.count_nonzero() == 0


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
        ({"contestants": "one_f_one_b/oases@2:int7"}, 8, "unknown type 'int7'"),
        ({"layers": 3}, 8, "--layers 3 do not divide"),
        ({"layers": 2, "peers": "torch_interleaved"}, 8, "--layers 2 do not divide over 4 parts"),
        ({"sequence": 8}, 8, "--sequence must be at least 16, got 8"),
        ({"hidden": 100}, 8, "--hidden must be a multiple of 64, got 100"),
        ({"flops": 10.0}, 8, "--flops must be 0 or between"),
        ({"peers": "nosuch"}, 8, "--peers 'nosuch' is unknown"),
        ({"iterations": 0}, 8, "--iterations must be at least 1"),
    ],
)
def test_bad_values_are_named(changes, ranks, message):
    with pytest.raises(UsageError, match=message):
        NodesBenchConfig(**changes).check(ranks, 2)
