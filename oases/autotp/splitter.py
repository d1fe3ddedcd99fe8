"""Sharding propagation over a layer's graph; writes the graph of one rank.

Every value is replicated (equal on all ranks, "whole"), sharded along one dimension ("split") or partial (the sum
over the ranks is the value). A column-parallel linear makes a sharded value of a replicated one; views, heads and
element-wise functions keep it sharded; a linear that contracts the sharded dimension makes it partial (row-parallel).
Linear functions keep partial values partial, and addends wait until the sum: two branches that are only added share
one all-reduce. The op table tells where a sharded dimension goes; rules are for what it has no letters for. Ops that
are in neither raise UnsplittableError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from oases.autotp.export import Exported, UnsplittableError, shape_of
from oases.autotp.op_table import args_of, follow, name_of
from oases.autotp.shapes import Copied, Segments, Split, copies_of
from oases.core.blocks.sharding import Cut


@dataclass(frozen=True)
class Value:
    """Node of the rank's graph that a node of the layer's graph became.

    split: None for replicated and partial values. addends: replicated values to add once to a partial value, after
    its sum. several: splits of the results of an op that has several.
    """

    node: Any
    split: Split | None = None
    partial: bool = False
    addends: tuple[fx.Node, ...] = ()
    several: tuple[Split, ...] = ()


def reduce(partial: Tensor) -> Tensor:
    """Mark in the rank's graph: an all-reduce of a partial value, inserted later."""
    raise AssertionError("a mark that was not replaced")


def enter(whole: Tensor) -> Tensor:
    """Mark: a replicated value enters sharded computation, so its gradient is all-reduced (Megatron's f)."""
    raise AssertionError("a mark that was not replaced")


def take(whole: Tensor, dim: int, segments: Segments, rank: int, ranks: int) -> Tensor:
    """This rank's shard of a replicated value."""
    return Cut(dim, tuple(segments)).take(whole, rank, ranks)


def take_copy(whole: Tensor, dim: int, copies: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of a replicated value of which each part is on `copies` ranks."""
    length = whole.shape[dim] * copies // ranks
    return whole.narrow(dim, rank // copies * length, length)


def take_own(shard: Tensor, dim: int, copies: int, rank: int) -> Tensor:
    """Part of a shard that is on `copies` ranks which this rank has where it is on one."""
    length = shard.shape[dim] // copies
    return shard.narrow(dim, rank % copies * length, length)


ABSENT = "this result is sharded over the ranks"
"""In place of a result of a layer that no rank has in full."""

Rule = Callable[["Splitter", fx.Node], Value]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}
"""Rules by the name of the aten op without its overload; filled by the rule modules."""


def rule(*names: str) -> Callable[[R], R]:
    """Register a function as the rule of these ops."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass
class Splitter:
    """Propagation over one graph. columns: linears to shard by their output features, each with its segments.

    ranks: 1 finds the structure and the `limits`, whose common divisors are the possible degrees; otherwise the graph
    of rank `rank` of `ranks` is written. linear, dropout: functions to call for them. experts: expert weights sharded
    over the ranks; refused: expert modules that are replicated, and why. balanced: expert modules that tokens are
    sent to, by path; states: path of each placeholder of their state. sums: whether sums and means along a sharded
    dimension are summed over the ranks, which adds an all-reduce to the layer. cached, kept: sharding of the keys and
    values that are given by a key-value cache, and put into it.
    """

    exported: Exported
    columns: Mapping[fx.Node, Segments]
    linear: Callable[..., Any]
    dropout: Callable[..., Any]
    rank: int = 0
    ranks: int = 1
    sums: bool = False
    graph: fx.Graph = field(default_factory=fx.Graph)
    cuts: dict[str, Cut] = field(default_factory=dict)
    rows: list[fx.Node] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    balanced: dict[str, Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    limits: dict[int, str] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()
    cached: dict[str, Split] = field(default_factory=dict)
    kept: list[Split | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values: dict[fx.Node, Value] = {}
        self._whole: set[str] = set()
        self._entered: dict[fx.Node, fx.Node] = {}

    def run(self) -> Splitter:
        """Process the graph."""
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                if not node.users:  # non-tensor arguments have a placeholder, too
                    continue
                self._values[node] = Value(self.graph.placeholder(str(node.target)))
                self._values[node].node.meta["like"] = node
            elif node.op == "call_function":
                self._values[node] = self._called(node)
            elif node.op != "output":
                raise UnsplittableError(f"its graph has a {node.op} ({node.target})")
        self.outputs = tuple(self._result(place, out) for place, out in enumerate(self.exported.outputs))
        self.graph.output(self.outputs)
        both = self._whole & set(self.cuts)
        if both:
            raise UnsplittableError(f"{', '.join(sorted(both))} would be both replicated and sharded")
        return self

    def _result(self, place: int, out: Any) -> Any:
        """The first result must be replicated; sharded other results (attention weights) are absent."""
        if not isinstance(out, fx.Node):
            return out
        split = self.value(out).split
        if place >= self.exported.own_results:  # of a key-value cache, which keeps this rank's shards
            self.kept.append(split)
            return self.whole(out) if split is None else self.value(out).node
        return ABSENT if place > 0 and split is not None else self.whole(out)

    def _called(self, node: fx.Node) -> Value:
        source, name = self._values.get(node.all_input_nodes[0]) if node.all_input_nodes else None, name_of(node)
        if name == "getitem" and source is not None and source.several:
            split = source.several[args_of(node)[1]]
            return self.split(self.emit(node, (source.node, args_of(node)[1])), split.dim, split.segments)
        if name in RULES:
            return RULES[name](self, node)
        if any(self._values[each].several for each in node.all_input_nodes):
            raise UnsplittableError(f"{node.target} unpacks a list")
        return self.mapped(node)

    def mapped(self, node: fx.Node) -> Value:
        """Call an op on shards, where it keeps the elements of the sharded dimension apart; replicated inputs that
        have this dimension are sliced.
        """
        splits = {each: split for each in node.all_input_nodes if (split := self.value(each).split) is not None}
        if not splits:
            return Value(self.copy(node))
        path = follow(node, splits)
        if path.why == "unknown" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise UnsplittableError(f"{node.target} needs a replicated input")
        if path.why == "combines":
            raise UnsplittableError(f"{node.target} combines tensors sharded along {set(splits.values())}")
        if path.why:
            raise UnsplittableError(f"{node.target} {path.why} the sharded dimension")
        given = {each: self.value(each).node for each in splits}
        for each, at in path.beside.items():
            split = None if at is None else Split(at, path.results[0].segments)
            given[each] = self.entered(each) if split is None else self.as_split(each, split)
        made = self.copy(node, given)
        if not isinstance(node.meta["val"], Tensor):
            return Value(made, several=tuple(path.results))
        return self.split(made, path.results[0].dim, path.results[0].segments)

    # --- values of the layer's graph ---

    def value(self, node: Any) -> Value:
        """Value of a node. UnsplittableError for a node with several outputs."""
        found = self._values[node]
        if found.several:
            raise UnsplittableError(f"{node.target} is used as one value")
        return found

    def whole(self, node: Any) -> fx.Node:
        """Node of a replicated value; a partial one is summed now. UnsplittableError for a sharded one."""
        value = self.value(node)
        if value.split is not None:
            raise UnsplittableError(f"{node} must be replicated, but is sharded")
        if value.partial:
            total = self.call(reduce, (value.node,), node)
            for addend in value.addends:
                total = self.call(torch.ops.aten.add.Tensor, (total, addend), node)
            value = self._values[node] = Value(total)
        if node.name in self.exported.parameters:
            self._whole.add(self.exported.parameters[node.name])
        found: fx.Node = value.node
        return found

    def entered(self, node: Any) -> fx.Node:
        """Replicated value on entry into sharded computation."""
        whole = self.whole(node)
        if whole not in self._entered:
            value = node.meta.get("val")
            trained = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            self._entered[whole] = self.call(enter, (whole,), node) if trained else whole
        return self._entered[whole]

    def part(self, node: Any, dim: int, segments: Segments) -> fx.Node:
        """This rank's shard of a replicated value."""
        copies = copies_of(segments)
        if copies > 1:
            return self.call(take_copy, (self.entered(node), dim, copies, self.rank, self.ranks), node)
        return self.call(take, (self.entered(node), dim, segments, self.rank, self.ranks), node)

    def as_split(self, node: Any, split: Split) -> fx.Node:
        """Value sharded by `split`; a replicated one is sliced."""
        value = self.value(node)
        if value.split is None and node.name in self.exported.cached:  # filled by this layer: a shard already
            self.cached[node.name] = split
            value = self._values[node] = Value(value.node, split)
        if value.split is None:
            return self.part(node, split.dim, split.segments)
        if value.split != split:
            raise UnsplittableError(f"{node} is sharded along {value.split}, not {split}")
        found: fx.Node = value.node
        return found

    # --- the rank's graph ---

    def split(self, node: Any, dim: int, segments: Segments, of: str = "") -> Value:
        """New sharded value; its segments limit the degrees. of: weight that made it; default: its input's."""
        for source in node.all_input_nodes:
            of = of or source.meta.get("of", "")
        node.meta["of"] = of
        like = node.meta.get("like")
        if like is not None and not isinstance(like.meta["val"].shape[dim], int):
            raise UnsplittableError(f"{like.name}: a sharded dimension is merged with a dynamic length")
        for length in segments:
            self.limits.setdefault(length, of)
            self.local(length)
        return Value(node, Split(dim, segments))

    def own(self, node: fx.Node, dim: int, segments: Copied) -> Value:
        """Value that is sharded over all ranks, of one of which each part is on several."""
        made = self.call(take_own, (node, dim, segments.copies, self.rank), node.meta["like"])
        made.meta["of"] = node.meta["of"]
        return self.split(made, dim, tuple(length // segments.copies for length in segments))

    def local(self, length: int) -> int:
        """Length per rank."""
        if length % self.ranks:
            raise UnsplittableError(f"a length of {length} does not divide by {self.ranks} ranks")
        return length // self.ranks

    def cut(self, node: Any, dim: int, segments: Segments) -> fx.Node | None:
        """Node of a sharded parameter; None for None. UnsplittableError where another linear cuts it differently."""
        if node is None:
            return None
        name, cut = self.exported.parameters[node.name], Cut(dim, segments)
        if self.cuts.setdefault(name, cut) != cut:
            raise UnsplittableError(f"{name} would be sharded in two ways")
        found: fx.Node = self.value(node).node
        return found

    def given(self, name: str | None) -> fx.Node:
        """Placeholder of the rank's graph of this name."""
        (found,) = self.graph.find_nodes(op="placeholder", target=name)
        return found

    def state(self, path: str) -> fx.Node:
        """Placeholder of the state of a module of the layer, which is an object and no tensor."""
        name = f"state_{len(self.states)}"
        self.states[name] = path
        return self.graph.placeholder(name)

    def is_parameter(self, node: Any) -> bool:
        """Whether a node is a parameter of the layer."""
        return isinstance(node, fx.Node) and node.name in self.exported.parameters

    def emit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Call the op of `node` with arguments of the rank's graph."""
        return self.call(node.target, args, node, kwargs)

    def call(
        self, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Call a function in place of the node `like`."""
        made = self.graph.call_function(target, args, dict(kwargs or {}))
        made.meta["like"] = like
        return made

    def copy(self, node: fx.Node, given: Mapping[fx.Node, Any] | None = None) -> fx.Node:
        """Call the op of `node` on the rank's values of its arguments, `given` ones or else replicated ones."""
        given = given or {}

        def of_rank(arg: fx.Node) -> Any:
            return given[arg] if arg in given else self.whole(arg)

        return self.emit(node, fx.map_arg(node.args, of_rank), dict(fx.map_arg(node.kwargs, of_rank)))

    def shape(self, node: Any) -> tuple[int, ...]:
        """Full shape of a value."""
        return shape_of(node)
