"""Search space of the planner, and settings shared by all blocks of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import isqrt

from oases.core.dtypes import WIRES
from oases.core.schedule import PIPELINES
from oases.core.schedule.pipeline import Pass
from oases.errors import UsageError
from oases.limits import MOST_PLACES
from oases.plans.layered import Model
from oases.plans.pipelines import StageReading, chunks_of, enough, in_flight, parts_on, passes, read_stage
from oases.simulator.hardware import Hardware

MAX_STAGES = 64
"""Maximum number of pipeline stages in the search."""

BEST_PIPELINES = (
    "one_f_one_b", "last_no_recompute", "shifted_critical_path", "interleaved", "zb_h1", "zb_v",
)  # fmt: skip
"""Pipelines that can win: gpipe and pre_recompute use as much memory as one of these and are not faster."""
MOST_MICRO_BATCHES = 4096
"""Maximum number of micro-batches per optimizer step, unless more are requested."""


@dataclass(frozen=True)
class Space:
    """Search space. degrees: empty for powers of two, or for those at which the model's blocks were measured.
    micro_batches: empty for all that fit. recompute: whether layers may be recomputed.

    pipelines: pipeline schedules, for up to `max_stages` stages. fsdp and sequence_parallel are searched where a run
    can execute them: of models other than built-in ones, sequence parallelism where attention is sharded. wire:
    dtypes in which sums are sent; one that rounds them is used only if it is named. expert_parallel: ranks over which
    experts of a traced model are divided, 0 for its tensor-parallel ones; empty for 0 and powers of two.
    """

    degrees: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("oases", "cross_pass", "fine_grained")
    sub_batches: tuple[int, ...] = (2, 4, 8)
    micro_batches: tuple[int, ...] = ()
    zero: tuple[bool, ...] = (False, True)
    fsdp: tuple[bool, ...] = (False, True)
    sequence_parallel: tuple[bool, ...] = (False, True)
    wire: tuple[str, ...] = ("none",)
    expert_parallel: tuple[int, ...] = ()
    recompute: bool = True
    max_stages: int = MAX_STAGES
    pipelines: tuple[str, ...] = BEST_PIPELINES

    def __post_init__(self) -> None:
        unknown = [name for name in self.pipelines if name not in PIPELINES]
        if unknown or not self.pipelines:
            raise UsageError(
                f"pipelines: unknown {', '.join(map(repr, unknown))}; known are {', '.join(PIPELINES)}"
                if unknown
                else f"pipelines: give at least one; known are {', '.join(PIPELINES)}"
            )
        self._check_choices()
        for name in ("degrees", "sub_batches", "micro_batches"):
            for value in getattr(self, name):
                if not isinstance(value, int) or value < 1:
                    raise UsageError(f"{name} must be whole numbers of at least 1, got {value!r}")
        if any(not isinstance(value, int) or value < 0 for value in self.expert_parallel):
            raise UsageError(f"expert_parallel must be whole numbers of at least 0, got {self.expert_parallel!r}")
        for smaller, larger in pairwise(sorted(self.degrees)):
            if larger % smaller:
                raise UsageError(
                    f"degrees {smaller} and {larger} do not nest, so samples cannot pass from rank to rank between "
                    "their blocks; give degrees of which one divides the next, such as 1,2,4"
                )

    def _check_choices(self) -> None:
        for wire in self.wire:
            if wire not in WIRES:
                raise UsageError(f"wire: unknown {wire!r}; known are {', '.join(WIRES)}")
        for name in ("zero", "fsdp", "sequence_parallel", "wire"):
            if not getattr(self, name):
                raise UsageError(f"{name}: give at least one value to search")


def degrees_to_try(model: Model, hardware: Hardware, ranks: int, space: Space) -> Sequence[int]:
    """Tensor-parallel degrees to search on so many ranks, some of which may not divide them or the model."""
    return (
        space.degrees or sorted(hardware.degrees_of(model)) or tuple(2**power for power in range(ranks.bit_length()))
    )


@dataclass(frozen=True)
class Setting:
    """Settings shared by all blocks: stages, micro-batches, pipeline, and whether the optimizer is sharded."""

    world: int
    global_batch: int
    stages: int
    micro_batches: int
    zero: bool
    pipeline: str = "one_f_one_b"
    fsdp: bool = False
    wire: str = "none"

    @property
    def stage_ranks(self) -> int:
        """Ranks per stage."""
        return self.world // self.stages

    def samples(self, tp: int) -> float:
        """Samples of a micro-batch on a replica of this degree."""
        return self.global_batch * tp / (self.stage_ranks * self.micro_batches)

    def degrees(self, model: Model, hardware: Hardware, space: Space) -> list[int]:
        """Tensor-parallel degrees that the ranks, the model, the samples and the profile allow."""
        return [
            tp
            for tp in degrees_to_try(model, hardware, self.stage_ranks, space)
            if self.stage_ranks % tp == 0
            and model.fits_degree(tp)
            and self.samples(tp) >= 1
            and self.samples(tp) == int(self.samples(tp))
            and hardware.has_block(model, tp)
            and self._divides_experts(model, tp)
        ]

    def _divides_experts(self, model: Model, tp: int) -> bool:
        """Whether experts are divided over more ranks than tensor parallelism has, and shards of them are even."""
        degree, ranks = model.expert_parallel, self.stage_ranks
        even = not (self.zero or self.fsdp) or model.num_experts % ranks == 0
        return not degree or (even and degree > tp and ranks % degree == degree % tp == 0)

    def held(self, stage: int) -> tuple[tuple[int, int], ...]:
        """Micro-batches in flight on a stage and with deferred weight gradients, over all its model parts.

        Pairs of both at a time, of which any may take most memory.
        """
        if self.has_weights:
            return self._reading(stage).held
        return ((in_flight(self.pipeline, self.stages, self.micro_batches, stage), 0),)

    @property
    def chunks(self) -> int:
        """Model parts per stage."""
        return chunks_of(self.pipeline)

    @property
    def last_stage(self) -> int:
        """Stage of the last model part, which has the head."""
        last = self.stages * self.chunks - 1
        return next(stage for stage in range(self.stages) if last in parts_on(self.pipeline, self.stages, stage))

    @property
    def has_weights(self) -> bool:
        """Whether weight gradients are passes of their own."""
        return self._reading(0).has_weights

    def recomputes_early(self, stage: int) -> bool:
        """Whether a stage recomputes a micro-batch before its gradient arrives."""
        return bool(self._reading(stage).early)

    def _reading(self, stage: int) -> StageReading:
        few = min(self.micro_batches, enough(self.pipeline, self.stages))
        return read_stage(self.pipeline, self.stages, few, stage)


@lru_cache(maxsize=64)
def only_earlier(pipeline: str) -> bool:
    """Whether a pipeline is 1F1B unless it recomputes: it differs in when recomputation runs."""
    if pipeline == "one_f_one_b" or chunks_of(pipeline) > 1:
        return False

    def found(name: str) -> list[list[Pass]]:
        return [[each for each in passes(name, 4, 8, stage) if each[0] != "R"] for stage in range(4)]

    return found(pipeline) == found("one_f_one_b")


@lru_cache(maxsize=1024)
def _too_much_in_flight(pipeline: str, num_stages: int) -> bool:
    """Whether a stage that recomputes early holds more micro-batches for it than there are stages."""
    readings = (read_stage(pipeline, num_stages, enough(pipeline, num_stages), stage) for stage in range(num_stages))
    return any(each.early and each.in_flight > num_stages for each in readings)


def settings(model: Model, hardware: Hardware, world: int, global_batch: int, space: Space) -> Iterator[Setting]:
    """Every setting with at least one possible degree. Raises UsageError if there is none."""
    stage_counts = [s for s in _divisors(world) if s <= min(space.max_stages, model.layers)]
    found = False
    for stages in stage_counts:
        for micro in space.micro_batches or _micro_batches(global_batch):
            if stages > 1 and micro < stages:
                continue
            shared = product(_pipelines(model, stages, micro, space), _sharding(space), space.wire)
            for pipeline, (zero, fsdp), wire in shared:
                setting = Setting(world, global_batch, stages, micro, zero, pipeline, fsdp, wire)
                if stages * setting.chunks * micro > MOST_PLACES:  # no list of so many passes is built
                    continue
                degrees = setting.degrees(model, hardware, space)
                if degrees and (not (zero or fsdp) or min(degrees) < setting.stage_ranks):
                    found = True
                    yield setting
    if not found:
        asked = "".join(
            f"; requested are {what} {', '.join(map(str, values))}"
            for what, values in (("degrees", space.degrees), ("micro-batches", space.micro_batches))
            if values
        )
        known = [tp for tp in _divisors(world) if model.fits_degree(tp)]
        raise UsageError(
            f"cannot divide {global_batch} samples and the model's {model.heads} heads over {world} ranks: degrees "
            f"that the model allows are {', '.join(map(str, known))}, of which powers of two are searched unless "
            "others are named or measured, and each replica needs a whole number of samples"
            f"{asked}; profile {hardware.name!r} holds {hardware.measured_shapes() or 'no blocks, but rates'}"
        )


def variants(model: Model, world: int, space: Space) -> Iterator[Model]:
    """The model with its experts divided over each number of ranks that the space has and that fits."""
    experts = model.num_experts
    for degree in space.expert_parallel or (0, *(2**power for power in range(1, world.bit_length()))):
        if degree == 0:
            yield model
        elif experts and experts % degree == world % degree == 0:
            yield model.with_expert_parallel(degree)


def _sharding(space: Space) -> list[tuple[bool, bool]]:
    """(zero, fsdp) to search, least sharded first."""
    found = [(zero, False) for zero in space.zero] if False in space.fsdp else []
    return found + [(False, True)] * (True in space.fsdp)


def _pipelines(model: Model, stages: int, micro_batches: int, space: Space) -> Iterator[str]:
    """Pipelines that are possible with these stages and micro-batches, without duplicates."""
    if stages == 1:
        yield "one_f_one_b"
        return
    for name in space.pipelines:
        chunks = chunks_of(name)
        if chunks > 1 and (model.layers < chunks * stages or len(model.layer_kinds) > 1):
            continue  # a stage's parts are of equal layers
        if name == "interleaved" and micro_batches % stages:
            continue
        if only_earlier(name) and not space.recompute:
            continue
        if _too_much_in_flight(name, stages):
            continue  # last_no_recompute takes as long with less memory
        yield name


def _micro_batches(global_batch: int) -> list[int]:
    """Micro-batch counts to try by default; many small ones lose to fewer large ones long before the bound."""
    return [d for d in range(1, min(global_batch, MOST_MICRO_BATCHES) + 1) if global_batch % d == 0]


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
