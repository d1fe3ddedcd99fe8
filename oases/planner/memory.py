"""Memory model of a rank: parameters, gradients, optimizer state, kept activations and in-flight tensors."""

from __future__ import annotations

from collections import Counter

from oases.errors import UsageError
from oases.plans.layered import Kind, Model
from oases.plans.plan import Plan, Segment
from oases.plans.shape import GRADIENT_BYTES, REDUCED_UNITS
from oases.simulator.hardware import Hardware, kept_along_sequence

CONTEXT_BYTES = 512 << 20
"""Bytes of a CUDA context, with torch's loaded kernels and the workspaces of cuBLAS and attention."""
COMMUNICATORS = 10
"""Communicators of a rank, at most: of the run, two tensor-parallel degrees, data, weights, ends, four lanes."""
COMMUNICATOR_BYTES = 48 << 20
"""NCCL's buffers of one: about 6 MiB for each of the 8 channels that `nccl_options` allows."""
FRAGMENTED = 0.04
"""Fraction of a device's memory that the caching allocator holds in pieces too small to be used again."""


def head_bytes(model: Model, tp: int, samples: float) -> int:
    """Bytes of logits, their fp32 softmax and their gradient on one of `tp` ranks."""
    return round(model.logits(samples, tp) * (2 * model.element_bytes + 4))


def kept_bytes(model: Model, kind: Kind, tp: int, samples: float, *, recomputed: bool, along: bool = False) -> int:
    """Bytes of activations that a block keeps for its backward pass, for all samples of a micro-batch.

    along: with sequence parallelism.
    """
    unit = model.unit_bytes(samples)
    if recomputed:
        return unit + unit // tp * along
    return kept_along_sequence(model, kind, tp, samples) if along else model.kept_bytes(kind, tp, samples)


def in_flight_bytes(model: Model, tp: int, samples: float, sub_batches: int) -> int:
    """Bytes besides kept activations: partial sums and gradients in flight, and one recomputed block."""
    part = samples / sub_batches
    largest = max(model.kept_bytes(kind, tp, part) for kinds in model.layer_kinds for kind in kinds)
    return 2 * model.unit_bytes(samples) + largest


def divided(model: Model, kind: Kind, tp: int) -> list[tuple[int, int]]:
    """(parameters on a rank, ranks that they are divided over) of a block: all but balanced experts, and these."""
    experts = model.expert_parameters(kind)
    dense = (model.block_parameters(kind, tp) - experts, tp)
    return [dense, (experts, model.expert_parallel)] if experts else [dense]


def stage_parameters(plan: Plan, number: int) -> list[tuple[int, int]]:
    """(parameters per rank, replicas) of each segment of a stage, its experts apart, and of the embeddings."""
    model, parts = plan.model, []
    for first, segment in plan.placed(number):
        counts = Counter[int]()
        for block in range(first, first + segment.num_blocks):
            for count, degree in divided(model, model.kind_of(block), segment.tp):
                counts[degree] += count
        parts += [(count, plan.stage_ranks // degree) for degree, count in counts.items()]
    outside = end_parameters(plan, number)
    if outside:
        parts.append((outside, plan.stage_ranks // embedding_segment(plan).tp))
    return parts


def end_parameters(plan: Plan, number: int) -> int:
    """Parameters per rank of a stage outside of its layers: embeddings, last norm and head."""
    tp = embedding_segment(plan).tp
    parts = plan.parts_of(number)
    found = sum(plan.model.end_parameters(each.start, each.stop, tp) for each in map(plan.layers_of, parts))
    both = parts[0].number == 0 and len(parts) > 1 and parts[-1].number == len(plan.parts) - 1
    return found - _counted_twice(plan.model, tp) * both


def shared_parameters(plan: Plan, number: int) -> int:
    """Parameters per rank of a table of tokens that the stages of the first and the last part have, on either.

    Their gradients are summed over both. 0 on other stages, and where one stage has both parts.
    """
    if number not in plan.end_stages or len(plan.end_stages) == 1:
        return 0
    return _counted_twice(plan.model, embedding_segment(plan).tp)


def _counted_twice(model: Model, tp: int) -> int:
    """Parameters per rank outside of the layers that count with the first layer and with the last one."""
    ends = [(0, 1), (1, model.layers - 1), (model.layers - 1, model.layers)]
    apart = sum(model.end_parameters(first, last, tp) for first, last in ends if first < last)
    return apart - model.end_parameters(0, model.layers, tp)


def embedding_segment(plan: Plan) -> Segment:
    """The segment whose degree the embedding and the head have."""
    return plan.stages[0].segments[0]


def stage_state_bytes(plan: Plan, number: int) -> int:
    """Bytes that a rank of a stage holds during a step: its state, and with fsdp or zero what is whole meanwhile."""
    sizes = stage_parameters(plan, number)
    states = sum(plan.model.state_bytes(count, replicas, zero=plan.zero, fsdp=plan.fsdp) for count, replicas in sizes)
    smallest = min(segment.tp for segment in plan.stages[number].segments)
    if plan.stage_ranks == smallest or not (plan.zero or plan.fsdp):
        return states
    return states + sharding_bytes(plan.model, smallest, end_parameters(plan, number), fsdp=plan.fsdp)


def sharding_bytes(model: Model, tp: int, ends: int, *, fsdp: bool) -> int:
    """Bytes of weights and gradients that are whole for a while where replicas share state.

    ends: parameters of the stage outside of layers. With fsdp the weights of two blocks, one of them prefetched,
    and of the ends are whole. Gradients, in float32, are copied and sent block by block, those of the ends last,
    after those of all blocks.
    """
    blocks = [model.block_parameters(kind, tp) for kinds in model.layer_kinds for kind in kinds]
    layers = (sum(model.block_parameters(kind, tp) for kind in kinds) for kinds in model.layer_kinds)
    copies = max((REDUCED_UNITS + 2) * max(blocks) + ends, REDUCED_UNITS * max(blocks) + 2 * ends)
    return copies * GRADIENT_BYTES + fsdp * (max(layers) + ends) * model.element_bytes


def usable_bytes(hardware: Hardware, budget: int | None = None) -> int:
    """Bytes that a plan may use: the budget, or the device's without those of the runtime and of fragments.

    UsageError where these leave nothing.
    """
    if budget is not None:
        return budget
    runtime, whole = CONTEXT_BYTES + COMMUNICATORS * COMMUNICATOR_BYTES, hardware.device.memory_bytes
    usable = int((1 - FRAGMENTED) * whole) - runtime
    if usable <= 0:
        raise UsageError(
            f"profile {hardware.name!r}: a device of {whole / 2**30:.1f} GiB has no memory beside the runtime's "
            f"{runtime / 2**30:.1f} GiB; say how much may be filled (--memory)"
        )
    return usable
