"""Graphs made by hand."""

import pytest

from oases.graph.layer_graph import Input, LayerGraph, Node, Parameter


def made(*lines, outputs=None, tied=(), sizes=None):
    """A graph of lines such as "y = linear x mask : weight", each value of 4 bytes unless `sizes` says otherwise.

    What is read and never made is a model input. Every op but an embedding has as many FLOPs as parameters; sizes:
    elements of values and parameters by name, 1 where they have none. tied: groups of names of one parameter.
    """
    sizes = sizes or {}
    nodes, parameters, known, inputs = [], {}, set(), []
    identity = {name: f"tied {number}" for number, names in enumerate(tied) for name in names}
    numbers = {}
    for line in lines:
        body, _, owned = line.partition(":")
        name, _, read = body.partition("=")
        op, *reads = dict.fromkeys(read.split())
        for each in reads:
            if each not in known and each not in [i.name for i in inputs]:
                inputs.append(Input(each, (sizes.get(each, 1),), "int32"))
        for each in owned.split():
            number = numbers.setdefault(identity.get(each, each), len(numbers))
            size = sizes.get(each, 1)
            parameters[each] = Parameter(each, (size,), "float32", 4 * size, number)
        size, flops = (
            sizes.get(name.strip(), 1),
            sum(sizes.get(each, 1) for each in owned.split() if op != "embedding"),
        )
        module = f"layers.{name.strip()[1:]}" if name.strip()[1:].isdecimal() else name.strip()
        nodes.append(
            Node(
                name.strip(), f"aten.{op}", tuple(reads), ((size,),), ("float32",), module, tuple(owned.split()),
                flops, 4 * size,
            )
        )  # fmt: skip
        known.add(name.strip())
    return LayerGraph("Made", tuple(nodes), tuple(inputs), outputs or (nodes[-1].name,), tuple(parameters.values()))


@pytest.fixture(name="made")
def made_graph():
    return made
