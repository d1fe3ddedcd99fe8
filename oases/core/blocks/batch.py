"""Split a call into sub-batches, by sample or sequence, with the blocks' extra inputs.

Inputs (masks, tables, position biases, an encoder's states, programs) belong to a call, not to a block: another
forward pass may run before this call's backward pass, and recomputation reads them again. A tensor that many blocks
read gets one gradient: the sum over blocks and sub-batches, and over the ranks for uses before an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oases.core.blocks.randomness import Extent
from oases.core.execution.communication import Scheduler
from oases.core.execution.failure import refuse_capture, refuse_recomputation
from oases.core.execution.piece import BlockParameters, Leaves
from oases.core.schedule import Schedule


class SubBatches:
    """Sub-batches of an input of `shape`, [batch, tokens, ...], under `schedule`: samples, or tokens.

    rank, ranks: this rank's part of the sequence between blocks is number `rank` of `ranks` under sequence
    parallelism. Where the length does not divide, the first sub-batches are longer by one.
    """

    def __init__(self, shape: Sequence[int], schedule: Schedule, rank: int = 0, ranks: int = 1) -> None:
        self._shape = tuple(shape)
        self._dim = 0 if schedule.along == "batch" else 1
        self.along = schedule.along
        self._rank, self.ranks = (rank, ranks) if schedule.sequence_parallel else (0, 1)
        self.number = schedule.num_sub_batches
        short, longer = divmod(self._shape[self._dim], self.number)
        self.sizes = [short + (s < longer) for s in range(self.number)]
        """Length of each along the split dimension."""

    def split(self, whole: Tensor, dim: int | None = None) -> tuple[Tensor, ...]:
        """Sub-batches of a tensor as long as the input along the split dimension; views. dim: the tensor's own."""
        return whole.split(self.sizes, self._dim if dim is None else dim)

    def join(self, parts: Sequence[Tensor], dim: int | None = None) -> Tensor:
        """Inverse of `split`."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), self._dim if dim is None else dim)

    def tokens(self, whole: Tensor) -> Tensor:
        """This rank's part of [batch, tokens, ...] between blocks, a view."""
        return whole if self.ranks == 1 else whole.chunk(self.ranks, dim=1)[self._rank]

    def whole_extent(self, s: int = 0) -> Extent:
        """Extent of the whole batch, for ops of blocks that need all tokens at once."""
        return Extent(0, self._shape[0])

    def extent(self, s: int) -> Extent:
        """Extent of the tensors of sub-batch `s` inside a block."""
        first = sum(self.sizes[:s])
        if self._dim:
            return Extent(0, self._shape[0], first, self._shape[1])
        return Extent(first, self.sizes[s])

    def extent_between(self, s: int) -> Extent:
        """Extent of this rank's tensors of sub-batch `s` between blocks."""
        if self.ranks == 1:
            return self.extent(s)
        first = self._rank * (self._shape[1] // self.ranks)
        return replace(self.extent(s), first_token=first, of_tokens=self._shape[1])


@dataclass(frozen=True)
class BlockInputs:
    """Further arguments of one block's methods in one call, after their own: `partial(x, *values)`.

    values: tensors, None or any other object. Tensors that require grad get gradients; those inside of other objects
    do not. per_sample: for each value, whether it is a tensor [batch, ...] to split into sub-batches like the
    activation; others are passed whole. tokens: for each value, the dimension along which sub-batches of tokens get
    their part of it, None to pass it whole, as to blocks that need all tokens; None for all where blocks that read
    these values cannot be cut along the sequence. Raises ValueError where they do not fit.
    """

    values: tuple[Any, ...] = ()
    per_sample: tuple[bool, ...] = ()
    tokens: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        many = len(self.values)
        for name, given in (("tokens", self.tokens), ("per_sample", self.per_sample)):
            if given is not None and len(given) != many:
                raise ValueError(f"{many} values have {len(given)} entries of {name}; give one for each")
        for index, (value, cut) in enumerate(zip(self.values, self.per_sample, strict=True)):
            if cut and not isinstance(value, Tensor):
                raise ValueError(
                    f"value {index} is cut per sample, but is not a tensor ({type(value).__name__}); give it as "
                    "per_sample=False to pass it whole"
                )


def trained_values(inputs: Sequence[BlockInputs]) -> list[Tensor]:
    """Tensors among the values that require grad, each once, in the order of their first block."""
    return [value for value in _tensors_of(inputs) if value.requires_grad]


def _tensors_of(inputs: Sequence[BlockInputs]) -> list[Tensor]:
    found = {id(value): value for each in inputs for value in each.values if isinstance(value, Tensor)}
    return list(found.values())


class Given(NamedTuple):
    """Inputs of the blocks in a call besides the activation, or () where no block reads any.

    differentiable: whether there will be a backward pass of the call.
    """

    inputs: Sequence[BlockInputs]
    differentiable: bool

    @classmethod
    def of(cls, x: Tensor, inputs: Sequence[BlockInputs], parameters: Sequence[BlockParameters]) -> Given:
        """Inputs of a call on `x` of blocks with these parameters."""
        trained = x.requires_grad or any(each.trained for each in parameters) or bool(trained_values(inputs))
        return cls(inputs, torch.is_grad_enabled() and trained)

    def tensors(self) -> list[Tensor]:
        """Tensors among the values and inside of their lists, tuples and dicts, each once."""
        values = {id(value): value for each in self.inputs for value in each.values}
        return list({id(v): v for v in tree_leaves(list(values.values())) if isinstance(v, Tensor)}.values())

    def form(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and types of the tensors among the values."""
        return tuple((tuple(value.shape), value.dtype) for value in _tensors_of(self.inputs))


def checked(
    x: Any, inputs: Sequence[BlockInputs] | None, parameters: Callable[[], Sequence[BlockParameters]],
    num_blocks: int, label: str,
) -> Given:  # fmt: skip
    """Check the arguments of a call of a stack. parameters: of the blocks, asked for a valid call.

    TypeError or ValueError unless `x` is a tensor [batch, ...] of floating-point numbers, and for another number of
    inputs than of blocks. RuntimeError in a CUDA graph's capture and in a recomputation.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"an OverlappedStack was called with {x!r:.80}; give a tensor [batch, ...]")
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"an OverlappedStack was called with a tensor of shape {list(x.shape)} and type {x.dtype}; give an "
            "activation [batch, ...] of a floating-point type, such as an embedding of tokens"
        )
    refuse_capture(x)
    refuse_recomputation(label)
    if inputs is not None and len(inputs) != num_blocks:
        raise ValueError(f"{len(inputs)} BlockInputs were given to {num_blocks} blocks; give one for each")
    read = inputs is not None and any(each.values for each in inputs)
    return Given.of(x, inputs if inputs is not None and read else (), parameters())


class CallInputs:
    """Inputs of one call, split into sub-batches, and their accumulated gradients.

    given: one BlockInputs per block, or () where blocks read the activation alone. with_gradients: whether there will
    be a backward pass. Raises ValueError for a value to be cut of another length than the activation's.
    """

    def __init__(self, given: Sequence[BlockInputs], cut: SubBatches, *, with_gradients: bool) -> None:
        self.tensors = trained_values(given) if with_gradients and given else []
        """Tensors that get gradients, in the order of `gradients`."""
        self.cut = cut
        """The sub-batches."""
        self._numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._values: list[list[tuple[Any, ...]]] = []  # by block and sub-batch; of tokens, last the whole
        self.lowest_reader: int | None = None
        """Lowest block that reads such a tensor, and so the last one that contributes to its gradient."""
        self.leaves: list[Leaves] = []
        """Stand-ins of those tensors: one holder, or none."""
        # Of each stand-in: its tensor's number, the dimension along which it is cut, its sub-batch.
        self._names: list[tuple[int, int | None, int]] = []
        self._shares: list[Tensor | None] = []
        self._tickets: list[tuple[Any, Tensor]] = []
        if given:
            self._cut_up(given)

    def _cut_up(self, given: Sequence[BlockInputs]) -> None:
        of_tokens = self.cut.along == "sequence"
        parts: dict[tuple[int, int | None], list[Any]] = {}
        stood_for: list[Tensor] = []
        for block, each in enumerate(given):
            for index, (value, dim) in enumerate(zip(each.values, self._dims(each), strict=True)):
                self._require_length(value, dim, index, block)
                for asked in (dim, None) if of_tokens else (dim,):
                    if (id(value), asked) not in parts:
                        parts[id(value), asked] = self._parts(value, asked, stood_for)
                if self.lowest_reader is None and id(value) in self._numbers:
                    self.lowest_reader = block
        if stood_for:
            self.leaves = [Leaves(stood_for)]
            stand_ins = dict(zip(map(id, stood_for), self.leaves[0].stand_ins, strict=True))
            parts = {key: [stand_ins.get(id(part), part) for part in found] for key, found in parts.items()}
        nothing: list[tuple[Any, ...]] = [()] * self.cut.number
        known: dict[int, list[tuple[Any, ...]]] = {}  # blocks of a layer usually share one object
        for each in given:
            if id(each) not in known:
                columns = [parts[id(value), dim] for value, dim in zip(each.values, self._dims(each), strict=True)]
                whole = [tuple(parts[id(value), None][0] for value in each.values)] if of_tokens else []
                known[id(each)] = [*(zip(*columns, strict=True) if columns else nothing), *whole]
            self._values.append(known[id(each)])

    def _dims(self, each: BlockInputs) -> Sequence[int | None]:
        """Dimension along which each value is cut."""
        if self.cut.along == "sequence":
            return each.tokens or (None,) * len(each.values)
        return [0 if cut else None for cut in each.per_sample]

    def _require_length(self, value: Any, dim: int | None, index: int, block: int) -> None:
        length, of_tokens = sum(self.cut.sizes), self.cut.along == "sequence"
        if dim is None or (isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == length):
            return
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        if of_tokens:
            raise ValueError(
                f"value {index} of block {block} has {found} and is cut along dimension {dim}, but the sequence has "
                f"{length} tokens; give it that many, or None in tokens"
            )
        raise ValueError(
            f"value {index} of block {block} has {found} and is cut per sample, but the batch has {length} samples; "
            "give it one row for each, or as per_sample=False"
        )

    def values(self, block: int, s: int, *, whole: bool = False) -> tuple[Any, ...]:
        """Arguments of a block's methods besides the activation, for sub-batch `s`.

        whole: for all sub-batches of tokens at once.
        """
        return self._values[block][-1 if whole else s] if self._values else ()

    def versions(self) -> list[int]:
        """Versions of the tensors among the values and inside of their lists, tuples and dicts."""
        rows = list({id(rows): rows for rows in self._values}.values())
        return [v._version for v in tree_leaves(rows) if isinstance(v, Tensor)]

    def start_sums(self, scheduler: Scheduler, label: str) -> None:
        """Start to sum partial gradients over the ranks, after the last block that contributes."""
        self._shares = self._joined(self.leaves[0].take(False))
        self._tickets = [(scheduler.all_reduce(share, label), share) for share in self._shares if share is not None]

    def gradients(self, scheduler: Scheduler) -> list[Tensor | None]:
        """Wait for the sums; return the gradients of `tensors`, None where nothing depends on one."""
        if not self.leaves:
            return []
        for ticket, _ in self._tickets:
            scheduler.wait(ticket)
        whole = self._joined(self.leaves[0].take(True))
        shares = self._shares or [None] * len(whole)
        found = [_sum(share, other) for share, other in zip(shares, whole, strict=True)]
        self.forget()
        return found

    def forget(self) -> None:
        """Release values and gradients."""
        for held in (self._values, self.leaves, self._shares, self._tickets):
            held.clear()

    def _parts(self, value: Any, dim: int | None, stood_for: list[Tensor]) -> list[Any]:
        """The value of each sub-batch. stood_for: extended by parts that get a gradient, for `Leaves`."""
        number = self._numbers.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach()  # keep the caller's graph out
        if dim is None:
            parts = [value] * self.cut.number
            own = [] if number is None else [value.requires_grad_()]
        else:
            parts = list(self.cut.split(value, dim))
            if number is not None:
                parts = [part.detach().requires_grad_() for part in parts]
            own = [] if number is None else parts
        stood_for += own
        self._names += [(number, dim, s) for s in range(len(own)) if number is not None]
        return parts

    def _joined(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients by tensor, concatenated from those of sub-batches."""
        by_name = dict(zip(self._names, sums, strict=True))
        found: list[Tensor | None] = []
        for number, tensor in enumerate(self.tensors):
            total = by_name.get((number, None, 0))
            for dim in dict.fromkeys(dim for of, dim, _ in self._names if of == number and dim is not None):
                parts = [by_name[number, dim, s] for s in range(self.cut.number)]
                if any(part is not None for part in parts):
                    places = zip(parts, self.cut.split(tensor.detach(), dim), strict=True)
                    rows = [torch.zeros_like(place) if part is None else part for part, place in places]
                    total = _sum(total, self.cut.join(rows, dim))
            found.append(total)
        return found


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)
