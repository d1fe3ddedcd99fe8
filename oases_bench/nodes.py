"""A Llama of transformers over data x pipeline x tensor parallel ranks of several nodes, beside other people's ways.

Contestants run the same weights, samples, micro-batches, recomputation and optimizer. With more ranks than cores the
matmuls are emulated: each waits as long as a given device would take, whoever calls it; all else is real. What went
over the link between the nodes is read off its interface.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import RenderableType
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.pipeline.building import DIMENSIONS
from oases.core.dtypes import WIRES
from oases.core.schedule import ScheduleError, generate_pipeline
from oases.core.schedule.tensor import GENERATORS
from oases.errors import UsageError
from oases.plans.pipelines import chunks_of
from oases.profile.memory import measure_memory
from oases.terminal import table
from oases.testbed import Nodes, link_bytes_per_second
from oases_bench.baselines import require_installed
from oases_bench.emulation import EmulatedDevice, emulated_device
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    checked_settings,
    gather_objects,
    interleave,
    milliseconds,
    times,
)
from oases_bench.llama import LlamaShape, LlamaSteps, OursLlama
from oases_bench.node_predictions import Predictions
from oases_train.config import option

AXES = ("data", "pipeline", "tensor")
PEERS = {
    "torch": "Schedule1F1B, DTensor's tensor parallelism, FSDP2",
    "torch_sequence": "the same with sequence parallelism, torchtitan's default",
    "torch_interleaved": "ScheduleInterleaved1F1B with two parts on a stage",
    "megatron": "Megatron-Core's pipeline, layers and DistributedDataParallel",
    "torch_keeping": "torch whose last stage recomputes nothing",
    "megatron_keeping": "megatron whose last stage recomputes nothing",
}
"""Other people's ways, by name. Keeping: as the last stage of ours does in last_no_recompute and its kin."""


@dataclass(frozen=True)
class NodesBenchConfig(BenchConfig):
    """The model, how it is cut, and the device that its matmuls are emulated for."""

    contestants: str = option(
        "one_f_one_b/oases,shifted_critical_path/oases",
        "PIPELINE/SCHEDULE of the stages and of the tensor-parallel layers in them, comma-separated; a number of "
        "sub-batches may follow, as in one_f_one_b/oases@4, then the type in which sums are sent, as in oases@4:int8",
    )
    peers: str = option(
        "torch,torch_interleaved,megatron,megatron_keeping", f"other people's ways: {', '.join(PEERS)}, all or none"
    )
    data: int = option(2, "data-parallel replicas")
    stages: int = option(2, "pipeline stages")
    tensor: int = option(2, "tensor-parallel degree")
    across: str = option("tensor", f"the axis whose ranks are on different nodes: {', '.join(AXES)}")
    hidden: int = option(256, "hidden size, features")
    layers: int = option(8, "layers")
    sequence: int = option(128, "sequence length, tokens per sample")
    samples: int = option(4, "samples of a micro-batch on a replica; overlapped schedules cut them in two")
    micro_batches: int = option(8, "micro-batches of a step")
    keep: bool = option(False, "keep all activations; else recompute every layer")
    flops: float = option(1e10, "FLOP/s of the emulated device; 0: compute on this machine")
    memory: bool = option(False, "measure peak memory, too, which takes as long again")
    iterations: int = option(3, "interleaved repetitions")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.stages * self.tensor

    @property
    def shape(self) -> LlamaShape:
        """Sizes of the model and of a step."""
        return LlamaShape(
            self.hidden, self.layers, self.sequence, samples=self.samples, micro_batches=self.micro_batches,
            keep=self.keep,
        )  # fmt: skip

    def prepared(self, ranks: Ranks) -> NodesBenchConfig:
        """See `BenchConfig`. Leaves peers out of "all" that cannot run here."""
        self.check(ranks.size, ranks.nodes)
        return replace(self, peers=",".join(self.chosen_peers()) or "none")

    def described(self) -> str:
        """See `BenchConfig`."""
        compute = f"matmuls of {self.flops:.3g} FLOP/s are emulated" if self.flops else "all compute is real"
        return (
            f"{self.data} replicas x {self.stages} stages x tp {self.tensor}, {self.across} parallelism across the "
            f"nodes: {{1}}; {compute}, communication is real"
        )

    def check(self, ranks: int, nodes: int) -> None:
        """Everything that can be known before any rank starts."""
        self.require_least(1, "data", "stages", "tensor", "layers", "samples", "micro_batches")
        self.require_least(1, "iterations")
        if self.sequence < 16:
            raise UsageError(f"--sequence must be at least 16, got {self.sequence}")
        if self.hidden % 64 or self.hidden < 64:
            raise UsageError(f"--hidden must be a multiple of 64, got {self.hidden}")
        if self.flops and not 1e6 <= self.flops <= 1e15:
            raise UsageError(f"--flops must be 0 or between 1e6 and 1e15, got {self.flops}")
        if ranks != self.world:
            raise UsageError(
                f"--data {self.data} x --stages {self.stages} x --tensor {self.tensor} are {self.world} ranks, and "
                f"--tp asks for {ranks}; give --tp {self.world}"
            )
        if ranks % nodes:
            raise UsageError(f"{ranks} ranks do not spread evenly over --nodes {nodes}; give a divisor")
        self.order(nodes)
        self.ours()
        self.chosen_peers()

    def ours(self) -> dict[str, tuple[str, str, int, str]]:
        """Pipeline, schedule, sub-batches and wire of each of ours. UsageError for one that cannot be."""
        found = {}
        for name in self.contestants.split(","):
            pipeline, _, rest = name.strip().partition("/")
            rest, _, wire = rest.partition(":")
            schedule, _, cuts = rest.partition("@")
            if not schedule:
                raise UsageError(f"--contestants {name!r} is not PIPELINE/SCHEDULE, such as one_f_one_b/sync")
            try:
                generate_pipeline(pipeline, self.stages, self.micro_batches)
            except ScheduleError as error:
                raise UsageError(f"--contestants {name!r}: {error}") from error
            if schedule not in GENERATORS:
                raise UsageError(
                    f"--contestants {name!r}: unknown schedule; known are {', '.join(sorted(GENERATORS))}"
                )
            self._require_parts(self.stages * chunks_of(pipeline))
            if not (cuts or "2").isdecimal() or not 1 <= int(cuts or "2") <= self.samples:
                raise UsageError(f"--contestants {name!r}: sub-batches must be 1 to the {self.samples} samples")
            if (wire or "none") not in WIRES:
                raise UsageError(f"--contestants {name!r}: unknown type {wire!r}; known are {', '.join(WIRES[1:])}")
            found[name.strip()] = (pipeline, schedule, int(cuts or "2"), wire)
        return found

    def chosen_peers(self) -> list[str]:
        """Names of the peers. UsageError for one that is unknown or cannot run here."""
        names = list(PEERS)
        if self.peers not in ("all", "none"):
            names = self.parse_list("peers", PEERS)
        elif self.peers == "none":
            return []
        for name in list(names):
            try:
                if name.startswith("megatron"):
                    require_installed("megatron")
                self._require_parts(self.stages * (2 if name == "torch_interleaved" else 1))
            except UsageError:
                if self.peers != "all":
                    raise
                names.remove(name)
        return names

    def _require_parts(self, parts: int) -> None:
        if self.layers % parts:
            raise UsageError(f"--layers {self.layers} do not divide over {parts} parts of the model; give a multiple")

    def order(self, nodes: int) -> list[int]:
        """Ranks by their place in the mesh, so that the axis `across` joins the nodes.

        Ranks are spread over nodes in their order; in the mesh tensor parallelism counts first, then data, then
        stages.
        """
        if self.across not in AXES:
            raise UsageError(f"--across must be one of {', '.join(AXES)}, got {self.across!r}")
        degree = {"data": self.data, "pipeline": self.stages, "tensor": self.tensor}[self.across]
        if degree % nodes:
            raise UsageError(
                f"--across {self.across} joins {nodes} nodes, and its degree {degree} is not a multiple; give "
                f"--{'stages' if self.across == 'pipeline' else self.across} {nodes}, or another axis"
            )
        placed: list[list[int]] = [[] for _ in range(nodes)]
        shape = {"pipeline": self.stages, "data": self.data, "tensor": self.tensor}
        for place, where in enumerate(itertools.product(*map(range, shape.values()))):
            at = where[list(shape).index(self.across)]
            placed[at * nodes // degree].append(place)
        ranks = [0] * self.world
        for rank, place in enumerate(place for node in placed for place in node):
            ranks[place] = rank
        return ranks

    def mesh(self, nodes: int) -> DeviceMesh:
        """Mesh of "pp", "dp" and "tp" in that order of the ranks. Collective."""
        ranks = torch.tensor(self.order(nodes)).view(self.stages, self.data, self.tensor)
        return DeviceMesh("cpu", ranks, mesh_dim_names=DIMENSIONS)


def contestants_of(config: NodesBenchConfig, mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], LlamaSteps]]]:
    """Makers of the contestants by name, in the same order on every rank."""
    for name, how in config.ours().items():
        yield name, partial(OursLlama, config.shape, mesh, *how)
    for name in config.chosen_peers():
        way, _, kind = name.partition("_")
        shape = replace(config.shape, keep_last=kind == "keeping")
        if way == "megatron":
            from oases_bench.llama_megatron import MegatronLlama

            yield name, partial(MegatronLlama, shape, mesh)
        else:
            from oases_bench.llama_torch import TorchLlama

            chosen = {"interleaved": kind == "interleaved", "sequence": kind == "sequence"}
            yield name, partial(TorchLlama, shape, mesh, **chosen)


class _Observed:
    """A contestant with its computing and its traffic, warmed up.

    interface: of the link on this rank's node. memory: measure its peak.
    """

    def __init__(self, steps: LlamaSteps, device: EmulatedDevice | None, interface: str | None, memory: bool) -> None:
        self.steps, self._device, self._interface = steps, device, interface
        steps.train()  # pipelines learn shapes in their first step
        self.peak = measure_memory(self._loss, lambda _: None, torch.device("cpu")).peak if memory else None
        self.compute: list[float] = []
        """Seconds of emulated matmuls of each step."""
        self.sent: list[int] = []
        """Bytes that left this rank's node in each step."""
        self.host: list[float] = []
        """Seconds of CPU of this rank in each step."""

    def _loss(self) -> torch.Tensor:
        self.steps.train()
        return torch.zeros(())

    def step(self) -> None:
        """One step."""
        busy, sent = self._device.seconds if self._device else 0.0, _bytes_sent(self._interface)
        host = time.process_time()
        self.steps.step()
        self.host.append(time.process_time() - host)
        self.sent.append(_bytes_sent(self._interface) - sent)
        if self._device is not None:
            self.compute.append(self._device.seconds - busy)

    def row(self, stage: int, rate: float | None) -> dict[str, Any]:
        """Result row, equal on all ranks. rate: of the link, bytes per second."""
        everyone = gather_objects(
            (stage, self.peak, median(self.compute or [0.0]), median(self.sent), median(self.host))
        )
        stages, peaks, computes, sent, hosts = zip(*everyone, strict=True)
        row = self.steps.row() | {"host_seconds": sum(hosts)}
        if self.peak is not None:
            row["peak_bytes_per_stage"] = [
                max(peak for number, peak in zip(stages, peaks, strict=True) if number == each)
                for each in sorted(set(stages))
            ]
        if self._device is not None:
            row["compute_seconds"] = max(computes)
        if rate is not None:
            row["link_seconds"] = max(sent) / rate
        return row


def _bytes_sent(interface: str | None) -> int:
    """Bytes that have left over an interface of this process' network namespace."""
    if interface is None:
        return 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == interface:
            return int(rest.split()[8])
    raise RuntimeError(f"no interface {interface} in /proc/self/net/dev")


def run_nodes_bench(config: NodesBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, whose ranks are spread over the nodes. Called on every rank."""
    named, nodes = checked_settings(config), ranks.nodes
    mesh = config.mesh(nodes)
    interface, rate = None, None
    if ranks.link is not None:
        where = Nodes(nodes, ranks.link)
        interface = "lo" if nodes == 1 else where.interface(torch.distributed.get_rank() // (config.world // nodes))
        rate = link_bytes_per_second(ranks.link)
    with emulated_device(config.flops) if config.flops else nullcontext() as device:
        predictions = None
        if config.flops:
            across = dict(zip(AXES, ("dp", "pp", "tp"), strict=True))[config.across]
            predictions = Predictions(config.shape, mesh, across, config.flops, config.world // nodes)
        makers = contestants_of(config, mesh)
        found = {name: _Observed(make(), device, interface, config.memory) for name, make in makers}
        interleave(found.values(), config.iterations, "steps", shows)
        rows = {name: each.row(mesh.get_local_rank("pp"), rate) for name, each in found.items()}
    if predictions is not None:
        for name, how in config.ours().items():
            rows[name]["predicted_seconds"] = predictions.seconds(*how)
    best = min((rows[name]["step_seconds"] for name in config.chosen_peers()), default=None)
    for row in rows.values() if best is not None else ():
        row["speedup"] = best / row["step_seconds"]
    return {"config": named | {"nodes": nodes}, "contestants": rows}


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per contestant."""
    columns = ("contestant", "step", "predicted", "compute", "link", "link / compute", "host", "over", "peak MB")
    rows = []
    for name, row in result["contestants"].items():
        compute, link = row.get("compute_seconds"), row.get("link_seconds")
        predicted = row.get("predicted_seconds")
        rows.append(
            (
                name, milliseconds(row["step_seconds"]), milliseconds(predicted) if predicted else "-",
                milliseconds(compute) if compute else "-",
                milliseconds(link) if link else "-", times(link / compute, 2) if link and compute else "-",
                milliseconds(row["host_seconds"]), times(row.get("speedup"), 2),
                " ".join(f"{num_bytes / 1e6:.1f}" for num_bytes in row.get("peak_bytes_per_stage", ())) or "-",
            )
        )  # fmt: skip
    yield table(columns, rows)
    yield (
        "compute: emulated matmuls of the busiest rank; link: what leaves the busiest node, at the link's rate; "
        "host: CPU time of all ranks; over: step of the best peer over this; peak MB: by stage"
    )


BENCHMARK = Benchmark(
    "nodes",
    "a Llama over several nodes in all three ways of cutting, beside torch's own and Megatron-Core's",
    NodesBenchConfig(),
    run_nodes_bench,
    shown,
    size=8,
    nodes=2,
)
