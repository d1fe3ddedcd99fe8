"""A training run as a plan says: the configuration that fits it, and what can be checked before any rank starts.

A plan comes from the planner, or from the degrees that a configuration asks for.
"""

from __future__ import annotations

import itertools
import os

from oases.errors import UsageError
from oases.parallel.parts import require_runnable
from oases.plans.plan import Plan, Segment, Stage, read_plan
from oases.plans.shape import ModelShape
from oases.schedule import GENERATORS
from oases.schedule.pipeline import chunks_of
from oases.train.config import TrainConfig, config_for, require_bytes, sizes_of
from oases.train.data import Corpus
from oases.train.fit import require_fit

__all__ = ["asked_for", "by_hand", "check", "config_for", "read_plan", "require_fit"]


def asked_for(config: TrainConfig, ranks: int) -> Plan | None:
    """The plan that a configuration asks for in a run of so many ranks: the one it names, or one of its degrees.

    None where all ranks are one tensor-parallel group and a batch is one pass, and where there are experts.
    UsageError where it cannot be.
    """
    if config.experts:
        return None
    if config.plan is not None:
        return read_plan(config.plan)
    tensor = config.degrees.tensor_of(ranks)
    return by_hand(config, tensor) if config.is_planned else None


def by_hand(config: TrainConfig, tensor: int) -> Plan:
    """A plan of the configuration's degrees without a profile: layers spread evenly, one schedule for all.

    tensor: the tensor-parallel degree. Of a number of layers that does not divide, the last stage, which has the
    head, has the fewer. UsageError for what cannot be executed: stages more than layers, micro-batches fewer than
    stages, a batch that does not divide, a schedule that is no generator's name.
    """
    config.require_degree(tensor)
    degrees, (name, _, count) = config.degrees, config.schedule.partition("@")
    if name not in GENERATORS or (count and not count.isdecimal()):
        raise UsageError(
            f"schedule {config.schedule!r} is not for a run of several stages, replicas or micro-batches; give "
            f"one of {', '.join(sorted(GENERATORS))}"
        )
    sub_batches = int(count[:9]) if count else config.sub_batches
    chunks = chunks_of(config.pipeline_schedule)
    num_parts = degrees.pipeline * chunks
    if num_parts > config.layers:
        each = f", each with {chunks} parts of the model," if chunks > 1 else ""
        raise UsageError(
            f"{degrees}: {degrees.pipeline} stages{each} are more than the {config.layers} layers; give fewer stages "
            "or more --layers"
        )
    share = degrees.data * config.micro_batches
    if config.batch % share:
        raise UsageError(
            f"a batch of {config.batch} does not divide into {config.micro_batches} micro-batches for each of "
            f"{degrees.data} replicas; give a multiple of {share} as --batch"
        )
    if config.batch // share < sub_batches:
        raise UsageError(
            f"{config.batch // share} samples of a micro-batch on a replica cannot be cut into {sub_batches} "
            f"sub-batches; raise --batch to {sub_batches * share}, or lower --sub-batches or --micro-batches"
        )
    cuts = [-(-config.layers * part // num_parts) for part in range(num_parts + 1)]
    layers = [last - first for first, last in itertools.pairwise(cuts)]
    again = config.recompute == "full"
    segments = [
        Segment(2 * count, tensor, name, sub_batches, count if again else 0, config.sequence_parallel)
        for count in layers
    ]
    plan = Plan(
        model=ModelShape(
            config.hidden, config.layers, config.heads, config.sequence, config.rows, dtype=config.precision
        ),
        world=degrees.data * degrees.pipeline * tensor,
        ranks_per_node=degrees.data * degrees.pipeline * tensor,
        global_batch=config.batch,
        micro_batches=config.micro_batches,
        stages=tuple(Stage(tuple(segments[stage :: degrees.pipeline])) for stage in range(degrees.pipeline)),
        zero=config.zero,
        fsdp=config.fsdp,
        pipeline=config.pipeline_schedule,
    )
    require_runnable(plan)
    return plan


def check(config: TrainConfig, plan: Plan) -> Corpus:
    """Everything that can be known before any rank starts; returns the corpus."""
    require_fit(config, plan)
    require_runnable(plan)
    if config.device == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ:
        require_bytes(_bytes_of(plan), f"the plan over its {plan.world} ranks", "take a smaller model")
    return config.check_files(sizes_of(config) | {"vocabulary": plan.model.vocabulary})


def _bytes_of(plan: Plan) -> int:
    """Of weights, gradients and AdamW's two moments of all ranks."""
    total, number = 0.0, 0
    for segment in (segment for part in plan.parts for segment in part.segments):
        replicas = plan.stage_ranks // segment.tp
        copies = 4 / replicas if plan.fsdp else 2 + 2 / (replicas if plan.zero else 1)
        for _ in range(segment.num_blocks):
            total += copies * plan.stage_ranks * plan.model.block_parameters(plan.model.kind_of(number), segment.tp)
            number += 1
    return round(total * plan.model.element_bytes)
