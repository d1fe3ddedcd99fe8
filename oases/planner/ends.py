"""Embedding, head and loss: the work of the first and last stage besides their blocks.

They have the tensor-parallel degree of the plan's first segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oases.planner.memory import head_bytes
from oases.plans.layered import LayeredModel, Model
from oases.simulator.hardware import Hardware
from oases.simulator.program import Compute, Instruction, Start, Wait


def exposed(name: str, link: str, seconds: float) -> Iterator[Instruction]:
    """An exposed collective: started and waited for at once; empty if it takes no time."""
    if seconds:
        yield Start(name, link, seconds)
        yield Wait(name)


def embedding(
    hardware: Hardware, model: Model, tp: int, samples: float, prefix: str, layers: tuple[int, int] | None = None
) -> Iterator[Instruction]:
    """Forward pass of what lies before layers [first, last) on one of `tp` ranks: embeddings. None: all layers."""
    first, last = layers or (0, model.layers)
    if isinstance(model, LayeredModel):
        for each in model.outside_of(first, last):
            if each.before == model.layers:
                continue
            name = f"{prefix}embedding" + (f" before layer {each.before}" if each.before else "")
            moved = sum(share.moved / share.ranks(tp) for share in each.shares)
            flops = sum(share.column / share.ranks(tp) for share in each.shares)
            yield Compute(name, samples * (moved / hardware.device.bytes_per_second + flops / _rate(hardware, model)))
            if any(share.ranks(tp) > 1 for share in each.shares):
                seconds = hardware.collective_seconds("all_reduce", tp, model.unit_bytes(samples))
                yield from exposed(name, hardware.link_of(tp), seconds)
        return
    if first:
        return
    unit = model.unit_bytes(samples)
    table = model.vocabulary * model.hidden * model.element_bytes
    yield Compute(f"{prefix}embedding", 3 * unit / hardware.device.bytes_per_second)
    seconds = hardware.collective_seconds("all_reduce", tp, min(unit, table))
    yield from exposed(f"{prefix}embedding", hardware.link_of(tp), seconds)


def _rate(hardware: Hardware, model: Model) -> float:
    return hardware.device.rate(model.dtype)


def head(
    hardware: Hardware, model: Model, tp: int, samples: float, prefix: str, *, backward: bool
) -> Iterator[Instruction]:
    """Logits and loss, or their backward pass: two matmuls and the all-reduce of the input gradient."""
    name = f"{prefix}head {'backward' if backward else 'forward'}"
    flops = model.head_flops(samples, tp)
    held = head_bytes(model, tp, samples)
    matmuls = 2 if backward else 1
    seconds = matmuls * flops / _rate(hardware, model) + held / hardware.device.bytes_per_second
    yield Compute(name, seconds, *((0, held) if backward else (held, 0)))
    if backward:
        seconds = hardware.collective_seconds("all_reduce", tp, model.unit_bytes(samples))
        yield from exposed(name, hardware.link_of(tp), seconds)


def ends_seconds(hardware: Hardware, model: Model, tp: int, samples: float) -> tuple[float, float]:
    """Seconds of a micro-batch outside the blocks: on the first stage, and on the last."""
    last = [op for late in (False, True) for op in head(hardware, model, tp, samples, "", backward=late)]
    return _seconds(embedding(hardware, model, tp, samples, "")), _seconds(last)


def _seconds(instructions: Iterable[Instruction]) -> float:
    return sum(each.seconds for each in instructions if isinstance(each, Compute | Start))
