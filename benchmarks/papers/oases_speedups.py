"""The speed-ups of the Oases paper's evaluation (arXiv 2305.16121, section 5), simulated.

    python benchmarks/papers/oases_speedups.py

Batch sizes, degrees and links of those runs are not published, so one set of assumptions, `Assumptions`, represents
all seven models. Rates of device and network come from the published times of smaller blocks, of 32 RTX 3090, 4 per
server, fp32, sequence 1024, heads of 64. The speed-ups are read off the paper's charts, to 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp, inf, log

import numpy as np

from oases.core.schedule import generate
from oases.plans.gpt import gpt, kind_called
from oases.plans.layered import Model
from oases.plans.shape import KINDS
from oases.simulator.cost import BlockBytes, BlockTimes, StackCosts
from oases.simulator.hardware import Device, Hardware
from oases.simulator.links import LinkModel, Sample, fit_link
from oases.simulator.program import Contention
from oases.simulator.simulate import simulate

WORLD, PER_SERVER = 32, 4
MEMORY_BYTES = 24268 * 2**20
USABLE = 0.95
PARAMETER_BYTES = 16
"""Weight, gradient and Adam's two moments in fp32."""

BLOCKS_MS: tuple[tuple[int, int, int, float, float, float, float], ...] = (
    (1024, 4, 1, 0.888, 1.218, 0.393, 0.686),
    (1024, 4, 2, 0.973, 1.296, 0.592, 0.907),
    (1024, 4, 4, 1.536, 2.246, 0.987, 1.647),
    (1024, 4, 8, 2.85, 4.243, 1.75, 2.965),
    (1024, 4, 16, 5.512, 8.182, 3.297, 5.56),
    (1024, 4, 32, 10.767, 16.342, 6.329, 10.686),
    (1024, 8, 1, 0.706, 0.594, 0.341, 0.388),
    (1024, 8, 2, 0.558, 0.891, 0.368, 0.642),
    (1024, 8, 4, 0.996, 1.426, 0.654, 1.05),
    (1024, 8, 8, 1.789, 2.549, 1.216, 1.887),
    (1024, 8, 16, 3.351, 4.868, 2.236, 3.435),
    (1024, 8, 32, 6.495, 9.48, 4.254, 6.736),
    (2048, 4, 1, 1.075, 1.555, 0.873, 1.546),
    (2048, 4, 2, 1.811, 2.762, 1.518, 2.705),
    (2048, 4, 4, 3.236, 5.184, 2.685, 5.076),
    (2048, 4, 8, 6.328, 10.055, 5.28, 9.934),
    (2048, 4, 16, 12.42, 19.709, 9.857, 17.496),
    (2048, 8, 1, 0.775, 1.035, 0.532, 0.947),
    (2048, 8, 2, 1.195, 1.713, 0.97, 1.641),
    (2048, 8, 4, 2.029, 2.966, 1.683, 2.881),
    (2048, 8, 8, 3.743, 5.631, 3.081, 5.369),
    (2048, 8, 16, 7.304, 11.016, 5.903, 9.971),
    (2048, 8, 32, 14.254, 22.217, 11.537, 19.527),
    (3072, 4, 1, 1.529, 2.614, 1.591, 3.052),
    (3072, 4, 2, 2.864, 4.762, 2.656, 5.178),
    (3072, 4, 4, 5.578, 9.071, 5.252, 9.997),
    (3072, 4, 8, 10.768, 17.671, 10.049, 19.226),
    (3072, 4, 16, 21.13, 34.704, 19.905, 37.212),
    (3072, 8, 1, 0.936, 1.546, 0.929, 1.705),
    (3072, 8, 2, 1.68, 2.715, 1.686, 2.98),
    (3072, 8, 4, 3.221, 5.065, 2.994, 5.46),
    (3072, 8, 8, 6.231, 9.654, 5.894, 10.616),
    (3072, 8, 16, 12.108, 18.995, 11.277, 20.122),
    (4096, 4, 1, 2.378, 3.992, 2.663, 4.89),
    (4096, 4, 2, 4.17, 7.266, 4.613, 8.765),
    (4096, 4, 4, 8.122, 13.974, 8.615, 16.416),
    (4096, 4, 8, 15.804, 27.289, 16.67, 31.77),
    (4096, 8, 1, 1.333, 2.296, 1.428, 2.792),
    (4096, 8, 2, 2.542, 4.015, 2.713, 4.983),
    (4096, 8, 4, 4.642, 7.602, 4.967, 9.179),
    (4096, 8, 8, 9.035, 14.945, 9.471, 17.442),
    (4096, 8, 16, 17.649, 28.8, 18.336, 33.68),
)
"""One block, of degree 4 or 8: hidden, degree, samples, and milliseconds.

Attention forward, attention backward, MLP forward, MLP backward.
"""

ALL_REDUCE_MS: dict[int, float] = {
    4: 1.434,
    8: 1.982,
    12: 2.436,
    16: 3.285,
    24: 4.93,
    32: 7.136,
    48: 12.208,
    64: 18.258,
    96: 29.254,
    128: 40.278,
    192: 58.31,
    256: 79.958,
    384: 118.119,
    512: 161.471,
}
"""Median of the published milliseconds by size of the tensor, MiB, over all 32 GPUs."""

SPEEDUPS: dict[tuple[int, int], tuple[float, float]] = {
    (1024, 24): (1.06, 1.53),
    (2048, 24): (1.62, 1.95),
    (3072, 24): (1.45, 1.78),
    (4096, 16): (1.39, 1.73),
    (6144, 16): (1.59, 1.67),
    (8192, 8): (1.63, 1.71),
    (12288, 4): (1.58, 1.81),
}
"""Throughput of Oases over Megatron-LM by hidden and layers: with NVLink bridges, and without."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions common to all runs.

    contention: of compute and an all-reduce in flight; none, for lack of published measurements. most_samples: of a
    replica, the largest batch of the published times; smaller powers of two where that does not fit. bridged: how
    many times as fast an all-reduce inside a server is with NVLink bridges; they carry two of the ring's four hops,
    so PCIe carries half as much. published_runtime: the "oases" side pays what the published code pays: one forward
    pass of each MLP too many in the backward pass, and no all-reduce before the weight gradients. whole_step: with
    head, optimizer and the data-parallel all-reduce after `accumulation` micro-batches, beside the stack.
    """

    contention: Contention = field(default_factory=Contention)
    most_samples: int = 32
    bridged: float = 2.0
    published_runtime: bool = True
    whole_step: bool = True
    accumulation: int = 20


@dataclass(frozen=True)
class Rates:
    """A device by its rates. score_passes: how often unfused attention passes over its scores, each way.

    error: geometric mean of how far the rates are from the published times.
    """

    device: Device
    score_passes: float
    error: float


@dataclass(frozen=True)
class Result:
    """One model: its degree, samples of a replica, and simulated and published speed-up."""

    model: Model
    bridges: bool
    tp: int
    samples: int
    simulated: float
    published: float


def _device(flops: float, num_bytes: float, launch: float) -> Device:
    return Device("RTX 3090", MEMORY_BYTES, {"float32": flops}, num_bytes, launch)


def _shape(hidden: int, layers: int) -> Model:
    return gpt(hidden, layers, hidden // 64, 1024)


def _score_bytes(model: Model, kind: str, tp: int, samples: float) -> float:
    heads = model.heads / tp if kind == "attention" else 0.0
    return samples * heads * model.sequence**2 * model.element_bytes


@cache
def fitted_rates() -> Rates:
    """Rates that come closest, relatively, to the published times of blocks of degree 4 and 8."""
    link = LinkModel(0.0, 1.0)
    ones = [_device(1.0, inf, 0.0), _device(inf, 1.0, 0.0), _device(inf, inf, 1.0)]
    units = [Hardware("one rate", device, PER_SERVER, link, link) for device in ones]
    rows, seconds = [], []
    for hidden, tp, samples, *published in BLOCKS_MS:
        model = _shape(hidden, 1)
        for place, kind in enumerate(KINDS):
            each = [unit.block_times(model, kind_called(kind), tp, samples) for unit in units]
            scores = _score_bytes(model, kind, tp, samples)
            rows.append([*(times.forward + times.combine for times in each), scores])
            rows.append([*(t.backward + t.weight_gradient + t.combine_backward for t in each), scores])
            seconds += [time / 1e3 for time in published[2 * place : 2 * place + 2]]
    terms = np.array(rows) / np.array(seconds)[:, None]
    scale = terms.max(0)  # the terms differ by many orders of magnitude
    from scipy.optimize import nnls  # here, for the ranks of a run read plans and make none

    found, _ = nnls(terms / scale, np.ones(len(terms)))
    per_flop, per_byte, launch, per_score_byte = found / scale
    error = exp(float(np.abs(np.log(terms / scale @ found)).mean())) - 1
    device = _device(float(1 / per_flop), float(1 / per_byte), float(launch))
    return Rates(device, float(per_score_byte / per_byte), error)


@cache
def fitted_network() -> LinkModel:
    """Start-up and bandwidth of the published all-reduces, which cross the servers."""
    samples = [Sample("all_reduce", WORLD, mib * 2**20, ms / 1e3) for mib, ms in ALL_REDUCE_MS.items()]
    fitted = fit_link(samples, Contention())
    return LinkModel(fitted.startup_seconds, fitted.bytes_per_second)


def hardware(bridges: bool, assumed: Assumptions) -> Hardware:
    """The cluster. Without bridges a ring inside a server is as fast as the published ones, which cross PCIe too."""
    network = replace(fitted_network(), contention=assumed.contention)
    node = replace(network, bytes_per_second=network.bytes_per_second * (assumed.bridged if bridges else 1.0))
    return Hardware("32 RTX 3090", fitted_rates().device, PER_SERVER, node, network)


class _Run:
    """One model on the cluster with degree `tp` and a micro-batch of `samples` on each replica."""

    def __init__(self, model: Model, cluster: Hardware, tp: int, samples: int, assumed: Assumptions) -> None:
        self._model, self._cluster, self._tp, self._samples = model, cluster, tp, samples
        self._assumed = assumed
        blocks = model.layers * sum(model.block_parameters(kind_called(kind), tp) for kind in KINDS)
        self._parameters = blocks + model.end_parameters(0, model.layers, tp)
        self._logits_bytes = samples * model.sequence * model.vocabulary / tp * model.element_bytes

    def seconds(self, schedule: str, sub_batches: int) -> tuple[float, float]:
        """Seconds of a micro-batch with its part of the step, and peak bytes."""
        model, tp, samples = self._model, self._tp, self._samples / sub_batches
        sizes = [
            BlockBytes(
                model.unit_bytes(samples),
                model.kept_bytes(kind_called(kind), tp, samples) + round(2 * _score_bytes(model, kind, tp, samples)),
            )
            for kind in KINDS
        ]
        costs = StackCosts(
            tuple(self._times(kind, samples, schedule) for kind in KINDS) * model.layers,
            {"all_reduce": self._cluster.collective_seconds("all_reduce", tp, model.unit_bytes(samples))},
            tuple(sizes) * model.layers,
            contention=self._assumed.contention,
        )
        timeline = simulate(generate(schedule, model.num_blocks, sub_batches, model.layers), costs)
        held = PARAMETER_BYTES * self._parameters + 3 * self._logits_bytes  # logits, their softmax, their gradient
        around = self._around() if self._assumed.whole_step else 0.0
        return timeline.total_seconds + around, timeline.peak_bytes(0) + held

    def _times(self, kind: str, samples: float, schedule: str) -> BlockTimes:
        rates = fitted_rates()
        times = self._cluster.block_times(self._model, kind_called(kind), self._tp, samples)
        scores = rates.score_passes * _score_bytes(self._model, kind, self._tp, samples)
        more = scores / rates.device.bytes_per_second
        times = replace(
            times, forward=times.forward + more, forward_unkept=times.forward_unkept + more,
            recompute=times.recompute + more, recompute_whole=times.recompute_whole + more,
            backward=times.backward + more,
        )  # fmt: skip
        if schedule != "oases" or not self._assumed.published_runtime:
            return times
        twice = times.forward if kind == "mlp" else 0.0
        return replace(times, backward=times.backward + times.weight_gradient + twice, weight_gradient=0.0)

    def _around(self) -> float:
        """Seconds outside the stack: the head with its loss, and a share of the optimizer's step."""
        model, device, tp = self._model, self._cluster.device, self._tp
        tokens = self._samples * model.sequence
        products = 6 * tokens * model.hidden * model.vocabulary / tp / device.flops_per_second[model.dtype]
        passes = 10 * self._logits_bytes / device.bytes_per_second  # written and read by product, softmax, gradient
        edges = 2 * self._cluster.collective_seconds("all_reduce", tp, model.unit_bytes(self._samples))
        gradients = self._cluster.collective_seconds("all_reduce", WORLD // tp, 4 * self._parameters, stride=tp)
        adam = 7 * 4 * self._parameters / device.bytes_per_second  # reads four tensors, writes three
        return products + passes + edges + (gradients + adam) / self._assumed.accumulation


def simulated(assumed: Assumptions | None = None) -> list[Result]:
    """The seven models, with bridges and without.

    The degree is 4, a server, or 8 where the model does not fit in 4.
    """
    return list(_simulated(assumed or Assumptions()))


def _simulated(assumed: Assumptions) -> Iterator[Result]:
    for place, bridges in enumerate((True, False)):
        cluster = hardware(bridges, assumed)
        for (hidden, layers), published in SPEEDUPS.items():
            model = _shape(hidden, layers)
            tp, samples, speedup = _largest(model, cluster, assumed)
            yield Result(model, bridges, tp, samples, speedup, published[place])


def _largest(model: Model, cluster: Hardware, assumed: Assumptions) -> tuple[int, int, float]:
    """Degree, samples and speed-up of the largest batch that fits in the smallest degree."""
    for tp in (PER_SERVER, 2 * PER_SERVER):
        samples = assumed.most_samples
        while samples >= 2:
            run = _Run(model, cluster, tp, samples, assumed)
            ours, num_bytes = run.seconds("oases", 2)
            if num_bytes <= USABLE * MEMORY_BYTES:
                return tp, samples, run.seconds("sync", 1)[0] / ours
            samples //= 2
    raise ValueError(f"hidden {model.hidden}, {model.layers} layers: fits in no degree up to {2 * PER_SERVER}")


def error(results: Sequence[Result]) -> float:
    """Geometric mean of how far simulated and published are apart, as a share."""
    return exp(sum(abs(log(each.simulated / each.published)) for each in results) / len(results)) - 1


def _mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def report() -> str:
    """The seven models in Markdown, the assumptions, and what other ones would give."""
    assumed = Assumptions()
    results, faultless = simulated(assumed), simulated(replace(assumed, published_runtime=False))
    rows = [
        f"| {each.model.hidden}/{each.model.layers} | {'yes' if each.bridges else 'no'} | {each.tp} | "
        f"{each.samples} | {each.simulated:.2f} | {each.published:.2f} | {each.simulated / each.published:.2f} | "
        f"{clean.simulated:.2f} |"
        for each, clean in zip(results, faultless, strict=True)
    ]
    slower = Contention(1.1, 1.1)
    others = {
        "these": results,
        "a runtime without the published faults": faultless,
        "the stack alone": simulated(replace(assumed, whole_step=False)),
        "at most 8 samples": simulated(replace(assumed, most_samples=8)),
        "compute and link take 1.1 times as long while both run": simulated(replace(assumed, contention=slower)),
    }
    return "\n".join([*_stated(assumed), "", *_HEADS[0], *rows, "", *_HEADS[1], *_compared(others), ""])


_HEADS = (
    (
        "| hidden/layers | NVLink | tp | samples | simulated | published | ratio | without the published faults |",
        "|---|---|---|---|---|---|---|---|",
    ),
    (
        "| assumptions | mean, NVLink | mean, none | error, NVLink | error, none | error |",
        "|---|---|---|---|---|---|",
    ),
)


def _stated(assumed: Assumptions) -> list[str]:
    rates, network = fitted_rates(), fitted_network()
    device = rates.device
    return [
        f"Device, fitted to {4 * len(BLOCKS_MS)} published block times: "
        f"{device.flops_per_second['float32'] / 1e12:.1f} TFLOP/s, {device.bytes_per_second / 1e9:.0f} GB/s, "
        f"{device.launch_seconds * 1e6:.0f} us per launch, {rates.score_passes:.1f} passes over attention scores; "
        f"{rates.error:.1%} off, geometric mean.",
        f"All-reduce between servers, fitted: {network.bytes_per_second / 1e9:.1f} GB/s; inside a server the same, "
        f"with NVLink bridges {assumed.bridged:g} times as much.",
        f"Recomputation, Adam, {assumed.accumulation} micro-batches to a step, head and optimizer counted; tensor "
        f"parallel in a server, in two where {MEMORY_BYTES / 2**30:.1f} GiB do not do; the largest batch of at most "
        f"{assumed.most_samples} that fits; no contention; the published runtime, with one forward pass of each MLP "
        "too many.",
    ]


def _compared(others: dict[str, list[Result]]) -> Iterator[str]:
    """Geometric means and errors of other assumptions, below those published."""
    half = len(SPEEDUPS)
    published = (_mean([both[place] for both in SPEEDUPS.values()]) for place in (0, 1))
    yield f"| published | {' | '.join(f'{mean:.2f}' for mean in published)} | | | |"
    for name, found in others.items():
        parts = found[:half], found[half:]
        means = " | ".join(f"{_mean([each.simulated for each in part]):.2f}" for part in parts)
        yield f"| {name} | {means} | {error(parts[0]):.1%} | {error(parts[1]):.1%} | {error(found):.1%} |"


if __name__ == "__main__":
    print(report())
