"""Layered models: the costs of a model's own layers, by kind of layer, for the planner.

Parameters, FLOPs and bytes of every block, and how each part of it is sharded: counted in a trace, or of a GPT by
formulas of its sizes (`oases.plans.gpt`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from math import gcd
from typing import NamedTuple

from oases.errors import UsageError
from oases.limits import MOST_LAYERS, require_numbers, short
from oases.plans.shape import ELEMENT_BYTES, GPTSizes, state_bytes

Kind = tuple[int, int]
"""A block's (kind of layer, place in the layer)."""


@dataclass(frozen=True)
class Share:
    """Work of a block that is sharded in one way.

    units: heads, features, experts or tokens of the vocabulary, which the degree divides; 1: every rank computes it
    whole. optional: where the degree does not divide, every rank computes it whole; else that is an error.
    parameters: elements. Of one sample's forward pass: column, core, row: FLOPs of column-parallel matmuls, of
    attention, of row-parallel matmuls. moved: bytes that other ops read and write. kept: bytes kept for the backward
    pass. routed: bytes of tokens that are sent to their experts, and back, where these are balanced.
    """

    units: int = 1
    optional: bool = False
    parameters: int = 0
    column: int = 0
    core: int = 0
    row: int = 0
    moved: int = 0
    kept: int = 0
    routed: int = 0

    def ranks(self, tp: int) -> int:
        """Number of ranks over which it is sharded at degree `tp`."""
        return tp if self.units % tp == 0 else 1


@dataclass(frozen=True)
class Block:
    """Block of a layer: what is computed up to one all-reduce, and with its result.

    combined: bytes per sample that ops after the all-reduce read and write. ops: kernels of its forward pass.
    """

    name: str
    shares: tuple[Share, ...]
    combined: int = 0
    ops: int = 1


@dataclass(frozen=True)
class LayerKind:
    """Layers with equal costs. name: path of the first of them in the model."""

    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Outside:
    """Work of a model outside of its layers, before layer `before`; after the last one if that is their number.

    logits: elements of the largest matmul's result per sample, 0 without matmuls. tied: parameters of its table of
    tokens, if an earlier Outside has that table, too.
    """

    before: int
    shares: tuple[Share, ...]
    logits: int = 0
    tied: int = 0


@dataclass(frozen=True)
class LayerList:
    """A model's list of layers: its path in the model, and how many it calls."""

    path: str
    layers: int


class Work(NamedTuple):
    """Work of a block on one rank: FLOPs of the forward pass by matmul, bytes moved, kernels.

    moved, ops: of the forward pass. moved_backward, ops_backward: of the backward pass without the weights'
    gradients, moved_weights: of these.
    """

    column: float
    core: float
    row: float
    moved: float
    combined: float
    ops: int
    moved_backward: float
    ops_backward: float
    moved_weights: float


@dataclass(frozen=True)
class Model:
    """A model as data: its layers in call order, by kind, and what lies outside of them.

    sequence: tokens per sample (patches or frames where there are no tokens). hidden: features of an activation
    between layers, `unit` its elements per sample. vocabulary: rows of the table of tokens, 0 without one. lists: its
    lists of layers in call order. order: kind of each layer. messages: bytes per sample with gradients that cross the
    border before each layer. token_wise: whether the layers compute all that relates tokens between a column- and a
    row-parallel matmul, which sequence parallelism needs. expert_parallel: ranks over which experts are divided,
    and to which tokens are sent (`parallelize(experts="balanced")`); 0: they are sharded over
    the tensor-parallel ranks. sizes: of a GPT, which stand for it in files; None for a traced model.
    """

    name: str
    dtype: str
    sequence: int
    hidden: int
    unit: int
    vocabulary: int
    num_parameters: int
    lists: tuple[LayerList, ...]
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]
    outside: tuple[Outside, ...]
    messages: tuple[int, ...]
    token_wise: bool = False
    expert_parallel: int = 0
    sizes: GPTSizes | None = field(default=None, metadata={"in_files": False})

    def __post_init__(self) -> None:
        require_numbers({name: getattr(self, name) for name in ("sequence", "hidden", "vocabulary")}, "model: ")
        for name in ("sequence", "hidden", "unit"):
            if getattr(self, name) < 1:
                raise UsageError(f"model: {name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"model: unknown dtype {self.dtype!r}; known are {', '.join(ELEMENT_BYTES)}")
        if not self.order or len(self.order) > MOST_LAYERS:
            raise UsageError(f"model: order must name 1 to {MOST_LAYERS} layers, got {len(self.order)}")
        if any(not 0 <= kind < len(self.kinds) for kind in self.order):
            raise UsageError(f"model: order must hold kinds below {len(self.kinds)}, got {short(list(self.order))}")
        if any(not kind.blocks or not all(block.shares for block in kind.blocks) for kind in self.kinds):
            raise UsageError("model: every kind of layer needs a block, and every block a share")
        if sum(each.layers for each in self.lists) != self.layers or len(self.messages) != self.layers:
            raise UsageError(f"model: lists and messages must be those of its {self.layers} layers")
        if any(not 0 <= each.before <= self.layers for each in self.outside):
            raise UsageError(f"model: outside must lie before layers 0 to {self.layers}")
        if self.expert_parallel and (not self.num_experts or self.num_experts % self.expert_parallel):
            raise UsageError(
                f"model: expert_parallel {self.expert_parallel} does not divide {self.num_experts} experts"
            )

        self._check_sizes()

    def _check_sizes(self) -> None:
        for name in ("name", "dtype", "hidden", "layers", "sequence", "vocabulary") if self.sizes is not None else ():
            if (ours := getattr(self, name)) != (theirs := getattr(self.sizes, name)):
                raise UsageError(
                    f"model: {name} is {ours!r} and {theirs!r} in its sizes; change it by oases.plans.gpt.resized"
                )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a search looks models up thousands of times
        return hash(tuple(getattr(self, item.name) for item in fields(self)))

    @property
    def layers(self) -> int:
        """Number of layers, of all lists."""
        return len(self.order)

    @property
    def mixed(self) -> bool:
        """Whether blocks of one plan may have different degrees, and a segment half layers: those of a GPT."""
        return self.sizes is not None

    @property
    def is_gpt(self) -> bool:
        """Whether its blocks are a GPT's, which a profile knows by width, heads and sequence."""
        return self.sizes is not None and self.sizes.is_gpt

    @property
    def heads(self) -> int:
        """Heads of a GPT; of a traced model the largest degree that divides what must be sharded."""
        return self._limit if self.sizes is None else self.sizes.heads

    @cached_property
    def _limit(self) -> int:
        """Largest degree that divides what must be sharded; where nothing must, what may be."""
        if self.sizes is not None:
            return self.sizes.divisor
        shares = [s for kind in self.kinds for b in kind.blocks for s in b.shares if s.units > 1]
        return gcd(*(s.units for s in shares if not s.optional)) or gcd(*(s.units for s in shares))

    @cached_property
    def num_experts(self) -> int:
        """Experts of a layer, of different numbers their greatest common divisor; 0 for a dense model."""
        return gcd(*(s.units for kind in self.kinds for b in kind.blocks for s in b.shares if s.routed))

    @cached_property
    def layer_kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """Kinds of the blocks of each kind of layer."""
        return tuple(tuple((at, place) for place in range(len(k.blocks))) for at, k in enumerate(self.kinds))

    @property
    def layer_order(self) -> tuple[int, ...]:
        """Index in `layer_kinds` of each layer."""
        return self.order

    @cached_property
    def _first_blocks(self) -> tuple[int, ...]:
        return tuple(accumulate((len(self.kinds[kind].blocks) for kind in self.order), initial=0))

    @cached_property
    def _blocks(self) -> tuple[Kind, ...]:
        return tuple(kind for layer in self.order for kind in self.layer_kinds[layer])

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all layers."""
        return self._first_blocks[-1]

    def first_block(self, layer: int) -> int:
        """First block of a layer; of the number of layers, the number of blocks."""
        return self._first_blocks[layer]

    def layer_at(self, block: int) -> int:
        """Layer that holds a block."""
        return bisect_right(self._first_blocks, block) - 1

    def num_layers(self, first: int, count: int) -> int:
        """Number of layers of `count` blocks from block `first` on; of a GPT pairs, an odd last one as one."""
        if self.mixed:
            return (count + 1) // 2
        return self.layer_at(first + count - 1) - self.layer_at(first) + 1

    def layer_numbers(self, first: int, count: int) -> tuple[int, ...] | None:
        """Layer of each of these blocks, for a schedule's generator; None for pairs."""
        return None if self.mixed else tuple(self.layer_at(block) for block in range(first, first + count))

    def alike(self, first: int, count: int) -> int:
        """First block from which `count` blocks of the same kinds begin: one name for equal segments."""
        return _first_like(self._blocks, first, count)

    def kind_of(self, block: int) -> Kind:
        """Kind of a block."""
        return self._blocks[block]

    def block(self, kind: Kind) -> Block:
        """The block of this kind."""
        return self.kinds[kind[0]].blocks[kind[1]]

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """First layer of each list, and the number of layers."""
        return tuple(accumulate((each.layers for each in self.lists), initial=0))

    def block_name(self, kind: Kind) -> str:
        """Name of a block's measurements, which blocks of equal work have in common."""
        if self.is_gpt:
            return self.block(kind).name
        return f"{self.name} block, {_work_of(self.block(kind).shares)}"

    def end_name(self, before: int) -> str:
        """Name of measurements of what is computed right before layer `before`, or after the last."""
        shares = [share for each in self.outside if each.before == before for share in each.shares]
        return f"{self.name} {'head' if before == self.layers else 'embedding'}, {_work_of(shares)}"

    @property
    def element_bytes(self) -> int:
        """Bytes per element of an activation."""
        return ELEMENT_BYTES[self.dtype]

    def state_bytes(self, parameters: int, replicas: int, *, zero: bool = False, fsdp: bool = False) -> int:
        """Bytes of parameters, gradients and Adam state on a rank (see `plans.shape.state_bytes`)."""
        return state_bytes(self.element_bytes, parameters, replicas, zero=zero, fsdp=fsdp)

    def fits_degree(self, tp: int) -> bool:
        """Whether the heads and widths that must be sharded divide over `tp` ranks."""
        return self._limit % tp == 0

    def block_parameters(self, kind: Kind, tp: int) -> int:
        """Parameters of a block on one of `tp` ranks."""
        dense = sum(
            share.parameters // share.ranks(tp) for share in self.block(kind).shares if not self._sends(share)
        )
        return dense + self.expert_parameters(kind)

    def expert_parameters(self, kind: Kind) -> int:
        """Parameters of a block that are experts divided over `expert_parallel` ranks, on one of them."""
        shares = (share for share in self.block(kind).shares if self._sends(share))
        return sum(share.parameters // self.expert_parallel for share in shares)

    def routed_bytes(self, kind: Kind, tp: int, samples: float) -> float:
        """Bytes that one of `tp` ranks sends to a block's experts: its share of the tokens, once for each expert."""
        return samples * sum(share.routed for share in self.block(kind).shares if self._sends(share)) / tp

    def _sends(self, share: Share) -> bool:
        return self.expert_parallel > 0 and share.routed > 0

    def outside_of(self, first: int, last: int) -> tuple[Outside, ...]:
        """Work outside of the layers on a stage with layers [first, last)."""
        return tuple(
            each for each in self.outside if first <= each.before < last or each.before == last == self.layers
        )

    def end_parameters(self, first: int, last: int, tp: int) -> int:
        """Parameters outside of the layers on one of `tp` ranks of a stage with layers [first, last).

        A tied table counts once on each stage that reads it.
        """
        found = self.outside_of(first, last)
        whole = sum(share.parameters // share.ranks(tp) for each in found for share in each.shares)
        return whole - sum(each.tied for each in found[1:]) // self._table_ranks(tp)

    def _table_ranks(self, tp: int) -> int:
        return tp if self.vocabulary and self.vocabulary % tp == 0 else 1

    def unit_bytes(self, samples: float) -> int:
        """Bytes of the activation between two layers."""
        return round(samples * self.unit * self.element_bytes)

    def kept_bytes(self, kind: Kind, tp: int, samples: float) -> int:
        """Bytes of activations that the backward pass of one block needs, with its input."""
        return round(samples * sum(share.kept / share.ranks(tp) for share in self.block(kind).shares))

    def message_bytes(self, layer: int, samples: float) -> int:
        """Bytes of the activations that cross the border before a layer."""
        return round(samples * self.messages[layer])

    def work(self, kind: Kind, tp: int, samples: float) -> Work:
        """Work of a block's forward pass on one of `tp` ranks."""
        block = self.block(kind)

        def total(name: str) -> float:
            return samples * sum(getattr(share, name) / share.ranks(tp) for share in block.shares)

        moved, ops = total("moved"), block.ops
        # The gradient of an op reads its inputs and its result's gradient.
        backward, ops_backward, weights = 2 * moved, 1.5 * ops, moved / 2
        if self.sizes is not None:  # of the 3 units that every rank moves, and of what is sharded
            whole = samples * block.shares[0].moved
            backward, ops_backward, weights = 2 * moved - whole / 3, ops + 1, moved - 2 * whole / 3
        return Work(
            total("column"), total("core"), total("row"), moved, samples * block.combined, ops,
            backward, ops_backward, weights,
        )  # fmt: skip

    def matmul_flops(self, kind: Kind, tp: int, samples: float) -> tuple[float, float, float]:
        """FLOPs of a forward pass: column-parallel matmuls, attention itself, row-parallel matmuls."""
        work = self.work(kind, tp, samples)
        return work.column, work.core, work.row

    def head_flops(self, samples: float, tp: int = 1) -> float:
        """FLOPs of the matmuls after the last layer on one of `tp` ranks."""
        return samples * sum(share.column / share.ranks(tp) for each in self._behind for share in each.shares)

    def logits(self, samples: float, tp: int) -> float:
        """Elements of the logits on one of `tp` ranks."""
        return samples * max((each.logits for each in self._behind), default=0) / self._table_ranks(tp)

    @cached_property
    def _behind(self) -> tuple[Outside, ...]:
        return tuple(each for each in self.outside if each.before == self.layers)

    def step_flops(self, samples: float) -> float:
        """FLOPs of a step without recomputation: matmuls of the forward and the backward pass."""
        blocks = sum(
            sum(self.matmul_flops(kind, 1, samples)) for layer in self.order for kind in self.layer_kinds[layer]
        )
        outside = samples * sum(share.column for each in self.outside for share in each.shares)
        return 3 * (blocks + outside)

    def in_dtype(self, dtype: str) -> Model:
        """The model in another dtype: all bytes in proportion."""
        to, of = ELEMENT_BYTES[dtype], self.element_bytes

        def share(each: Share) -> Share:
            routed = each.routed * to // of
            return replace(each, moved=each.moved * to // of, kept=each.kept * to // of, routed=routed)

        def block(each: Block) -> Block:
            return replace(each, shares=tuple(map(share, each.shares)), combined=each.combined * to // of)

        return replace(
            self, dtype=dtype, messages=tuple(each * to // of for each in self.messages),
            kinds=tuple(replace(kind, blocks=tuple(map(block, kind.blocks))) for kind in self.kinds),
            outside=tuple(replace(each, shares=tuple(map(share, each.shares))) for each in self.outside),
            sizes=None if self.sizes is None else replace(self.sizes, dtype=dtype),
        )  # fmt: skip

    def with_expert_parallel(self, degree: int) -> Model:
        """The model with its experts divided over `degree` ranks; layers then run on whole sequences."""
        return replace(self, expert_parallel=degree, token_wise=False)

    def with_layers(self, count: int) -> Model:
        """The model with another number of layers, of its kinds in the same proportions."""
        old = self.layers
        picked = [layer * old // count for layer in range(count)]
        owners = [at for at, each in enumerate(self.lists) for _ in range(each.layers)]
        lists = {at: len(list(run)) for at, run in groupby(owners[layer] for layer in picked)}
        a_layer = [sum(s.parameters for kind in kinds for s in self.block(kind).shares) for kinds in self.layer_kinds]
        inside = [sum(a_layer[kind] for kind in order) for order in (self.order, [self.order[p] for p in picked])]
        return replace(
            self, order=tuple(self.order[layer] for layer in picked),
            messages=tuple(self.messages[layer] for layer in picked),
            lists=tuple(replace(self.lists[at], layers=number) for at, number in lists.items()),
            outside=tuple(replace(each, before=-(-each.before * count // old)) for each in self.outside),
            num_parameters=self.num_parameters - inside[0] + inside[1],
            sizes=None if self.sizes is None else replace(self.sizes, layers=count),
        )  # fmt: skip


def _work_of(shares: Iterable[Share]) -> str:
    each = [(share.column + share.core + share.row, share.moved, share.parameters) for share in shares]
    flops, moved, parameters = (sum(numbers) for numbers in zip(*each, strict=True)) if each else (0, 0, 0)
    return f"{flops} FLOPs, {moved} bytes, {parameters} parameters"


@lru_cache(maxsize=4096)
def _first_like(blocks: tuple[Kind, ...], first: int, count: int) -> int:
    wanted = blocks[first : first + count]
    return next(at for at in range(first + 1) if blocks[at : at + count] == wanted)
