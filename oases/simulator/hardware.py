"""Hardware model of a cluster: devices, links, and measured block times if there are any."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf, log
from typing import Annotated

from oases.core.dtypes import QUANTISED, WIRE_BYTES
from oases.core.schedule import Schedule
from oases.errors import UsageError
from oases.limits import short
from oases.plans.gpt import gpt, kind_called
from oases.plans.layered import Kind, Model, Work
from oases.plans.shape import ELEMENT_BYTES, KINDS
from oases.records import Check, Inline, Name, Number, OneOf, Within
from oases.simulator.cost import BlockBytes, BlockTimes, Seconds, StackCosts
from oases.simulator.links import USUAL_RATES, LinkModel, Rate
from oases.simulator.program import Contention

Count = Annotated[int, Number(least=1)]
Samples = Annotated[float, Number("samples", above=0)]
DType = Annotated[str, OneOf(tuple(ELEMENT_BYTES))]
_TRACED = re.compile(r"\S+ (block|embedding|head), \d+ FLOPs, \d+ bytes, \d+ parameters")


def _kind_fault(kind: str) -> str:
    """Error for a kind that is neither a GPT's block nor the name of a traced model's block or end."""
    return "" if kind in KINDS or _TRACED.fullmatch(kind) else f"is {short(kind)}; known are {', '.join(KINDS)}"


@dataclass(frozen=True)
class Device:
    """Accelerator, or one rank's share of a CPU. flops_per_second: achieved by large matmuls, by dtype.

    update_seconds: of torch's AdamW for a float32 parameter; 0: unknown. packing_bytes_per_second: of float32 numbers
    that are quantised and read back; 0: unknown.
    """

    name: str
    memory_bytes: Annotated[int, Number("bytes", least=1, usual=(2**20, inf, "not gigabytes"))]
    flops_per_second: Mapping[DType, Annotated[float, Number("FLOP/s", above=0, usual=(1e6, inf, "not TFLOP/s"))]]
    bytes_per_second: Rate
    launch_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    packing_bytes_per_second: Annotated[float, Number("bytes per second", least=0, usual=USUAL_RATES)] = 0.0

    def __post_init__(self) -> None:
        if not self.flops_per_second:
            raise UsageError("flops_per_second must be an object from dtype to FLOP/s, such as {'float32': 1e13}")

    def packing_seconds(self, collective: str, num_bytes: float, ranks: int, sent: float) -> float:
        """Seconds to quantise float32 numbers of `num_bytes` for a collective, and to sum and read them back.

        In an all-reduce a rank quantises the parts of the others and the sum of its own, and reads back parts of its
        own from the others and all sums. By the rate of memory where its own is unknown; sent: bytes.
        """
        scattered, gathered = 1 - 1 / ranks, 0.5 + 0.5 / ranks
        whole = scattered + gathered
        share = {"reduce_scatter": scattered, "all_gather": gathered}.get(collective, whole)
        if self.packing_bytes_per_second:
            return share * num_bytes / self.packing_bytes_per_second
        return share / whole * 2 * (num_bytes + sent) / self.bytes_per_second

    def rate(self, dtype: str) -> float:
        """FLOP/s in this dtype. Raises UsageError if it is unknown."""
        if dtype not in self.flops_per_second:
            raise UsageError(
                f"device {self.name!r}: flops_per_second holds no {dtype}; it holds "
                + ", ".join(self.flops_per_second)
            )
        return self.flops_per_second[dtype]


@dataclass(frozen=True, slots=True)
class MeasuredBlock:
    """Times of one block on one rank, for a sub-batch of `samples`.

    kind: attention or mlp of a GPT, or the name of a traced model's block or end (`Model.block_name`, `end_name`).
    """

    kind: Annotated[str, Check(_kind_fault)]
    hidden: Count
    heads: Count
    sequence: Count
    dtype: DType
    tp: Count
    samples: Samples
    times: Annotated[BlockTimes, Inline("_seconds")]

    def __post_init__(self) -> None:
        # Heads of a traced model's block need not divide its width.
        if self.of_gpt and (self.hidden % self.heads or self.heads % self.tp):
            raise UsageError(
                f"hidden {self.hidden} in {self.heads} heads over tp {self.tp} does not divide; one of the three is "
                "wrong"
            )

    @property
    def of_gpt(self) -> bool:
        """Whether it is a block of the built-in GPT."""
        return self.kind in KINDS

    @property
    def of(self) -> tuple[Model, Kind]:
        """A GPT of one layer with this block, and the block's kind there."""
        return gpt(self.hidden, 1, self.heads, self.sequence, dtype=self.dtype), kind_called(self.kind)

    @property
    def key(self) -> tuple[str, int, int, int, str, int, float]:
        """Identity among measurements."""
        return self.kind, self.hidden, self.heads, self.sequence, self.dtype, self.tp, self.samples


@dataclass(frozen=True, slots=True)
class MeasuredOverhead:
    """Seconds of a pass of a stack outside its ops: splitting and joining the batch, returning gradients.

    samples: of the whole batch, in `sub_batches` sub-batches, over `layers` layers.
    """

    hidden: Count
    heads: Count
    sequence: Count
    dtype: DType
    tp: Count
    layers: Count
    samples: Samples
    sub_batches: Count
    forward: Annotated[Seconds, Name("forward_seconds")]
    backward: Annotated[Seconds, Name("backward_seconds")]

    @property
    def key(self) -> tuple[int, int, int, str, int, int, float, int]:
        """Identity among measurements."""
        return (
            self.hidden, self.heads, self.sequence, self.dtype, self.tp, self.layers, self.samples, self.sub_batches,
        )  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """Devices, ranks per node, intra-node and inter-node links, and measured blocks."""

    name: str
    device: Device
    ranks_per_node: Annotated[int, Number(least=1)]
    node: Annotated[LinkModel, Within("links")]
    cluster: Annotated[LinkModel, Within("links")]
    blocks: tuple[MeasuredBlock, ...] = ()
    about: str = ""
    date: str = ""
    overheads: tuple[MeasuredOverhead, ...] = ()

    def link_of(self, tp: int, stride: int = 1) -> str:
        """Link of a group of `tp` ranks, `stride` apart: "node", or "cluster" if the group spans nodes."""
        return "node" if tp * stride <= self.ranks_per_node else "cluster"

    def link(self, name: str) -> LinkModel:
        """The link named "node" or "cluster"."""
        return self.node if name == "node" else self.cluster

    def collective_seconds(self, collective: str, ranks: int, num_bytes: float, stride: int = 1) -> float:
        """Seconds of a collective of `ranks` ranks, `stride` apart; all such groups communicate at once.

        Groups that span nodes share the node's link: as many as there are ranks of different groups on a node.
        """
        if self.link_of(ranks, stride) == "node":
            return self.node.seconds(collective, ranks, num_bytes)
        return self.cluster.seconds(collective, ranks, num_bytes, sharing=min(stride, self.ranks_per_node))

    def message_seconds(self, num_bytes: float, source: int, target: int, ranks: int) -> float:
        """Seconds of messages of `num_bytes` from `ranks` ranks, `source` the first, to as many from `target` on.

        Those between nodes share the node's link.
        """
        per_node = self.ranks_per_node
        crossing = sum((source + rank) // per_node != (target + rank) // per_node for rank in range(ranks))
        if not crossing:
            return self.node.seconds("send", 2, num_bytes)
        return self.cluster.seconds("send", 2, num_bytes, sharing=min(crossing, per_node))

    def block_times(self, model: Model, kind: Kind, tp: int, samples: float) -> BlockTimes:
        """Times of one block's ops for a sub-batch of `samples`.

        Measured for models that the profile holds. For others: from the device's rates, scaled as the measured block
        with the nearest number of FLOPs differs from them.
        """
        own = self._measured.get(_shape(model, model.block_name(kind), tp))
        if own is not None:
            return _between(own, samples)
        times = self._by_rates(model, kind, tp, samples)
        if not model.is_gpt:
            flops = sum(model.matmul_flops(kind, tp, samples))
            return times.scaled(self._correction(flops)) if self._ratios else times
        if self.blocks:
            raise UsageError(
                f"profile {self.name!r} holds no {model.block_name(kind)} block of hidden {model.hidden}, "
                f"{model.heads} heads, sequence {model.sequence}, {model.dtype}, tp {tp}; it holds "
                f"{self.measured_shapes()}: measure it with oases profile"
            )
        return times

    def end_times(self, model: Model, before: int, tp: int, samples: float) -> tuple[float, float] | None:
        """Seconds of the forward and the backward pass of what a model computes between lists of layers.

        before: the layer behind it, or the number of layers for what follows the last. None where it was not
        measured.
        """
        measured = self._measured.get(_shape(model, model.end_name(before), tp))
        if measured is None:
            return None
        times = _between(measured, samples)
        return times.forward, times.backward

    def _correction(self, flops: float) -> float:
        """Measured over predicted time of the measured block with the nearest number of FLOPs."""
        _, ratio = min(self._ratios, key=lambda each: abs(each[0] - log(max(1.0, flops))))
        return ratio

    @cached_property
    def _ratios(self) -> list[tuple[float, float]]:
        """(log of FLOPs, measured over predicted seconds of both passes) of each measured block."""
        found = []
        for block in self.blocks:
            if not block.of_gpt:
                continue
            model, kind = block.of
            predicted = self._by_rates(model, kind, block.tp, block.samples).both_passes
            flops = sum(model.matmul_flops(kind, block.tp, block.samples))
            found.append((log(max(1.0, flops)), block.times.both_passes / predicted))
        return found

    def pass_overhead(
        self, model: Model, tp: int, samples: float, sub_batches: int, layers: float | None = None
    ) -> tuple[float, float]:
        """Seconds outside the ops of the forward and of the backward pass of a stack of `layers` pairs of blocks.

        From the measurement nearest in sub-batches, then in samples. Most of it is work per block, sub-batch and
        parameter and little per sample, so it is scaled with the layers, and models of other widths than a measured
        GPT's have that of its degree. Zeros if nothing was measured.
        """
        shape = (model.hidden, model.heads, model.sequence, model.dtype, tp)
        found = [o for o in self.overheads if (o.hidden, o.heads, o.sequence, o.dtype, o.tp) == shape]
        if not found and not model.is_gpt:
            found = [o for o in self.overheads if o.tp == tp]
        if not found:
            return 0.0, 0.0
        nearest = min(found, key=lambda o: (abs(o.sub_batches - sub_batches), abs(o.samples - samples)))
        scale = (model.num_blocks / 2 if layers is None else layers) / nearest.layers
        return scale * nearest.forward, scale * nearest.backward

    def measured(self, model: Model, kind: Kind, tp: int) -> bool:
        """Whether this block was measured at degree `tp`."""
        return _shape(model, model.block_name(kind), tp) in self._measured

    def degrees_of(self, model: Model) -> set[int]:
        """Degrees at which blocks of a model were measured."""
        name = model.block_name(model.kind_of(0))
        return {block.tp for block in self.blocks if _shape(model, name, block.tp) == block.key[:-1]}

    def has_block(self, model: Model, tp: int) -> bool:
        """Whether block times of this model at degree `tp` are available."""
        if model.is_gpt and self.blocks:
            return all(self.measured(model, kind, tp) for kind in model.layer_kinds[0])
        return tp in (self.degrees_of(model) or {tp})

    def measured_shapes(self) -> str:
        """Description of the measured shapes."""
        shapes = sorted({(b.hidden, b.heads, b.sequence, b.dtype, b.tp) for b in self.blocks})
        some = "; ".join(f"hidden {h}, {n} heads, sequence {s}, {d}, tp {t}" for h, n, s, d, t in shapes[:6])
        return some + (f" and {len(shapes) - 6} more" if len(shapes) > 6 else "")

    @cached_property
    def _measured(self) -> dict[tuple[str, int, int, int, str, int], list[MeasuredBlock]]:
        found: dict[tuple[str, int, int, int, str, int], list[MeasuredBlock]] = {}
        for block in sorted(self.blocks, key=lambda block: block.samples):
            key = (block.kind, block.hidden, block.heads, block.sequence, block.dtype, block.tp)
            found.setdefault(key, []).append(block)
        return found

    def _by_rates(self, model: Model, kind: Kind, tp: int, samples: float) -> BlockTimes:
        return _of_work(model.work(kind, tp, samples), self.device.rate(model.dtype), self.device)


def _of_work(work: Work, rate: float, device: Device) -> BlockTimes:
    """Times of a block: matmuls by the rate of FLOPs, other ops by the bytes that they move."""
    column, core, row = work.column / rate, work.core / rate, work.row / rate
    memory, launch = device.bytes_per_second, device.launch_seconds
    combined = work.combined / memory
    forward = column + core + row + work.moved / memory + work.ops * launch
    return BlockTimes(
        forward=forward, forward_unkept=forward, combine=combined + 2 * launch, recompute=forward - row - launch,
        recompute_whole=forward, combine_backward=combined / 2 + launch,
        backward=column + 2.5 * core + row + work.moved_backward / memory + work.ops_backward * launch,
        weight_gradient=column + row + work.moved_weights / memory + 2 * launch,
    )  # fmt: skip


def merge(first: Hardware, second: Hardware) -> Hardware:
    """`first` with the blocks and overheads of `second`, which replace those of the same shape and size.

    Raises UsageError for different devices, whose times cannot be mixed in one profile.
    """
    if first.device.name != second.device.name:
        raise UsageError(
            f"profile {first.name!r} is of device {first.device.name!r}, but this is {second.device.name!r}; "
            "write a separate profile"
        )
    return replace(
        first,
        date=second.date or first.date,
        blocks=tuple({block.key: block for block in (*first.blocks, *second.blocks)}.values()),
        overheads=tuple({each.key: each for each in (*first.overheads, *second.overheads)}.values()),
    )


def _shape(model: Model, name: str, tp: int) -> tuple[str, int, int, int, str, int]:
    return name, model.hidden, model.heads, model.sequence, model.dtype, tp


def _between(points: Sequence[MeasuredBlock], samples: float) -> BlockTimes:
    """Times at `samples`: interpolated between measurements, extrapolated from the nearest two beyond them.

    Below the smallest measurement they are at least a quarter of the proportional time, so that noise cannot make
    them vanish.
    """
    if len(points) == 1 or samples == points[0].samples:
        return points[0].times.scaled(samples / points[0].samples)
    end = min(max(1, bisect_left([point.samples for point in points], samples)), len(points) - 1)
    low, high = points[end - 1], points[end]
    share = (samples - low.samples) / (high.samples - low.samples)

    def at(name: str) -> float:
        first, second = getattr(low.times, name), getattr(high.times, name)
        return max(first + share * (second - first), 0.25 * first * samples / low.samples)

    return BlockTimes(**{item.name: at(item.name) for item in fields(BlockTimes)})


def kept_along_sequence(model: Model, kind: Kind, tp: int, samples: float) -> int:
    """Bytes that the backward pass of one block needs under sequence parallelism, with its input.

    Of what every rank else holds in full it has a part, but for the gathered input of the matmuls.
    """
    kept, unit = model.kept_bytes(kind, tp, samples), model.unit_bytes(samples)
    whole = samples * sum(share.kept for share in model.block(kind).shares if share.ranks(tp) == 1)
    return kept - round(max(0.0, whole - unit) * (1 - 1 / tp))


def stack_costs(
    hardware: Hardware, model: Model, kinds: Sequence[Kind], tp: int, samples: float, schedule: Schedule,
    wire: str = "none",
) -> StackCosts:  # fmt: skip
    """Costs of each op of `schedule` on a stack of these blocks at degree `tp`, for `samples` samples.

    wire: dtype in which sums are sent; a smaller one than the model's is cast to before and from after each.
    Quantised numbers are made and summed by the thread that sends them, so that is a part of the collective. Under
    sequence parallelism the ops between reduce-scatter and all-gather work on a part of the sequence.
    """
    part = samples / schedule.num_sub_batches
    times = {kind: hardware.block_times(model, kind, tp, part) for kind in set(kinds)}
    unit = model.unit_bytes(part)
    sent = unit if wire == "none" else int(unit * WIRE_BYTES[wire] // model.element_bytes)
    link = hardware.link_of(tp)
    exchanges: tuple[float, ...] = ()
    exchange_link: tuple[str, Contention] | None = None
    if model.expert_parallel > 1:
        other = hardware.link_of(model.expert_parallel)
        exchange_link = None if other == link else (other, hardware.link(other).contention)
        tokens = [model.routed_bytes(kind, tp, part) * sent / unit for kind in kinds]
        exchanges = tuple(
            hardware.collective_seconds("all_to_all", model.expert_parallel, each) if each else 0.0 for each in tokens
        )
    names, packing = ("all_reduce", "reduce_scatter", "all_gather"), dict[str, float]()
    if wire == QUANTISED and tp > 1:
        numbers = unit * 4 / model.element_bytes
        packing = {name: hardware.device.packing_seconds(name, numbers, tp, sent) for name in names}
    if sent != unit and tp > 1 and not packing:
        cast = (unit + sent) / hardware.device.bytes_per_second + hardware.device.launch_seconds
        times = {kind: each.with_casts(cast) for kind, each in times.items()}
    if schedule.sequence_parallel:
        times = {
            kind: replace(each, combine=each.combine / tp, combine_backward=each.combine_backward / tp)
            for kind, each in times.items()
        }
    sizes = [BlockBytes(unit, model.kept_bytes(kind, tp, part)) for kind in kinds]
    if schedule.sequence_parallel:  # the first block gets the whole input
        sizes[1:] = [BlockBytes(unit, kept_along_sequence(model, kind, tp, part), unit // tp) for kind in kinds[1:]]
    return StackCosts(
        times=tuple(times[kind] for kind in kinds),
        collectives={name: hardware.collective_seconds(name, tp, sent) + packing.get(name, 0.0) for name in names},
        sizes=tuple(sizes),
        link=link,
        contention=hardware.link(link).contention,
        overhead=hardware.pass_overhead(model, tp, samples, schedule.num_sub_batches, len(kinds) / 2),
        exchanges=exchanges,
        exchange_link=exchange_link,
    )
