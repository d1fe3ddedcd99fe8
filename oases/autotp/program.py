"""Programs of a layer on one rank, traced once per call signature.

Layers that differ in their weights alone share a LayerSignature. Its fake copy of the unsharded layer is traced again
for every new call signature: other flags, other inputs, or shapes outside of earlier traces. The sharding is decided
once; every trace must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from oases.autotp.cutting import BlockPieces, Piece, cut, other_results
from oases.autotp.experts import replicate_experts
from oases.autotp.export import Exported, UnsplittableError, export, leaves, take_dtypes, twin_of
from oases.autotp.layers import LayerList, TracedCall
from oases.autotp.lowering import GroupRank, block_dropout, block_linear, lower
from oases.autotp.module_snapshot import comparison_key, inner_hooks, set_training_modes
from oases.autotp.rules import is_linear, linear_operands
from oases.autotp.shapes import Segments
from oases.autotp.spec import ParallelSpec
from oases.autotp.splitter import Splitter
from oases.autotp.structure import Structure, find
from oases.errors import UsageError
from oases.parallel.sharding import Cut


@dataclass(frozen=True)
class CallSignature:
    """Properties of a call, besides shapes, that determine its graph: tree, constants, types, training modes."""

    tree: str
    constants: tuple[str, ...]
    types: tuple[str, ...]
    modes: tuple[bool, ...]

    @classmethod
    def of(cls, found: list[Any], tree: pytree.TreeSpec, modes: tuple[bool, ...]) -> CallSignature:
        """Signature of a call from its leaves. UnsplittableError for a leaf that is neither a tensor nor a plain
        value.
        """
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


_Length = int | tuple[Any, float, float]
"""Dimension of an input: its length, or (symbol, minimum, maximum)."""


@dataclass
class Program:
    """Graphs of one rank for one call signature and a range of shapes.

    blocks: graphs of the stack's blocks. other_results: see `cutting.other_results`. module: the whole layer with its
    all-reduces, made on first use.
    """

    walk: Splitter
    activation: int | None
    tp: GroupRank
    blocks: list[BlockPieces] | None
    other_results: list[Any] = field(default_factory=list)
    reason: str = ""
    _module: tuple[Any, tuple[str, ...]] | None = field(default=None, repr=False)
    _constants: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _readings: dict[tuple[int, str], Any] = field(default_factory=dict, repr=False)
    _accepted: dict[Any, bool] = field(default_factory=dict, repr=False)

    @property
    def exported(self) -> Exported:
        """The layer's graph."""
        return self.walk.exported

    @cached_property
    def leaf_of(self) -> dict[str, int]:
        """Index among a call's leaves of each placeholder that represents one."""
        return {name: at for at, name in enumerate(self.exported.inputs) if name is not None}

    def reading(self, number: int, name: str) -> tuple[Piece, list[tuple[int | None, str, str]]]:
        """`partial` or `combine` of a block, and the sources of its further arguments.

        Each source is the index of a leaf of the call; or the name of a parameter of the block; or a placeholder.
        """
        if (number, name) not in self._readings:
            assert self.blocks is not None
            piece: Piece = getattr(self.blocks[number], name)
            parameters = self.exported.parameters
            self._readings[number, name] = (
                piece,
                [(self.leaf_of.get(source), mangled(parameters.get(source, "")), source) for source in piece.reads],
            )
        return self._readings[number, name]

    def constant(self, source: str, device: torch.device) -> Tensor:
        """Tensor that the layer creates, copied to a device once."""
        key = (source, device)
        if key not in self._constants:
            self._constants[key] = self.exported.constants[source].to(device)
        return self._constants[key]

    @cached_property
    def _shapes(self) -> tuple[tuple[_Length, ...] | None, ...]:
        """Required lengths of each leaf; None for a leaf that is not a tensor."""
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        return tuple(
            None if name is None else tuple(self._length(want) for want in nodes[name].meta["val"].shape)
            for name in self.exported.inputs
        )

    def _length(self, want: Any) -> _Length:
        if isinstance(want, int):
            return want
        found = self.exported.ranges.get(want.node.expr)
        return (want.node.expr, *((0, math.inf) if found is None else (float(found.lower), float(found.upper))))

    def accepts(self, tensors: list[Any]) -> bool:
        """Whether the program is valid for these shapes."""
        shapes = tuple(tensor.shape if isinstance(tensor, Tensor) else None for tensor in tensors)
        if shapes not in self._accepted:
            self._accepted[shapes] = self._accepts(tensors)
        return self._accepted[shapes]

    def _accepts(self, tensors: list[Any]) -> bool:
        bound: dict[Any, int] = {}
        for lengths, tensor in zip(self._shapes, tensors, strict=True):
            if lengths is None:
                continue
            for want, length in zip(lengths, tensor.shape, strict=True):
                if isinstance(want, int):
                    if want != length:
                        return False
                elif bound.setdefault(want[0], length) != length or not want[1] <= length <= want[2]:
                    return False
        return all(guard.subs(bound) == True for guard in self.exported.guards)  # noqa: E712  (of symbols)

    def per_sample(self, leaf: int) -> bool:
        """Whether dimension 0 of an input is the batch dimension."""
        assert self.activation is not None
        mine, x = self._shapes[leaf], self._shapes[self.activation]
        if not mine or not x:
            return False
        return x[0] > 1 and mine[0] == x[0] if isinstance(x[0], int) else mine[0] == x[0]

    @property
    def why_not_in_a_stack(self) -> str:
        """Reason why the blocks cannot run in sub-batches, or ""."""
        if self.blocks is None:
            return self.reason
        assert self.activation is not None
        x = self._shapes[self.activation]
        return "its graph is valid for one batch size alone" if x and isinstance(x[0], int) else ""

    def module(self) -> tuple[Any, tuple[str, ...]]:
        """The whole layer as a function with its all-reduces, and the placeholders it reads."""
        if self._module is None:
            graph = lower(self.walk.graph, self.tp)
            names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
            self._module = (fx.GraphModule(nn.Module(), graph).forward, names)
        return self._module


def mangled(name: str) -> str:
    """Parameter name without dots, valid in a single module."""
    return name.replace(".", "/")


class LayerSignature:
    """Layers that differ in their weights alone: one fake copy, one sharding, a program per call signature.

    Raises UnsplittableError where the layer cannot be traced or sharded.
    """

    def __init__(
        self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Any, tp: GroupRank
    ) -> None:
        self.twin = twin
        self.tp = tp
        CallSignature.of(*leaves(args, kwargs), ())
        exported = export(twin, args, kwargs)
        self.structure: Structure = find(exported, keep, tp.ranks)
        self.columns: dict[str, Segments] = {
            _weight(exported, node): segments for node, segments in self.structure.columns.items()
        }
        self.rows = tuple(_weight(exported, node) for node in self.structure.rows)
        walk = _walk(exported, self.columns, GroupRank())
        self.cuts: Mapping[str, Cut] = walk.cuts
        self.experts, self.refused = tuple(walk.experts), {**self.structure.refused, **walk.refused}
        if not self.cuts:
            raise UnsplittableError(
                "; ".join(f"{k}: {v}" for k, v in self.structure.refused.items()) or "no pair of linears"
            )
        self.programs: dict[tuple[CallSignature, int | None], list[Program]] = {}

    def program(
        self,
        call_signature: CallSignature,
        found: list[Any],
        tree: pytree.TreeSpec,
        activation: int | None,
        device: Any,
        layer: nn.Module,
    ) -> Program:
        """Program for a call of `layer` with this signature and leaves; traced if there is none."""
        programs = self.programs.setdefault((call_signature, activation), [])
        for program in programs:
            if program.accepts(found):
                return program
        args, kwargs = pytree.tree_unflatten(found, tree)
        if next(self.twin.parameters()).device != device:
            self.twin = twin_of(self.twin, device)
        take_dtypes(self.twin, layer)
        set_training_modes(self.twin, call_signature.modes)
        try:
            exported = export(self.twin, args, kwargs, _varying)
            walk = self._walked(exported)
        except UnsplittableError:  # some layers cannot be traced with dynamic lengths: trace these alone
            try:
                exported = export(self.twin, args, kwargs)
                walk = self._walked(exported)
            except UnsplittableError as error:
                raise UsageError(
                    f"{error}, in a call with other arguments or modes than at parallelize(), which sharded this "
                    "layer; call model.train() or model.eval() before it, as in most calls, and give such arguments "
                    "as spec=ParallelSpec(inputs=...): layers that cannot be sharded with them then stay whole"
                ) from error
        blocks, others, reason = None, list[Any](), ""
        try:
            name = None if activation is None or activation < 0 else exported.inputs[activation]
            if name is None:
                raise UnsplittableError("it has no activation")
            blocks, others = cut(walk, name), other_results(walk, name)
        except UnsplittableError as error:
            reason = str(error)
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in found)
        accepted = {shapes: True}  # valid for its own shapes even where a guard cannot be decided
        programs.append(Program(walk, activation, self.tp, blocks, others, reason, _accepted=accepted))
        return programs[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSignature:
        """Return self: it has no weights, and a copied layer has the same signature."""
        return self

    def _walked(self, exported: Exported) -> Splitter:
        walk = _walk(exported, self.columns, self.tp)
        if walk.cuts != self.cuts:
            raise UnsplittableError(
                f"with these arguments other parameters would be sharded: {set(walk.cuts) ^ set(self.cuts)}"
            )
        return walk


def _walk(exported: Exported, columns: Mapping[str, Segments], tp: GroupRank) -> Splitter:
    nodes = {node: columns[_weight(exported, node)] for node in exported.graph.nodes
             if is_linear(node) and _weight(exported, node) in columns}  # fmt: skip
    return Splitter(exported, nodes, block_linear, block_dropout, tp.rank, tp.ranks).run()


def _weight(exported: Exported, node: fx.Node) -> str:
    return exported.parameters.get(getattr(linear_operands(node)[1], "name", ""), "")


def _varying(tensor: Tensor) -> dict[int, Any]:
    return {dim: torch.export.Dim.AUTO for dim, length in enumerate(tensor.shape) if length > 1}


def layer_signatures(
    found: LayerList, model: nn.Module, spec: ParallelSpec, tp: GroupRank
) -> list[LayerSignature | UnsplittableError]:
    """Signature of each layer, one object for equal layers; the UnsplittableError for those that cannot be sharded.

    model: the original, whose layers are checked for hooks, which the fake copies do not have.
    """
    groups: dict[Any, list[int]] = {}
    indices = _indices([call.module for call in found.calls])
    for at, (call, path) in enumerate(zip(found.calls, found.paths, strict=True)):
        kept = frozenset(
            name
            for name, _ in call.module.named_parameters()
            if name in found.outside_reads or spec.keeps_whole(f"{path}.{name}" if path else name)
        )
        refused = inner_hooks(model.get_submodule(path))
        if path in found.assigned:
            refused = f"{type(call.module).__name__} sets {', '.join(found.assigned[path])} in its forward"
        groups.setdefault((_look(call.module, indices), _argument_types(call), call.ops, kept, refused), []).append(
            at
        )
    signatures: dict[int, LayerSignature | UnsplittableError] = {}
    for (*_, kept, refused), members in groups.items():
        signatures.update(dict.fromkeys(members, _layer_signature(found.calls[members[0]], kept, refused, tp)))
    return [signatures[at] for at in range(len(found.calls))]


def _layer_signature(
    call: TracedCall, kept: frozenset[str], refused: str, tp: GroupRank
) -> LayerSignature | UnsplittableError:
    if refused:
        return UnsplittableError(refused)
    replicate_experts(call.module, kept)
    try:
        return LayerSignature(call.module, call.args, call.kwargs, kept.__contains__, tp)
    except UnsplittableError as error:
        return error


def _look(module: nn.Module, ignored: set[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, attributes, shapes and shared weights of a module and its submodules."""
    shared: dict[int, int] = {}
    return tuple(
        (
            path,
            type(part),
            tuple((name, comparison_key(v)) for name, v in sorted(vars(part).items())
                  if not name.startswith("_") and (path, name) not in ignored and name != "training"),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad, shared.setdefault(id(p), len(shared)))
                  for name, p in part._parameters.items() if p is not None),
            tuple((name, tuple(b.shape), b.dtype) for name, b in part.named_buffers(recurse=False)),
        )
        for path, part in module.named_modules()
    )  # fmt: skip


def _indices(modules: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that hold the layer's index."""
    counting: set[tuple[str, str]] | None = None
    for at, module in enumerate(modules):
        mine = {(path, name) for path, part in module.named_modules() for name, v in vars(part).items()
                if type(v) is int and v == at}  # fmt: skip
        counting = mine if counting is None else counting & mine
    return counting or set()


def _argument_types(call: TracedCall) -> str:
    """Names and types of a call's arguments."""
    return repr(
        [type(each).__name__ for each in call.args] + sorted((k, type(v).__name__) for k, v in call.kwargs.items())
    )
