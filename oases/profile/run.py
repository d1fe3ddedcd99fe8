"""Complete profile of a machine or cluster: device, links, contention and blocks, measured on all ranks."""

from __future__ import annotations

import datetime
import math
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oases.autotp.configuration import (
    configuration,
    configured_model,
    read_configuration,
    sample_inputs,
    with_layers,
)
from oases.autotp.costs import trace_layers
from oases.core.execution.group import ProcessGroup, all_gather_objects
from oases.distributed.clock import Clock
from oases.errors import UsageError
from oases.kernels.quantized import dequantize, quantize
from oases.launch.ranks import require_agreement
from oases.profile.compute import OVERHEAD_SUB_BATCHES, BlockBench, StackBench
from oases.profile.config import DTYPES, ProfileConfig
from oases.profile.contention import ContentionBench
from oases.profile.layers import LayerBench, median_seconds, update_seconds
from oases.profile.links import (
    LinkBench,
    Probe,
    collectives_of,
    contiguous,
    fitted_link,
    probes,
    ranks_per_node,
    sizes,
)
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead, merge
from oases.simulator.links import LinkModel, Sample
from oases.simulator.program import Contention
from oases.terminal import progress

_PRODUCT = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def device_name(device: str) -> str:
    """Name of the accelerator or the processor."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: str, ranks_here: int) -> int:
    """Memory of the accelerator, or a rank's share of the machine's, in bytes."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here


def measure_device(config: ProfileConfig) -> Device:
    """Rates with all ranks at work. Collective: every rank must call this."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    clock = Clock(device)
    hosts = all_gather_objects(socket.gethostname(), dist.group.WORLD)
    ranks_here = hosts.count(socket.gethostname())  # they share its memory, whatever nodes they represent
    size = _PRODUCT[config.device]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    flops = 2 * size**3 / median_seconds(clock, lambda: a @ b, config.iterations)
    source = torch.zeros(_COPY_BYTES[config.device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / median_seconds(clock, lambda: target.copy_(source), config.iterations)
    small = torch.zeros(1, device=device)
    launch = median_seconds(clock, lambda: [small.add_(1) for _ in range(1000)], config.iterations) / 1000
    weights = [torch.nn.Parameter(torch.zeros(size * size, device=device)) for _ in range(2)]
    return Device(
        device_name(config.device), memory_bytes(config.device, ranks_here), {config.dtype: flops}, moved, launch,
        update_seconds(weights, clock, config.iterations),
        _packing_rate(clock, config.iterations) if config.device == "cpu" else 0.0,
    )  # fmt: skip


def _packing_rate(clock: Clock, iterations: int) -> float:
    """Bytes of float32 per second that a rank quantises and reads back."""
    x = torch.randn(1 << 20)
    return x.nbytes / median_seconds(clock, lambda: dequantize(quantize(x), x.numel()), iterations)


def of_model(config: ProfileConfig) -> ProfileConfig:
    """The profile of `config.model` with that model's width and heads, where its configuration has both.

    They are those of the activations that links are measured with. UsageError where it cannot be built.
    """
    data = with_layers(read_configuration(Path(str(config.model)), "--model"), config.layers)
    configured_model(data, config.dtype)
    found = configuration(data)
    hidden, heads = (getattr(found, name, None) for name in ("hidden_size", "num_attention_heads"))
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return config
    return replace(config, hidden=hidden, heads=math.gcd(hidden, heads))


def layer_bench(config: ProfileConfig, group: ProcessGroup) -> LayerBench:
    """Bench of the model in `config.model`, with `config.layers` layers and random weights."""
    data = with_layers(read_configuration(Path(str(config.model)), "--model"), config.layers)
    layered = trace_layers(configured_model(data, config.dtype), sequence=config.sequence)
    torch.manual_seed(config.seed)
    model = configured_model(data, config.dtype, device="cpu").to(config.device)
    inputs = sample_batch(model, config.batch, config.sequence, config.seed)
    return LayerBench(model, layered, inputs, group, config.iterations, config.batch)


def sample_batch(model: torch.nn.Module, samples: int, sequence: int, seed: int) -> dict[str, Any]:
    """Random arguments of a training step of a model that takes tokens, with labels."""
    generator, device = torch.Generator().manual_seed(seed), next(model.parameters()).device
    words = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    found = {
        name: torch.randint(words, each.shape, generator=generator).to(device)
        if isinstance(each, torch.Tensor)
        else each
        for name, each in sample_inputs(model, samples, sequence).items()
    }
    if "input_ids" not in found:
        raise UsageError(
            f"--model: {type(model).__name__} takes no tokens, so its loss is unknown; profile a GPT of "
            "its width instead"
        )
    return found | {"labels": found.get("decoder_input_ids", found["input_ids"])}


_BUSY = 0.85
"""Fraction of a core below which times are affected by other programs."""


@dataclass(frozen=True)
class Surroundings:
    """Facts about the run that ranks cannot detect.

    joined: description of the link between ranks. shaped: whether it is shaped or simulated. single_process: one
    process represents all ranks. known: a profile of this machine to add blocks to; device and links are then not
    measured again.
    """

    joined: str
    shaped: bool = False
    single_process: bool = False
    known: Hardware | None = None


def require_same_device(known: Hardware, config: ProfileConfig) -> None:
    """Raise UsageError unless `known` is a profile of the device that `config` measures."""
    name = device_name(config.device)
    if known.device.name != name:
        raise UsageError(
            f"--append: the profile is of device {known.device.name!r}, but this is {name!r}; leave out "
            "--append, or give another --json"
        )


def run_profile(config: ProfileConfig, around: Surroundings, show_progress: bool) -> Hardware:
    """Measure on the default group. Collective: every rank must call this."""
    require_agreement(asdict(config))
    profile = _Profile(config, around)
    visible = show_progress and dist.get_rank() == 0
    with progress("measuring", profile.num_parts, visible) as advance:
        profile.on_part = advance
        return profile.measure()


class _Profile:
    def __init__(self, config: ProfileConfig, around: Surroundings) -> None:
        self._config = config
        self._around = around
        self._world = dist.get_world_size()
        self._per_node = ranks_per_node(self._world, shaped=around.shaped)
        self._degrees = config.tensor_parallel(self._world)
        self._groups = {degree: contiguous(degree) for degree in self._degrees}
        self._probes = [] if around.known else probes(self._per_node)
        self._cuts = [count for count in OVERHEAD_SUB_BATCHES if count <= config.batch]
        self._done = 0
        self._again: set[str] = set()
        """Scopes whose links had to be measured more than once."""
        self.on_part: Callable[..., None] = lambda done, what: None
        """Progress callback, called after each part with the number done and its name."""
        blocks = len(self._degrees) * (len(config.sub_batch_sizes) + len(self._cuts))
        samples = sum(len(collectives_of(probe)) for probe in self._probes) * len(sizes(config))
        self.num_parts = blocks + samples + (0 if around.known else 1 + len(self._scopes))

    @property
    def _scopes(self) -> dict[str, Probe]:
        """Largest groups of each scope."""
        return {probe.scope: probe for probe in sorted(self._probes, key=lambda probe: probe.ranks)}

    def _part(self, what: str) -> None:
        self._done += 1
        self.on_part(self._done, what)

    def measure(self) -> Hardware:
        date = datetime.date.today().isoformat()
        if self._around.known is not None:
            blocks, overheads = self._blocks(self._benches())
            known = self._around.known
            return merge(known, replace(known, blocks=blocks, overheads=overheads, date=date))
        links = self._links()
        device = measure_device(self._config)
        self._part("device")
        benches = self._benches()
        largest = max(self._degrees)
        beside = benches[largest]
        if isinstance(beside, LayerBench):
            device = replace(device, update_seconds=beside.update_seconds())
            beside = BlockBench(self._config.beside(largest), self._groups[largest])
        assert isinstance(beside, BlockBench)
        contention = self._contention(beside)
        blocks, overheads = self._blocks(benches)
        models = {scope: replace(link, contention=contention[scope]) for scope, link in links.items()}
        # A scope that does not exist takes the other one's link.
        cluster = models.get("cluster") or models["node"]
        return Hardware(
            f"{self._world} ranks of {device.name}", device, self._per_node, models.get("node", cluster), cluster,
            blocks, self._about(set(models), min(bench.core_share() for bench in benches.values())), date, overheads,
        )  # fmt: skip

    def _benches(self) -> Mapping[int, StackBench]:
        if self._config.model is None:
            return {degree: BlockBench(self._config, group) for degree, group in self._groups.items()}
        return {degree: layer_bench(self._config, group) for degree, group in self._groups.items()}

    def _blocks(
        self, benches: Mapping[int, StackBench]
    ) -> tuple[tuple[MeasuredBlock, ...], tuple[MeasuredOverhead, ...]]:
        blocks, overheads, ends = [], [], self._config.model is not None  # of a GPT only blocks are measured
        for bench in benches.values():
            for samples in self._config.sub_batch_sizes:
                blocks += bench.blocks(samples)
                if ends:
                    blocks += bench.passes(samples, 1)[0]
                self._part(f"blocks of tp {bench.tp}, {samples} samples")
            for cut in self._cuts:
                overheads += bench.passes(self._config.batch, cut)[1]
                self._part(f"passes of tp {bench.tp}, {cut} sub-batches")
        return tuple(blocks), tuple(overheads)

    def _links(self) -> dict[str, LinkModel]:
        bench, found = LinkBench(self._config), dict[str, LinkModel]()
        for scope in dict.fromkeys(probe.scope for probe in self._probes):
            found[scope] = fitted_link(partial(self._samples, bench, scope), "--batch")
        return found

    def _samples(self, bench: LinkBench, scope: str, attempt: int) -> list[Sample]:
        """Samples of every group of the scope; repeated measurements do not count as progress."""
        if attempt:
            self._again.add(scope)
        found = []
        for probe in self._probes:
            for collective in collectives_of(probe) if probe.scope == scope else ():
                for num_bytes in sizes(self._config, attempt):
                    found.append(bench.sample(probe, collective, num_bytes, attempt))
                    if not attempt:
                        self._part(f"{collective} of {probe.ranks} ranks, {num_bytes / 1e3:.0f} kB")
        return found

    def _contention(self, bench: BlockBench) -> dict[str, Contention]:
        found = {}
        for scope, probe in self._scopes.items():
            assert probe.mine is not None, "the largest groups of a scope hold every rank"
            found[scope] = ContentionBench(bench, probe.mine).measure()
            self._part("contention")
        return found

    def _about(self, scopes: set[str], core_share: float) -> str:
        parts = [f"Measured by oases profile, {self._world} ranks {self._around.joined}."]
        if self._around.single_process:
            parts.append("One process represented all ranks, so blocks ran without others beside them.")
        if scopes == {"cluster"} and self._per_node == 1:
            parts.append("The link counts as one between nodes of one rank each.")
        if scopes == {"node"}:
            parts.append("There was one node; the inter-node link was not measured and is taken to be the node's.")
        if dist.get_backend() == "sim":
            parts.append("Messages between two ranks were not measured: a simulated link does not support them.")
        if self._again:
            parts.append(
                "At first the times of the links did not grow with their bytes, as on a busy machine; they are the "
                "least of more repetitions, not medians."
            )
        if core_share < _BUSY:
            parts.append(
                f"Other programs were running: a rank had {100 * core_share:.0f} % of its core, so times are too "
                "long and slowdowns unsure; measure again on a quiet machine."
            )
        return " ".join(parts)
