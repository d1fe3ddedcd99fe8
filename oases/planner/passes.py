"""Passes of a pipeline stage as instructions, with resharding, gradient all-reduces and the optimizer.

A block's gradients are all-reduced over its replicas once the stage's last pass has computed them, under the
remaining compute of that pass; those of a model part whose last pass was earlier start at the beginning of the last
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from oases.errors import UsageError
from oases.planner.ends import embedding, exposed, head
from oases.planner.memory import embedding_segment, end_parameters, stage_parameters, stage_state_bytes
from oases.planner.pass_costs import OPTIMIZER, SENT, PartCosts, PassCost, StageCosts
from oases.plans.layered import Model
from oases.plans.plan import BUCKET_BYTES, Part, Plan, Segment
from oases.plans.shape import GRADIENT_BYTES
from oases.schedule import Op
from oases.schedule.pipeline import read_stage
from oases.simulator.hardware import Hardware, stack_costs
from oases.simulator.lowering import StagePasses, lower
from oases.simulator.program import Compute, Contention, Instruction, Start, Wait

_ADAM_BYTES = 28
"""Bytes moved per fp32 parameter by Adam: reads weight, gradient and two moments, writes all but the gradient."""
_ROUNDING_BYTES = 6
"""Additional bytes moved per 16-bit parameter: reads and writes its fp32 master weight."""
_AT_THE_END = (-1, -1)
"""Key for buckets that start after the whole backward pass, in place of a (segment, block)."""

GradientSums = Mapping[tuple[int, int], Sequence[Instruction]]
"""Instructions that start the all-reduces of gradient buckets, by the (segment, block) that fills the bucket."""
Tagged = tuple[tuple[Instruction, Op | None], ...]
"""Instructions, each with the op it comes from, or None."""


def _buckets(lane: Sequence[tuple[tuple[int, int], int]]) -> Iterator[tuple[tuple[int, int], int]]:
    """(place, bytes) of each part -> (place that fills it, bytes) of each bucket."""
    used, last = 0, lane[0][0]
    for place, num_bytes in lane:
        if used and used + num_bytes > BUCKET_BYTES:
            yield last, used
            used = 0
        used, last = used + num_bytes, place
    yield last, used


@dataclass(frozen=True)
class Lowered:
    """Instructions of a segment's passes.

    recompute: the part of the backward pass that can run early. backward: all of it except `weights`, the W ops of
    the segment's schedule if they are passes of their own; without W, the backward pass computes them.
    """

    forward: tuple[Instruction, ...]
    backward: Tagged
    weights: Tagged

    @staticmethod
    def of(
        hardware: Hardware, model: Model, segment: Segment, first: int, samples: float, prefix: str,
        weights_apart: bool, wire: str = "none", replicas: int = 1,
    ) -> Lowered:  # fmt: skip
        """Lower a segment. first: number of its first block, which determines the kinds of its blocks.

        replicas: number of ranks over which its weights are sharded, 1 for whole weights.
        """
        schedule = segment.generated(model.layer_numbers(first, segment.num_blocks))
        kinds = [model.kind_of(first + b) for b in range(segment.num_blocks)]
        costs = stack_costs(hardware, model, kinds, segment.tp, samples, schedule, wire)
        (steps,) = lower(schedule, costs, prefix)
        forward = [(step.instruction, step.op) for step in steps if not step.backward]
        rest: list[tuple[Instruction, Op | None]] = []
        weights: list[tuple[Instruction, Op | None]] = []
        for step in steps[len(forward) :]:
            late = weights_apart and step.op is not None and step.op.kind == "W"
            (weights if late else rest).append((step.instruction, step.op))
        if replicas > 1:
            sizes = [model.block_parameters(kind, segment.tp) * model.element_bytes for kind in kinds]
            seconds = [hardware.collective_seconds("all_gather", replicas, size, segment.tp) for size in sizes]
            link = hardware.link_of(replicas, segment.tp)
            forward = _gathered(forward, seconds, link, prefix, "forward")
            rest = _gathered(rest, seconds, link, prefix, "backward")
        return Lowered(tuple(instruction for instruction, _ in forward), tuple(rest), tuple(weights))

    @cached_property
    def recompute(self) -> tuple[Instruction, ...]:
        """Ops R and RC, with the collectives that carry them."""
        return tuple(instruction for instruction, op in self.backward if _recomputes(op))

    @cached_property
    def backward_after(self) -> Tagged:
        """The backward pass after `recompute`."""
        return tuple(each for each in self.backward if not _recomputes(each[1]))


def _gathered(
    ops: Sequence[tuple[Instruction, Op | None]], seconds: Sequence[float], link: str, prefix: str, which: str
) -> list[tuple[Instruction, Op | None]]:
    """A pass with the all-gather of each block's sharded weights, under the ops of the block before (FSDP)."""
    first: dict[int, int] = {}
    for at, (_, op) in enumerate(ops):
        if op is not None and op.kind in ("F", "R", "B"):
            first.setdefault(op.block, at)
    order = sorted(first, key=lambda block: first[block])
    starts = {first[block]: following for block, following in pairwise(order)}
    found: list[tuple[Instruction, Op | None]] = []

    def name(block: int) -> str:
        return f"{prefix}weights of block {block} {which}"

    for at, each in enumerate(ops):
        if at == first[order[0]]:
            found.append((Start(name(order[0]), link, seconds[order[0]]), None))
        if each[1] is not None and first.get(each[1].block) == at:
            found.append((Wait(name(each[1].block)), None))
        if at in starts:
            found.append((Start(name(starts[at]), link, seconds[starts[at]]), None))
        found.append(each)
    return found


def _recomputes(op: Op | None) -> bool:
    return op is not None and (op.of or op.kind) in ("R", "RC")


class StageModel:
    """Instructions of one stage of a plan.

    lowered: `Lowered.of` on the hardware, cached. with_ends: include embedding, head and optimizer. distinct_names:
    put the micro-batch into instruction names.
    """

    def __init__(
        self, plan: Plan, number: int, hardware: Hardware, lowered: Callable[..., Lowered], *, with_ends: bool = True,
        distinct_names: bool = True,
    ) -> None:  # fmt: skip
        if plan.experts is not None:
            raise UsageError(
                f"plan: it has {plan.experts.experts} experts, but only dense models are predicted; leave out experts"
            )
        self.plan = plan
        self.number = number
        self.hardware = hardware
        self.model = plan.model
        self.with_ends = with_ends
        self.distinct_names = distinct_names and plan.micro_batches > 1
        self.parts = plan.parts_of(number)
        self._lowered_of = lowered
        count, many = len(plan.stages), plan.micro_batches
        reading = read_stage(plan.pipeline, count, many, number)
        self.early, self.last, self.weights_apart = reading.early, reading.last, reading.has_weights

    @property
    def key(self) -> tuple[Any, ...]:
        """Cache key: everything that the stage's passes depend on."""
        plan, several = self.plan, len(self.plan.stages) > 1
        kind, part, m = self.last
        ends = self.number == 0, self.number == len(plan.stages) - 1
        return (
            self.model, plan.stages[self.number].segments,
            tuple(self.model.alike(first, segment.num_blocks) for first, segment in plan.placed(self.number)), ends,
            end_parameters(plan, self.number), tuple(map(self._message_bytes, self.parts)), plan.wire,
            several, plan.stage_ranks, plan.global_batch / plan.micro_batches, plan.zero, plan.fsdp,
            embedding_segment(plan).tp, kind, bool(self.early), (part, m) in self.early,
        )  # fmt: skip

    def passes(self, part: Part, costs: StageCosts | None = None) -> StagePasses:
        """Passes of one model part. costs: lower each pass to one instruction, except the stage's last pass."""
        seconds = self._message_seconds(part)
        if costs is None:
            return StagePasses(
                lambda m: self.forward(part, m), lambda m: self.backward(part, m), lambda m: self.recompute(part, m),
                lambda m: self.weights(part, m), seconds,
            )  # fmt: skip
        found = costs.parts[self.parts.index(part)]

        def of(kind: Literal["F", "B", "R", "W"], m: int) -> Sequence[Instruction]:
            if (kind, part.number, m) == self.last:
                return self.weights(part, m) if kind == "W" else self.backward(part, m)
            ahead = (part.number, m) in self.early
            if kind == "R" and not ahead:
                return []
            after = found.backward_after if ahead else found.backward
            cost = {"F": found.forward, "B": after, "R": found.recompute, "W": found.weights}[kind]
            return cost.instructions(f"{kind} {part.number}.{m}")

        return StagePasses(
            lambda m: of("F", m), lambda m: of("B", m), lambda m: of("R", m), lambda m: of("W", m), seconds,
        )  # fmt: skip

    def stage_costs(self, contention: Mapping[str, Contention]) -> StageCosts:
        """Costs of the passes, each simulated separately; after early recomputation if the last pass is."""
        made = tuple(self._part_costs(part, contention) for part in self.parts)
        kind, number, m = self.last
        part = next(part for part in self.parts if part.number == number)
        before, after = self.forward(part, m), (number, m) in self.early
        if after:
            before += self.recompute(part, m)
        if kind == "W":
            before += self._backward(part, m, after=after, gradients=False)
            last = self.weights(part, m)
        else:
            last = self.backward(part, m)
        finish = list(self.finish())
        last = [*last, Compute(SENT, 0.0), *finish]
        optimizer = sum(op.seconds for op in finish if isinstance(op, Compute) and op.name.startswith(OPTIMIZER))
        held = stage_state_bytes(self.plan, self.number)
        return StageCosts(made, PassCost.of(contention, last, before), held, optimizer)

    def _part_costs(self, part: Part, contention: Mapping[str, Contention]) -> PartCosts:
        forward, backward = self.forward(part, 0), self._backward(part, 0, after=False, gradients=False)
        recompute, backward_after, weights = PassCost(), PassCost(), PassCost()
        if self.early:
            early = self._recompute(part, 0)
            recompute = PassCost.of(contention, early, forward)
            after = self._backward(part, 0, after=True, gradients=False)
            backward_after = PassCost.of(contention, after, forward + early)
        if self.weights_apart:
            weights = PassCost.of(contention, self._weights(part, 0, gradients=False), forward + backward)
        first, then = PassCost.of(contention, forward), PassCost.of(contention, backward, forward)
        return PartCosts(first, then, recompute, backward_after, weights, self._message_seconds(part))

    def _message_bytes(self, part: Part) -> int:
        """Bytes that a part sends to the next one."""
        following = self.plan.layers_of(part).stop
        samples = self.plan.samples(part.last_degree)
        return self.model.message_bytes(following, samples) if following < self.model.layers else 0

    def _message_seconds(self, part: Part) -> float:
        num_bytes = self._message_bytes(part) or self.model.unit_bytes(self.plan.samples(part.last_degree))
        stride = self.plan.stage_ranks
        # All ranks of a tensor-parallel group hold the same activations, and any of them could send all of them.
        return self.hardware.collective_seconds("send", 2, num_bytes, stride) if len(self.plan.stages) > 1 else 0.0

    def _lowered(self, part: Part, index: int, m: int) -> Lowered:
        segment = part.segments[index]
        first = part.first_block + sum(earlier.num_blocks for earlier in part.segments[:index])
        kind = self.model.alike(first, segment.num_blocks)
        name = f"{self._prefix(m)}segment {part.first_segment + index} "
        samples = self.plan.samples(segment.tp)
        replicas = self.plan.stage_ranks // segment.tp if self.plan.fsdp else 1
        return self._lowered_of(
            self.model, segment, kind, samples, name, self.weights_apart, self.plan.wire, replicas
        )

    def _prefix(self, m: int) -> str:
        return f"micro-batch {m} " if self.distinct_names else ""

    def _is_last(self, part: Part) -> bool:
        return self.with_ends and part.number == len(self.plan.parts) - 1

    def forward(self, part: Part, m: int) -> list[Instruction]:
        """Forward pass of a micro-batch."""
        own = embedding_segment(self.plan).tp
        samples, prefix = self.plan.samples(own), self._prefix(m)
        ops: list[Instruction] = []
        if self.with_ends:
            layers = self.plan.layers_of(part)
            ops += embedding(self.hardware, self.model, own, samples, prefix, (layers.start, layers.stop))
        for index, segment in enumerate(part.segments):
            if index:
                name = f"{prefix}{part.first_segment + index}"
                ops += self._resharded(name, part.segments[index - 1].tp, segment.tp)
            ops += self._lowered(part, index, m).forward
        if self._is_last(part):
            ops += self._resharded(f"{prefix}head", part.last_degree, own)
            ops += head(self.hardware, self.model, own, samples, prefix, backward=False)
        return ops

    def recompute(self, part: Part, m: int) -> list[Instruction]:
        """Early recomputation of a micro-batch; empty if its backward pass recomputes."""
        return self._recompute(part, m) if (part.number, m) in self.early else []

    def backward(self, part: Part, m: int) -> list[Instruction]:
        """Backward pass of a micro-batch; the stage's last one starts the gradient all-reduces."""
        last = ("B", part.number, m) == self.last
        return self._backward(part, m, after=(part.number, m) in self.early, gradients=last)

    def weights(self, part: Part, m: int) -> list[Instruction]:
        """Weight gradients of a micro-batch, if they are a pass of their own."""
        return self._weights(part, m, gradients=("W", part.number, m) == self.last)

    def _recompute(self, part: Part, m: int) -> list[Instruction]:
        # R of the first segment depends on no other segment; the last segments run backward first.
        order = reversed(range(len(part.segments)))
        return [each for index in order for each in self._lowered(part, index, m).recompute]

    def _backward(self, part: Part, m: int, *, after: bool, gradients: bool) -> list[Instruction]:
        """Backward pass. after: recomputation has been done."""
        starts = self._gradient_starts() if gradients else {}
        ops: list[Instruction] = list(self._of_others(part, starts))
        prefix = self._prefix(m)
        if self._is_last(part):
            own = embedding_segment(self.plan).tp
            ops += head(self.hardware, self.model, own, self.plan.samples(own), prefix, backward=True)
            ops += self._resharded(f"{prefix}head backward", own, part.last_degree)
        for index in reversed(range(len(part.segments))):
            lowered = self._lowered(part, index, m)
            ops += self._with_gradients(part, index, lowered.backward_after if after else lowered.backward, starts)
            if index:
                degrees = part.segments[index].tp, part.segments[index - 1].tp
                ops += self._resharded(f"{prefix}backward {part.first_segment + index}", *degrees)
        return ops

    def _weights(self, part: Part, m: int, *, gradients: bool) -> list[Instruction]:
        starts = self._gradient_starts() if gradients else {}
        ops: list[Instruction] = list(self._of_others(part, starts))
        for index in reversed(range(len(part.segments))):
            ops += self._with_gradients(part, index, self._lowered(part, index, m).weights, starts)
        return ops

    def finish(self) -> Iterator[Instruction]:
        """Instructions after the last micro-batch: remaining gradient all-reduces and the optimizer."""
        starts = self._gradient_starts()
        yield from starts.get(_AT_THE_END, ())
        for copied, start in (pair for lane in starts.values() for pair in pairwise(lane)):
            if isinstance(copied, Compute) and isinstance(start, Start):
                yield Wait(start.name, copied.allocates)
        if not self.with_ends:
            return
        for part, (parameters, replicas) in enumerate(stage_parameters(self.plan, self.number)):
            rate = self.hardware.device.bytes_per_second
            mine = parameters // replicas if self.plan.zero or self.plan.fsdp else parameters
            moved = _ADAM_BYTES + _ROUNDING_BYTES * (self.model.element_bytes < GRADIENT_BYTES)
            yield Compute(f"{OPTIMIZER} {part}", moved * mine / rate)
            if self.plan.zero and replicas > 1:
                num_bytes, stride = parameters * self.model.element_bytes, self.plan.stage_ranks // replicas
                seconds = self.hardware.collective_seconds("all_gather", replicas, num_bytes, stride)
                yield from exposed(f"parameters {part}", self.hardware.link_of(replicas, stride), seconds)

    def _of_others(self, part: Part, starts: GradientSums) -> Iterator[Instruction]:
        """All-reduces of gradients that were complete before the stage's last pass."""
        own = range(part.first_segment, part.first_segment + len(part.segments))
        for (index, _), lane in starts.items():
            if index >= 0 and index not in own:
                yield from lane

    def _with_gradients(self, part: Part, index: int, ops: Tagged, starts: GradientSums) -> Iterator[Instruction]:
        """Pass of a segment, with all-reduces started once their buckets are full."""
        if not starts:
            yield from (instruction for instruction, _ in ops)
            return
        made = {op.block: at for at, (_, op) in enumerate(ops) if op is not None and op.kind in ("BC", "B", "W")}
        behind = {at: block for block, at in made.items()}
        for (segment, block), lane in starts.items():  # where W is the last pass, B may have made them
            if segment == part.first_segment + index and block not in made:
                yield from lane
        for at, (instruction, _) in enumerate(ops):
            yield instruction
            yield from starts.get((part.first_segment + index, behind.get(at, -1)), ())

    def _gradient_starts(self) -> dict[tuple[int, int], list[Instruction]]:
        """All-reduces of gradients in buckets, by the (segment, block) that fills each.

        Segments of one degree share buckets, from the last block to the first, followed by the embedding of that
        degree. A bucket is a copy of its gradients, held until `finish`; with fsdp it replaces them.
        """
        lanes: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for part in reversed(self.parts):
            for index in reversed(range(len(part.segments))):
                segment = part.segments[index]
                first = part.first_block + sum(earlier.num_blocks for earlier in part.segments[:index])
                for block in reversed(range(segment.num_blocks)):
                    size = self.model.block_parameters(self.model.kind_of(first + block), segment.tp)
                    place = (part.first_segment + index, block)
                    lanes.setdefault(segment.tp, []).append((place, size * GRADIENT_BYTES))
        outside = end_parameters(self.plan, self.number)
        if self.with_ends and outside:
            tp, size = embedding_segment(self.plan).tp, outside * GRADIENT_BYTES
            lanes.setdefault(tp, []).append((_AT_THE_END, size))
        starts: dict[tuple[int, int], list[Instruction]] = {}
        for tp, lane in lanes.items():
            replicas = self.plan.stage_ranks // tp
            if replicas == 1:
                continue
            link = self.hardware.link_of(replicas, tp)
            for number, (place, num_bytes) in enumerate(_buckets(lane)):
                how = "reduce_scatter" if self.plan.fsdp else "all_reduce"
                seconds = self.hardware.collective_seconds(how, replicas, num_bytes, tp)
                name = f"gradients tp {tp} bucket {number}"
                copied = Compute(f"copy of {name}", 0.0, 0 if self.plan.fsdp else num_bytes)
                starts.setdefault(place, []).extend((copied, Start(name, link, seconds)))
        return starts

    def _resharded(self, name: str, before: int, after: int) -> Iterator[Instruction]:
        """All-gather of samples over replicas that are joined if the degree grows; otherwise ranks keep a part."""
        if after <= before:
            return
        num_bytes = self.model.unit_bytes(self.plan.samples(after))
        seconds = self.hardware.collective_seconds("all_gather", after // before, num_bytes, before)
        yield from exposed(f"reshard {name}", self.hardware.link_of(after // before, before), seconds)
