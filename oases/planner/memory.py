"""Memory model of a rank: parameters, gradients, optimizer state, kept activations and in-flight tensors."""

from __future__ import annotations

from oases.plans.layered import Model
from oases.plans.plan import Plan, Segment
from oases.plans.shape import AnyKind
from oases.simulator.hardware import Hardware

USABLE = 0.92
"""Fraction of a device's memory that a plan may use; the rest is for the runtime, the allocator and libraries."""


def head_bytes(model: Model, tp: int, samples: float) -> int:
    """Bytes of logits, their fp32 softmax and their gradient on one of `tp` ranks."""
    return round(model.logits(samples, tp) * (2 * model.element_bytes + 4))


def kept_bytes(model: Model, kind: AnyKind, tp: int, samples: float, *, recomputed: bool) -> int:
    """Bytes of activations that a block keeps for its backward pass, for all samples of a micro-batch."""
    return model.unit_bytes(samples) if recomputed else model.kept_bytes(kind, tp, samples)


def in_flight_bytes(model: Model, tp: int, samples: float, sub_batches: int) -> int:
    """Bytes besides kept activations: partial sums and gradients in flight, and one recomputed block."""
    part = samples / sub_batches
    largest = max(model.kept_bytes(kind, tp, part) for kinds in model.layer_kinds for kind in kinds)
    return 2 * model.unit_bytes(samples) + largest


def stage_parameters(plan: Plan, number: int) -> list[tuple[int, int]]:
    """(parameters per rank, replicas) of each segment of a stage and of the embeddings."""
    model, parts = plan.model, []
    for first, segment in plan.placed(number):
        numbers = range(first, first + segment.num_blocks)
        count = sum(model.block_parameters(model.kind_of(b), segment.tp) for b in numbers)
        parts.append((count, plan.stage_ranks // segment.tp))
    outside = end_parameters(plan, number)
    if outside:
        parts.append((outside, plan.stage_ranks // embedding_segment(plan).tp))
    return parts


def end_parameters(plan: Plan, number: int) -> int:
    """Parameters per rank of a stage outside of its layers: embeddings, last norm and head."""
    tp = embedding_segment(plan).tp
    layers = (plan.layers_of(part) for part in plan.parts_of(number))
    return sum(plan.model.end_parameters(each.start, each.stop, tp) for each in layers)


def embedding_segment(plan: Plan) -> Segment:
    """The segment whose degree the embedding and the head have."""
    return plan.stages[0].segments[0]


def stage_state_bytes(plan: Plan, number: int) -> int:
    """Bytes that a rank of a stage always holds; with fsdp also the gathered weights in use.

    Those are the weights of two blocks, one of them prefetched, and the embedding.
    """
    sizes = stage_parameters(plan, number)
    states = sum(plan.model.state_bytes(count, replicas, zero=plan.zero, fsdp=plan.fsdp) for count, replicas in sizes)
    if not plan.fsdp:
        return states
    smallest = min(segment.tp for segment in plan.stages[number].segments)
    layers = (sum(plan.model.block_parameters(kind, smallest) for kind in kinds) for kinds in plan.model.layer_kinds)
    return states + (max(layers) + end_parameters(plan, number)) * plan.model.element_bytes


def usable_bytes(hardware: Hardware, budget: int | None = None) -> int:
    """Bytes that a plan may use: the budget, or the usable fraction of the device."""
    return budget if budget is not None else int(USABLE * hardware.device.memory_bytes)
