"""One pass under another: what is computed again of a micro-batch, in the waits of another's forward pass.

Both lists belong to the same blocks, so every rank puts them together in the same way, and collectives keep
one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from oases.schedule.ir import Op

Item = TypeVar("Item")
Tagged = tuple[Item, Op | None]
"""Something, and the op that it stands for, if it stands for one."""


def steps(again: Iterable[Tagged[Item]]) -> Iterator[list[Item]]:
    """A recomputation cut up before every R: what runs in one piece under another pass."""
    step: list[Item] = []
    for item, op in again:
        if step and op is not None and op.kind == "R":
            yield step
            step = []
        step.append(item)
    if step:
        yield step


def makes_room(op: Op | None) -> bool:
    """Whether a step goes before this op of a forward pass: it waits for the sum that some F left."""
    return op is not None and op.kind == "wait" and op.of == "F"


def under(forward: Sequence[Tagged[Item]], again: Iterable[Tagged[Item]]) -> Iterator[Item]:
    """A forward pass with a step of `again` before every wait that makes room; those left over follow it."""
    left = steps(again)
    for item, op in forward:
        if makes_room(op):
            yield from next(left, [])
        yield item
    yield from chain.from_iterable(left)
