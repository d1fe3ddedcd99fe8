"""One walk over a layer's graph that finds what is cut over the ranks, and writes the graph that one rank runs.

Every value is whole (the same on all ranks), split (each rank has its part of one dimension) or partial (the sum over
the ranks is the value). A column-parallel product makes a split value of a whole one; shapes, heads and element-wise
functions keep it split; a product that sums over the split dimension makes it partial, which is row-parallel. Partial
values stay so through what is linear, and what is added to them waits until they are summed: so two branches that are
only added share one sum. What is not understood raises UnsplittableError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from oases.autotp.export import Exported, UnsplittableError, shape_of
from oases.autotp.shapes import Segments
from oases.parallel.sharding import Cut


@dataclass(frozen=True)
class Split:
    """Each rank has its part of dimension `dim`, whose whole length is that of the segments."""

    dim: int
    segments: Segments


@dataclass(frozen=True)
class Value:
    """What one node of the layer's graph became: a node of the rank's graph.

    split: None for whole and partial values. Of a partial one, `addends` are whole and belong to it once.
    """

    node: Any
    split: Split | None = None
    partial: bool = False
    addends: tuple[fx.Node, ...] = ()


def reduce(partial: Tensor) -> Tensor:
    """A mark in the rank's graph: here a sum over the ranks is due; what runs the graph replaces it."""
    raise AssertionError("a mark that was not replaced")


def enter(whole: Tensor) -> Tensor:
    """A mark: a whole value goes where each rank computes its part, so its gradient is a sum over the ranks."""
    raise AssertionError("a mark that was not replaced")


def take(whole: Tensor, dim: int, segments: Segments, rank: int, ranks: int) -> Tensor:
    """This rank's part of a value that all ranks have."""
    return Cut(dim, tuple(segments)).take(whole, rank, ranks)


ABSENT = "this result is in parts on the ranks"
"""Stands for a result of a layer that no rank has whole."""

Rule = Callable[["Splitter", fx.Node], "Value | tuple[Value, ...]"]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}
"""By the name of the aten op without its overload; filled by the modules of rules."""


def rule(*names: str) -> Callable[[R], R]:
    """Register a function as the rule of these ops."""

    def register(function: R) -> R:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def name_of(node: fx.Node) -> str:
    """`aten.add.Tensor` -> `add`."""
    parts = str(node.target).split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else str(node.target)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, of whatever kind its op takes."""
    return node.args


def keyword(node: fx.Node, name: str, default: Any) -> Any:
    """An argument that a node has by name."""
    return node.kwargs.get(name, default)


@dataclass
class Splitter:
    """The walk. columns: the products to cut by their output features, each with its segments.

    ranks: 1 finds the structure and the `limits`, whose common divisors are the degrees that fit; then the same walk
    writes the graph of rank `rank` of `ranks`. product, dropout: what the rank's graph calls for a
    linear and for a dropout that is on. experts: the weights of experts that are spread over the ranks;
    refused: collections of experts that stay whole, and why.
    """

    exported: Exported
    columns: Mapping[fx.Node, Segments]
    product: Callable[..., Any]
    dropout: Callable[..., Any]
    rank: int = 0
    ranks: int = 1
    graph: fx.Graph = field(default_factory=fx.Graph)
    cuts: dict[str, Cut] = field(default_factory=dict)
    rows: list[fx.Node] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    limits: dict[int, str] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self._values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        self._whole: set[str] = set()
        self._entered: dict[fx.Node, fx.Node] = {}

    def run(self) -> Splitter:
        """Walk the graph."""
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                if not node.users:  # arguments that are no tensors have one, too
                    continue
                self._values[node] = Value(self._copied(node, node.target))
            elif node.op == "call_function":
                self._values[node] = self._called(node)
            elif node.op != "output":
                raise UnsplittableError(f"its graph has a {node.op} ({node.target})")
        self.outputs = tuple(self._result(place, out) for place, out in enumerate(self.exported.outputs))
        self.graph.output(self.outputs)
        both = self._whole & set(self.cuts)
        if both:
            raise UnsplittableError(f"{', '.join(sorted(both))} would be needed whole and cut")
        return self

    def _result(self, place: int, out: Any) -> Any:
        """The first result must be whole; others that are not (attention weights) nobody can have."""
        if not isinstance(out, fx.Node):
            return out
        split = place > 0 and self.value(out).split is not None
        return ABSENT if split else self.whole(out)

    def _called(self, node: fx.Node) -> Value | tuple[Value, ...]:
        name = name_of(node)
        if "getitem" in name:
            source, index = node.args
            several = self._values.get(source)  # type: ignore[arg-type]
            if isinstance(several, tuple):
                return several[index]  # type: ignore[index]
        values = [self._values[each] for each in node.all_input_nodes]
        if name in RULES:
            return RULES[name](self, node)
        if any(isinstance(value, tuple) for value in values):
            raise UnsplittableError(f"{node.target} takes a list apart")
        if all(value.split is None for value in values):  # type: ignore[union-attr]
            return Value(self.copy(node))
        pointwise = RULES["mul"]
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return pointwise(self, node)
        raise UnsplittableError(f"{node.target} would need its input whole")

    # --- values of the layer's graph ---

    def value(self, node: Any) -> Value:
        """What a node became. UnsplittableError for one that stands for several."""
        found = self._values[node]
        if isinstance(found, tuple):
            raise UnsplittableError(f"{node.target} is used as one value")
        return found

    def whole(self, node: Any) -> fx.Node:
        """The rank's node of a value that all ranks have; a partial one is summed now. Not of a split one."""
        value = self.value(node)
        if value.split is not None:
            raise UnsplittableError(f"{node} is needed whole where each rank has a part of it")
        if value.partial:
            total = self._made(reduce, (value.node,), node)
            for addend in value.addends:
                total = self._made(torch.ops.aten.add.Tensor, (total, addend), node)
            value = self._values[node] = Value(total)
        if node.name in self.exported.parameters:
            self._whole.add(self.exported.parameters[node.name])
        found: fx.Node = value.node
        return found

    def entered(self, node: Any) -> fx.Node:
        """A whole value on its way into what is computed on parts."""
        whole = self.whole(node)
        if whole not in self._entered:
            tensor = isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_floating_point()
            self._entered[whole] = self._made(enter, (whole,), node) if tensor else whole
        return self._entered[whole]

    def part(self, node: Any, dim: int, segments: Segments) -> fx.Node:
        """This rank's part of a whole value."""
        return self._made(take, (self.entered(node), dim, segments, self.rank, self.ranks), node)

    def as_split(self, node: Any, split: Split) -> fx.Node:
        """A value as one that is split so; whole ones are taken apart."""
        value = self.value(node)
        if value.split is None:
            return self.part(node, split.dim, split.segments)
        if value.split != split:
            raise UnsplittableError(f"{node} is split along {value.split} where {split} is needed")
        found: fx.Node = value.node
        return found

    # --- the rank's graph ---

    def split(self, node: Any, dim: int, segments: Segments, of: str = "") -> Value:
        """A new split value; its segments limit the degrees. of: the weight that made it; else its input's."""
        for source in node.all_input_nodes:
            of = of or source.meta.get("of", "")
        node.meta["of"] = of
        like = node.meta.get("like")
        if like is not None and not isinstance(like.meta["val"].shape[dim], int):
            raise UnsplittableError(f"{like.name}: what is split is joined with a length that varies")
        for length in segments:
            self.limits.setdefault(length, of)
            self.local(length)
        return Value(node, Split(dim, segments))

    def local(self, length: int) -> int:
        """A rank's share of a length."""
        if length % self.ranks:
            raise UnsplittableError(f"a length of {length} does not divide by {self.ranks} ranks")
        return length // self.ranks

    def cut(self, node: Any, dim: int, segments: Segments) -> fx.Node | None:
        """The rank's node of a parameter that is cut; None for None. Not if another product cuts it otherwise."""
        if node is None:
            return None
        name, cut = self.exported.parameters[node.name], Cut(dim, segments)
        if self.cuts.setdefault(name, cut) != cut:
            raise UnsplittableError(f"{name} would be cut in two ways")
        found: fx.Node = self.value(node).node
        return found

    def is_parameter(self, node: Any) -> bool:
        """Whether a node is a parameter of the layer."""
        return isinstance(node, fx.Node) and node.name in self.exported.parameters

    def emit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Call the op of `node` with arguments of the rank's graph."""
        return self._made(node.target, args, node, kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """Call a function for what `like` was."""
        return self._made(function, args, like)

    def copy(self, node: fx.Node, given: Mapping[fx.Node, Any] | None = None) -> fx.Node:
        """Call the op of `node` on the rank's values of its arguments, `given` ones or else whole ones."""
        given = given or {}

        def of_rank(arg: fx.Node) -> Any:
            return given[arg] if arg in given else self.whole(arg)

        args = fx.map_arg(node.args, of_rank)
        kwargs = dict(fx.map_arg(node.kwargs, of_rank))
        return self._made(node.target, args, node, kwargs)

    def _made(self, target: Any, args: Any, like: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta["like"] = like
        return node

    def _copied(self, node: fx.Node, name: Any) -> fx.Node:
        placeholder = self.graph.placeholder(str(name))
        placeholder.meta["like"] = node
        return placeholder

    def shape(self, node: Any) -> tuple[int, ...]:
        """The whole shape of a value."""
        return shape_of(node)
