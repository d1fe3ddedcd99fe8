"""Plan: how a model is trained on a cluster, as versioned JSON that can be executed as it is.

Ranks are numbered along tensor parallelism first, then data parallelism, then pipeline stages. In a stage of R
ranks a segment of degree t runs R / t replicas, each on its share of the samples.
With the pipelines `interleaved` and `zb_v` a stage has two model parts: stage s of p has parts s and s + p, or with
`zb_v` s and 2 p - 1 - s. Its segments are those of the first part, followed by as many of the second. In any other
pipeline a stage is one part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import oases.records as records
from oases.core.dtypes import WIRES
from oases.core.schedule import GENERATORS, PIPELINES, ScheduleError, is_text
from oases.core.schedule.pipeline import require_sizes
from oases.core.schedule.schedule import stage_of
from oases.errors import UsageError
from oases.files import parse_json, read_json
from oases.limits import require_numbers, short
from oases.plans.gpt import gpt_of
from oases.plans.layered import Model
from oases.plans.pipelines import chunks_of, name_of, placement_of
from oases.plans.segment import AUTO, Segment, Stage, generated
from oases.plans.shape import Experts, GPTSizes

__all__ = [
    "AUTO", "BUCKET_BYTES", "PLANNED", "Experts", "Part", "Plan", "Prediction", "Segment", "Stage", "generated",
    "read_plan",
]  # fmt: skip

VERSION = 1
FORMAT = "oases plan"
_REMEDY = "write one with: oases plan --json FILE"
PLANNED = tuple(PIPELINES)
"""Pipelines whose time and memory the planner predicts."""

BUCKET_BYTES = 16 * 2**20
"""Bucket size of the gradient all-reduce: small enough to start early, large enough to use the link well."""


@dataclass(frozen=True)
class Part:
    """Consecutive blocks that a stage runs in one pass.

    number: of the part in the model. first_block: number of its first block. first_segment: index of its first
    segment in the stage.
    """

    number: int
    first_block: int
    segments: tuple[Segment, ...]
    first_segment: int = 0

    @cached_property
    def placed(self) -> tuple[tuple[int, Segment], ...]:
        """Segments, each with its first block."""
        firsts = accumulate((segment.num_blocks for segment in self.segments), initial=self.first_block)
        return tuple(zip(firsts, self.segments, strict=False))

    @property
    def first_degree(self) -> int:
        """Tensor-parallel degree of the first segment."""
        return self.segments[0].tp

    @property
    def last_degree(self) -> int:
        """Tensor-parallel degree of the last segment."""
        return self.segments[-1].tp


Seconds = Annotated[float, records.Number(least=0)]
Count = Annotated[int, records.Number(least=1, most=10**7)]


@dataclass(frozen=True)
class Prediction:
    """Prediction of the simulator. memory_bytes: peak memory by stage.

    Exposed communication and bubble are those of the stage that computes most (in older plans each the maximum over
    the stages). optimizer_seconds: the maximum; None in plans written before that field existed.
    """

    step_seconds: Seconds
    exposed_seconds: Seconds
    bubble_seconds: Seconds
    memory_bytes: tuple[Annotated[int, records.Number(least=0)], ...]
    optimizer_seconds: Seconds | None = None


@dataclass(frozen=True)
class Plan:
    """Parallelism of a training run: stages, micro-batches and sharding. `global_batch`: samples per optimizer
    step.

    zero: gradients and optimizer state are sharded over the data-parallel ranks (ZeRO-2). fsdp: weights, too. wire:
    dtype in which tensor-parallel sums are sent, one of WIRES. pipeline: pipeline schedule, the name of a generator
    or the text of a list for these stages and micro-batches. experts: replaces every MLP, sharded across the ranks of
    its stage; segments then hold whole layers, and their own schedule is not used.
    """

    model: Model
    world: Count
    ranks_per_node: Count
    global_batch: int
    micro_batches: int
    stages: tuple[Stage, ...]
    zero: bool = False
    pipeline: str = "one_f_one_b"
    prediction: Prediction | None = None
    fsdp: bool = False
    experts: Experts | None = None
    wire: str = "none"

    def __post_init__(self) -> None:
        for name in ("world", "ranks_per_node", "global_batch", "micro_batches"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError(f"plan: {name} must be at least 1, got {short(value)}")
            require_numbers({name: value}, "plan: ")
        if self.wire not in WIRES:
            raise UsageError(f"plan: unknown wire {short(self.wire)}; known are {', '.join(WIRES)}: plan again")
        if self.zero and self.fsdp:
            raise UsageError("plan: fsdp includes zero; leave out zero")
        if self.pipeline not in PLANNED and not is_text(self.pipeline):
            raise UsageError(
                f"plan: unknown pipeline {self.pipeline!r}; known are {', '.join(PLANNED)}, and the text of a list"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        if not self.stages:
            raise UsageError("plan: it has no stages; give at least 1")
        blocks = sum(stage.num_blocks for stage in self.stages)
        if blocks != self.model.num_blocks:
            raise UsageError(f"plan: its stages hold {blocks} blocks, the model has {self.model.num_blocks}")
        if self.world < 1 or self.world % len(self.stages):
            raise UsageError(f"plan: {len(self.stages)} stages do not divide {self.world} ranks")
        for number, stage in enumerate(self.stages):
            self._check_stage(stage, f"plan: stage {number}")
        self._check_pipeline()
        for number in range(len(self.stages)):
            for first, segment in self.placed(number):
                self._check_layers(segment, first, f"plan: stage {number}")

    def _check_pipeline(self) -> None:
        if self.fsdp and all(segment.tp == self.stage_ranks for stage in self.stages for segment in stage.segments):
            raise UsageError(f"plan: fsdp needs data-parallel replicas, but tp is {self.stage_ranks}; leave out fsdp")
        try:
            if is_text(self.pipeline):
                require_sizes(self.pipeline, len(self.stages), self.micro_batches)
            chunks = chunks_of(self.pipeline)
        except ScheduleError as error:
            raise UsageError(f"plan: pipeline: {error}") from error
        if chunks > 1:
            self._check_parts(chunks)

    def _check_layers(self, segment: Segment, first: int, where: str) -> None:
        layers = self.model.num_layers(first, segment.num_blocks)
        if not 0 <= segment.recomputed_layers <= layers:
            raise UsageError(
                f"{where}: recomputed_layers must be from 0 to the {layers} layers of its segment, got "
                f"{segment.recomputed_layers}"
            )
        if self.model.mixed:
            return
        last = first + segment.num_blocks
        if any(self.model.first_block(self.model.layer_at(block)) != block for block in (first, last)):
            raise UsageError(
                f"{where}: its blocks {first} to {last - 1} split a layer of {self.model.name}; a segment holds "
                "whole layers"
            )
        if segment.tp != self.stages[0].segments[0].tp:
            raise UsageError(
                f"{where}: its tp is {segment.tp}, that of stage 0 {self.stages[0].segments[0].tp}; "
                f"{self.model.name} runs at one degree, so give all segments the same"
            )

    def _check_stage(self, stage: Stage, where: str) -> None:
        if not stage.segments:
            raise UsageError(f"{where} has no blocks; give each stage at least one, or fewer stages")
        for segment in stage.segments:
            self._check(segment, where)

    def _check_parts(self, chunks: int) -> None:
        if len(self.stages) == 1:
            raise UsageError(f"plan: {name_of(self.pipeline)} needs at least 2 stages, got 1; take one_f_one_b")
        try:
            require_sizes(self.pipeline, len(self.stages), self.micro_batches, chunks)
        except ScheduleError as error:
            raise UsageError(f"plan: {error}") from error
        for number, stage in enumerate(self.stages):
            if len(stage.segments) % chunks:
                raise UsageError(
                    f"plan: stage {number} has {len(stage.segments)} segments; {name_of(self.pipeline)} runs "
                    f"{chunks} parts of the model on each stage, so give a multiple of that, the first part's first"
                )

    def _check(self, segment: Segment, where: str) -> None:
        if segment.num_blocks < 1 or segment.tp < 1 or self.stage_ranks % segment.tp:
            raise UsageError(
                f"{where}: a segment of {segment.num_blocks} blocks with tp {segment.tp} does not fit its "
                f"{self.stage_ranks} ranks"
            )
        if not self.model.fits_degree(segment.tp):
            raise UsageError(f"{where}: heads, hidden or vocabulary do not divide by tp {segment.tp}")
        if segment.schedule not in (AUTO, *GENERATORS) and not is_text(segment.schedule):
            raise UsageError(
                f"{where}: unknown schedule {segment.schedule!r}; known are {', '.join(GENERATORS)}, auto, and the "
                "text of a list"
            )
        if segment.sequence_parallel and (segment.tp == 1 or self.model.sequence % segment.tp):
            raise UsageError(
                f"{where}: sequence {self.model.sequence} does not divide over tp {segment.tp}; leave out "
                "sequence_parallel there"
            )
        if segment.sub_batches < (0 if segment.schedule == AUTO else 1):
            raise UsageError(f"{where}: sub_batches must be at least 1, got {segment.sub_batches}")
        samples = self.samples(segment.tp)
        if samples < 1 or samples != int(samples):
            raise UsageError(
                f"{where}: {self.global_batch} samples in {self.micro_batches} micro-batches do not divide over "
                f"{self.stage_ranks // segment.tp} replicas of tp {segment.tp}"
            )
        if samples < segment.parts:
            raise UsageError(f"{where}: {samples:g} samples do not divide into {segment.parts} sub-batches")

    @property
    def stage_ranks(self) -> int:
        """Ranks per pipeline stage."""
        return self.world // len(self.stages)

    def samples(self, tp: int) -> float:
        """Samples of one micro-batch on one replica of a segment of degree `tp`."""
        return self.global_batch * tp / (self.stage_ranks * self.micro_batches)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Model parts in order, see `stage_of`."""
        count, chunks = len(self.stages), chunks_of(self.pipeline)
        found: list[Part] = []
        block = 0
        for number in range(count * chunks):
            segments = self.stages[self.stage_of(number)].segments
            each = len(segments) // chunks
            first = number // count * each
            found.append(Part(number, block, segments[first : first + each], first))
            block += sum(segment.num_blocks for segment in found[-1].segments)
        return tuple(found)

    def placed(self, stage: int) -> Iterator[tuple[int, Segment]]:
        """Segments of a stage, each with its first block."""
        for part in self.parts_of(stage):
            yield from part.placed

    def layers_of(self, part: Part) -> range:
        """Layers of a model part, in call order over all lists of the model's layers."""
        blocks = sum(segment.num_blocks for segment in part.segments)
        return range(self.model.layer_at(part.first_block), self.model.layer_at(part.first_block + blocks - 1) + 1)

    def layer_counts(self, part: Part) -> Iterator[tuple[int, Segment]]:
        """Segments of a part, each with its number of layers."""
        for first, segment in part.placed:
            yield self.model.num_layers(first, segment.num_blocks), segment

    def parts_of(self, stage: int) -> tuple[Part, ...]:
        """Model parts of a stage."""
        return tuple(part for part in self.parts if self.stage_of(part.number) == stage)

    def stage_of(self, part: int) -> int:
        """Stage that has a model part."""
        return stage_of(part, len(self.stages), placement_of(self.pipeline))

    @property
    def end_stages(self) -> tuple[int, ...]:
        """Stages of the first and of the last part, which have embedding and head: two, or one that has both."""
        return tuple(sorted({self.stage_of(0), self.stage_of(len(self.parts) - 1)}))

    @property
    def hands_on(self) -> bool:
        """Whether adjacent parts have the same degree at their border, so that samples pass from rank to rank."""
        return all(one.last_degree == other.first_degree for one, other in pairwise(self.parts))

    @property
    def uniform_tp(self) -> int | None:
        """The tensor-parallel degree if all blocks have the same, else None."""
        degrees = {segment.tp for stage in self.stages for segment in stage.segments}
        return next(iter(degrees)) if len(degrees) == 1 else None

    def text(self) -> str:
        """Summary in one line, e.g. "14 blocks tp 2 x dp 4 (oases@2) -> 34 blocks tp 4 x dp 2 (oases@2); 1 micro-
        batch".
        """
        runs: list[tuple[int, str]] = []
        for number in range(len(self.stages)):
            parts = []
            for first_block, segment in self.placed(number):
                extra = f", {segment.recomputed_layers} layers recomputed" if segment.recomputed_layers else ""
                extra += ", sequence-parallel" if segment.sequence_parallel else ""
                replicas = self.stage_ranks // segment.tp
                name = segment.name if self.experts is None else self.experts.name
                held = f"{segment.num_blocks} blocks"
                if not self.model.mixed:
                    held = f"{self.model.num_layers(first_block, segment.num_blocks)} layers"
                parts.append(f"{held} tp {segment.tp} x dp {replicas} ({name}{extra})")
            text = " -> ".join(parts)
            if runs and runs[-1][1] == text:
                runs[-1] = (runs[-1][0] + 1, text)
            else:
                runs.append((1, text))
        names, first = [], 0
        for many, text in runs:
            numbers = f"stage {first}" if many == 1 else f"stages {first}-{first + many - 1}"
            names.append(f"{numbers}: {text}" if len(self.stages) > 1 else text)
            first += many
        counts = f"{self.micro_batches} micro-batch" + ("es" if self.micro_batches > 1 else "")
        how = [name_of(self.pipeline)] if len(self.stages) > 1 else []
        how += [f"{self.experts.experts} experts"] if self.experts is not None else []
        if self.model.expert_parallel:
            how += [f"experts over {self.model.expert_parallel} ranks"]
        return "; ".join(
            [
                *names,
                counts,
                *how,
                *(["sharded optimizer"] if self.zero else []),
                *(["fsdp"] if self.fsdp else []),
                *([f"sums sent in {self.wire}"] if self.wire != "none" else []),
            ]
        )

    def data(self) -> dict[str, Any]:
        """The plan as plain data; of a GPT its sizes."""
        return records.plain(self) | {"model": records.plain(self.model.sizes or self.model)}

    def to_json(self) -> str:
        """Serialise the plan as JSON for `from_json`."""
        return json.dumps({"format": FORMAT, "version": VERSION, **self.data()}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse a plan. Raises UsageError naming the field that is missing, unknown or of the wrong type."""
        return Plan._of(parse_json(text, "plan", _REMEDY))

    @staticmethod
    def _of(data: Any) -> Plan:
        body = records.body(data, FORMAT, VERSION, "plan", _REMEDY)
        if "model" in body:
            model = records.one_of((GPTSizes, Model), body["model"], "plan: model", _REMEDY)
            body["model"] = gpt_of(model) if isinstance(model, GPTSizes) else model
        plan: Plan = records.read(Plan, body, "plan", _REMEDY)
        if plan.prediction is not None and len(plan.prediction.memory_bytes) != len(plan.stages):
            raise UsageError(
                f"plan: prediction: memory_bytes must be a whole number for each of {len(plan.stages)} stages, got "
                f"{short(list(plan.prediction.memory_bytes))}"
            )
        return plan


def read_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises UsageError for a file that cannot be read or is not a plan."""
    data = read_json(path, "plan", _REMEDY)
    try:
        return Plan._of(data)
    except UsageError as error:
        raise UsageError(f"plan {str(path)!r}: {str(error).removeprefix('plan: ')}") from error
