"""Cost models: seconds and bytes of each block's ops and of each collective, without contention.

Times come from a profile or a formula; the engine models how ops slow each other down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated

from oases.core.schedule import Op, Schedule
from oases.core.schedule.ops import STARTS
from oases.records import Number
from oases.simulator.program import Contention

_IN_SECONDS = (0.0, 3600.0, "not milliseconds")
Seconds = Annotated[float, Number("seconds", least=0, usual=_IN_SECONDS)]
"""Time that may be nothing: published figures do not separate some."""
Duration = Annotated[float, Number("seconds", above=0, usual=_IN_SECONDS)]
"""Time of something."""


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of the ops of one block on one sub-batch, each without contention.

    forward: F that keeps what B needs; forward_unkept: F that will be recomputed. recompute: R without the
    row-parallel matmul, whose result is unused; recompute_whole: R with it. combine: C and RC; combine_backward:
    its backward. backward: the rest of B, up to the block's input, without weight_gradient.
    """

    forward: Duration
    forward_unkept: Duration
    combine: Seconds
    recompute: Duration
    recompute_whole: Duration
    combine_backward: Seconds
    backward: Duration
    weight_gradient: Seconds

    @property
    def both_passes(self) -> float:
        """Seconds of a forward and a backward pass without recomputation."""
        return self.forward + self.combine + self.combine_backward + self.backward + self.weight_gradient

    def with_casts(self, seconds: float) -> BlockTimes:
        """Times with a cast before each all-reduce and one after it."""
        return replace(
            self, forward=self.forward + seconds, forward_unkept=self.forward_unkept + seconds,
            recompute_whole=self.recompute_whole + seconds, combine=self.combine + seconds,
            combine_backward=self.combine_backward + seconds, backward=self.backward + seconds,
        )  # fmt: skip

    def scaled(self, factor: float) -> BlockTimes:
        """All times multiplied by `factor`."""
        return BlockTimes(**{item.name: factor * getattr(self, item.name) for item in fields(self)})

    def of(self, op: Op, schedule: Schedule) -> float:
        """Seconds of a compute op in this schedule. Of a block with a D, all but weight gradients is its experts'."""
        place = (op.block, op.sub_batch)
        in_pieces = place in schedule.dispatched
        if op.kind == "E":
            return self.forward
        if op.kind == "D" or (op.kind == "F" and in_pieces):
            return 0.0
        if op.kind == "F":
            return self.forward_unkept if ("R", *place) in schedule.recomputed else self.forward
        if op.kind == "R":
            return self.recompute_whole if op in schedule.starts else self.recompute
        if op.kind in ("C", "RC"):
            return self.combine
        if op.kind == "BC":
            return self.combine_backward
        if op.kind == "W":
            return self.weight_gradient
        apart, deferred = Op("BC", *place) in schedule.backward_set, Op("W", *place) in schedule.backward_set
        own, weights = 0.0 if apart else self.combine_backward, 0.0 if deferred else self.weight_gradient
        if op.kind == "BF":
            return own
        if op.kind == "BE":
            return self.backward
        assert op.kind == "B", f"{op} is not compute"
        return weights if in_pieces else self.backward + own + weights


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of one block for one sub-batch. unit: its input or output. kept: activations for B, with the input.

    part: of a rank's part of the input, which is held beside the gathered one under sequence parallelism.
    """

    unit: int = 0
    kept: int = 0
    part: int = 0


@dataclass(frozen=True)
class StackCosts:
    """Costs of each op of a schedule on one rank of a tensor-parallel group.

    times, sizes: by block, of one sub-batch. collectives: seconds by kind (all_reduce, reduce_scatter, all_gather)
    of one sub-batch, on `link`. exchanges: by block, seconds of an all-to-all of a sub-batch's tokens; () for none. A
    block whose schedule does not list them waits for two in each F, R and B. exchange_link: link that they are sent
    on, with its contention; None for `link`. overhead: seconds outside the ops, before the forward and before the
    backward pass.
    """

    times: tuple[BlockTimes, ...]
    collectives: Mapping[str, float]
    sizes: tuple[BlockBytes, ...] = ()
    link: str = "link"
    contention: Contention = field(default_factory=Contention)
    overhead: tuple[float, float] = (0.0, 0.0)
    exchanges: tuple[float, ...] = ()
    exchange_link: tuple[str, Contention] | None = None

    @staticmethod
    def by_kind(schedule: Schedule, seconds: Mapping[str, float]) -> StackCosts:
        """Equal blocks: seconds by kind of op, 0 for kinds not given. For drawings and proofs."""
        of = seconds.get
        times = BlockTimes(
            of("F", 0.0), of("F", 0.0), of("C", 0.0), of("R", 0.0), of("R", 0.0), of("BC", 0.0), of("B", 0.0),
            of("W", 0.0),
        )  # fmt: skip
        sent = (of("all_to_all", 0.0),) * schedule.num_blocks if schedule.dispatched else ()
        return StackCosts((times,) * schedule.num_blocks, dict(seconds), exchanges=sent)

    def seconds(self, op: Op, schedule: Schedule) -> float:
        """Seconds of a collective, or of a compute op of one sub-batch."""
        if op.kind == "all_to_all":
            return self.exchanges[op.block] if self.exchanges else 0.0
        if op.kind in STARTS:
            return self.collectives.get(op.kind, 0.0)
        return self.times[op.block].of(op, schedule)

    def inside(self, op: Op, schedule: Schedule) -> float:
        """Seconds of the all-to-alls that an op of one sub-batch waits for, as the schedule does not list them."""
        listed = op.kind not in ("F", "R", "B") or (op.block, op.sub_batch) in schedule.dispatched
        return 0.0 if listed or not self.exchanges else 2 * self.exchanges[op.block]

    @property
    def links(self) -> dict[str, Contention]:
        """Contention of each link."""
        return {self.link: self.contention} | dict([self.exchange_link] if self.exchange_link else [])

    @cached_property
    def no_bytes(self) -> bool:
        """Whether memory is unknown."""
        return not self.sizes

    def bytes_of(self, block: int) -> BlockBytes:
        """Memory of a block; zeros if unknown."""
        return self.sizes[block] if self.sizes else BlockBytes()


_FORWARD = {"RD": "D", "RE": "E", "R": "F", "B": "D", "BE": "E", "BF": "F", "split": "join", "return": "share"}
"""Forward op of blocks of experts that another op of them takes as long as, or in a multiple of it."""


@dataclass(frozen=True)
class ExpertCosts:
    """Costs of an expert schedule with equal blocks, each op on its slowest rank, as all-to-alls synchronise all.

    forward: seconds by D, E, F, P, all_to_all, share and join, 0 for others. backward: pass of D, E and F, as
    a multiple of the forward pass. Raises ValueError for negative values.
    """

    forward: Mapping[str, float]
    backward: float = 2.0
    link: str = "link"

    def __post_init__(self) -> None:
        for kind, value in self.forward.items():
            if not value >= 0:
                raise ValueError(f"{kind} must be at least 0 seconds, got {value}")

    def seconds(self, op: Op) -> float:
        """Seconds of a compute op or a collective."""
        times = self.backward if op.kind in ("B", "BE", "BF") else 1.0
        return times * self.forward.get(_FORWARD.get(op.kind, op.kind), 0.0)
