"""Plans of large models, scaled down and executed beside their predictions on this machine's profile.

For each config.json the planner is asked for the plan on a cluster. Model and plan are scaled down in size, not in
shape, and run as users run them: `oases.parallelize(model, plan=...)`, `train_step`, the optimizer. The prediction
knows what was measured before, in the same run: the links of every axis of the mesh, the rates of the device, and the
model's own blocks and ends by `oases.profile`. Where there are more ranks than cores, blocks and head are emulated by
timed waits instead, and all else is real.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.autotp import parallelize
from oases.autotp.configuration import configured_model, read_configuration
from oases.autotp.costs import trace_configuration, trace_layers
from oases.core.execution.group import ProcessGroup, group_of
from oases.distributed.clock import Clock
from oases.distributed.mesh import Mesh
from oases.distributed.optimizer import make_optimizer
from oases.errors import UsageError
from oases.planner import Predictor, Space, rank_plans
from oases.plans.layered import Model
from oases.plans.plan import BUCKET_BYTES, Plan, Prediction
from oases.profile.compute import BlockBench
from oases.profile.config import ProfileConfig
from oases.profile.contention import ContentionBench
from oases.profile.layers import LayerBench, update_seconds
from oases.profile.links import LinkBench, Probe, contiguous
from oases.profile.run import measure_device, sample_batch
from oases.simulator.cluster import cluster_called, with_link
from oases.simulator.hardware import Device, Hardware
from oases.simulator.links import LinkModel, Sample
from oases.simulator.program import Contention
from oases.terminal import progress, table
from oases_bench.harness import (
    BenchConfig,
    Benchmark,
    Ranks,
    Result,
    checked_settings,
    first_rank,
    max_over_ranks,
    milliseconds,
    signed_percent,
    timed_step,
)
from oases_bench.scaled_plans import (
    emulate_compute,
    emulated_hardware,
    scaled_configuration,
    scaled_layers,
    scaled_plan,
)
from oases_train.config import option

KINDS = ("any", "tp", "zero", "fsdp", "pp")
"""Parts of the search space, by which a cell may be narrowed; "any" is all of it."""


def space_of(kind: str, world: int) -> Space:
    """Search space of a kind of plan."""
    zero, fsdp = (kind == "zero",), (kind == "fsdp",)
    if kind == "any":
        return Space()
    if kind == "pp":
        return Space(degrees=(1,), zero=zero, fsdp=fsdp, micro_batches=tuple(2**n for n in range(1, 8)))
    return Space(degrees=(world if kind == "tp" else 1,), zero=zero, fsdp=fsdp, max_stages=1)


@dataclass(frozen=True)
class PlansBenchConfig(BenchConfig):
    """Models, the cluster that is planned for, and the size at which plans run."""

    models: str = option("", "config.json of transformers models, or folders with one, comma-separated")
    cluster: str = option("2x4090", "cluster to plan for, COUNTxNAME, with as many ranks as --tp")
    cluster_link: str = option("", "links of the cluster, as the --link of oases plan, e.g. cluster=1gbit")
    kinds: str = option("any", f"plans to search, comma-separated: {', '.join(KINDS)}")
    global_batch: int = option(16, "samples of a step of the large model")
    dtype: str = option("bfloat16", "dtype of the large model", ("float32", "bfloat16", "float16"))
    width: int = option(256, "features of the scaled model, about")
    layers: int = option(2, "layers of its largest part of a stage")
    sequence: int = option(128, "tokens per sample of the scaled model; the large one has 1024")
    samples: int = option(4, "most samples of its micro-batches on a replica")
    flops: float = option(0.0, "FLOP/s of an emulated device; 0: real compute, for as many ranks as cores")
    iterations: int = option(5, "steps; the median counts")
    seed: int = option(0, "random seed")

    def prepared(self, ranks: Ranks) -> PlansBenchConfig:
        """See `BenchConfig`."""
        self.check(ranks.size, ranks.nodes)
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        compute = f"blocks and heads are emulated at {self.flops:g} FLOP/s" if self.flops else "compute is real"
        return f"plans for {self.cluster}, scaled down to run on {{}} ranks {{}}; {compute}, communication is real"

    def check(self, ranks: int, nodes: int) -> None:
        """Everything that can be known before any rank starts."""
        self.require_least(1, "global_batch", "width", "layers", "sequence", "samples", "iterations")
        if not self.named_models:
            raise UsageError("--models names no config.json; give some, separated by commas")
        for path in self.named_models:
            read_configuration(Path(path), "--models")
        self.parse_list("kinds", KINDS)
        _, world = self.planned_for(max(1, ranks // nodes))
        if world != ranks:
            raise UsageError(
                f"--cluster {self.cluster} has {world} ranks, and --tp asks for {ranks}; give --tp {world}"
            )
        cores = os.cpu_count() or 1
        if not self.flops and ranks > cores:
            raise UsageError(
                f"{ranks} ranks cannot compute at once on {cores} cores; emulate their compute, by --flops 1e10"
            )

    @property
    def named_models(self) -> list[str]:
        """Paths of the configurations."""
        return [path.strip() for path in self.models.split(",") if path.strip()]

    def planned_for(self, per_node: int) -> tuple[Hardware, int]:
        """Hardware of the cluster, and its ranks."""
        hardware, world = cluster_called(self.cluster, per_node)
        return (with_link(hardware, world, self.cluster_link) if self.cluster_link else hardware), world


@dataclass(frozen=True)
class Cell:
    """A plan of a large model, and the same plan of a small one. data: content of the small one's config.json."""

    large: Plan
    plan: Plan
    data: dict[str, Any]

    @property
    def degree(self) -> int:
        """Tensor-parallel degree."""
        return self.plan.stages[0].segments[0].tp

    @property
    def samples(self) -> int:
        """Samples of a micro-batch on a replica."""
        return int(self.plan.samples(self.degree))

    @property
    def model(self) -> Model:
        """The small model."""
        return self.plan.model

    def built(self, seed: int) -> torch.nn.Module:
        """The small model with random weights, the same on every rank."""
        torch.manual_seed(seed)
        return configured_model(self.data, "float32", device="cpu")

    def batch(self, model: torch.nn.Module, samples: int, seed: int) -> dict[str, Any]:
        """Random arguments of a step."""
        return sample_batch(model, samples, self.model.sequence, seed)


def cells_of(config: PlansBenchConfig, per_node: int) -> Iterator[tuple[str, Cell | str]]:
    """A cell for each model and kind of plan by name, or why there is no plan."""
    hardware, world = config.planned_for(per_node)
    for path in config.named_models:
        data = read_configuration(Path(path), "--models")
        model = trace_configuration(path, sequence=1024, dtype=config.dtype)
        for kind in config.parse_list("kinds", KINDS):
            try:
                found = rank_plans(model, hardware, world, config.global_batch, space=space_of(kind, world))
            except UsageError as error:
                yield data["model_type"] + f" {kind}", str(error)
                continue
            large = next((plan for plan in found if kind != "pp" or len(plan.stages) == world), found[0])
            # A list of layers has two at least.
            counts = scaled_layers(large, max(config.layers, -(-2 * len(model.lists) // len(large.parts))))
            small = scaled_configuration(data, config.width, sum(counts), large.stages[0].segments[0].tp)
            traced = trace_layers(configured_model(small), sequence=config.sequence)
            plan = replace(scaled_plan(large, traced, counts, config.samples), ranks_per_node=per_node)
            yield data["model_type"] + f" {kind}", Cell(large, plan, small)


def links_of(cell: Cell, mesh: Mesh, per_node: int) -> tuple[LinkModel, LinkModel]:
    """Links inside and between nodes, by the collectives that the plan has, each of its own size.

    Inside of nodes all groups communicate at once, between nodes one of them.
    """
    plan, tp = cell.plan, cell.degree
    bench = LinkBench(ProfileConfig(iterations=3))
    data = plan.stage_ranks // tp
    unit, bucket = plan.model.unit_bytes(cell.samples), BUCKET_BYTES
    parameters = 4 * plan.model.num_parameters // tp
    jobs: list[tuple[str, int, int, ProcessGroup | None, list[int]]] = []
    if tp > 1:
        parts = plan.stages[0].segments[0].parts
        jobs += [("all_reduce", tp, 1, mesh.tensor(tp), [unit // 4, unit // parts, unit])]
        jobs += [("all_gather", tp, 1, mesh.tensor(tp), [unit // 4, unit])] if len(plan.stages) > 1 else []
    if data > 1:
        sizes = sorted({1 << 16, 1 << 20, min(bucket, parameters // len(plan.stages))})
        names = ["reduce_scatter", "all_gather"] if plan.fsdp else ["all_reduce"]
        jobs += [(name, data, tp, mesh.data(tp), sizes) for name in names + ["broadcast"] * plan.zero]
    samples: dict[str, list[Sample]] = {"node": [], "cluster": []}

    def measure(name: str, ranks: int, link: str, group: ProcessGroup | None, sizes: list[int]) -> None:
        first = 0 if name != "send" else mesh.members_of(mesh.stage)[0]
        alone = group if link == "node" or group is None or first in dist.get_process_group_ranks(group) else None
        samples[link] += [bench.sample(Probe(link, ranks, alone), name, size) for size in sizes]

    for name, ranks, stride, group, sizes in jobs:
        measure(name, ranks, "node" if ranks * stride <= per_node else "cluster", group, sizes)
    if len(plan.stages) > 1:
        _measure_messages(cell, mesh, per_node, measure)
    found = [_link(samples[link]) for link in ("node", "cluster")]
    return found[0], found[1]


def _measure_messages(cell: Cell, mesh: Mesh, per_node: int, measure: Any) -> None:
    """Messages between stages, and the sum of what the first and the last stage share."""
    plan, ranks = cell.plan, cell.plan.stage_ranks
    sizes = sorted(
        {plan.model.message_bytes(layer, cell.samples) // cell.degree for layer in range(1, plan.model.layers)}
    )
    seen = set()
    for stage in range(len(plan.stages)):
        other = (stage + 1) % len(plan.stages)
        link = "node" if stage * ranks // per_node == other * ranks // per_node else "cluster"
        if link not in seen:  # one pair of stages stands for all
            seen.add(link)
            groups = [dist.new_group([stage * ranks + at, other * ranks + at]) for at in range(ranks)]
            mine = groups[mesh.rank] if mesh.stage in (stage, other) else None
            measure("send", 2, link, mine, sizes)
    shared = group_of(mesh.peers((0, len(plan.stages) - 1)))
    table_bytes = 4 * cell.data["vocab_size"] * plan.model.hidden // cell.degree
    link = "node" if plan.world <= per_node else "cluster"
    measure("all_reduce", 2, link, shared, [table_bytes])


def _link(samples: list[Sample]) -> LinkModel:
    """Link of these samples alone."""
    rate = max((each.bytes / each.seconds for each in samples), default=1e9)
    return LinkModel(0.0, rate, samples=tuple(samples))


def measured_contention(config: PlansBenchConfig) -> Contention:
    """Mutual slowdown of compute and collectives on this machine; none of waits."""
    if config.flops:
        return Contention()
    everyone = contiguous(dist.get_world_size())
    profile = ProfileConfig(
        iterations=7, hidden=config.width, heads=everyone.size(), sequence=config.sequence, batch=config.samples
    )
    return ContentionBench(BlockBench(profile, everyone), everyone).measure()


def profiled(
    config: PlansBenchConfig, cell: Cell, device: Device, contention: Contention, mesh: Mesh, per_node: int
) -> Hardware:
    """This machine as a profile has it, for one cell."""
    node, cluster = (replace(link, contention=contention) for link in links_of(cell, mesh, per_node))
    if config.flops:
        update = update_seconds(list(cell.built(config.seed).parameters()), Clock(torch.device("cpu")), 3)
        plain = Hardware("this machine", replace(device, update_seconds=update), per_node, node, cluster)
        return emulated_hardware(plain, cell.model, (cell.degree,), config.flops)
    parts = max(segment.parts for stage in cell.plan.stages for segment in stage.segments)
    model = cell.built(config.seed)
    inputs, group = cell.batch(model, cell.samples, config.seed), contiguous(cell.degree)
    bench = LayerBench(model, cell.model, inputs, group, config.iterations, cell.samples)
    blocks = bench.blocks(cell.samples // parts, parts)
    ends, overheads = bench.passes(cell.samples, parts)
    device = replace(device, update_seconds=bench.update_seconds())
    return Hardware("this machine", device, per_node, node, cluster, (*blocks, *ends), overheads=tuple(overheads))


class Run:
    """The steps of a cell's plan on this rank."""

    def __init__(self, config: PlansBenchConfig, cell: Cell, hardware: Hardware, mesh: Mesh) -> None:
        model = cell.built(config.seed).train()
        replica = mesh.rank // cell.degree
        self._batch = cell.batch(model, cell.samples * cell.plan.micro_batches, config.seed + replica)
        self.model = parallelize(model, mesh=mesh, plan=cell.plan, micro_batches=cell.plan.micro_batches)
        if config.flops:
            emulate_compute(self.model, cell.model, hardware, cell.degree)
        self._optimizer = make_optimizer(self.model, torch.optim.AdamW, zero=cell.plan.zero, lr=1e-4)
        self.seconds: list[float] = []
        self.optimizer_seconds: list[float] = []

    def step(self) -> None:
        """A step, timed from when every rank has begun to when the slowest has ended."""

        def run() -> None:
            self.model.train_step(**self._batch)  # type: ignore[operator]
            start = time.perf_counter()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.optimizer_seconds.append(time.perf_counter() - start)

        self.seconds.append(timed_step(run))


def run_plans_bench(config: PlansBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Plan, profile and measure on the default group. Called on every rank."""
    named, per_node = checked_settings(config), dist.get_world_size() // ranks.nodes
    # Rank 0 plans for all: a search that its own clock ends could find another plan elsewhere.
    sent: list[Any] = [dict(cells_of(config, per_node)) if first_rank() else None]
    dist.broadcast_object_list(sent, src=0)
    cells: dict[str, Cell | str] = sent[0]
    device, contention = measure_device(ProfileConfig(iterations=3)), measured_contention(config)
    rows: dict[str, Any] = {}
    with progress("cells", len(cells), shows and first_rank()) as advance:
        for done, (name, cell) in enumerate(cells.items(), start=1):
            try:
                if isinstance(cell, str):
                    raise UsageError(cell)
                rows[name] = _row(config, cell, device, contention, per_node)
            except UsageError as error:  # on all ranks alike
                rows[name] = {"not_run": str(error)}
            advance(done)
    return {
        "config": named | {"nodes": ranks.nodes},
        "device": vars(device),
        "contention": vars_of(contention),
        "cells": rows,
    }


def _row(
    config: PlansBenchConfig, cell: Cell, device: Device, contention: Contention, per_node: int
) -> dict[str, Any]:
    mesh = Mesh.of(cell.plan)
    hardware = profiled(config, cell, device, contention, mesh, per_node)
    predictor = Predictor(hardware)
    prediction: Prediction = predictor.predict(cell.plan)
    steps = Run(config, cell, hardware, mesh)
    for _ in range(config.iterations + 1):
        steps.step()
    measured = statistics.median(steps.seconds[1:])  # the first is a warm-up
    (optimizer,) = max_over_ranks([statistics.median(steps.optimizer_seconds[1:])])
    predicted = prediction.step_seconds
    links = {name: [vars_of(sample) for sample in hardware.link(name).samples] for name in ("node", "cluster")}
    return {
        "large": cell.large.text(), "plan": cell.plan.text(), "parameters": cell.model.num_parameters,
        "samples": cell.samples, "step_seconds": measured, "predicted_seconds": predicted,
        "prediction_error": predicted / measured - 1, "optimizer_seconds": optimizer,
        "predicted_optimizer_seconds": prediction.optimizer_seconds,
        "predicted_exposed_seconds": prediction.exposed_seconds,
        "predicted_bubble_seconds": prediction.bubble_seconds, "steps": steps.seconds, "links": links,
        "blocks": [(block.kind, block.samples, vars_of(block.times)) for block in hardware.blocks],
        "overheads": [(each.forward, each.backward) for each in hardware.overheads],
    }  # fmt: skip


def vars_of(item: Any) -> dict[str, Any]:
    """Fields of a dataclass with slots."""
    return {name: getattr(item, name) for name in item.__slots__}


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per cell, the median error, and why other cells did not run."""
    cells = {name: row for name, row in result["cells"].items() if "not_run" not in row}
    rows = [
        (
            name, row["plan"], milliseconds(row["step_seconds"]), milliseconds(row["predicted_seconds"]),
            signed_percent(row["prediction_error"]), milliseconds(row["optimizer_seconds"]),
            milliseconds(row["predicted_optimizer_seconds"]),
        )
        for name, row in cells.items()
    ]  # fmt: skip
    yield table(("cell", "plan, scaled down", "step", "predicted", "error", "optimizer", "predicted"), rows, words=2)
    errors = [abs(row["prediction_error"]) for row in cells.values()]
    if errors:
        within = sum(error <= 0.1 for error in errors)
        yield f"median error {100 * statistics.median(errors):.1f} %; {within} of {len(errors)} cells within 10 %"
    yield from (f"{name}: {row['not_run']}" for name, row in result["cells"].items() if "not_run" in row)


BENCHMARK = Benchmark(
    "plans",
    "plans of large models, scaled down and executed beside their predictions",
    PlansBenchConfig(),
    run_plans_bench,
    shown,
)
