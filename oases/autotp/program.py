"""Programs of a layer on one rank, traced once per call signature.

Layers that differ in their weights alone share a LayerSignature. Its fake copy of the unsharded layer is traced again
for every new call signature: other flags, other inputs, or shapes outside of earlier traces. The sharding is decided
once; every trace must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from oases.autotp.cache import NO_CACHE, is_layer_cache
from oases.autotp.cutting import BlockPieces, Piece, cut, other_results
from oases.autotp.experts import ExpertMlp, collections
from oases.autotp.export import (
    CallSignature,
    Exported,
    TooLongError,
    UnsplittableError,
    export,
    leaves,
    take_dtypes,
    twin_of,
    varying_lengths,
    varying_shapes,
    without_data,
)
from oases.autotp.fusion import fuse
from oases.autotp.layers import TracedCall
from oases.autotp.lowering import GroupRank, block_dropout, block_linear, lower
from oases.autotp.module_snapshot import Modes, modes_of, set_modes, states_of
from oases.autotp.rules import is_linear, linear_operands
from oases.autotp.samples import relation_of_samples
from oases.autotp.shapes import Segments
from oases.autotp.splitter import Split, Splitter
from oases.autotp.structure import Structure, find
from oases.autotp.token_pieces import (
    ExpertPieces,
    SubBatchPieces,
    TokenPieces,
    expert_pieces,
    sub_batch_pieces,
    token_pieces,
)
from oases.errors import UsageError
from oases.parallel.sharding import Cut

_Pieces = TypeVar("_Pieces", TokenPieces, SubBatchPieces, ExpertPieces | None)
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

    @cached_property
    def tokens(self) -> list[TokenPieces]:
        """Graphs of the blocks under sequence parallelism. UsageError where what is not gathered relates tokens."""
        try:
            return self._pieces_by("part", token_pieces)
        except UnsplittableError as error:
            raise UsageError(
                f"sequence_parallel: {type(self.exported.layer).__name__} cannot run on parts of a sequence: "
                f"{error}; leave sequence_parallel out"
            ) from error

    @cached_property
    def sub_batches_of_tokens(self) -> list[SubBatchPieces]:
        """Graphs of the blocks for sub-batches of tokens; none where what follows a sum relates tokens."""
        try:
            return self._pieces_by("tokens", sub_batch_pieces)
        except UnsplittableError:
            return []

    @cached_property
    def in_pieces(self) -> list[ExpertPieces | None]:
        """Graphs of the blocks that send tokens to experts; None for others."""
        return self._pieces_by("experts", expert_pieces)

    def _pieces_by(self, kind: str, made_by: Callable[..., _Pieces]) -> list[_Pieces]:
        assert self.blocks is not None
        assert self.activation is not None
        graph, name = self.walk.graph, self.exported.inputs[self.activation]
        (x,) = (node for node in graph.nodes if node.op == "placeholder" and node.target == name)
        made = [made_by(graph, x, each.begin, each.sums, each.end) for each in self.blocks]
        for number, pieces in enumerate(made):  # now: a compiled block would be compiled anew for each entry
            for name, piece in ({} if pieces is None else vars(pieces)).items():
                if isinstance(piece, Piece):
                    self._readings[number, f"{kind}.{name}"] = self._with_sources(piece)
        return made

    def reading(self, number: int, name: str) -> tuple[Piece, list[tuple[int | None, str, str]]]:
        """A graph of a block, and the sources of its further arguments.

        name: of BlockPieces, "part.NAME" of TokenPieces or "tokens.NAME" of SubBatchPieces. Each source is the index
        of a leaf of the call; or the name of a parameter of the block; or a placeholder.
        """
        if (number, name) not in self._readings:
            assert self.blocks is not None
            if name.startswith("part."):
                _ = self.tokens
            elif name.startswith("tokens."):
                _ = self.sub_batches_of_tokens
            elif name.startswith("experts."):
                _ = self.in_pieces
            else:
                self._readings[number, name] = self._with_sources(getattr(self.blocks[number], name))
        return self._readings[number, name]

    def _with_sources(self, piece: Piece) -> tuple[Piece, list[tuple[int | None, str, str]]]:
        parameters = self.exported.parameters
        return piece, [(self.leaf_of.get(each), mangled(parameters.get(each, "")), each) for each in piece.reads]

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
            None if name is None else tuple(
                self._length(
                    want * cached.copies // self.tp.ranks if cached is not None and dim == cached.dim else want
                )
                for dim, want in enumerate(nodes[name].meta["val"].shape)
            )
            for name in self.exported.inputs
            for cached in [self.walk.cached.get(name or "")]
        )  # fmt: skip

    def _length(self, want: Any) -> _Length:
        if isinstance(want, int):
            return want
        if want.node.expr.is_number:  # a symbol that the trace found to have one value
            return int(want.node.expr)
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

    def tokens_of(self, leaf: int) -> int | None:
        """Dimension of the tokens of an input of which sub-batches of tokens get their part; None for all of it."""
        name = self.exported.inputs[leaf] or ""
        return next((each.dims[name] for each in self.sub_batches_of_tokens if name in each.dims), None)

    @property
    def why_not_in_a_stack(self) -> str:
        """Reason why the blocks cannot run in sub-batches, or ""."""
        if self.blocks is None:
            return self.reason
        assert self.activation is not None
        x = self._shapes[self.activation]
        return "its graph is valid for one batch size alone" if x and isinstance(x[0], int) else self._relation

    @cached_property
    def _relation(self) -> str:
        """Op that relates the samples of the activation, or ""."""
        assert self.activation is not None
        name = self.exported.inputs[self.activation]
        return relation_of_samples(self.exported.graph, str(name), self.exported.outputs[0])

    def module(self) -> tuple[Any, tuple[str, ...]]:
        """The whole layer as a function with its all-reduces, and the placeholders it reads."""
        if self._module is None:
            graph = lower(self.walk.graph, self.tp)
            fuse(graph)
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
        self.states = states_of(twin)
        CallSignature.of(*leaves(args, kwargs), Modes())
        exported = export(twin, args, kwargs)
        self.structure: Structure = find(exported, keep, tp.ranks)
        self.sums = not self.structure.columns and not any(collections(twin))
        if self.sums:  # norms over what would be sharded: rather more all-reduces than a layer on every rank
            self.structure = find(exported, keep, tp.ranks, sums=True)
        self.columns: dict[str, Segments] = {
            _weight(exported, node): segments for node, segments in self.structure.columns.items()
        }
        self.rows = tuple(_weight(exported, node) for node in self.structure.rows)
        walk = _walk(exported, self.columns, GroupRank(), self.sums)
        self.cuts: Mapping[str, Cut] = walk.cuts
        self.balanced: Mapping[str, tuple[ExpertMlp, int]] = walk.balanced
        self.experts, self.refused = tuple(walk.experts), {**self.structure.refused, **walk.refused}
        if not self.cuts:
            raise UnsplittableError(
                "; ".join(f"{k}: {v}" for k, v in self.structure.refused.items()) or "no pair of linears"
            )
        self.programs: dict[tuple[CallSignature, int | None], list[Program]] = {}
        self._static: dict[tuple[CallSignature, int | None], int] = {}
        self.kept: tuple[Split | None, ...] | None = None
        """Sharding of the keys and values that a key-value cache keeps; None before it is known."""

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
        args, kwargs = pytree.tree_map(self._whole_cache, pytree.tree_unflatten(found, tree), is_leaf=is_layer_cache)
        if next(self.twin.parameters()).device != device:
            self.twin = twin_of(self.twin, device)
        take_dtypes(self.twin, layer)
        try:
            exported, walk = self._traced(args, kwargs, (call_signature, activation))
        except UnsplittableError as error:
            if any(map(is_layer_cache, pytree.tree_leaves((args, kwargs), is_leaf=is_layer_cache))):
                raise UsageError(f"{error}, with a key-value cache; {NO_CACHE}") from error
            if states := call_signature.modes.states:
                raise UsageError(
                    f"{error}, with another {', '.join(sorted({each.name for each in states}))} than at "
                    "parallelize(); set it back (peft: unmerge_adapter(), set_adapter()), or before parallelize()"
                ) from error
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

    def _traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[CallSignature, int | None]
    ) -> tuple[Exported, Splitter]:
        """Graph of a call and its sharding, with as many dynamic lengths as it allows: all, all but the batch, none.

        Later calls of the same key begin with those that the first one allowed. Raises UnsplittableError.
        """
        for tries, varying in enumerate((varying_shapes, varying_lengths)):
            if tries < self._static.get(key, 0):
                continue
            try:
                return self._traced_as(key[0].modes, args, kwargs, varying)
            except TooLongError:
                raise
            except UnsplittableError:  # trace more of these shapes alone
                self._static[key] = tries + 1
        return self._traced_as(key[0].modes, args, kwargs, None)

    def _traced_as(
        self, modes: Modes, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Callable[..., Any] | None
    ) -> tuple[Exported, Splitter]:
        set_modes(self.twin, modes, self.states)  # each time: a forward that cannot be traced may have changed some
        exported = export(self.twin, args, kwargs, varying)
        return exported, self._walked(exported)

    def sample(self, call: TracedCall, activation: int) -> Program:
        """Program of a traced call."""
        flat, tree = leaves(call.args, call.kwargs)
        signature = CallSignature.of(flat, tree, modes_of(call.module, self.states))
        return self.program(signature, flat, tree, activation, flat[activation].device, call.module)

    def _whole_cache(self, held: Any) -> Any:
        """A LayerCache of the unsharded layer, without data; anything else itself."""
        if not is_layer_cache(held) or held.keys is None:
            return held
        whole = []
        for tensor, split in zip((held.keys, held.values), self.kept or (None, None), strict=True):
            shape = list(tensor.shape)
            if split is not None:
                shape[split.dim] = sum(split.segments) // split.copies
            if self.kept is None or (split and sum(split.segments) != self.tp.ranks * tensor.shape[split.dim]):
                raise UsageError(
                    f"{type(self.twin).__name__} was given a key-value cache of another model, with the shape "
                    f"{list(tensor.shape)}; give an empty one, or that of a call of this model"
                )
            whole.append(without_data(tensor.new_empty(1).expand(shape)))
        return held._replace(keys=whole[0], values=whole[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSignature:
        """Return self: it has no weights, and a copied layer has the same signature."""
        return self

    def _walked(self, exported: Exported) -> Splitter:
        walk = _walk(exported, self.columns, self.tp, self.sums)
        read = exported.parameters_read
        wrong = [name for name in sorted(read) if walk.cuts.get(name) != self.cuts.get(name)]
        if wrong:
            raise UnsplittableError(f"with these arguments other parameters would be sharded: {', '.join(wrong)}")
        if exported.keeps:
            self.kept = self.kept or tuple(walk.kept)
            given = [walk.cached.get(name) for name in exported.cached]
            if list(self.kept) != walk.kept or (given and given != walk.kept):
                raise UnsplittableError("its key-value cache would be sharded in two ways")
        return walk


def _walk(exported: Exported, columns: Mapping[str, Segments], tp: GroupRank, sums: bool) -> Splitter:
    nodes = {node: columns[_weight(exported, node)] for node in exported.graph.nodes
             if is_linear(node) and _weight(exported, node) in columns}  # fmt: skip
    return Splitter(exported, nodes, block_linear, block_dropout, tp.rank, tp.ranks, sums).run()


def _weight(exported: Exported, node: fx.Node) -> str:
    return exported.parameters.get(getattr(linear_operands(node)[1], "name", ""), "")
