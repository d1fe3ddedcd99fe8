"""What blocks read besides the activation: masks, tables, position biases, an encoder's states, programs.

The values belong to a call and not to a block: another forward pass may run before this one's backward pass, and
what is recomputed reads them again. A tensor that many blocks read gets one gradient: the sum over blocks and
sub-batches, and over the ranks of what came from before the blocks' sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oases.execution.piece import Gradients, Leaves
from oases.execution.wire import Scheduler
from oases.parallel.sub_batches import SubBatches


@dataclass(frozen=True)
class BlockInputs:
    """What one block's methods get in one call, after their own arguments: `partial(x, *values)`.

    values: tensors, None or any other object. Tensors that require grad get gradients; those inside of other objects
    do not. per_sample: for each value, whether it is a tensor [batch, ...] that is cut into sub-batches as the
    activation is; others pass whole. Raises ValueError where the two do not fit.
    """

    values: tuple[Any, ...] = ()
    per_sample: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) != len(self.per_sample):
            raise ValueError(
                f"{len(self.values)} values have {len(self.per_sample)} entries of per_sample; give one for each"
            )
        for index, (value, cut) in enumerate(zip(self.values, self.per_sample, strict=True)):
            if cut and not isinstance(value, Tensor):
                raise ValueError(
                    f"value {index} is cut per sample, but is no tensor ({type(value).__name__}); give it as "
                    "per_sample=False to pass it whole"
                )


def differentiable(inputs: Sequence[BlockInputs]) -> list[Tensor]:
    """The tensors among the values that require grad, each once, in the order of their first block."""
    found = {id(value): value for each in inputs for value in each.values if isinstance(value, Tensor)}
    return [tensor for tensor in found.values() if tensor.requires_grad]


class Inputs:
    """The inputs of one call: cut into sub-batches, and what their gradients have added up to.

    given: one BlockInputs per block, or nothing where blocks read the activation alone. with_gradients: whether there
    is to be a backward pass. Raises ValueError for a per-sample value of another batch than the activation's.
    """

    def __init__(self, given: Sequence[BlockInputs], cut: SubBatches, *, with_gradients: bool) -> None:
        self.tensors = differentiable(given) if with_gradients else []
        """Those that get gradients, in the order of `gradients`."""
        self._cut = cut
        self._numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._values: list[list[tuple[Any, ...]]] = []  # by block and sub-batch
        self._stand_ins: list[list[dict[str, Tensor]]] = []
        self._shares: Gradients = {}
        self._whole: Gradients = {}
        self._tickets: list[Any] = []
        parts: dict[tuple[int, bool], list[tuple[str, Any]]] = {}
        for block, each in enumerate(given):
            columns = []
            for index, (value, per_sample) in enumerate(zip(each.values, each.per_sample, strict=True)):
                if per_sample and (value.dim() == 0 or value.shape[0] != cut.batch):
                    raise ValueError(
                        f"value {index} of block {block} has shape {tuple(value.shape)} and is cut per sample, but "
                        f"the batch has {cut.batch} samples; give it one row for each, or as per_sample=False"
                    )
                key = (id(value), per_sample)
                if key not in parts:
                    parts[key] = self._parts(value, per_sample)
                columns.append(parts[key])
            places = [[column[s] for column in columns] for s in range(cut.number)]
            self._values.append([tuple(part for _, part in place) for place in places])
            self._stand_ins.append([{name: part for name, part in place if name} for place in places])

    @property
    def lowest_reader(self) -> int | None:
        """The lowest block that reads a tensor that gets a gradient, and so the last one to add to it."""
        return next((block for block, places in enumerate(self._stand_ins) if any(places)), None)

    def values(self, block: int, s: int) -> tuple[Any, ...]:
        """What the methods of a block get besides the activation, in sub-batch `s`."""
        return self._values[block][s] if self._values else ()

    def shares(self, block: int, s: int) -> Leaves:
        """Leaves for a graph whose gradients are to be summed over the ranks."""
        return Leaves(self._stand_ins[block][s] if self._stand_ins else {}, self._shares)

    def whole(self, block: int, s: int) -> Leaves:
        """Leaves for a graph after the sum, whose gradients are the same on every rank."""
        if self._cut.tokens.size > 1:
            return self.shares(block, s)  # every rank has its own tokens
        return Leaves(self._stand_ins[block][s] if self._stand_ins else {}, self._whole)

    def start_sums(self, scheduler: Scheduler, label: str) -> None:
        """Start summing the shares over the ranks, after the last graph that adds to them."""
        self._shares = {name: share for name, share in self._joined(self._shares).items() if share is not None}
        self._tickets = [scheduler.all_reduce(share, label) for share in self._shares.values()]

    def gradients(self, scheduler: Scheduler) -> list[Tensor | None]:
        """Wait for those sums; return the gradients of `tensors`, None where nothing depends on one."""
        for ticket in self._tickets:
            scheduler.wait(ticket)
        shares, whole = self._shares, self._joined(self._whole)
        found = [_sum(shares.get(name), whole[name]) for name in map(str, range(len(self.tensors)))]
        self.forget()
        return found

    def forget(self) -> None:
        """Let go of values and gradients."""
        for held in (self._values, self._stand_ins, self._shares, self._whole, self._tickets):
            held.clear()

    def _parts(self, value: Any, per_sample: bool) -> list[tuple[str, Any]]:
        """By sub-batch: what the blocks get of a value, and its name among the leaves, "" for what is none."""
        number = self._numbers.get(id(value))
        if isinstance(value, Tensor):
            value = value.detach()  # graphs must not run on into the caller's
        parts = list(self._cut.split(value)) if per_sample else [value] * self._cut.number
        if number is None:
            return [("", part) for part in parts]
        if not per_sample:
            return [(str(number), value.requires_grad_())] * self._cut.number
        return [(f"{number}.{s}", part.detach().requires_grad_()) for s, part in enumerate(parts)]

    def _joined(self, sums: Gradients) -> dict[str, Tensor | None]:
        """Gradients by the number of the tensor: those of its sub-batches put together."""
        found: dict[str, Tensor | None] = {}
        for number, tensor in enumerate(self.tensors):
            parts = [sums.get(f"{number}.{s}") for s in range(self._cut.number)]
            cut = None
            if any(part is not None for part in parts):
                sizes = zip(parts, self._cut.sizes, strict=True)
                rows = [tensor.new_zeros((n, *tensor.shape[1:])) if part is None else part for part, n in sizes]
                cut = self._cut.join(rows)
            found[str(number)] = _sum(sums.get(str(number)), cut)
        return found


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)
