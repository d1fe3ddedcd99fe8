"""Passes of a pipeline stage as instructions, with resharding, gradient all-reduces and the optimizer.

A block's gradients are all-reduced over its replicas once the stage's last pass has computed them, under the
remaining compute of that pass; those of a model part whose last pass was earlier start at the beginning of the last
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from oases.errors import UsageError
from oases.planner.ends import embedding, embedding_backward, exposed, head
from oases.planner.gradients import AT_THE_END, Gradients, GradientSums
from oases.planner.lowered import Lowered, Tagged
from oases.planner.memory import (
    divided,
    embedding_segment,
    end_parameters,
    shared_parameters,
    stage_parameters,
    stage_state_bytes,
)
from oases.planner.pass_costs import OPTIMIZER, SENT, PartCosts, PassCost, StageCosts
from oases.plans.pipelines import read_stage
from oases.plans.plan import Part, Plan
from oases.plans.shape import GRADIENT_BYTES
from oases.simulator.hardware import Hardware
from oases.simulator.lowering import StagePasses
from oases.simulator.program import Compute, Contention, Instruction, Start, Wait

_ADAM_BYTES = 28
"""Bytes moved per fp32 parameter by Adam: reads weight, gradient and two moments, writes all but the gradient."""
_ROUNDING_BYTES = 6
"""Additional bytes moved per 16-bit parameter: reads and writes its fp32 master weight."""
_AVERAGE_COPIES = 4
"""Times that a bucket's gradients are read or written to divide their sums and copy them back."""


class StageModel:
    """Instructions of one stage of a plan.

    lowered: `Lowered.of` on the hardware, cached. with_ends: include embedding, head and optimizer. distinct_names:
    put the micro-batch into instruction names. split: ranks of a tensor-parallel group send a part of each message.
    """

    def __init__(
        self, plan: Plan, number: int, hardware: Hardware, lowered: Callable[..., Lowered], *, with_ends: bool = True,
        distinct_names: bool = True, split: bool = True,
    ) -> None:  # fmt: skip
        if plan.experts is not None:
            raise UsageError(
                f"plan: it has {plan.experts.experts} experts, but only dense models are predicted; leave out experts"
            )
        self.plan = plan
        self.number = number
        self.hardware = hardware
        self.model = plan.model
        self.with_ends, self.split = with_ends, split
        self.distinct_names = distinct_names and plan.micro_batches > 1
        self.parts = plan.parts_of(number)
        self._gradients = Gradients(plan, number, hardware, with_ends=with_ends)
        self._lowered_of = lowered
        count, many = len(plan.stages), plan.micro_batches
        reading = read_stage(plan.pipeline, count, many, number)
        self.early, self.last, self.weights_apart = reading.early, reading.last, reading.has_weights

    @property
    def key(self) -> tuple[Any, ...]:
        """Cache key: everything that the stage's passes depend on."""
        plan, several = self.plan, len(self.plan.stages) > 1
        kind, part, m = self.last
        ends = self.parts[0].number == 0, self.parts[-1].number == len(plan.parts) - 1
        return (
            self.model, plan.stages[self.number].segments,
            tuple(self.model.alike(first, segment.num_blocks) for first, segment in plan.placed(self.number)), ends,
            end_parameters(plan, self.number), tuple(self._messages(part) for part in self.parts), plan.wire,
            plan.micro_batches, shared_parameters(plan, self.number),
            several, plan.stage_ranks, plan.global_batch / plan.micro_batches, plan.zero, plan.fsdp,
            embedding_segment(plan).tp, kind, bool(self.early), (part, m) in self.early,
        )  # fmt: skip

    def passes(self, part: Part, costs: StageCosts | None = None) -> StagePasses:
        """Passes of one model part. costs: lower each pass to one instruction, except the stage's last pass."""
        seconds = self._messages(part)
        if costs is None:
            return StagePasses(
                lambda m: self.forward(part, m), lambda m: self.backward(part, m), lambda m: self.recompute(part, m),
                lambda m: self.weights(part, m), *seconds,
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
            lambda m: of("F", m), lambda m: of("B", m), lambda m: of("R", m), lambda m: of("W", m), *seconds,
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
        return PartCosts(first, then, recompute, backward_after, weights, *self._messages(part))

    def _messages(self, part: Part) -> tuple[float, float]:
        """Seconds of an activation to the part behind and of a gradient to the part before; 0 where there is none."""
        return self._message_seconds(part.number, part.number + 1), self._message_seconds(
            part.number, part.number - 1
        )

    def _message_seconds(self, part: int, other: int) -> float:
        """Seconds of what crosses the border between two parts.

        Tensor-parallel ranks of one node send a share each, and join all shares.
        """
        plan = self.plan
        if not 0 <= other < len(plan.parts) or plan.stage_of(part) == plan.stage_of(other):
            return 0.0
        before, behind = sorted((part, other))
        tp = plan.parts[before].last_degree
        num_bytes = self.model.message_bytes(plan.layers_of(plan.parts[behind]).start, plan.samples(tp))
        first, last = (plan.stage_of(number) * plan.stage_ranks for number in (part, other))
        inside = self.hardware.link_of(tp) == "node"  # others are not worth joining: each rank sends all
        shares = tp if self.split and inside else 1
        seconds = self.hardware.message_seconds(num_bytes / shares, first, last, plan.stage_ranks)
        return seconds + self.hardware.collective_seconds("all_gather", shares, num_bytes)

    def _lowered(self, part: Part, index: int, m: int) -> Lowered:
        first, segment = part.placed[index]
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
        """Backward pass. after: recomputation has been done. gradients: it starts their all-reduces."""
        starts = self._gradient_starts_of(part, m, gradients, not self.weights_apart)
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
        if self.with_ends:
            layers, own = self.plan.layers_of(part), embedding_segment(self.plan).tp
            samples = self.plan.samples(own)
            ops += embedding_backward(self.hardware, self.model, own, samples, prefix, (layers.start, layers.stop))
            if not self.weights_apart:
                ops += self._accumulated(part, prefix)
        return [*ops, *(starts.get(AT_THE_END, ()) if self._shares else ())]

    def _weights(self, part: Part, m: int, *, gradients: bool) -> list[Instruction]:
        starts = self._gradient_starts_of(part, m, gradients, True)
        ops: list[Instruction] = list(self._of_others(part, starts))
        for index in reversed(range(len(part.segments))):
            ops += self._with_gradients(part, index, self._lowered(part, index, m).weights, starts)
        if self.with_ends:
            ops += self._accumulated(part, self._prefix(m))
        return [*ops, *(starts.get(AT_THE_END, ()) if self._shares else ())]

    def _accumulated(self, part: Part, prefix: str) -> Iterator[Instruction]:
        """Addition of a micro-batch's weight gradients to those of earlier ones; the first one's stay as they are."""
        many, own = self.plan.micro_batches, embedding_segment(self.plan).tp
        if many == 1:
            return
        layers = self.plan.layers_of(part)
        counts = [(self.model.end_parameters(layers.start, layers.stop, own), own)]
        for first, segment in part.placed:
            for number in range(first, first + segment.num_blocks):
                counts += divided(self.model, self.model.kind_of(number), segment.tp)
        # Where replicas share them, of this rank's share.
        parameters = sum(n / (self.plan.stage_ranks // degree if self._shares else 1) for n, degree in counts)
        moved = parameters * (2 * GRADIENT_BYTES + self.model.element_bytes) * (many - 1) / many
        yield Compute(f"{prefix}accumulated gradients", moved / self.hardware.device.bytes_per_second)

    def finish(self) -> Iterator[Instruction]:
        """Instructions after the last micro-batch: remaining gradient all-reduces and the optimizer."""
        starts = {} if self._shares else self._gradients.starts()
        yield from starts.get(AT_THE_END, ())
        device = self.hardware.device
        for copied, start in (pair for lane in starts.values() for pair in pairwise(lane)):
            if isinstance(copied, Compute) and isinstance(start, Start):
                yield Wait(start.name, copied.allocates)
                if self.with_ends:
                    seconds = _AVERAGE_COPIES * copied.allocates / device.bytes_per_second
                    yield Compute(start.name.replace("gradients", "average of gradients"), seconds)
        if not self.with_ends:
            return
        if shared := shared_parameters(self.plan, self.number):
            if self._shares:  # each rank sums its own part of the table
                shared //= self.plan.stage_ranks // embedding_segment(self.plan).tp
            inside, per_node = self.plan.world <= self.hardware.ranks_per_node, self.hardware.ranks_per_node
            link, sharing = ("node", 1) if inside else ("cluster", min(self.plan.stage_ranks, per_node))
            seconds = self.hardware.link(link).seconds("all_reduce", 2, shared * GRADIENT_BYTES, sharing)
            yield from exposed("gradients of shared parameters", link, seconds)
        for part, (parameters, replicas) in enumerate(stage_parameters(self.plan, self.number)):
            mine = parameters // replicas if self._shares else parameters
            rounded = _ROUNDING_BYTES * (self.model.element_bytes < GRADIENT_BYTES) / device.bytes_per_second
            update = device.update_seconds or _ADAM_BYTES / device.bytes_per_second
            yield Compute(f"{OPTIMIZER} {part}", (update + rounded) * mine)
            if self.plan.zero and replicas > 1:
                num_bytes, stride = parameters * self.model.element_bytes, self.plan.stage_ranks // replicas
                # Each rank's share in turn, copied to a flat tensor and from it.
                seconds = self.hardware.collective_seconds("broadcast", replicas, num_bytes, stride)
                yield from exposed(f"parameters {part}", self.hardware.link_of(replicas, stride), seconds)
                yield Compute(f"copy of parameters {part}", 4 * num_bytes / device.bytes_per_second)

        if self.plan.fsdp:
            yield from self._gathered_ends()

    def _gathered_ends(self) -> Iterator[Instruction]:
        """All-gather of the sharded weights outside of layers, at their first use in a step."""
        tp, device = embedding_segment(self.plan).tp, self.hardware.device
        replicas = self.plan.stage_ranks // tp
        num_bytes = end_parameters(self.plan, self.number) * self.model.element_bytes
        if replicas == 1 or not num_bytes:
            return
        seconds = self.hardware.collective_seconds("all_gather", replicas, num_bytes, tp)
        yield from exposed("parameters outside of layers", self.hardware.link_of(replicas, tp), seconds)
        copied = 2 * (1 + 1 / replicas) * num_bytes / device.bytes_per_second
        yield Compute("copy of parameters outside of layers", copied)

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

    @property
    def _shares(self) -> bool:
        """Whether replicas share gradients and optimizer state: gradients are reduced in every pass then."""
        return self.plan.zero or self.plan.fsdp

    def _gradient_starts_of(self, part: Part, m: int, last: bool, computed: bool) -> GradientSums:
        """Collectives that a pass of a micro-batch starts. last: of the stage. computed: it has weight gradients."""
        if self._shares:
            return self._gradients.reduced(part, self._prefix(m)) if computed else {}
        return self._gradients.starts() if last else {}

    def _resharded(self, name: str, before: int, after: int) -> Iterator[Instruction]:
        """All-gather of samples over replicas that are joined if the degree grows; otherwise ranks keep a part."""
        if after <= before:
            return
        num_bytes = self.model.unit_bytes(self.plan.samples(after))
        seconds = self.hardware.collective_seconds("all_gather", after // before, num_bytes, before)
        yield from exposed(f"reshard {name}", self.hardware.link_of(after // before, before), seconds)
