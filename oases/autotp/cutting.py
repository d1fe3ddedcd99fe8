"""Cut a rank's graph of a layer at its all-reduces into the blocks of an OverlappedStack.

Block k is two graphs: `partial`, from the block's input to the tensors that are summed over the ranks, and `combine`,
from the block's input and the sum to the next block's input. Between blocks a single tensor of the activation's shape
must carry everything; otherwise the layer cannot be cut. Independent sums share one all-reduce.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from oases.autotp.export import UnsplittableError, shape_of
from oases.autotp.lowering import block_dropout, block_linear, fuse
from oases.autotp.rules import is_linear
from oases.autotp.splitter import ABSENT, Splitter, enter, reduce


@dataclass(frozen=True)
class Piece:
    """Function of the activation (and the sum, for `combine`), and of the parameters and inputs named in `reads`."""

    run: Callable[..., Tensor]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class BlockPieces:
    """The two graphs of a block: before and after its all-reduce.

    begin, sums, end: nodes of its input, its sums over the ranks and its result. prologue: graph from the layer's
    activation to `begin`, where that is another node.
    """

    partial: Piece
    combine: Piece
    begin: fx.Node
    sums: list[fx.Node]
    end: fx.Node
    prologue: Piece | None = None

    @property
    def targets(self) -> list[Any]:
        """Nodes of its partial sums."""
        return [node.args[0] for node in self.sums]

    def parameters(self, names: Mapping[str, str]) -> set[str]:
        """Parameters that it reads. names: those of the layer, by placeholder."""
        before = () if self.prologue is None else self.prologue.reads
        return {names[each] for each in (*before, *self.partial.reads, *self.combine.reads) if each in names}


def cut(walk: Splitter, x: fx.Node) -> list[BlockPieces]:
    """Blocks of a layer whose first result is the next activation. x: its activation. Raises UnsplittableError."""
    graph, output = walk.graph, walk.outputs[0]
    phases = _phases(graph)
    if not isinstance(output, fx.Node) or shape_of(output.meta["like"]) != shape_of(x.meta["like"]):
        raise UnsplittableError("its result has another shape than its activation")
    last = phases[output]
    if last == 0:
        raise UnsplittableError("nothing in it is sharded over the ranks")
    blocks, begin, drawn = [], x, set[fx.Node]()
    for phase in range(1, last + 1):
        sums = [node for node in graph.nodes if node.target is reduce and phases[node] == phase]
        later = [node.args[0] for node in graph.nodes if node.target is reduce and phases[node] > phase]
        end = output if phase == last else _waist(graph, x, [*later, output], phases, phase)
        partial = piece_between(graph, x, [begin], [node.args[0] for node in sums])
        blocks.append(BlockPieces(partial, piece_between(graph, x, [begin, *sums], [end]), begin, sums, end))
        _require_same_draws(begin, sums, end, drawn)
        begin = end
    return blocks


def with_prologue(walk: Splitter, x: fx.Node, first: BlockPieces) -> BlockPieces | None:
    """The first block of a layer, begun behind the matmuls that every rank computes in full; None without such ones.

    `cut` has them in both graphs of the block: they run twice, and their gradients are partial sums. Behind another
    block of a stack they run once, between the two blocks.
    """
    graph = walk.graph
    later = [each.args[0] for each in graph.nodes if each.target is reduce]
    begin = _waist(graph, x, [*later, first.end, walk.outputs[0]], _phases(graph), 0)
    inside = ancestors([begin], {x}) - {x}
    if not any(node.target is block_linear or is_linear(node) for node in inside):
        return None
    return BlockPieces(
        piece_between(graph, x, [begin], first.targets), piece_between(graph, x, [begin, *first.sums], [first.end]),
        begin, first.sums, first.end, piece_between(graph, x, [x], [begin]),
    )  # fmt: skip


def _require_same_draws(begin: fx.Node, sums: list[fx.Node], end: fx.Node, drawn: set[fx.Node]) -> None:
    """Raise UnsplittableError where two graphs would need the same random numbers, or ranks different ones.

    Graphs and ranks have separate random streams. drawn: random nodes of earlier graphs; updated.
    """
    partial = ancestors([node.args[0] for node in sums], {begin})
    for needed in (partial, ancestors([end], {begin, *sums})):
        for node in needed:
            if not is_random(node):
                continue
            if node in drawn:
                raise UnsplittableError(
                    f"{node.meta['like']} draws random numbers that are needed before and after a sum"
                )
            drawn.add(node)
            if needed is partial and "of" not in node.meta and node.target is not block_dropout:
                raise UnsplittableError(
                    f"{node.meta['like']} draws random numbers for a replicated value before a sum"
                )


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention without dropout does not."""
    if "scaled_dot_product" in str(node.target):
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(given, (int, float)) or given != 0
    return node.target is block_dropout or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def other_results(walk: Splitter, x: fx.Node) -> list[Any]:
    """The layer's other results: a Piece where one depends on the activation's shape alone (a table of position
    biases), ABSENT where it depends on its values, the constant itself where it is one.
    """
    found: list[Any] = []
    for out in walk.outputs[1:]:
        if not isinstance(out, fx.Node):
            found.append(out)
        elif any(node is x or node.target is reduce for node in ancestors([out], set())):
            found.append(ABSENT)
        else:
            made, values = _copied(walk.graph, x, [out], [x])
            made.output(values[out])
            found.append(_piece(made, 1))
    return found


def _phases(graph: fx.Graph) -> dict[fx.Node, int]:
    """Depth of each node, counted in successive all-reduces."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((found[each] for each in node.all_input_nodes), default=0)
        found[node] = before + (node.target is reduce)
    return found


def _waist(graph: fx.Graph, x: fx.Node, later: list[Any], phases: dict[fx.Node, int], phase: int) -> fx.Node:
    """Last node of this phase, of the activation's shape, that every later node depends on through it alone."""
    shape, dtype = shape_of(x.meta["like"]), x.meta["like"].meta["val"].dtype
    for node in reversed(list(graph.nodes)):
        like = node.meta.get("like")
        if phases[node] != phase or not isinstance(like and like.meta.get("val"), Tensor):
            continue
        if shape_of(like) != shape or like.meta["val"].dtype != dtype or node in later:
            continue
        others = ancestors(later, {node})
        if not any(each is x or (each.target is reduce and phases[each] <= phase) for each in others):
            return node
    raise UnsplittableError(f"more than one tensor is needed after its sum {phase}")


def ancestors(targets: Iterable[Any], stop: set[fx.Node]) -> set[fx.Node]:
    """Ancestors of the targets, up to `stop`."""
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
    """Whether a node is a length of an input; all activations of a layer share the lengths of its input."""
    return "sym_size" in str(node.target) and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def piece_between(
    graph: fx.Graph, x: fx.Node, given: list[fx.Node], targets: list[Any], length: Any = None,
    calls: Mapping[fx.Node, tuple[Callable[..., Tensor], tuple[Any, ...]]] | None = None, *, apart: bool = False,
) -> Piece:  # fmt: skip
    """Graph from an activation, and the sums after it where it is followed by them, to the targets.

    x: the layer's activation. Several sums arrive, and several targets leave, concatenated in their last dimension.
    length: expression that is read as the length of the activation's dimension 1 wherever it is read; None to read
    each length where the layer does. calls: functions and arguments to call in place of nodes'. apart: return the
    targets as a tuple.
    """
    made, values = _copied(graph, x, targets, given, length)
    for node, (function, arguments) in (calls or {}).items():
        values[node].target, values[node].args = function, fx.map_arg(arguments, values.__getitem__)
    found = [values[each] for each in targets]
    if apart:
        made.output(tuple(found))
    else:
        made.output(found[0] if len(found) == 1 else made.call_function(torch.cat, (found, -1)))
    if calls:
        made.eliminate_dead_code()
    return _piece(made, min(len(given), 2))


def _copied(
    graph: fx.Graph, x: fx.Node, targets: list[Any], given: list[fx.Node], length: Any = None
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Separate graph that computes the targets from given values, its first inputs, and from placeholders.

    length: see `piece_between`.
    """
    needed = ancestors(targets, set(given))
    made = fx.Graph()
    values = _arrived(made, given)
    inside = [node for node in graph.nodes if node in needed]
    sized = {node.args[0] for node in inside if _is_size(node) and not _counts(node, length)} - {x}
    for node in graph.nodes:  # placeholders first, whatever the order of the layer's graph
        if node.op == "placeholder" and (node in needed or node in sized) and node not in values:
            values[node] = made.placeholder(node.target)
    values.setdefault(x, values[given[0]])
    for node in [each for each in inside if _counts(each, length)]:
        values[node] = made.call_function(torch.ops.aten.sym_size.int, (values[given[0]], 1))
        inside.remove(node)
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


def _arrived(made: fx.Graph, given: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Values of the given nodes, by placeholders of a new graph. Several sums arrive as one, concatenated."""
    values, joined = dict[fx.Node, fx.Node](), given[1:]
    for place, node in enumerate(given if len(joined) < 2 else given[:1]):
        values[node] = made.placeholder(f"given_{place}")
        values[node].meta.update(node.meta)
    if len(joined) > 1:
        whole = made.placeholder("given_1")
        parts = made.call_function(torch.split, (whole, [shape_of(node.meta["like"])[-1] for node in joined], -1))
        for place, node in enumerate(joined):
            values[node] = made.call_function(operator.getitem, (parts, place))
    return values


def _counts(node: fx.Node, length: Any) -> bool:
    """Whether a node reads a length that is this expression."""
    if length is None or "sym_size" not in str(node.target):
        return False
    value = node.meta["like"].meta["val"]
    return isinstance(value, torch.SymInt) and bool(value.node.expr == length)


def _piece(graph: fx.Graph, given: int) -> Piece:
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    fuse(graph)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Piece(module.forward, tuple(names[given:]))
