"""Predicted steps of the nodes benchmark: its model as the planner traces it, links as its groups measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.costs import trace_layers
from oases.core.schedule import generate_pipeline
from oases.core.schedule.tensor import WHOLE
from oases.planner.predict import Predictor
from oases.plans.layered import Model
from oases.plans.pipelines import chunks_of
from oases.plans.plan import Plan
from oases.plans.segment import Segment, Stage
from oases.profile.config import ProfileConfig
from oases.profile.links import LinkBench, Probe
from oases.simulator.engine import run
from oases.simulator.hardware import Device, Hardware
from oases.simulator.links import LinkModel
from oases.simulator.program import replicated
from oases_bench.llama import LlamaShape


@dataclass(frozen=True)
class AxisHardware(Hardware):
    """Hardware of which the links of a mesh's dimensions are known, each as its own groups measured it.

    axes: by how far apart the ranks of a group are in the mesh: 1, the tensor-parallel degree, a stage. across: that
    of the dimension that joins the nodes.
    """

    axes: Mapping[int, LinkModel] = field(default_factory=dict)
    across: int = 0

    def link_of(self, tp: int, stride: int = 1) -> str:
        """See `Hardware.link_of`."""
        return "cluster" if stride == self.across else "node"

    def collective_seconds(self, collective: str, ranks: int, num_bytes: float, stride: int = 1) -> float:
        """See `Hardware.collective_seconds`."""
        return 0.0 if ranks == 1 else self.axes[stride].seconds(collective, ranks, num_bytes)

    def message_seconds(self, num_bytes: float, source: int, target: int, ranks: int) -> float:
        """See `Hardware.message_seconds`."""
        return self.axes[ranks].seconds("send", 2, num_bytes)


class Predictions:
    """Steps of ours over a mesh, simulated with these links and matmuls, and nothing else of this machine.

    across: the mesh's dimension whose ranks are on different nodes. flops: FLOP/s of the emulated device. Collective.
    """

    def __init__(self, shape: LlamaShape, mesh: DeviceMesh, across: str, flops: float, per_node: int) -> None:
        self._shape, self._mesh, self._across, self._per_node = shape, mesh, across, per_node
        self._model = trace_layers(shape.model(), sequence=shape.sequence)
        axes = _measured_axes(shape, self._model, mesh, across)
        some = next(iter(axes.values()), LinkModel(0.0, 1e12))
        self._predictor = Predictor(
            AxisHardware(
                "emulated", Device("emulated", 1 << 40, {"float32": flops}, 1e15), per_node, some, some, axes=axes,
                across=_strides(mesh)[across],
            ),
            split=across != "tp",  # parts of a message are joined over tensor-parallel links, inside a node alone
        )  # fmt: skip

    def plan(self, pipeline: str, schedule: str, sub_batches: int, wire: str = "") -> Plan:
        """Plan of what `parallelize` does with these names."""
        shape, (stages, replicas, degree) = self._shape, self._mesh.shape
        chunks = chunks_of(pipeline)
        blocks = self._model.num_blocks // (stages * chunks)
        layers = shape.layers // (stages * chunks)
        recomputes = generate_pipeline(pipeline, stages, shape.micro_batches).recomputes
        cuts = 1 if schedule in WHOLE else sub_batches

        def stage(number: int) -> Stage:
            again = layers if recomputes(number) and not shape.keep else 0
            return Stage((Segment(blocks, degree, schedule, cuts, again),) * chunks)

        batch = shape.samples * replicas * shape.micro_batches
        return Plan(
            self._model, self._mesh.size(), self._per_node, batch, shape.micro_batches,
            tuple(map(stage, range(stages))), pipeline=pipeline, wire=wire or "none",
        )  # fmt: skip

    def seconds(self, pipeline: str, schedule: str, sub_batches: int, wire: str = "") -> float:
        """Seconds of a step. Stages and replicas share the link of a node where their sums go over it."""
        program = self._predictor.program(self.plan(pipeline, schedule, sub_batches, wire), every_op=True)
        shared = {"cluster"} if self._across == "tp" else set[str]()
        if shared:
            program = replicated(program, self._mesh.shape[1], shared)
        return run(program, shared).total_seconds


def _strides(mesh: DeviceMesh) -> dict[str, int]:
    _, replicas, degree = mesh.shape
    return {"tp": 1, "dp": degree, "pp": degree * replicas}


def _measured_axes(shape: LlamaShape, model: Model, mesh: DeviceMesh, across: str) -> dict[int, LinkModel]:
    """Link of each dimension, measured by its own groups at once.

    Where tensor parallelism goes over the link of the nodes, by those of one stage, of which each then gets its part
    of the link: the simulator lets stages and replicas share all of it.
    """
    stages, replicas, degree = mesh.shape
    bench = LinkBench(ProfileConfig(hidden=shape.hidden, heads=1, sequence=shape.sequence, batch=shape.samples))
    unit = model.unit_bytes(shape.samples)
    gradients = model.element_bytes * model.num_parameters // degree // stages
    first = mesh.get_local_rank("pp") == 0 or across != "tp"
    jobs: tuple[tuple[str, int, Any, str, tuple[int, ...]], ...] = (
        ("tp", degree, mesh.get_group("tp") if first else None, "all_reduce", (unit // 4, unit // 2, unit)),
        ("dp", replicas, mesh.get_group("dp"), "all_reduce", (1 << 16, gradients)),
        # One pair of stages represents all: messages of a step hardly overlap on the link.
        ("pp", stages, mesh.get_group("pp"), "send", (unit // 2, unit)),
    )
    axes: dict[int, LinkModel] = {}
    for name, ranks, group, collective, sizes in jobs:
        if ranks == 1:
            continue
        probe = Probe(name, 2 if collective == "send" else ranks, group)
        if collective == "send" and mesh.get_local_rank("pp") > 1:
            probe = replace(probe, mine=None)
        samples = [bench.sample(probe, collective, size) for size in sizes]
        rate = samples[-1].bytes / samples[-1].seconds
        if name == across == "tp":
            samples = [replace(each, seconds=each.seconds / replicas) for each in samples]
            rate *= replicas
        axes[_strides(mesh)[name]] = LinkModel(0.0, rate, samples=tuple(samples))
    return axes
