"""ModelShape of a graph that is a single stack of equal transformer layers."""

from __future__ import annotations

from collections.abc import Sequence

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph, Node, Parameter, layer_of
from oases.graph.part import is_embedding
from oases.plans.shape import ModelShape

_ATTENTION = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")


def shape_of_graph(graph: LayerGraph) -> ModelShape:
    """Derive a ModelShape. Raises UsageError, naming what does not fit, for other models.

    Exact: the layers' matrices, the FLOPs of matmuls and attention (with GQA and gated MLPs), and whether the head
    is tied. Approximate, each by well under 1 % of a large model: biases, norms and positions are counted as in a
    GPT, and layers before the head (BERT) are left out. Activations are those that a GPT's ops keep; additional
    ones of rotary embeddings and of unfused norms are not counted.
    """
    layers = _layers(graph)
    first = next(iter(layers.values()))
    width, length, vocabulary, table = _embedding(graph)
    if first[-1].shapes[0][-1:] != (width,):
        raise _unfit(graph, f"its embedding has {width} features, its layers have {first[-1].shapes[0][-1:]}")
    heads, head_size, attention, mlp = _parts(graph, next(iter(layers)), first)
    kv_heads = (_elements(attention) / width / head_size - 2 * heads) / 2
    if kv_heads < 1 or kv_heads != int(kv_heads) or heads % kv_heads:
        raise _unfit(
            graph,
            f"the matmuls of its attention, {_shapes(attention)}, are not queries, keys, values and output of "
            f"{heads} heads of {head_size}",
        )
    intermediate = mlp[-1].size // width if mlp else 0
    matmuls = _elements(mlp) / width / intermediate if intermediate else 0
    if matmuls not in (2, 3):
        raise _unfit(graph, f"the matmuls of its MLP, {_shapes(mlp)}, are not two, or three of a gated MLP")
    return ModelShape(
        hidden=width, layers=len(layers), heads=heads, sequence=length, vocabulary=vocabulary,
        dtype=table.dtype, name=graph.name, head_size=0 if heads * head_size == width else head_size,
        kv_heads=0 if kv_heads == heads else int(kv_heads),
        intermediate=0 if intermediate == 4 * width else intermediate, gated=matmuls == 3,
        tied=_tied(graph, table),
    )  # fmt: skip


def _layers(graph: LayerGraph) -> dict[str, list[Node]]:
    """Nodes of each layer. All layers are in one module list and equal in parameters and FLOPs."""
    layers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if layer := layer_of(node.module):
            layers.setdefault(layer, []).append(node)
    layers = {layer: nodes for layer, nodes in layers.items() if _matrices(graph, nodes)}
    stacks = dict.fromkeys(layer.rpartition(".")[0] for layer in layers)
    if len(stacks) != 1:
        raise _unfit(graph, f"its layers are in {len(stacks)} lists: {', '.join(stacks) or 'none'}")
    kinds = {
        layer: (sorted(each.shape for each in _matrices(graph, nodes)), sum(node.flops for node in nodes))
        for layer, nodes in layers.items()
    }
    (first, kind), *others = kinds.items()
    odd = next((layer for layer, other in others if other != kind), None)
    if odd is not None:
        raise _unfit(graph, f"its layers {first} and {odd} differ in parameters or FLOPs")
    return layers


def _embedding(graph: LayerGraph) -> tuple[int, int, int, Parameter]:
    """Width, tokens per sample, vocabulary and table of the largest embedding of a model input."""
    given = {each.name for each in graph.inputs}
    found = []
    for node in graph.nodes:
        if is_embedding(graph, node) and not given.isdisjoint(node.inputs) and len(node.shapes[0]) == 3:
            found += [(graph.table[name], node) for name in node.parameters]
        elif not node.bytes_out and len(node.inputs) == 1 and node.inputs[0] in given:
            given.add(node.name)  # a view of an input
    if not found:
        raise _unfit(graph, "it has no token embedding")
    table, node = max(found, key=lambda each: each[0].size)
    return table.shape[1], node.shapes[0][1], table.shape[0], table


def _parts(graph: LayerGraph, layer: str, nodes: Sequence[Node]) -> tuple[int, int, list[Parameter], list[Parameter]]:
    """Heads, features per head, and the matrices of a layer's attention and MLP.

    Attention ends with the first matmul after it that reads a matrix; the MLP follows.
    """
    places = [at for at, node in enumerate(nodes) if node.op in _ATTENTION and len(node.shapes[0]) == 4]
    if len(places) != 1:
        raise _unfit(graph, f"its layer {layer} has {len(places)} attention ops, but exactly one is required")
    place = places[0]
    behind = [node for node in nodes[place:] if node.flops]
    large = [each.name for each in _matrices(graph, nodes) if len(each.shape) > 2]
    if large:
        raise _unfit(graph, f"its layer has parameters of more than two dimensions: {', '.join(large)}")
    end = next((at for at in range(place, len(nodes)) if _matrices(graph, [nodes[at]])), len(nodes) - 1)
    _, heads, _, _ = nodes[place].shapes[0]
    return heads, behind[0].shapes[0][-1], _matrices(graph, nodes[: end + 1]), _matrices(graph, nodes[end + 1 :])


def _tied(graph: LayerGraph, table: Parameter) -> bool:
    """Whether no matmul outside the layers reads another table of the embedding's size."""
    ends = [node for node in graph.nodes if node.flops and not layer_of(node.module)]
    return all(
        each.identity == table.identity or each.size != table.size
        for node in ends
        for each in _matrices(graph, [node])
    )


def _matrices(graph: LayerGraph, nodes: Sequence[Node]) -> list[Parameter]:
    found = {
        each.identity: each
        for node in nodes
        for each in (graph.table[name] for name in node.parameters)
        if not each.buffer and len(each.shape) >= 2
    }
    return list(found.values())


def _elements(matrices: Sequence[Parameter]) -> int:
    return sum(each.size for each in matrices)


def _shapes(matrices: Sequence[Parameter]) -> str:
    return ", ".join("x".join(map(str, each.shape)) for each in matrices) or "none"


def _unfit(graph: LayerGraph, why: str) -> UsageError:
    return UsageError(
        f"{graph.name} is not a stack of equal transformer layers, which the planner needs: {why}; give its sizes as "
        "a ModelShape, or cut its graph into stages with oases.graph.stages.split"
    )
