"""Stages: a partition of the nodes whose largest part is least, with every value that crosses declared."""

import random
from itertools import combinations, pairwise

import pytest

from oases.errors import UsageError
from oases.graph.part import clean_borders, shards, units
from oases.graph.stages import balanced, shared_parameters, split
from oases.simulator.cluster import cluster_called


def require_sound(graph, stages):
    """Stages partition the nodes, edges go forward, and exactly what is declared crosses."""
    assert [node for stage in stages for node in stage.nodes] == list(graph.nodes)
    assert all(stage.start < stage.stop for stage in stages)
    home = {node.name: stage.number for stage in stages for node in stage.nodes}
    home |= {name: stage.number for stage in stages for name in stage.loads}
    needed = {}
    for stage in stages:
        for node in stage.nodes:
            for name in node.inputs:
                assert home[name] <= stage.number
                for border in range(home[name], stage.number):
                    needed.setdefault(border, set()).add(name)
    for before, after in pairwise(stages):
        assert before.sends == after.receives
        assert {value.name for value in before.sends} == needed.get(before.number, set())
        assert sum(not value.along for value in before.sends) <= 1
    assert stages[0].receives == stages[-1].sends == ()
    used = {each.name for each in graph.inputs if graph.users[each.name]}
    assert sorted(name for stage in stages for name in stage.loads) == sorted(used)
    assert {name for stage in stages for name in stage.returns} == {n for n in graph.outputs if n in graph.place}


def random_graph(made, seed):
    """Layers with residuals, skips over several, masks used by many, tied weights and late inputs."""
    draw = random.Random(seed)
    lines, values = ["mask = gt ids", "h0 = embedding ids : table"], ["h0"]
    for n in range(1, draw.randint(6, 20)):
        reads = [values[-1]]
        if draw.random() < 0.4:
            reads.append(draw.choice(values[-4:]))
        if draw.random() < 0.5:
            reads.append("mask")
        if draw.random() < 0.1:
            reads.append(f"late{n}")
        weight = f" : w{draw.randint(0, n)}" if draw.random() < 0.7 else ""
        lines.append(f"h{n} = linear {' '.join(dict.fromkeys(reads))}{weight}")
        values.append(f"h{n}")
    lines.append(f"head = linear {values[-1]} : lm")
    sizes = {f"w{n}": draw.randint(1, 9) for n in range(30)} | {"table": 7, "lm": 7}
    return made(*lines, tied=[("table", "lm")], sizes=sizes, outputs=("head", "h0"))


@pytest.mark.parametrize("seed", range(40))
def test_any_graph_in_any_number_of_stages(made, seed):
    graph = random_graph(made, seed)
    parts = units(graph)
    assert [node for part in parts for node in part.nodes] == list(graph.nodes)
    for count in range(1, len(parts) + 1):
        for balance in ("time", "parameters", "uniform"):
            require_sound(graph, split(graph, count, balance=balance))
    with pytest.raises(UsageError, match=f"at most {len(parts)}"):
        split(graph, len(parts) + 1)


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_part_is_least(seed):
    draw = random.Random(seed)
    costs = [draw.choice((0, 0, 1, 2, 3, 10)) * draw.random() for _ in range(draw.randint(1, 9))]
    for count in range(1, len(costs) + 1):
        ends = balanced(costs, count)
        assert len(ends) == count - 1
        assert all(a < b for a, b in pairwise([0, *ends, len(costs)]))
        best = min(
            max(sum(costs[a:b]) for a, b in pairwise([0, *some, len(costs)]))
            for some in combinations(range(1, len(costs)), count - 1)
        )
        assert max(sum(costs[a:b]) for a, b in pairwise([0, *ends, len(costs)])) == pytest.approx(best)


def chain(made, count, **more):
    return made("e = embedding ids : table", *(
        f"h{n} = linear {f'h{n - 1}' if n else 'e'} : w{n}" for n in range(count)
    ), f"head = linear h{count - 1} : lm", **more)  # fmt: skip


def test_a_tied_head_in_another_stage_is_reported(made):
    graph = chain(made, 4, tied=[("table", "lm")], sizes={"table": 6, "lm": 6})
    (shared,) = shared_parameters(split(graph, 2))
    assert (shared.names, shared.stages, shared.num_bytes) == (("table", "lm"), (0, 1), 24)
    assert shared_parameters(split(graph, 1)) == ()
    assert split(graph, 1)[0].num_parameters == graph.num_parameters == 10


def test_equal_shapes_are_not_tied(made):
    graph = chain(made, 4, sizes={"table": 6, "lm": 6})
    assert shared_parameters(split(graph, 2)) == ()


def test_a_layer_called_twice_is_shared(made):
    graph = made("a0 = linear x : w", "b0 = linear a0 : v", "c0 = linear b0 : w")
    stages = split(graph, 3)
    (shared,) = shared_parameters(stages)
    assert (shared.names, shared.stages) == (("w",), (0, 2))


def test_balances_differ(made):
    graph = chain(made, 4, sizes={"table": 100, "w3": 40})
    assert [s.num_parameters for s in split(graph, 2, balance="parameters")] == [100, 44]
    assert [len(s.layers) for s in split(graph, 2, balance="uniform")] == [2, 2]
    device = cluster_called("1x3090")[0]
    timed = split(graph, 2, hardware=device)
    assert sum(stage.cost for stage in timed) == pytest.approx(sum(s.cost for s in split(graph, 1, hardware=device)))
    # All ops are as short as their launch, so the stages have as many of them.
    assert [stage.stop - stage.start for stage in timed] == [3, 3]


def test_an_embedding_reads_its_rows_alone(made):
    hardware = cluster_called("1x3090")[0]
    small, large = (
        split(made("e = embedding ids : table", sizes={"table": size}), 1, hardware=hardware)[0].cost
        for size in (1, 10**9)
    )
    assert small == large


def test_stages_begin_where_they_are_told(made):
    graph = chain(made, 4)
    stages = split(graph, 3, balance=["layers.1", "head"])
    assert [stage.nodes[0].name for stage in stages] == ["e", "h1", "head"]
    require_sound(graph, stages)
    assert [s.nodes[0].name for s in split(graph, 2, balance=["h2"])] == ["e", "h2"]


@pytest.mark.parametrize(
    ("balance", "said"),
    [
        (["layers.1"], "3 stages begin at 2 borders, got 1"),
        (["layers.1", "layers.9"], "'layers.9'"),
        (["layers.2", "layers.1"], "'layers.1' is not after the start"),
        (["e", "layers.1"], "'e'"),
        ("speed", "balance 'speed' is unknown"),
    ],
)
def test_a_border_that_cannot_be_is_named(made, balance, said):
    with pytest.raises(UsageError) as caught:
        split(chain(made, 4), 3, balance=balance)
    assert said in str(caught.value)


def test_a_border_inside_of_a_residual_is_refused(made):
    graph = made("a0 = linear x : w0", "b0 = linear a0 : w1", "c0 = add a0 b0", "d0 = linear c0 : w2")
    assert 2 not in clean_borders(graph)
    with pytest.raises(
        UsageError, match="more than one value crosses there; the nearest place before it is the node"
    ):
        split(graph, 2, balance=["c0"])


def test_shards_are_taken_whole(made):
    graph = chain(made, 8)
    parts = shards(graph, 3)
    stages = split(parts, 2)
    assert {stage.start for stage in stages} <= {part.start for part in parts}
    require_sound(graph, stages)
    with pytest.raises(UsageError, match="not those of a whole graph"):
        split(parts[1:], 1)
    with pytest.raises(UsageError, match="stages must be at least 1"):
        split(graph, 0)
