"""Stages of a model from a mesh or a plan: options of `parallelize`, checked, and the model divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.layers import Inputs, LayerList
from oases.autotp.pipeline.dataflow import dataflow_of, flops_by_layer, units_of
from oases.autotp.pipeline.stages import Division, balanced_counts, divide
from oases.autotp.pipeline.units import Units, take_stage
from oases.core.schedule import Schedule, is_text
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.plans.check import pipeline_of
from oases.plans.pipelines import resolve_pipeline
from oases.plans.plan import Plan, Segment

DIMENSIONS = ("pp", "dp", "tp")
"""Dimensions of a mesh, in the order of the ranks of a run: neighbours are of one tensor-parallel group."""


@dataclass(frozen=True)
class PipelineOptions:
    """Options of training in micro-batches. counts: layers of each part; () to balance them by FLOPs.

    fsdp, zero: weights, gradients and optimizer state are sharded over the replicas; with zero the weights are whole
    during a step. dtype: of weights in passes; None: their own. gradient_wire, pipeline_wire: "int8" for quantised
    averages of gradients and messages between stages; "" for their own type.
    """

    mesh: Mesh
    degree: int
    schedule: Schedule
    counts: tuple[int, ...] = ()
    fsdp: bool = False
    zero: bool = False
    dtype: torch.dtype | None = None
    gradient_wire: str = ""
    pipeline_wire: str = ""

    def __post_init__(self) -> None:
        if self.schedule.chunks > self.schedule.num_stages == 1:
            raise UsageError(f"{self.schedule.name} needs at least 2 stages, got 1; take one_f_one_b")

    @property
    def shards(self) -> bool:
        """Whether weights are sharded over several replicas."""
        return self.fsdp or (self.zero and self.mesh.replicas(self.degree) > 1)

    @property
    def parts(self) -> int:
        """Parts of the model."""
        return self.schedule.num_blocks

    @property
    def recomputes(self) -> bool:
        """Whether this rank's stage recomputes where others do: the last one of some pipelines never does."""
        stages = range(self.schedule.num_stages)
        return self.schedule.recomputes(self.mesh.stage) or not any(map(self.schedule.recomputes, stages))


def pipeline_options(
    mesh: Any,
    plan: Plan | None,
    pipeline: str,
    micro_batches: int | None,
    recompute: Any,
    *,
    fsdp: bool,
    zero: bool,
    dtype: torch.dtype | None,
) -> PipelineOptions | None:
    """Options for a mesh with "pp", for fsdp, or for a plan of stages, micro-batches, replicas or FSDP; None without.

    The replicas of a DeviceMesh without "pp", and of a process group, are not this function's: the model averages its
    gradients over "dp" in each backward pass, the user over what lies outside of a group.

    Collective: creates the groups of the mesh. Raises UsageError for a mesh that does not fit.
    """
    _require_one_kind(plan, fsdp=fsdp, zero=zero)
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if plan is not None and (_is_staged(plan, mesh, names) or micro_batches is not None):
        if micro_batches not in (None, plan.micro_batches):
            raise UsageError(f"plan: it has {plan.micro_batches} micro-batches, not {micro_batches}; leave them out")
        require_runnable(plan)
        counts = tuple(len(plan.layers_of(part)) for part in plan.parts)
        degree = plan.stages[0].segments[0].tp
        return PipelineOptions(
            _mesh_of(plan, degree, mesh), degree, pipeline_of(plan), counts, plan.fsdp, plan.zero, dtype
        )
    if "pp" not in names:
        if micro_batches is not None:
            raise UsageError(
                f"micro_batches {micro_batches} needs a mesh with the dimension 'pp'; without it accumulate "
                "gradients in your loop"
            )
        if not fsdp:
            return None
        if "dp" not in names:
            raise UsageError("fsdp shards over a mesh's dimension 'dp', and there is none; give such a mesh")
    what = "a mesh with 'pp'" if "pp" in names else "a mesh for fsdp"
    if not set(names) <= set(DIMENSIONS):
        raise UsageError(f"mesh has the dimensions {names}; {what} may have {', '.join(DIMENSIONS)} alone")
    sizes = {name: mesh.size(names.index(name)) for name in names}
    stages, degree = sizes.get("pp", 1), sizes.get("tp", 1)
    many = (2 * stages if "pp" in names else 1) if micro_batches is None else micro_batches
    schedule = resolve_pipeline(pipeline, stages, many, recompute not in ("none", 0))
    if mesh.size() != dist.get_world_size():
        raise UsageError(f"mesh has {mesh.size()} ranks, the run {dist.get_world_size()}; {what} takes all of them")
    made = Mesh.of_stages([[degree]] * stages, order=_order(mesh, names), fsdp=fsdp or zero)
    return PipelineOptions(made, degree, schedule, fsdp=fsdp, zero=zero, dtype=dtype)


def require_runnable(plan: Plan) -> None:
    """Raise UsageError, naming the field, for a plan that parallelize() cannot run."""
    segments = [segment for stage in plan.stages for segment in stage.segments]
    if plan.uniform_tp is None:
        raise UsageError(
            f"plan: its segments have the tensor-parallel degrees {sorted({each.tp for each in segments})}; "
            "parallelize() runs plans of one degree: plan with one, by oases plan --tp"
        )
    why = "parallelize() does not do"
    if plan.experts:
        raise UsageError(
            f"plan: {why} experts {plan.experts.experts} for such a model; leave them out; parallelize() keeps the "
            "model's own experts"
        )
    odd = [segment.num_blocks for segment in segments if plan.model.mixed and segment.num_blocks % 2]
    if odd:
        raise UsageError(
            f"plan: {why} num_blocks {odd[0]} for such a model; give segments of whole layers, of two blocks each"
        )


def _require_one_kind(plan: Plan | None, *, fsdp: bool, zero: bool) -> None:
    """Raise UsageError for both kinds of sharding, and for one that a plan does not have."""
    if zero and fsdp:
        raise UsageError("fsdp includes zero; leave out zero")
    for name, given in (("zero", zero), ("fsdp", fsdp)):
        if given and plan is not None and not getattr(plan, name):
            raise UsageError(f"plan: it has no {name}; leave {name} out, or plan for it")


def planned_dtype(plan: Plan | None, dtype: torch.dtype | None) -> torch.dtype | None:
    """Type of weights in passes: the plan's where none is given. UsageError for another than the plan's."""
    if plan is None:
        return dtype
    planned: torch.dtype = getattr(torch, plan.model.dtype)
    if dtype not in (None, planned):
        raise UsageError(
            f"plan: it is for a model in {planned}, and dtype is {dtype}; leave dtype out, or plan for {dtype}"
        )
    return dtype if planned == torch.float32 else planned


def planned_experts(plan: Plan | None, experts: str, degree: int | None) -> tuple[str, int | None]:
    """Mode and degree of experts: the plan's where it has a degree. UsageError for another than the plan's."""
    if plan is None or not plan.model.expert_parallel:
        return experts, degree
    planned = plan.model.expert_parallel
    if degree not in (None, planned):
        raise UsageError(f"plan: its experts are divided over {planned} ranks, and expert_parallel is {degree}")
    return "balanced", planned


def _is_staged(plan: Plan, mesh: Any, names: Sequence[str]) -> bool:
    """Whether the model trains by `train_step`: it is in stages, or what the plan has needs whole steps."""
    if len(plan.stages) > 1 or plan.micro_batches > 1 or plan.fsdp or "pp" in names:
        return True
    return plan.uniform_tp not in (None, plan.world) and (mesh is None or isinstance(mesh, Mesh))


def _order(mesh: DeviceMesh, names: Sequence[str]) -> list[int]:
    """Ranks of a mesh in the order of DIMENSIONS."""
    found: list[int] = (
        mesh.mesh.permute([names.index(name) for name in DIMENSIONS if name in names]).flatten().tolist()
    )
    return found


def _mesh_of(plan: Plan, degree: int, mesh: Any) -> Mesh:
    """The mesh of a plan, with the ranks in the order of a given one. UsageError for a mesh of other sizes."""
    wanted = dict(zip(DIMENSIONS, (len(plan.stages), plan.stage_ranks // degree, degree), strict=True))
    given = dict(wanted)
    if isinstance(mesh, Mesh):
        tp = mesh.degrees[-1]
        given = dict(zip(DIMENSIONS, (mesh.num_stages, mesh.ranks // tp, tp), strict=True))
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ("tp",) * (mesh.ndim == 1)
        if not names or not set(names) <= set(DIMENSIONS):
            raise UsageError(
                f"mesh has the dimensions {names or mesh.ndim}; one of a plan may have {', '.join(DIMENSIONS)} alone"
            )
        given = {name: mesh.size(names.index(name)) if name in names else 1 for name in DIMENSIONS}
    if given != wanted:
        planned, got = (" x ".join(f"{name} {size}" for name, size in each.items()) for each in (wanted, given))
        raise UsageError(f"plan: it is for {planned}, the mesh has {got}; leave mesh out, or give one of these sizes")
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh.of(plan, order=_order(mesh, names))
    return Mesh.of(plan, process_group=mesh)


@dataclass(frozen=True)
class Stages:
    """A model divided into the parts of a pipeline.

    twin: fake copy of the whole model. names: of its units. inputs: of the pass by which it was divided.
    """

    twin: nn.Module
    inputs: Inputs
    names: Sequence[str]
    units: Units
    division: Division


Signatures = Sequence[Any]
"""Signature of each layer of a list, or why it cannot be sharded."""


def segments_of(
    found: Sequence[tuple[LayerList, Signatures]],
    plan: Plan | None,
    options: dict[str, Any],
    division: Division | None,
    stage: int,
) -> list[tuple[LayerList, list[Any], dict[str, Any]]]:
    """Lists of the layers that run together on a stage, each with its signatures and the options of its stack.

    found: the model's lists. A list ends where a part of the pipeline or a segment of the plan does.
    """
    parts = [[path for each, _ in found for path in each.paths]] if division is None else division.layers
    slices: list[tuple[LayerList, list[Any], dict[str, Any]]] = []
    for number, layers in enumerate(parts):
        if division is not None and division.stage_of[number] != stage:
            continue
        given = [(len(layers), options)]
        if plan is not None:
            placed = plan.layer_counts(plan.parts[number])
            given = [(count, options | _options_of(each, plan.wire)) for count, each in placed]
        start = 0
        for count, chosen in given:
            mine = set(layers[start : start + count])
            start += count
            for each, signatures in found:
                at = [place for place, path in enumerate(each.paths) if path in mine]
                if at:
                    lists = ("paths", "calls", "activations")
                    kept: Any = {name: [getattr(each, name)[place] for place in at] for name in lists}
                    slices.append((replace(each, **kept), [signatures[place] for place in at], chosen))
                    recomputed = chosen.get("recompute")
                    if plan is not None and isinstance(recomputed, int):  # the first layers of a segment of two lists
                        slices[-1] = (*slices[-1][:2], chosen | {"recompute": min(recomputed, len(at))})
                        chosen = chosen | {"recompute": max(0, recomputed - len(at))}
    return slices


def _options_of(segment: Segment, wire: str = "none") -> dict[str, Any]:
    """Stack options for running all layers as the segment specifies. wire: the plan's."""
    options: dict[str, Any] = {
        "recompute": segment.recomputed_layers, "sequence_parallel": segment.sequence_parallel
    }  # fmt: skip
    if wire != "none":
        options["wire_dtype"] = wire
    if is_text(segment.schedule):
        return options | {"schedule": segment.generated()}
    return options | {"schedule": segment.schedule, "sub_batches": segment.sub_batches or None}


def divide_model(
    model: nn.Module, twin: nn.Module, lists: Sequence[LayerList], inputs: Inputs, options: PipelineOptions
) -> Stages:
    """Divide a model into stages and keep this rank's, in place: other stages' weights are freed.

    twin: its fake copy. lists: of layers. UsageError for a model that cannot be divided so.
    """
    kind = type(model).__name__
    layers = [path for found in lists for path in found.paths]
    if not layers or layers == [""]:
        raise UsageError(f"{kind} has no list of layers to divide into stages; train it without 'pp'")
    names = units_of(twin, layers)
    flow = dataflow_of(twin, names, inputs)
    costs = flops_by_layer(flow, layers)
    counts = options.counts or balanced_counts(costs, options.parts, kind)
    if sum(counts) != len(costs):
        raise UsageError(
            f"plan: its stages have {sum(counts)} layers, {kind} calls {len(costs)}; plan for this model"
        )
    stage_of = [options.schedule.stage_of(part) for part in range(options.parts)]
    division = divide(twin, flow, names, layers, stage_of, counts)
    units = Units(twin, names)
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    take_stage(model, units, names, division, options.mesh.stage, options.dtype)
    held = set(model.state_dict(keep_vars=True))
    held_by = {before[name]: name for name in before if name in held}
    elsewhere = {name: held_by.get(key, "") for name, key in before.items() if name not in held}
    object.__setattr__(model, "oases_elsewhere", elsewhere)
    return Stages(twin, inputs, names, units, division)
