"""A step over data x pipeline x tensor parallel ranks of several nodes, beside its simulation and beside torch's own.

Compute is emulated by timed waits, so more ranks than cores can run; what is sent is sent. Every contestant runs the
same model by the same degrees, micro-batches and recomputation, with the same waits. The links are measured first, by
the groups of each axis; the simulator knows them and the waits, and nothing else of this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

import torch.distributed as dist
from rich.console import RenderableType

from oases.errors import UsageError
from oases.execution.group import ProcessGroup
from oases.parallel.mesh import Mesh
from oases.planner.predict import Predictor
from oases.plans.check import check
from oases.plans.plan import Plan, Segment, Stage
from oases.profile.config import ProfileConfig
from oases.profile.links import LinkBench, Probe
from oases.schedule import ScheduleError
from oases.schedule.pipeline import chunks_of, generate_pipeline
from oases.simulator.engine import run
from oases.simulator.hardware import Hardware
from oases.simulator.links import LinkModel
from oases.simulator.program import replicated
from oases.simulator.timeline import Timeline
from oases.terminal import progress
from oases.train.config import option
from oases_bench.harness import Benchmark, Ranks, Result, add_speedups, checked_settings, first_rank, interleave
from oases_bench.stage_baselines import BASELINES, TorchStage, parse_baselines
from oases_bench.stage_steps import EmulatedConfig, PlannedSteps, stages_table

AXES = ("data", "pipeline", "tensor")
_REFERENCE = "one_f_one_b/sync"


@dataclass(frozen=True)
class NodesBenchConfig(EmulatedConfig):
    """The model, how it is cut, and the device that its compute is emulated for."""

    contestants: str = option(
        "one_f_one_b/sync,one_f_one_b/oases,shifted_critical_path/sync,shifted_critical_path/oases",
        "PIPELINE/SCHEDULE of the stages and of the tensor-parallel stacks in them, comma-separated",
    )
    peers: str = option(
        "all", f"torch's own pipelining, tensor and data parallelism: {', '.join(BASELINES)}, all or none"
    )
    data: int = option(2, "data-parallel replicas")
    stages: int = option(2, "pipeline stages")
    tensor: int = option(2, "tensor-parallel degree")
    across: str = option("tensor", f"the axis whose ranks are on different nodes: {', '.join(AXES)}")
    samples: int = option(4, "samples of a micro-batch on a replica; overlapped schedules cut them in two")
    micro_batches: int = option(8, "micro-batches of a step")
    keep: bool = option(False, "keep all activations; else recompute every layer")
    flops: float = option(4e9, "FLOP/s of the emulated device")
    iterations: int = option(3, "interleaved repetitions")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.stages * self.tensor

    def prepared(self, ranks: Ranks) -> NodesBenchConfig:
        """See `BenchConfig`."""
        self.check(ranks.size, ranks.nodes)
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return (
            f"{self.data} replicas x {self.stages} stages x tp {self.tensor}, {self.across} parallelism across the "
            "nodes: {1}; compute is emulated, communication is real"
        )

    def check(self, ranks: int, nodes: int) -> None:
        """Everything that can be known before any rank starts."""
        self.require_least(1, "data", "stages", "tensor", "samples", "iterations")
        if ranks != self.world:
            raise UsageError(
                f"--data {self.data} x --stages {self.stages} x --tensor {self.tensor} are {self.world} ranks, and "
                f"--tp asks for {ranks}; give --tp {self.world}"
            )
        if ranks % nodes:
            raise UsageError(f"{ranks} ranks do not spread evenly over --nodes {nodes}; give a divisor")
        self.order(nodes)
        self.plans(ranks // nodes)
        self.peer_plan(ranks // nodes)
        parse_baselines(self.peers)

    def plans(self, per_node: int) -> dict[str, Plan]:
        """A plan for every contestant. UsageError, before any rank starts, for one that cannot be."""
        found = {}
        for name in self.contestants.split(","):
            pipeline, _, schedule = name.strip().partition("/")
            if not schedule:
                raise UsageError(f"--contestants {name!r} is not PIPELINE/SCHEDULE, such as {_REFERENCE}")
            try:
                plan = self._plan(pipeline, schedule, per_node)
                check(plan)
            except ScheduleError as error:
                raise UsageError(f"--contestants {name!r}: {error}") from error
            found[name.strip()] = plan
        return found

    def peer_plan(self, per_node: int) -> Plan:
        """Plan of the baselines: same degrees, with recomputation unless --keep."""
        return self._plan("one_f_one_b", "sync", per_node)

    def _plan(self, pipeline: str, schedule: str, per_node: int) -> Plan:
        parts = self.stages * chunks_of(pipeline)
        if self.layers % parts:
            raise UsageError(f"--layers {self.layers} do not divide over {parts} parts of the model; give a multiple")
        layers = self.layers // parts
        again, cuts = 0 if self.keep else layers, 1 if schedule in ("sync", "fine_grained") else 2
        keeps_last = not generate_pipeline(pipeline, self.stages, self.micro_batches).recomputes(self.stages - 1)

        def stage(number: int) -> Stage:
            layers_again = 0 if keeps_last and number == self.stages - 1 else again
            segment = Segment(2 * layers, self.tensor, schedule, cuts, layers_again)
            return Stage((segment,) * chunks_of(pipeline))

        batch = self.samples * self.data * self.micro_batches
        stages = tuple(map(stage, range(self.stages)))
        return Plan(self.model(), self.world, per_node, batch, self.micro_batches, stages, pipeline=pipeline)

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


@dataclass(frozen=True)
class AxisHardware(Hardware):
    """Hardware of which the links of one plan's axes are known, each as its own groups measured it.

    axes: by how far apart the ranks of a group are in the mesh: 1, the tensor-parallel degree, a stage. across: that
    of the axis that joins the nodes.
    """

    axes: Mapping[int, LinkModel] = field(default_factory=dict)
    across: int = 0

    def link_of(self, tp: int, stride: int = 1) -> str:
        """See `Hardware.link_of`."""
        return "cluster" if stride == self.across else "node"

    def collective_seconds(self, collective: str, ranks: int, num_bytes: float, stride: int = 1) -> float:
        """See `Hardware.collective_seconds`."""
        return 0.0 if ranks == 1 else self.axes[stride].seconds(collective, ranks, num_bytes)


def predicted(plan: Plan, predictor: Predictor, tensor_across: bool) -> Timeline:
    """A step as the simulator says. Stages and replicas share the link of a node where their sums go over it."""
    program, shared = predictor.program(plan, every_op=True), {"cluster"} if tensor_across else set[str]()
    if tensor_across:
        program = replicated(program, plan.stage_ranks // plan.stages[0].segments[0].tp, shared)
    return replace(run(program, shared), who="stage")


def run_nodes_bench(config: NodesBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group, whose ranks are spread over the nodes. Called on every rank."""
    named, nodes = checked_settings(config), ranks.nodes
    plans, order = config.plans(config.world // nodes), config.order(nodes)
    mesh = Mesh.of(next(iter(plans.values())), order=order)
    pairs = _pipeline_groups(config, order)
    hardware = measured_axes(config, nodes, mesh, pairs, shows and first_rank())
    predictor = Predictor(hardware, stack_only=True)
    # Parts of a message are joined over tensor-parallel links: a gain only where those are the faster ones.
    split = config.across == "pipeline"
    ours = {name: PlannedSteps(plan, hardware, mesh, split=split) for name, plan in plans.items()}
    peers = {
        name: TorchStage(config.peer_plan(config.world // nodes), hardware, mesh, pairs)
        for name in parse_baselines(config.peers)
    }
    peaks = {name: contestant.peak_bytes() for name, contestant in ours.items()}  # and a warm-up
    for peer in peers.values():
        peer.warm_up()
    interleave([*ours.values(), *peers.values()], config.iterations, "steps", shows)
    shared = config.across == "tensor"
    rows = {name: each.row(peaks[name], predicted(each.plan, predictor, shared)) for name, each in ours.items()}
    others = {name: peer.row() for name, peer in peers.items()}
    add_speedups(rows.get(_REFERENCE), (*rows.values(), *others.values()))
    names = {stride: name for name, stride in _strides(config).items()}
    links = {names[stride]: [asdict(sample) for sample in link.samples] for stride, link in hardware.axes.items()}
    return {"config": named | {"nodes": nodes}, "schedules": rows, "peers": others, "links": links}


def _strides(config: NodesBenchConfig) -> dict[str, int]:
    """Rank strides of the mesh axes that have groups."""
    known = {"tensor": (config.tensor, 1), "data": (config.data, config.tensor)}
    known["pipeline"] = config.stages, config.tensor * config.data
    return {name: stride for name, (degree, stride) in known.items() if degree > 1}


def _pipeline_groups(config: NodesBenchConfig, order: list[int]) -> ProcessGroup:
    """This rank's group of the ranks with its place in all stages. Every rank must call this."""
    ranks, mine = config.world // config.stages, None
    for place in range(ranks):
        members = order[place::ranks]
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    assert mine is not None, "every rank has a place in its stage"
    return mine


def measured_axes(
    config: NodesBenchConfig, nodes: int, mesh: Mesh, pipeline: ProcessGroup, visible: bool
) -> AxisHardware:
    """The emulated device behind the links of each axis, measured by the axis' own groups at once.

    Where tensor parallelism goes over the link of the nodes, by those of one stage, of which each then gets its part
    of the link: `run` lets stages and replicas share all of it.
    """
    model, tensor, data = config.model(), mesh.tensor(config.tensor), mesh.data(config.tensor)
    bench = LinkBench(ProfileConfig(hidden=config.hidden, heads=1, sequence=config.sequence, batch=config.samples))
    unit = model.unit_bytes(config.samples)
    gradients = sum(model.block_parameters(model.kind_of(b), config.tensor) for b in range(model.num_blocks))
    first = mesh.stage == 0 or config.across != "tensor"
    jobs = [
        ("tensor", config.tensor, tensor if first else None, "all_reduce", (unit // 4, unit // 2, unit)),
        ("data", config.data, data, "all_reduce", (1 << 16, model.element_bytes * gradients // config.stages)),
        # One pair of stages represents all: messages of a step hardly overlap on the link.
        ("pipeline", config.stages, pipeline, "send", (unit // 2, unit)),
    ]
    axes: dict[int, LinkModel] = {}
    with progress("links", len(jobs), visible) as advance:
        for done, (name, ranks, group, collective, sizes) in enumerate(jobs, start=1):
            if ranks > 1:
                probe = Probe(name, 2 if collective == "send" else ranks, group)
                if collective == "send" and ranks > 2 and mesh.stage > 1:
                    probe = replace(probe, mine=None)
                samples = [bench.sample(probe, collective, size) for size in sizes]
                rate = samples[-1].bytes / samples[-1].seconds
                if name == "tensor" and config.across == "tensor":
                    samples = [replace(each, seconds=each.seconds / config.data) for each in samples]
                    rate *= config.data
                axes[_strides(config)[name]] = LinkModel(0.0, rate, samples=tuple(samples))
            advance(done)
    some = next(iter(axes.values()))
    plain = config.hardware(config.world // nodes, some, some)
    known = {item.name: getattr(plain, item.name) for item in fields(Hardware)}
    return AxisHardware(**known, axes=axes, across=_strides(config)[config.across])


def shown(result: Result) -> Iterator[RenderableType]:
    """A row per contestant, peers below."""
    yield stages_table(result, "pipeline/tensor")


BENCHMARK = Benchmark(
    "nodes",
    "a step over several nodes in all three ways of cutting, beside torch's own",
    NodesBenchConfig(),
    run_nodes_bench,
    shown,
    size=8,
    nodes=2,
)
