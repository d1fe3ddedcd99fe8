"""LayerGraph as data: totals, values with gradients, and layers by the paths of modules."""

import pytest

from oases.autotp.costs import last_uses
from oases.autotp.model_graph import Input, LayerGraph, Node, Parameter, layer_of


def small():
    return LayerGraph(
        "Tied",
        (
            Node("look", "aten.embedding", ("ids",), ((2, 4),), 32, True, "embed", ("embed.weight",), 0, 32),
            Node("shown", "aten.view", ("look",), ((8,),), 32, True, "layers.0"),
            Node("most", "aten.argmax", ("look",), ((),), 8, False, "layers.0"),
            Node("out", "aten.linear", ("shown",), ((2, 3),), 24, True, "head", ("head.weight",), 48, 24),
        ),
        (Input("ids", (2,), 16),),
        (
            Parameter("embed.weight", (3, 4), "float32", 0),
            Parameter("head.weight", (3, 4), "float32", 0),
            Parameter("scale", (5,), "bfloat16", 1, buffer=True),
        ),
    )


def test_totals_count_tied_parameters_once_and_buffers_not():
    graph = small()
    assert graph.num_parameters == 12
    assert graph.value_bytes == {"ids": 16, "look": 32, "shown": 32, "most": 8, "out": 24}
    assert last_uses(graph) == {"ids": 0, "look": 2, "shown": 3, "most": 2, "out": 3}
    assert graph.trained == {"look", "shown", "out"}


@pytest.mark.parametrize(
    ("module", "layer"),
    [("model.layers.3.mlp.act", "model.layers.3"), ("0", "0"), ("1.weight", "1"), ("head", None), ("", None),
     ("encoder.block.2.layer.1.wo", "encoder.block.2"), ("conv1.bn2", None)],
)  # fmt: skip
def test_layer_of_a_module(module, layer):
    assert layer_of(module) == layer
