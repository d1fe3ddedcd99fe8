"""A rank's graph of a layer, cut at its sums into the blocks of an OverlappedStack.

Block k is two graphs: `partial`, from the layer's activation to what is summed over the ranks, and `combine`, from
the activation and the sum to the next activation. Everything in between must pass through one tensor of the
activation's shape; where more would have to, the layer cannot be cut. Sums that do not need each other share one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.export import UnsplittableError, shape_of
from oases.autotp.lowering import block_dropout
from oases.autotp.splitter import ABSENT, Splitter, enter, reduce


@dataclass(frozen=True)
class Piece:
    """A function of the activation (`combine`: and the sum), parameters and other inputs, by the names of `reads`."""

    run: Callable[..., Tensor]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class BlockPieces:
    """One block: what comes before the sum over the ranks and what comes after it."""

    partial: Piece
    combine: Piece


def cut(walk: Splitter, activation: str) -> list[BlockPieces]:
    """The blocks of a layer whose one result is the next activation.

    activation: the name of the placeholder that is the layer's activation. Raises UnsplittableError.
    """
    graph, output = walk.graph, walk.outputs[0]
    (x,) = (node for node in graph.nodes if node.op == "placeholder" and node.target == activation)
    phases = _phases(graph)
    if not isinstance(output, fx.Node) or shape_of(output.meta["like"]) != shape_of(x.meta["like"]):
        raise UnsplittableError("its result has another shape than its activation")
    last = phases[output]
    if last == 0:
        raise UnsplittableError("nothing in it is cut over the ranks")
    blocks, begin, drawn = [], x, set[fx.Node]()
    for phase in range(1, last + 1):
        sums = [node for node in graph.nodes if node.target is reduce and phases[node] == phase]
        later = [node.args[0] for node in graph.nodes if node.target is reduce and phases[node] > phase]
        end = output if phase == last else _waist(graph, x, [*later, output], phases, phase)
        blocks.append(BlockPieces(_partial(graph, x, begin, sums), _combine(graph, x, begin, sums, end)))
        _require_same_draws(begin, sums, end, drawn)
        begin = end
    return blocks


def _require_same_draws(begin: fx.Node, sums: list[fx.Node], end: fx.Node, drawn: set[fx.Node]) -> None:
    """Raise UnsplittableError for random numbers that two pieces would draw, or ranks differently: pieces and ranks
    have streams of their own.

    drawn: what the pieces before draw, added to.
    """
    partial = _back([node.args[0] for node in sums], {begin})
    for needed in (partial, _back([end], {begin, *sums})):
        for node in needed:
            if not _is_random(node):
                continue
            if node in drawn:
                raise UnsplittableError(
                    f"{node.meta['like']} draws random numbers that are needed before and after a sum"
                )
            drawn.add(node)
            if needed is partial and "of" not in node.meta and node.target is not block_dropout:
                raise UnsplittableError(f"{node.meta['like']} draws random numbers for what is whole before a sum")


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws; attention whose dropout is off does not."""
    if "scaled_dot_product" in str(node.target):
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(given, (int, float)) or given != 0
    return node.target is block_dropout or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def other_results(walk: Splitter, activation: str) -> list[Any]:
    """The layer's other results: a Piece for what depends on the activation's lengths alone (a table of position
    biases), ABSENT for what only its run gives, constants as they are.
    """
    (x,) = (node for node in walk.graph.nodes if node.op == "placeholder" and node.target == activation)
    found: list[Any] = []
    for out in walk.outputs[1:]:
        if not isinstance(out, fx.Node):
            found.append(out)
        elif any(node is x or node.target is reduce for node in _back([out], set())):
            found.append(ABSENT)
        else:
            made, values = _copied(walk.graph, x, [out], [x])
            made.output(values[out])
            found.append(_piece(made, 1))
    return found


def _phases(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many sums, one after the other, a value needs."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((found[each] for each in node.all_input_nodes), default=0)
        found[node] = before + (node.target is reduce)
    return found


def _waist(graph: fx.Graph, x: fx.Node, later: list[Any], phases: dict[fx.Node, int], phase: int) -> fx.Node:
    """The last value of this phase, of the activation's shape, that all of what comes later passes through."""
    shape, dtype = shape_of(x.meta["like"]), x.meta["like"].meta["val"].dtype
    for node in reversed(list(graph.nodes)):
        like = node.meta.get("like")
        if phases[node] != phase or not isinstance(like and like.meta.get("val"), Tensor):
            continue
        if shape_of(like) != shape or like.meta["val"].dtype != dtype or node in later:
            continue
        earlier = [
            each for each in _back(later, {node}) if each is x or (each.target is reduce and phases[each] <= phase)
        ]
        if not earlier:
            return node
    raise UnsplittableError(f"more than one tensor is needed after its sum {phase}")


def _back(targets: Iterable[Any], stop: set[fx.Node]) -> set[fx.Node]:
    """Everything that the targets are computed from, up to `stop`."""
    seen, queue = set[fx.Node](), [each for each in targets if isinstance(each, fx.Node)]
    while queue:
        node = queue.pop()
        if node in seen or node in stop:
            continue
        seen.add(node)
        if not _is_size(node):
            queue.extend(node.all_input_nodes)
    return seen


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a length of an input; every activation of a layer has those of its first."""
    return "sym_size" in str(node.target) and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def _partial(graph: fx.Graph, x: fx.Node, begin: fx.Node, sums: list[fx.Node]) -> Piece:
    """Up to what is summed; several tensors travel as one."""
    addends = [node.args[0] for node in sums]
    made, values = _copied(graph, x, addends, [begin])
    found = [values[each] for each in addends]  # type: ignore[index]
    made.output(found[0] if len(found) == 1 else made.call_function(torch.cat, (found, -1)))
    return _piece(made, 1)


def _combine(graph: fx.Graph, x: fx.Node, begin: fx.Node, sums: list[fx.Node], end: fx.Node) -> Piece:
    """From the sum on."""
    made, values = _copied(graph, x, [end], [begin, *sums], joined=sums if len(sums) > 1 else [])
    made.output(values[end])
    return _piece(made, 2)


def _copied(
    graph: fx.Graph, x: fx.Node, targets: Iterable[Any], given: list[fx.Node], joined: list[fx.Node] | None = None
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of its own that computes the targets from given values, the first inputs, and placeholders.

    joined: given values that come as one tensor, side by side in its last dimension.
    """
    targets = list(targets)
    needed = _back(targets, set(given))
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for place, node in enumerate(each for each in given if each not in (joined or [])):
        values[node] = made.placeholder(f"given_{place}")
    if joined:
        whole = made.placeholder("given_1")
        parts = made.call_function(torch.split, (whole, [shape_of(node.meta["like"])[-1] for node in joined], -1))
        for place, node in enumerate(joined):
            values[node] = made.call_function(operator.getitem, (parts, place))
    inside = [node for node in graph.nodes if node in needed]
    sized = {node.args[0] for node in inside if _is_size(node)} - {x}
    for node in graph.nodes:  # placeholders first, whatever the order of the layer's graph
        if node.op == "placeholder" and (node in needed or node in sized) and node not in values:
            values[node] = made.placeholder(node.target)
    values.setdefault(x, values[given[0]])
    for node in inside:
        if node.op == "placeholder":
            continue
        if node.target is enter:  # the sum of a block's gradients over the ranks is the stack's
            values[node] = values[node.args[0]]
        elif node.target is reduce:
            raise UnsplittableError("a sum needs another one of the same block")
        else:
            values[node] = made.node_copy(node, lambda each: values[each])
    return made, values


def _piece(graph: fx.Graph, given: int) -> Piece:
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Piece(module.forward, tuple(names[given:]))
