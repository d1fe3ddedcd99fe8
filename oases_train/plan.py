"""Training runs: a configuration with a plan, read from a file or built from the parallel degrees."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oases.autotp.configuration import configured_model, read_configuration
from oases.autotp.costs import trace_configuration
from oases.core.dtypes import AUTO_LOSSY, WIRES
from oases.core.schedule import GENERATORS, PIPELINES, WHOLE, format_schedule, recomputed_layers
from oases.errors import UsageError
from oases.models.options import Degrees, require_bytes, sizes_of
from oases.moe.placement import owner_ranks
from oases.plans.balance import balanced_starts
from oases.plans.check import check
from oases.plans.gpt import gpt
from oases.plans.layered import Model
from oases.plans.pipelines import chunks_of, parts_on
from oases.plans.plan import AUTO, Plan, Segment, Stage, read_plan
from oases.plans.schedule_files import read_schedule
from oases_train.config import TrainConfig, require_fit
from oases_train.data import Corpus
from oases_train.instructions import Instructions

__all__ = ["Run", "num_ranks", "plan_from_degrees", "read_plan", "resolve_degrees"]

DEFAULT_RANKS = 2
"""Ranks of a run without given degrees."""


@dataclass(frozen=True)
class Run:
    """Configuration and plan of a run, validated once, on construction.

    Raises UsageError where they disagree on model or batch, and for a plan that cannot be executed.
    """

    config: TrainConfig
    plan: Plan

    def __post_init__(self) -> None:
        require_fit(self.config, self.plan)
        check(self.plan)
        if self.config.model is not None and self.config.plan is not None:
            _require_planned(self.config.model, self.plan)
        if self.config.wire_dtype == AUTO_LOSSY:
            _require_whole_steps(self.plan)
        if self.config.gradient_wire != "none":
            _require_averages(self.config, self.plan)
        if self.config.pipeline_wire != "none" and len(self.plan.stages) < 2:
            raise UsageError(
                f"pipeline_wire {self.config.pipeline_wire!r}: there is one stage; give --pp, or leave it out"
            )

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Run:
        """Run with the plan that a configuration names, or with a plan of its degrees over `ranks` ranks."""
        return cls(config, plan_from_degrees(config, ranks) if config.plan is None else read_plan(config.plan))

    def corpus(self, *, single_process: bool = False) -> Corpus | Instructions:
        """Check files and memory before any rank starts; returns the corpus.

        single_process: whether one process, with a rank's share of the model, represents all ranks.
        """
        config, plan = self.config, self.plan
        if config.device == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:
            what = f"{config.layers} layers of hidden {config.hidden}"
            if config.plan is not None:
                what = "the plan"
            elif config.experts:
                what = f"{config.layers} layers of {config.experts} experts"
            share = plan.world if single_process else 1
            require_bytes(
                {name: size // share for name, size in least_bytes(plan).items()},
                f"{what} with a vocabulary of {plan.model.vocabulary} and a batch of {plan.global_batch} over "
                f"{plan.world} ranks",
            )
        return config.check_files(self.sizes)

    @property
    def sizes(self) -> dict[str, Any]:
        """Model sizes that must match to load a checkpoint."""
        found, experts = sizes_of(self.config) | {"vocabulary": self.plan.model.vocabulary}, self.plan.experts
        if experts is None:
            return found
        return found | {
            "experts": experts.experts, "top_k": experts.top_k,
            "expert_hidden": experts.expert_hidden or 4 * self.config.hidden,
            "shared_hidden": experts.shared_hidden, "gate": experts.gate, "expert_bias": experts.bias_update_rate > 0,
        }  # fmt: skip


def num_ranks(config: TrainConfig, launched: int | None = None, *, one_replica: bool = False) -> int:
    """Number of ranks for a configuration without a plan.

    launched: ranks started by a launcher; a run with experts uses all of them as replicas, unless one_replica.
    """
    given = config.degrees
    if not config.experts:
        tensor = given.tensor or (1 if config.beyond_tensor_parallel else DEFAULT_RANKS)
        return given.data * given.pipeline * tensor
    if launched is not None and given.data == 1 and not one_replica:
        return launched
    data = given.data if given.data > 1 or one_replica else DEFAULT_RANKS
    return data * given.pipeline * (given.tensor or 1)


def resolve_degrees(config: TrainConfig, ranks: int) -> Degrees:
    """Parallel degrees for a number of ranks. UsageError where their product differs from it.

    Ranks left over go to tensor parallelism, or, with experts, to data parallelism unless that is given.
    """
    given = config.degrees
    tensor, data = given.tensor, given.data
    if config.experts:
        tensor = tensor or (1 if data == 1 else max(1, ranks // (data * given.pipeline)))
        data = data if data > 1 else max(1, ranks // (tensor * given.pipeline))
    degrees = Degrees(data, given.pipeline, tensor)
    return Degrees(data, given.pipeline, degrees.tensor_of(ranks))


def plan_from_degrees(config: TrainConfig, ranks: int) -> Plan:
    """Build a plan from the configuration's degrees, without a profile: equal stages, one schedule for all layers.

    If the layers do not divide evenly, the last part, which has the head, gets fewer. UsageError where the degrees
    do not match the ranks, for more stages than layers, indivisible batch or experts, and an unknown schedule.
    """
    degrees, model = resolve_degrees(config, ranks), _model_of(config)
    if model.sizes is not None:
        config.require_degree(degrees.tensor)
    elif not model.fits_degree(degrees.tensor):
        fits = [degree for degree in range(1, model.heads + 1) if model.heads % degree == 0]
        raise UsageError(
            f"--tp {degrees.tensor} does not divide the heads and widths of {model.name}; degrees that do: "
            f"{', '.join(map(str, fits))}"
        )
    if config.experts:
        owner_ranks(config.experts, ranks // degrees.pipeline)
    if config.sequence_parallel and (degrees.tensor == 1 or config.sequence % degrees.tensor):
        raise UsageError(
            f"a sequence of {config.sequence} does not divide by --tp {degrees.tensor}; leave out "
            "--sequence-parallel, or change --sequence"
        )
    pipeline = config.pipeline_schedule
    if pipeline not in PIPELINES:
        stages, many = degrees.pipeline, config.micro_batches
        pipeline = format_schedule(read_schedule(pipeline, "stage", num_stages=stages, num_sub_batches=many))
    chunks = chunks_of(pipeline)
    num_parts = degrees.pipeline * chunks
    layers = model.layers
    if num_parts > layers:
        each = f", each with {chunks} model chunks," if chunks > 1 else ""
        raise UsageError(
            f"{degrees}: {degrees.pipeline} stages{each} are more than the {layers} layer{'s' * (layers > 1)}; give "
            f"fewer stages{'' if model.sizes is None else ' or more --layers'}"
        )
    share = degrees.data * config.micro_batches
    if config.batch % share:
        raise UsageError(
            f"a batch of {config.batch} does not divide into {config.micro_batches} micro-batches for each of "
            f"{degrees.data} replicas; give a multiple of {share} as --batch"
        )
    cuts = [-(-layers * part // num_parts) for part in range(num_parts + 1)]
    if model.sizes is None:
        cuts = [0, *balanced_starts(_layer_flops(model), num_parts), layers]
    borders = [model.first_block(layer) for layer in cuts]
    segments = [
        _segment(config, last_layer - first_layer, last - first, degrees.tensor)
        for (first_layer, last_layer), (first, last) in zip(
            itertools.pairwise(cuts), itertools.pairwise(borders), strict=True
        )
    ]
    most = max(segment.parts for segment in segments)
    if config.batch // share < most:
        raise UsageError(
            f"{config.batch // share} samples of a micro-batch on a replica cannot be split into {most} sub-batches; "
            f"raise --batch to {most * share}, name a schedule with fewer (oases@2), or lower --micro-batches"
        )
    return Plan(
        model=model,
        world=ranks,
        ranks_per_node=ranks,
        global_batch=config.batch,
        micro_batches=config.micro_batches,
        stages=tuple(
            Stage(tuple(segments[part] for part in parts_on(pipeline, degrees.pipeline, stage)))
            for stage in range(degrees.pipeline)
        ),
        zero=config.zero,
        fsdp=config.fsdp,
        pipeline=pipeline,
        experts=config.plan_experts(config.schedule),
    )


def _model_of(config: TrainConfig) -> Model:
    """The built-in GPT, or the traced layers of a transformers model."""
    if config.model is not None:
        return trace_configuration(config.model, sequence=config.sequence, dtype=config.precision)
    return gpt(config.hidden, config.layers, config.heads, config.sequence, config.rows, dtype=config.precision)


def _require_planned(path: str, plan: Plan) -> None:
    """Raise UsageError, before ranks start, for a plan whose traced model has other parameters than `path`'s."""
    made = configured_model(read_configuration(Path(path), "--model"))
    found = sum(parameter.numel() for parameter in made.parameters())
    if plan.model.sizes is None and found != plan.model.num_parameters:
        raise UsageError(
            f"plan: its model {plan.model.name} has {plan.model.num_parameters} parameters, --model {path!r} has "
            f"{found}; make a plan for this one by oases plan --model {path}"
        )


def _layer_flops(model: Model) -> list[float]:
    """FLOPs of each layer; the last one has the head's, too."""
    found = [
        sum(sum(model.matmul_flops(kind, 1, 1)) for kind in model.layer_kinds[each]) for each in model.layer_order
    ]
    found[-1] += model.head_flops(1)
    return found


def _segment(config: TrainConfig, layers: int, blocks: int, tensor: int) -> Segment:
    """Segment of `layers` layers under the configuration's schedule, by name or by its file's text."""
    again = layers if config.recompute == "full" else 0
    name, _, count = config.schedule.partition("@")
    if config.experts:  # experts have a schedule of their own
        return Segment(blocks, tensor, "sync", 1, again)
    if name in GENERATORS and (not count or count.isdecimal()):
        sub_batches = 1 if name in WHOLE else int(count[:9]) if count else config.default_sub_batches
        config.require_batch(sub_batches, name)
        return Segment(blocks, tensor, name, sub_batches, again, config.sequence_parallel)
    made = config.schedule_or_auto(config.schedule, num_blocks=blocks)
    if isinstance(made, str):
        return Segment(blocks, tensor, AUTO, config.default_sub_batches, again, config.sequence_parallel)
    again = recomputed_layers(made.recomputed_blocks, blocks)
    text = format_schedule(made)
    return Segment(blocks, tensor, text, made.num_sub_batches, again, config.sequence_parallel)


def least_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that all ranks of a plan hold at the least, by what for, with the options that lower them.

    State is weights, gradients and AdamW's. Activations are the inputs of blocks alone, of one micro-batch, as with
    full recomputation.
    """
    model, blocks, activations, number = plan.model, 0, 0, 0
    for segment in (segment for part in plan.parts for segment in part.segments):
        replicas = plan.stage_ranks // segment.tp
        unit = model.unit_bytes(plan.samples(segment.tp)) // (segment.tp if segment.sequence_parallel else 1)
        activations += plan.stage_ranks * segment.num_blocks * unit
        for _ in range(segment.num_blocks):
            kind = model.kind_of(number)
            number += 1
            if plan.experts is not None and model.block(kind).name == "mlp":
                blocks += model.state_bytes(plan.experts.layer_parameters(model.hidden), 1)
                continue
            held = model.state_bytes(
                model.block_parameters(kind, segment.tp), replicas, zero=plan.zero, fsdp=plan.fsdp
            )
            blocks += plan.stage_ranks * held
    tp = plan.stages[0].segments[0].tp
    table = model.state_bytes(
        model.end_parameters(0, model.layers, tp), plan.stage_ranks // tp, zero=plan.zero, fsdp=plan.fsdp
    )
    first_and_last = len(plan.end_stages)  # both have the embedding, which is the head
    tokens = plan.global_batch * model.sequence // plan.micro_batches
    return {
        "blocks (--hidden, --layers)": blocks,
        "the embedding (--tokenizer, --sequence)": first_and_last * plan.stage_ranks * table,
        "activations (--batch, --sequence)": activations,
        # Of the loss's numbers in float32, with the logits that they are computed from.
        "logits (--batch, --sequence, --tokenizer)": tokens * model.vocabulary * (model.element_bytes + 4),
    }


def _require_whole_steps(plan: Plan) -> None:
    """Raise UsageError for a plan whose stacks cannot choose a wire by measuring, or a schedule."""
    replicas = any(segment.tp != plan.stage_ranks for stage in plan.stages for segment in stage.segments)
    if len(plan.stages) > 1 or plan.micro_batches > 1 or replicas:
        raise UsageError(
            f"wire_dtype {AUTO_LOSSY!r} is not for a run of several stages, replicas or micro-batches; give one of "
            f"{', '.join(WIRES)}"
        )


def _require_averages(config: TrainConfig, plan: Plan) -> None:
    """Raise UsageError unless gradients are averaged over data-parallel ranks, and by collectives that quantise."""
    if plan.experts is not None:
        raise UsageError(
            f"gradient_wire {config.gradient_wire!r} is not for the built-in GPT with experts; leave out "
            "--gradient-wire, or --experts"
        )
    if all(segment.tp == plan.stage_ranks for stage in plan.stages for segment in stage.segments):
        raise UsageError(
            f"gradient_wire {config.gradient_wire!r}: there are no data-parallel ranks; give --dp, or leave it out"
        )
