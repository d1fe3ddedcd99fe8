"""Shards: cut where one value crosses, as large as their target, embeddings apart, skips and masks respected."""

import pytest

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph
from oases.graph.part import clean_borders, crossing, shards, travels, units


def names(parts):
    return [" ".join(node.name for node in part.nodes) for part in parts]


def chain(made, count, **more):
    return made(*(f"h{n} = linear {f'h{n - 1}' if n else 'x'} : w{n}" for n in range(count)), **more)


def test_a_chain_is_cut_by_its_target(made):
    graph = chain(made, 8)
    assert names(shards(graph, 1)) == ["h0 h1 h2 h3 h4 h5 h6 h7"]
    # Eight parameters over four shards: two each, and a shard ends once it is over the target.
    assert names(shards(graph, 4)) == ["h0 h1 h2", "h3 h4 h5", "h6 h7"]
    assert names(shards(graph)) == [f"h{n}" for n in range(8)], "2 L + 4 are more than there are"


def test_a_residual_is_never_cut(made):
    graph = made("a0 = linear x : w0", "b0 = linear a0 : w1", "c0 = add a0 b0", "d0 = linear c0 : w2")
    assert sorted(clean_borders(graph)) == [1, 3]
    assert names(units(graph)) == ["a0", "b0 c0", "d0"]


def test_shards_that_a_value_skips_over_are_one(made):
    """The first layer's output is read by the last: the border at each of them is where the skip begins or ends."""
    graph = made(
        "down0 = linear x : w0", "down1 = linear down0 : w1", "deep = linear down1 : w2",
        "up1 = add deep down1", "up1w = linear up1 : w3", "up0 = add up1w down0", "head = linear up0 : w4",
    )  # fmt: skip
    assert names(shards(graph, 100)) == ["down0", "down1 deep up1 up1w up0", "head"]


def test_masks_and_what_many_use_may_cross(made):
    lines = ["mask = gt ids", "e = embedding ids : table"]
    last = "e"
    for n in range(3):
        lines += [f"a{n} = linear {last} mask : w{n}"]
        last = f"a{n}"
    graph = made(*lines)
    assert travels(graph) == {"ids", "mask"}
    assert names(units(graph)) == ["mask e", "a0", "a1", "a2"]
    # A bias that is learned: with five users it keeps its layers together, with six it travels.
    for users, parts in ((5, 2), (6, 7)):
        bias = made(
            "bias = linear x : b",
            *(f"a{n} = linear {f'a{n - 1}' if n else 'bias'} bias : w{n}" for n in range(users)),
        )
        assert ("bias" in travels(bias)) == (users == 6)
        assert len(units(bias)) == parts


def test_an_embedding_is_a_shard_of_its_own(made):
    graph = made(
        "p = linear y : w0", "e = embedding ids : table", "f = add e p", "a = linear f : w1", "b = linear a : w2",
        sizes={"table": 1000},
    )  # fmt: skip
    parts = shards(graph, 1)
    assert names(parts) == ["p", "e f", "a b"]
    alone = made("e = embedding ids : table", "a0 = linear e : w1", "b0 = linear a0 : w2", sizes={"table": 1000})
    assert names(shards(alone, 1)) == ["e", "a0 b0"]
    assert [part.embedding for part in shards(alone, 1)] == [True, False]


def test_the_smallest_value_is_handed_on(made):
    graph = made("a = linear x : w0", "b = mean a", "c = exp b", "d = linear c : w1", sizes={"a": 50})
    assert names(units(graph)) == ["a b", "c d"]
    assert [[v.name for v in values] for values in crossing(graph, [2])] == [["b"]]


def test_a_graph_without_parameters_is_one_shard(made):
    assert names(shards(made("a = exp x", "b = exp a"))) == ["a b"]
    assert shards(LayerGraph("Empty", (), (), (), ())) == ()


def test_a_count_below_one_is_refused(made):
    with pytest.raises(UsageError, match="at least 1, got 0"):
        shards(chain(made, 2), 0)
