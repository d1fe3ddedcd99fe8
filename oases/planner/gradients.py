"""Gradients averaged over the replicas of a pipeline stage, as instructions of its passes.

Without sharding they accumulate, and buckets of them are all-reduced in the stage's last pass. With ZeRO and FSDP
those of each block are reduced in every pass, of few blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from oases.planner.memory import divided, embedding_segment, end_parameters
from oases.plans.plan import BUCKET_BYTES, Part, Plan
from oases.plans.shape import GRADIENT_BYTES, REDUCED_UNITS
from oases.simulator.hardware import Hardware
from oases.simulator.program import Compute, Instruction, Start, Wait

_BUCKET_COPIES = 2
"""Times that gradients are read or written to fill a bucket."""
AT_THE_END = (-1, -1)
"""Key for buckets that start after the whole backward pass, in place of a (segment, block)."""

GradientSums = Mapping[tuple[int, int], Sequence[Instruction]]
"""Instructions that start the all-reduces of gradient buckets, by the (segment, block) that fills the bucket."""


def _buckets(lane: Sequence[tuple[tuple[int, int], int]]) -> Iterator[tuple[tuple[int, int], int]]:
    """(place, bytes) of each part -> (place that fills it, bytes) of each bucket."""
    used, last = 0, lane[0][0]
    for place, num_bytes in lane:
        if used and used + num_bytes > BUCKET_BYTES:
            yield last, used
            used = 0
        used, last = used + num_bytes, place
    yield last, used


class Gradients:
    """Collectives of a stage's gradients. with_ends: include those of embedding and head."""

    def __init__(self, plan: Plan, number: int, hardware: Hardware, *, with_ends: bool) -> None:
        self.plan, self.number, self.hardware, self.with_ends = plan, number, hardware, with_ends
        self.model, self.parts = plan.model, plan.parts_of(number)

    def _blocks(self, part: Part) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
        """(segment, block) of each block, the last one first, with its parameters by degree (`divided`)."""
        for index, (first, segment) in reversed([*enumerate(part.placed, start=part.first_segment)]):
            for block in reversed(range(segment.num_blocks)):
                yield (index, block), divided(self.model, self.model.kind_of(first + block), segment.tp)

    def reduced(self, part: Part, prefix: str) -> dict[tuple[int, int], list[Instruction]]:
        """Reduce-scatters of the gradients of a micro-batch, block by block, of which few are under way at a time."""
        starts: dict[tuple[int, int], list[Instruction]] = {}
        names: list[str] = []
        copies = _BUCKET_COPIES / self.hardware.device.bytes_per_second if self.with_ends else 0.0

        def reduced(place: tuple[int, int], parameters: int, degree: int) -> None:
            replicas, name = self.plan.stage_ranks // degree, f"{prefix}gradients {part.number} {len(names)}"
            if replicas == 1 or not parameters:
                return
            num_bytes = parameters * GRADIENT_BYTES
            seconds = self.hardware.collective_seconds("reduce_scatter", replicas, num_bytes, degree)
            ops = starts.setdefault(place, [])
            ops.append(Compute(f"copy of {name}", copies * num_bytes))
            ops.append(Start(name, self.hardware.link_of(replicas, degree), seconds))
            names.append(name)
            if len(names) > REDUCED_UNITS:
                ops.append(Wait(names[-1 - REDUCED_UNITS]))

        for place, counts in self._blocks(part):
            for count, degree in reversed(counts):
                reduced(place, count, degree)
        if self.with_ends:
            reduced(AT_THE_END, end_parameters(self.plan, self.number), embedding_segment(self.plan).tp)
        # A run waits for the last ones in the next pass; here passes do not overlap.
        starts.setdefault(AT_THE_END, []).extend(Wait(name) for name in names[-REDUCED_UNITS:])
        return starts

    def starts(self) -> dict[tuple[int, int], list[Instruction]]:
        """All-reduces of gradients in buckets, by the (segment, block) that fills each.

        Segments of one degree share buckets, from the last block to the first, followed by the embedding of that
        degree; experts that are divided over more ranks have buckets of their own. A bucket is a copy of its
        gradients, held until `finish`.
        """
        lanes: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for part in reversed(self.parts):
            for place, counts in self._blocks(part):
                for count, degree in counts:
                    lanes.setdefault(degree, []).append((place, count * GRADIENT_BYTES))
        outside = end_parameters(self.plan, self.number)
        if self.with_ends and outside:
            tp, size = embedding_segment(self.plan).tp, outside * GRADIENT_BYTES
            lanes.setdefault(tp, []).append((AT_THE_END, size))
        starts: dict[tuple[int, int], list[Instruction]] = {}
        copies = _BUCKET_COPIES / self.hardware.device.bytes_per_second if self.with_ends else 0.0
        for degree, lane in lanes.items():
            replicas = self.plan.stage_ranks // degree
            if replicas == 1:
                continue
            link = self.hardware.link_of(replicas, degree)
            for number, (place, num_bytes) in enumerate(_buckets(lane)):
                seconds = self.hardware.collective_seconds("all_reduce", replicas, num_bytes, degree)
                name = f"gradients tp {degree} bucket {number}"
                copied = Compute(f"copy of {name}", copies * num_bytes, num_bytes)
                starts.setdefault(place, []).extend((copied, Start(name, link, seconds)))
        return starts
