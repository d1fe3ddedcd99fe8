"""Costs of embedding, head and loss.

They have the tensor-parallel degree of the plan's first segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oases.planner.memory import head_bytes
from oases.plans.layered import Model
from oases.simulator.hardware import Hardware
from oases.simulator.program import Compute, Instruction, Start, Wait


def exposed(name: str, link: str, seconds: float) -> Iterator[Instruction]:
    """An exposed collective: started and waited for at once; empty if it takes no time."""
    if seconds:
        yield Start(name, link, seconds)
        yield Wait(name)


def embedding(
    hardware: Hardware,
    model: Model,
    tp: int,
    samples: float,
    prefix: str,
    layers: tuple[int, int] | None = None,
) -> Iterator[Instruction]:
    """Forward pass of what lies before layers [first, last) on one of `tp` ranks: embeddings. None: all layers."""
    first, last = layers or (0, model.layers)
    measured = _measured(hardware, model, tp, samples, (first, last))
    yield from (Compute(f"{prefix}embedding before layer {at}", times[0]) for at, times in measured.items())
    for each in model.outside_of(first, last):
        if each.before == model.layers or each.before in measured:
            continue
        name = f"{prefix}embedding" + (f" before layer {each.before}" if each.before else "")
        moved = sum(share.moved / share.ranks(tp) for share in each.shares)
        flops = sum(share.column / share.ranks(tp) for share in each.shares)
        yield Compute(name, samples * (moved / hardware.device.bytes_per_second + flops / _rate(hardware, model)))
        tables = [share.parameters for share in each.shares if share.ranks(tp) > 1]
        if tables:  # a table that is smaller than what is looked up in it is gathered
            sent = min(model.unit_bytes(samples), sum(tables) * model.element_bytes)
            yield from exposed(name, hardware.link_of(tp), hardware.collective_seconds("all_reduce", tp, sent))


def embedding_backward(
    hardware: Hardware, model: Model, tp: int, samples: float, prefix: str, layers: tuple[int, int]
) -> Iterator[Instruction]:
    """Backward pass of `embedding`: the gradients of tables are zeroed, and those of its results added to them."""
    rate, measured = hardware.device.bytes_per_second, _measured(hardware, model, tp, samples, layers)
    seconds = sum(backward for _, backward in measured.values())
    for each in model.outside_of(*layers):
        if each.before != model.layers and each.before not in measured:
            shares = [(share, share.ranks(tp)) for share in each.shares]
            tables = sum(share.parameters / ranks for share, ranks in shares) * model.element_bytes
            moved = samples * sum(share.moved / ranks for share, ranks in shares)
            flops = samples * sum(share.column / ranks for share, ranks in shares)
            seconds += (tables + moved) / rate + 2 * flops / _rate(hardware, model)
    if seconds:
        yield Compute(f"{prefix}embedding backward", seconds)


def _measured(
    hardware: Hardware, model: Model, tp: int, samples: float, layers: tuple[int, int]
) -> dict[int, tuple[float, float]]:
    """Measured seconds of both passes of what lies before each list of layers that begins in layers [first, last)."""
    found = {
        at: hardware.end_times(model, at, tp, samples) for at in model.borders[:-1] if layers[0] <= at < layers[1]
    }
    return {at: times for at, times in found.items() if times is not None}


def _rate(hardware: Hardware, model: Model) -> float:
    return hardware.device.rate(model.dtype)


def head(
    hardware: Hardware, model: Model, tp: int, samples: float, prefix: str, *, backward: bool
) -> Iterator[Instruction]:
    """Logits and loss, or their backward pass: two matmuls and the all-reduce of the input gradient."""
    name = f"{prefix}head {'backward' if backward else 'forward'}"
    flops = model.head_flops(samples, tp)
    held = head_bytes(model, tp, samples)
    measured = hardware.end_times(model, model.layers, tp, samples)
    if measured is not None:
        yield Compute(name, measured[backward], *((0, held) if backward else (held, 0)))
        return
    matmuls = 2 if backward else 1
    seconds = matmuls * flops / _rate(hardware, model) + held / hardware.device.bytes_per_second
    yield Compute(name, seconds, *((0, held) if backward else (held, 0)))
    if backward:
        seconds = hardware.collective_seconds("all_reduce", tp, model.unit_bytes(samples))
        yield from exposed(name, hardware.link_of(tp), seconds)


def ends_seconds(hardware: Hardware, model: Model, tp: int, samples: float) -> tuple[float, float]:
    """Seconds of a micro-batch outside the blocks: with the first model part, and with the last."""
    last = [op for late in (False, True) for op in head(hardware, model, tp, samples, "", backward=late)]
    return _seconds(embedding(hardware, model, tp, samples, "")), _seconds(last)


def _seconds(instructions: Iterable[Instruction]) -> float:
    return sum(each.seconds for each in instructions if isinstance(each, Compute | Start))
