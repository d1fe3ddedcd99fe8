"""What one rank runs of a layer, for calls of one form; made when a call of a new form comes.

A kind of layer is what layers that differ in their weights alone have in common. Its twin, the author's layer without
data and uncut, is traced again for every form of call: other flags, other inputs, shapes that the traces before are
not good for. What is cut was decided once; every trace must come to the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from oases.parallel.sharding import Cut
from oases.partition.cutting import BlockPieces, beside, cut
from oases.partition.export import Exported, UnsplittableError, export, leaves, twin_of
from oases.partition.operations import Place, block_dropout, lower, product
from oases.partition.rules import is_product, product_of
from oases.partition.shapes import Segments
from oases.partition.splitter import Splitter
from oases.partition.structure import Structure, find
from oases.partition.watch import set_modes


@dataclass(frozen=True)
class Form:
    """What of a call decides which graph it needs, but for shapes: the tree, what is no tensor, types, the mode."""

    tree: str
    constants: tuple[str, ...]
    types: tuple[str, ...]
    modes: tuple[bool, ...]

    @classmethod
    def of(cls, found: list[Any], tree: pytree.TreeSpec, modes: tuple[bool, ...]) -> Form:
        """The form of a call by its leaves. UnsplittableError for one that is neither a tensor nor a plain value."""
        for leaf in found:
            if not isinstance(leaf, (Tensor, int, float, str, bool, torch.dtype, torch.device, type(None))):
                what = type(leaf).__name__
                if "Cache" in what:
                    raise UnsplittableError(f"a {what} was passed; call the model with use_cache=False")
                raise UnsplittableError(f"an argument of type {what} was passed")
        return cls(
            str(tree),
            tuple("tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in found),
            tuple(f"{leaf.dtype} {leaf.dim()}" for leaf in found if isinstance(leaf, Tensor)),
            modes,
        )


@dataclass
class Program:
    """The rank's graphs for one form of call and a range of shapes.

    blocks: as a stack runs them; beside: the layer's other results (see `cutting.beside`). module: the whole layer
    with its sums in it, which is made when first asked for.
    """

    walk: Splitter
    activation: int | None
    place: Place
    blocks: list[BlockPieces] | None
    beside: list[Any] = field(default_factory=list)
    reason: str = ""
    _module: tuple[Any, tuple[str, ...]] | None = field(default=None, repr=False)
    _accepted: dict[Any, bool] = field(default_factory=dict, repr=False)

    @property
    def exported(self) -> Exported:
        """The layer's graph."""
        return self.walk.exported

    def accepts(self, tensors: list[Any]) -> bool:
        """Whether it is good for inputs of these shapes: a length that was traced as varying is one everywhere."""
        shapes = tuple(tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors)
        if shapes not in self._accepted:
            self._accepted[shapes] = self._accepts(tensors)
        return self._accepted[shapes]

    def _accepts(self, tensors: list[Any]) -> bool:
        bound: dict[Any, int] = {}
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        for name, tensor in zip(self.exported.inputs, tensors, strict=True):
            if name is None:
                continue
            for want, length in zip(nodes[name].meta["val"].shape, tensor.shape, strict=True):
                if isinstance(want, int):
                    if want != length:
                        return False
                elif bound.setdefault(want.node.expr, length) != length or not self._in_range(want, length):
                    return False
        return all(guard.subs(bound) == True for guard in self.exported.guards)  # noqa: E712  (of symbols)

    def _in_range(self, symbol: Any, length: int) -> bool:
        found = self.exported.ranges.get(symbol.node.expr)
        return found is None or (found.lower <= length and length <= found.upper)

    def per_sample(self, leaf: int, tensors: list[Any]) -> bool:
        """Whether dimension 0 of an input holds the samples, as that of the activation does."""
        assert self.activation is not None
        name, x = self.exported.inputs[leaf], self.exported.inputs[self.activation]
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        if name is None or not tensors[leaf].dim():
            return False
        mine, batch = (nodes[each].meta["val"].shape[0] for each in (name, x))  # type: ignore[index]
        if isinstance(batch, int):
            return batch > 1 and mine == batch
        return not isinstance(mine, int) and bool(mine.node.expr == batch.node.expr)

    @property
    def why_not_in_a_stack(self) -> str:
        """Why its blocks cannot run in sub-batches; empty where they can."""
        if self.blocks is None:
            return self.reason
        assert self.activation is not None
        name = self.exported.inputs[self.activation]
        (x,) = (node for node in self.exported.graph.nodes if node.op == "placeholder" and node.name == name)
        return "its graph is good for one batch size alone" if isinstance(x.meta["val"].shape[0], int) else ""

    def module(self) -> tuple[Any, tuple[str, ...]]:
        """The whole layer as a function with its sums in it, and the placeholders it reads."""
        if self._module is None:
            graph = lower(self.walk.graph, self.place)
            names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
            self._module = (fx.GraphModule(nn.Module(), graph).forward, names)
        return self._module


class Kind:
    """Layers that differ in their weights alone: one twin, one structure, a program for every form of call.

    Raises UnsplittableError where the layer cannot be traced or nothing of it can be cut.
    """

    def __init__(
        self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Any, place: Place
    ) -> None:
        self.twin = twin
        self.place = place
        Form.of(*leaves(args, kwargs), ())
        exported = export(twin, args, kwargs)
        self.structure: Structure = find(exported, keep, place.ranks)
        if not self.structure.columns:
            raise UnsplittableError(
                "; ".join(f"{k}: {v}" for k, v in self.structure.refused.items()) or "no pair of products"
            )
        self.columns: dict[str, Segments] = {
            _weight(exported, node): segments for node, segments in self.structure.columns.items()
        }
        self.rows = tuple(_weight(exported, node) for node in self.structure.rows)
        self.cuts: Mapping[str, Cut] = _walk(exported, self.columns, Place()).cuts
        self.programs: dict[Form, list[Program]] = {}

    def program(
        self, found: list[Any], tree: pytree.TreeSpec, activation: int | None, modes: tuple[bool, ...], device: Any
    ) -> Program:
        """The program for a call by its leaves. modes: whether each part of the layer trains."""
        form = Form.of(found, tree, modes)
        programs = self.programs.setdefault(form, [])
        for program in programs:
            if program.accepts(found):
                return program
        args, kwargs = pytree.tree_unflatten(found, tree)
        if next(self.twin.parameters()).device != device:
            self.twin = twin_of(self.twin, device)
        set_modes(self.twin, modes)
        try:
            exported = export(self.twin, args, kwargs, _varying)
            walk = self._walked(exported)
        except UnsplittableError:  # lengths that vary are more than some layers take: then for these alone
            exported = export(self.twin, args, kwargs)
            walk = self._walked(exported)
        blocks, others, reason = None, list[Any](), ""
        try:
            name = None if activation is None or activation < 0 else exported.inputs[activation]
            if name is None:
                raise UnsplittableError("it has no activation")
            blocks, others = cut(walk, name), beside(walk, name)
        except UnsplittableError as error:
            reason = str(error)
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in found)
        accepted = {shapes: True}  # whatever a guard may say that cannot be decided
        programs.append(Program(walk, activation, self.place, blocks, others, reason, _accepted=accepted))
        return programs[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Kind:
        """Itself: it has no weights, and a copy of a layer is of the same kind."""
        return self

    def _walked(self, exported: Exported) -> Splitter:
        walk = _walk(exported, self.columns, self.place)
        if walk.cuts != self.cuts:
            raise UnsplittableError(f"called so, other parameters would be cut: {set(walk.cuts) ^ set(self.cuts)}")
        return walk


def _walk(exported: Exported, columns: Mapping[str, Segments], place: Place) -> Splitter:
    nodes = {node: columns[_weight(exported, node)] for node in exported.graph.nodes
             if is_product(node) and _weight(exported, node) in columns}  # fmt: skip
    return Splitter(exported, nodes, product, block_dropout, place.rank, place.ranks).run()


def _weight(exported: Exported, node: fx.Node) -> str:
    return exported.parameters.get(getattr(product_of(node)[1], "name", ""), "")


def _varying(tensor: Tensor) -> dict[int, Any]:
    return {dim: torch.export.Dim.AUTO for dim, length in enumerate(tensor.shape) if length > 1}


__all__ = ["Form", "Kind", "Program", "leaves"]
