"""Programs: the graphs of a layer on one rank, for one call signature and a range of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from oases.autotp.cutting import BlockPieces, Piece, with_prologue
from oases.autotp.export import Exported, UnsplittableError
from oases.autotp.lowering import GroupRank, fuse, lower
from oases.autotp.splitter import Splitter
from oases.autotp.tokens import (
    ExpertPieces,
    SubBatchPieces,
    TokenPieces,
    expert_pieces,
    relation_of_samples,
    sub_batch_pieces,
    token_pieces,
)  # fmt: skip
from oases.errors import UsageError

_Pieces = TypeVar("_Pieces", TokenPieces, SubBatchPieces, ExpertPieces | None)
_Length = int | tuple[Any, float, float]
"""Dimension of an input: its length, or (symbol, minimum, maximum)."""


@dataclass
class Program:
    """Graphs of one rank for one call signature and a range of shapes.

    activation: leaf of a call that is the layer's activation, -1 for none. blocks: graphs of the stack's blocks; none
    where it cannot be cut, for `reason`. other_results: see `cutting.other_results`.
    """

    walk: Splitter
    activation: int
    tp: GroupRank
    blocks: list[BlockPieces]
    other_results: list[Any] = field(default_factory=list)
    reason: str = ""
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

    @property
    def _x(self) -> fx.Node:
        return self.walk.given(self.exported.inputs[self.activation])

    @cached_property
    def behind(self) -> Program | None:
        """The program of a layer that follows another one, with a prologue between them; None where it has none."""
        first = with_prologue(self.walk, self._x, self.blocks[0])
        return None if first is None else replace(self, blocks=[first, *self.blocks[1:]], _readings={})

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
        if self.blocks[0].prologue is not None:
            return []
        try:
            return self._pieces_by("tokens", sub_batch_pieces)
        except UnsplittableError:
            return []

    @cached_property
    def in_pieces(self) -> list[ExpertPieces | None]:
        """Graphs of the blocks that send tokens to experts; None for others."""
        return self._pieces_by("experts", expert_pieces)

    def _pieces_by(self, kind: str, made_by: Callable[..., _Pieces]) -> list[_Pieces]:
        made = [made_by(self.walk.graph, self._x, each) for each in self.blocks]
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
        shapes = shapes_of(tensors)
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
        mine, x = self._shapes[leaf], self._shapes[self.activation]
        if not mine or not x:
            return False
        return x[0] > 1 and mine[0] == x[0] if isinstance(x[0], int) else mine[0] == x[0]

    def tokens_of(self, leaf: int) -> int | None:
        """Dimension of the tokens of an input of which sub-batches of tokens get their part; None for all of it."""
        name = self.exported.inputs[leaf] or ""
        return next((each.dims[name] for each in self.sub_batches_of_tokens if name in each.dims), None)

    @cached_property
    def why_not_in_a_stack(self) -> str:
        """Reason why the blocks cannot run in sub-batches, such as an op that relates samples, or ""."""
        if not self.blocks:
            return self.reason
        x = self._shapes[self.activation]
        if x and isinstance(x[0], int):
            return "its graph is valid for one batch size alone"
        name = self.exported.inputs[self.activation]
        return relation_of_samples(self.exported.graph, str(name), self.exported.outputs[0])

    @cached_property
    def module(self) -> tuple[Any, tuple[str, ...]]:
        """The whole layer as a function with its all-reduces, and the placeholders it reads."""
        graph = lower(self.walk.graph, self.tp)
        fuse(graph)
        names = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
        return fx.GraphModule(nn.Module(), graph).forward, names


def mangled(name: str) -> str:
    """Parameter name without dots, valid in a single module."""
    return name.replace(".", "/")


def shapes_of(found: list[Any]) -> tuple[torch.Size | None, ...]:
    """Shapes of a call's leaves; None for one that is not a tensor."""
    return tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in found)
