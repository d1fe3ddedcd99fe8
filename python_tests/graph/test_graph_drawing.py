"""The picture of a graph: a box a layer, coloured by part, with arcs for what skips over boxes."""

from oases.cli.graph import draw_graph, groups, name_of
from oases.graph.stages import split


def test_boxes_are_layers_and_what_lies_between(made):
    graph = made(
        "e = embedding ids : embed.table", "h0 = linear e : w0", "h1 = linear h0 : w1", "out = linear h1 : lm"
    )
    boxes = groups(graph)
    assert [node for box in boxes for node in box.nodes] == list(graph.nodes)
    assert [name_of(box) for box in boxes][:3] == ["embed", "layers.0", "layers.1"]


def test_values_that_skip_are_arcs_and_stages_are_colours(made):
    graph = made(
        "mask = gt ids", "h0 = linear x : w0", "h1 = linear h0 : w1", "h2 = linear h1 h0 mask : w2",
        "h3 = linear h2 : w3",
    )  # fmt: skip
    figure = draw_graph(graph, split(graph, 2))
    *curves, squares, parameters, _, _ = figure.data
    arcs = {curve.text: curve.line.color for curve in curves}
    assert {text.split(":")[0] for text in arcs} == {"h0", "mask"}
    assert arcs["h0: 4e-06 MB"] != arcs["mask: 4e-06 MB"], "what travels along is pale"
    assert len(set(squares.marker.color)) == 2
    assert parameters.y == (0, 1e-6, 1e-6, 1e-6, 1e-6)
