"""Generators of tensor-parallel schedules: pure functions of the number of blocks and sub-batches.

The four of the Oases paper's ablation (arXiv 2305.16121) and Merak's sub-pipelined tensor parallelism (arXiv
2206.04959). With recompute="full" they differ in whether recomputation repeats all-reduces and in what hides them:
they have 6, 4, 6, 4 and 6 all-reduces per layer and sub-batch, and 4 without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import groupby
from typing import Final, Literal

from oases.core.schedule.ops import Compute, Op, ScheduleError
from oases.core.schedule.schedule import Extent, Schedule
from oases.core.schedule.validate import validate
from oases.limits import MOST_PLACES

AUTO: Final = "auto"
"""Schedule that is chosen by measuring several on the first steps."""
Recompute = Literal["none", "full"] | int
"""Recomputation in the backward pass: of nothing, of every layer, or of the first so many layers."""
LayerOf = Sequence[int] | None
"""Layer of each block, in order; None where two blocks, attention and MLP, form a layer."""


def sync(
    num_blocks: int, num_sub_batches: int = 1, recompute: Recompute = "none", layer_of: LayerOf = None
) -> Schedule:
    """Synchronous tensor parallelism (Megatron-LM): every all-reduce is waited for at once.

    With recomputation a layer's input is kept and its whole forward pass is repeated, all-reduces included.
    """

    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)

    def ops() -> Iterator[Op]:
        for b in range(num_blocks):
            for s in range(num_sub_batches):
                yield from _exposed("F", b, s, then="C")
        for layer in reversed(_layers(num_blocks, layer_of)):
            for s in reversed(range(num_sub_batches)):
                for b in (b for b in layer if b in recomputed):
                    yield from _exposed("R", b, s, then="RC")
                for b in reversed(layer):
                    yield from _exposed("B", b, s)

    return Schedule("sync", num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))


def fine_grained(
    num_blocks: int, num_sub_batches: int = 1, recompute: Recompute = "none", layer_of: LayerOf = None
) -> Schedule:
    """`sync` with recomputation between two all-reduces, which repeats none of them."""

    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)

    def ops() -> Iterator[Op]:
        for b in range(num_blocks):
            for s in range(num_sub_batches):
                yield from _exposed("F", b, s, then="C")
        for b in reversed(range(num_blocks)):
            for s in reversed(range(num_sub_batches)):
                if b in recomputed:
                    yield Op("R", b, s)
                yield from _exposed("B", b, s)

    return Schedule("fine_grained", num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))


def cross_pass(
    num_blocks: int, num_sub_batches: int = 2, recompute: Recompute = "none", layer_of: LayerOf = None
) -> Schedule:
    """All-reduces are hidden under the other sub-batches; recomputation repeats its all-reduces."""

    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)

    def ops() -> Iterator[Op]:
        yield from _piped("F", list(range(num_blocks)), num_sub_batches, "C")
        order = list(reversed(range(num_sub_batches)))
        for layer in reversed(_layers(num_blocks, layer_of)):
            if recomputed.issuperset(layer):
                yield from _overlapped_recompute(layer, order)
            for b in reversed(layer):
                for s in order:
                    if b in recomputed and b == layer[-1]:
                        yield from received("R", b, s, "RC")
                    if b < num_blocks - 1:
                        yield Op("wait", b + 1, s, "B")
                    yield from started("B", b, s)
        yield from (Op("wait", 0, s, "B") for s in order)

    return Schedule("cross_pass", num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))


def oases(
    num_blocks: int, num_sub_batches: int = 2, recompute: Recompute = "none", layer_of: LayerOf = None
) -> Schedule:
    """The Oases schedule: all-reduces of one sub-batch run under the blocks of the others, across block boundaries.

    A result is waited for only when the next block of the same sub-batch needs it. Weight gradients run after the
    start of the all-reduce that they would have delayed. Recomputation repeats no all-reduce and needs no gradient,
    so it runs while the gradient is in flight. Exposed: the last all-reduce of the forward pass, and the part of
    the last one of the backward pass that the weight gradients of the first block do not hide.
    """

    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)

    def ops() -> Iterator[Op]:
        yield from _piped("F", list(range(num_blocks)), num_sub_batches, "C")
        # The sub-batch that finished last goes first, as in the paper's backward pass.
        order = list(reversed(range(num_sub_batches)))
        for b in reversed(range(num_blocks)):
            for s in order:
                if b in recomputed:
                    yield Op("R", b, s)
                if b < num_blocks - 1:
                    yield Op("wait", b + 1, s, "B")
                yield from started("B", b, s)
                if b > 0:
                    yield Op("W", b, s)
        # No other op is left to hide the last all-reduces.
        yield from (Op("W", 0, s) for s in order)
        yield from (Op("wait", 0, s, "B") for s in order)

    return Schedule("oases", num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))


def sub_pipelined(
    num_blocks: int,
    num_sub_batches: int = 2,
    recompute: Recompute = "none",
    layer_of: LayerOf = None,
    *,
    level: int = 3,
) -> Schedule:
    """Merak's sub-pipelined tensor parallelism, levels 1 to 3: overlap inside a block, a layer, across layers.

    Inside its scope each pass hides an all-reduce under the other sub-batches; at the end of the scope all are
    waited for. Recomputation repeats its all-reduces and is a pass of its own per layer, before the backward pass.
    """
    if level not in (1, 2, 3):
        raise ScheduleError(f"sub_pipelined has levels 1, 2 and 3, got {level}")
    layers = _layers(num_blocks, layer_of)
    reach = {1: [[b] for b in range(num_blocks)], 2: layers, 3: [list(range(num_blocks))]}[level]

    recomputed = recomputed_blocks(num_blocks, recompute, layer_of)

    def ops() -> Iterator[Op]:
        for blocks in reach:
            yield from _piped("F", blocks, num_sub_batches, "C")
        if not recomputed:
            for blocks in reversed(reach):
                yield from _piped("B", blocks[::-1], num_sub_batches)
            return
        for layer in reversed(layers):
            parts = [[b] for b in layer] if level == 1 else [layer]
            for blocks in parts if recomputed.issuperset(layer) else []:
                yield from _piped("R", blocks, num_sub_batches, "RC")
            for blocks in reversed(parts):
                yield from _piped("B", blocks[::-1], num_sub_batches)

    name = "sub_pipelined" if level == 3 else f"sub_pipelined_{level}"
    return Schedule(name, num_blocks, num_sub_batches, tuple(ops()), extent_of(recomputed, num_blocks))


def recomputed_blocks(num_blocks: int, recompute: Recompute, layer_of: LayerOf = None) -> frozenset[int]:
    """Blocks that the backward pass recomputes. Raises ScheduleError for more layers than the model has."""
    layers = _layers(num_blocks, layer_of)
    count = {"none": 0, "full": len(layers)}.get(recompute) if isinstance(recompute, str) else recompute
    if count is None or isinstance(count, bool) or not 0 <= count <= len(layers):
        raise ScheduleError(
            f"unknown recompute {recompute!r}; known are none, full and a number of layers up to {len(layers)}"
        )
    return frozenset(b for layer in layers[:count] for b in layer)


def extent_of(recomputed: frozenset[int], num_blocks: int) -> Extent:
    """Extent of recomputation: none, some or full."""
    return "none" if not recomputed else "full" if len(recomputed) == num_blocks else "some"


def recomputed_layers(recomputed: AbstractSet[int], num_blocks: int, layer_of: LayerOf = None) -> int:
    """Number of layers among these blocks, wholly or in part: the value of `recompute` for them."""
    return sum(not recomputed.isdisjoint(layer) for layer in _layers(num_blocks, layer_of))


def _layers(num_blocks: int, layer_of: LayerOf = None) -> list[list[int]]:
    """Blocks of each layer: pairs (attention, MLP) unless `layer_of` is given; an odd last block is a layer."""
    if layer_of is None:
        layer_of = [block // 2 for block in range(num_blocks)]
    if len(layer_of) != num_blocks or list(layer_of) != sorted(layer_of):
        raise ScheduleError(
            f"layer_of must give each of the {num_blocks} blocks its layer, in order, got {list(layer_of)}"
        )
    return [list(blocks) for _, blocks in groupby(range(num_blocks), key=lambda block: layer_of[block])]


def started(kind: Compute, block: int, sub_batch: int) -> Iterator[Op]:
    """A compute op and the start of the all-reduce of its result."""
    yield Op(kind, block, sub_batch)
    yield Op("all_reduce", block, sub_batch, kind)


def received(kind: Compute, block: int, sub_batch: int, then: Compute | None) -> Iterator[Op]:
    """The wait for that all-reduce and the op that reads it."""
    yield Op("wait", block, sub_batch, kind)
    if then is not None:
        yield Op(then, block, sub_batch)


def _exposed(kind: Compute, block: int, sub_batch: int, then: Compute | None = None) -> Iterator[Op]:
    yield from started(kind, block, sub_batch)
    yield from received(kind, block, sub_batch, then)


def _piped(kind: Compute, blocks: list[int], num_sub_batches: int, then: Compute | None = None) -> Iterator[Op]:
    """A pass over `blocks`: each all-reduce under the other sub-batches, the last ones waited for at the end."""
    for index, b in enumerate(blocks):
        for s in range(num_sub_batches):
            if index:
                yield from received(kind, blocks[index - 1], s, then)
            yield from started(kind, b, s)
    for s in range(num_sub_batches):
        yield from received(kind, blocks[-1], s, then)


def _overlapped_recompute(layer: list[int], order: list[int]) -> Iterator[Op]:
    """Recompute a layer; its last all-reduces stay in flight, and the backward pass waits for them."""
    for index, b in enumerate(layer):
        for s in order:
            if index:
                yield from received("R", b - 1, s, "RC")
            yield from started("R", b, s)


GENERATORS: dict[str, Callable[[int, int, Recompute, LayerOf], Schedule]] = {
    "sync": sync,
    "fine_grained": fine_grained,
    "cross_pass": cross_pass,
    "oases": oases,
    "sub_pipelined": sub_pipelined,
    "sub_pipelined_1": partial(sub_pipelined, level=1),
    "sub_pipelined_2": partial(sub_pipelined, level=2),
}
WHOLE = frozenset({"sync", "fine_grained"})
"""Schedules without overlap, which run the batch as one sub-batch."""


def generate(
    name: str,
    num_blocks: int,
    num_sub_batches: int,
    recompute: Recompute = "none",
    layer_of: LayerOf = None,
) -> Schedule:
    """Generate the named schedule and validate it. Those in WHOLE get one sub-batch. Raises ScheduleError."""
    if name not in GENERATORS:
        raise ScheduleError(f"unknown schedule {name!r}; known are {', '.join(sorted(GENERATORS))}")
    many = 1 if name in WHOLE else num_sub_batches
    if num_blocks * many > MOST_PLACES:
        raise ScheduleError(
            f"{name} of {num_blocks} blocks in {many} sub-batches has more than {MOST_PLACES} parts; give fewer "
            "sub-batches"
        )
    schedule = GENERATORS[name](num_blocks, many, recompute, layer_of)
    validate(schedule)
    return schedule
