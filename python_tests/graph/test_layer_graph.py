"""LayerGraph as data: JSON without loss, totals, and mistakes that name the field."""

import json
import subprocess
import sys

import pytest

from oases.errors import UsageError
from oases.graph.layer_graph import Input, LayerGraph, Node, Parameter, layer_of, read_graph


def small():
    return LayerGraph(
        "Tied",
        (
            Node("look", "aten.embedding", ("ids",), ((2, 4),), ("float32",), "embed", ("embed.weight",), 0, 32),
            Node("shown", "aten.view", ("look",), ((8,),), ("float32",), "layers.0"),
            Node("out", "aten.linear", ("shown",), ((2, 3),), ("float32",), "head", ("head.weight",), 48, 24),
        ),
        (Input("ids", (2,), "int64"),),
        ("out",),
        (
            Parameter("embed.weight", (3, 4), "float32", 48, 0),
            Parameter("head.weight", (3, 4), "float32", 48, 0),
            Parameter("scale", (5,), "bfloat16", 10, 1, buffer=True),
        ),
    )


def test_json_loses_nothing(tmp_path):
    graph = small()
    assert LayerGraph.from_json(graph.to_json()) == graph
    path = tmp_path / "graph.json"
    path.write_text(graph.to_json())
    assert read_graph(path) == graph


def test_an_empty_graph_is_written_too():
    graph = LayerGraph("Empty", (), (), (), ())
    assert LayerGraph.from_json(graph.to_json()) == graph


def test_totals_count_tied_parameters_once_and_buffers_not():
    graph = small()
    assert (graph.num_parameters, graph.flops, graph.activation_bytes) == (12, 48, 56)
    assert graph.value_bytes == {"ids": 16, "look": 32, "shown": 32, "out": 24}
    assert graph.users == {"ids": (0,), "look": (1,), "shown": (2,), "out": ()}
    assert graph.trained == {"look", "shown", "out"}
    assert graph.layers == ("layers.0",)


@pytest.mark.parametrize(
    ("module", "layer"),
    [("model.layers.3.mlp.act", "model.layers.3"), ("0", "0"), ("1.weight", "1"), ("head", None), ("", None),
     ("encoder.block.2.layer.1.wo", "encoder.block.2"), ("conv1.bn2", None)],
)  # fmt: skip
def test_layer_of_a_module(module, layer):
    assert layer_of(module) == layer


def change(**changes):
    """The small graph's JSON with fields changed: a path such as nodes.0.flops."""
    data = json.loads(small().to_json())
    for path, value in changes.items():
        *where, last = path.split("__")
        target = data
        for key in where:
            target = target[int(key)] if isinstance(target, list) else target[key]
        if value is KeyError:
            del target[last]
        else:
            target[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an oases graph"),
        (change(format="oases plan"), "not an oases graph"),
        (change(version=2), "version 2"),
        (change(name=3), "graph: name must be a string, got 3"),
        (change(more=1), "unknown field 'more'"),
        (change(nodes=KeyError), "graph has no field 'nodes'"),
        (change(nodes={}), "nodes must be a list"),
        (change(nodes=[3]), "node 0 must be an object"),
        (change(nodes__1__op=KeyError), "node 1 has no field 'op'"),
        (change(nodes__1__flops=-1), "node 1: flops must be a whole number"),
        (change(nodes__1__flops=True), "node 1: flops must be a whole number"),
        (change(nodes__1__flops=1.5), "node 1: flops must be a whole number"),
        (change(nodes__1__shapes=[["x"]]), "node 1: shapes must be a list of shapes"),
        (change(nodes__1__dtypes=["float12"]), "node 'shown': unknown dtype 'float12'"),
        (change(nodes__1__dtypes=[]), "1 shapes, but 0 dtypes"),
        (change(nodes__1__inputs=["out"]), "node 'shown': inputs: 'out' is not a model input or an earlier node"),
        (change(nodes__1__name="look"), "node 'look': duplicate name of a node"),
        (change(nodes__0__parameters=["none"]), "'none' is not in the table"),
        (change(outputs=["none"]), "outputs: 'none'"),
        (change(parameters__0__num_bytes=47), "parameter 'embed.weight': num_bytes must be 48, got 47"),
        (change(parameters__2__identity=0), "identity 0 is that of 'embed.weight'"),
        (change(parameters__2__buffer=1), "parameter 2: buffer must be true or false"),
        (change(inputs__0__extra=1), "input 0 has an unknown field 'extra'"),
    ],
)
def test_a_mistake_is_named(text, said):
    with pytest.raises(UsageError) as caught:
        LayerGraph.from_json(text)
    assert said in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="graph"):
            read_graph(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_graph(tmp_path / "binary")


def test_graphs_need_no_torch():
    code = (
        "import sys, oases.graph.part, oases.graph.layered, oases.graph.stages, oases.planner;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
