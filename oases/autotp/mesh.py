"""The tensor-parallel group that a mesh or a plan means."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_size, resolve
from oases.parallel.mesh import Mesh
from oases.plans.check import check
from oases.plans.plan import AUTO, Experts, Plan, Segment
from oases.schedule import Schedule, is_text


def placed(
    mesh: DeviceMesh | Mesh | ProcessGroup | None,
    plan: Plan | None,
    schedule: str | Schedule,
    options: dict[str, Any],
) -> tuple[ProcessGroup | None, dict[str, Any]]:
    """The tensor-parallel group of `parallelize` and the options of its stacks.

    Raises UsageError for a mesh without a tensor-parallel dimension and a plan that does not fit it.
    """
    known = ("sub_batches", "recompute", "wire_dtype", "require_overlap", "small_batch")
    strange = sorted(set(options) - set(known))
    if strange:
        raise UsageError(
            f"parallelize() does not take {', '.join(strange)}; options of its stacks are {', '.join(known)}"
            + ("; its blocks' graphs are for whole sequences" if "sequence_parallel" in strange else "")
        )
    options = {"schedule": schedule, "small_batch": "whole", **options}
    if plan is not None:
        options |= _options_of(_only_segment(plan))
        mesh = _mesh_of(plan) if mesh is None else mesh
    if isinstance(mesh, Mesh):
        group = mesh.tensor(mesh.degrees[-1])
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and "tp" not in names:
            raise UsageError(f"mesh has the dimensions {names or mesh.ndim}; name the tensor-parallel one 'tp'")
        group = mesh.get_group("tp" if "tp" in names else 0)
    else:
        group = resolve(mesh)
    if plan is not None and group_size(group) != plan.stages[0].segments[0].tp:
        raise UsageError(
            f"plan: its tensor-parallel degree is {plan.stages[0].segments[0].tp}, the mesh has {group_size(group)} "
            "ranks; give the mesh of the plan, oases.parallel.mesh.Mesh.of(plan)"
        )
    return group, options


def _only_segment(plan: Plan) -> Segment:
    """The segment of a plan that parallelize() can run. UsageError, naming the field, for what it would leave out."""
    segments = [segment for stage in plan.stages for segment in stage.segments]
    if len(plan.stages) > 1 or len(segments) > 1:
        raise UsageError(
            f"plan: it has {len(plan.stages)} stages and {len(segments)} segments; parallelize() runs plans of "
            "one degree and schedule for all layers: plan with one stage and uniform settings"
        )
    (segment,) = segments
    remedies = {
        "zero": (plan.zero, "plan without it, by oases plan --no-zero or Space(zero=(False,))"),
        "fsdp": (plan.fsdp, "leave it out, and call fully_shard on the model"),
        "micro_batches": (
            plan.micro_batches if plan.micro_batches > 1 else None,
            "plan with one, by oases plan --micro-batches 1 or Space(micro_batches=(1,)), and accumulate gradients "
            "in your loop",
        ),
        "sequence_parallel": (segment.sequence_parallel, "leave it out; its blocks' graphs are for whole sequences"),
        "experts": (plan.experts, "leave them out; parallelize() keeps the model's own experts"),
    }
    for name, (value, remedy) in remedies.items():
        if value:
            shown = value.experts if isinstance(value, Experts) else value
            raise UsageError(f"plan: parallelize() does not do {name} {shown}, a part of the training loop; {remedy}")
    return segment


def _options_of(segment: Segment) -> dict[str, Any]:
    """The options of a stack that runs all layers as the segment says."""
    options: dict[str, Any] = {"recompute": segment.recomputed_layers}
    if is_text(segment.schedule):
        return options | {"schedule": segment.generated()}
    sub_batches = AUTO if segment.schedule == AUTO else segment.sub_batches
    return options | {"schedule": segment.schedule, "sub_batches": sub_batches}


def _mesh_of(plan: Plan) -> Mesh:
    check(plan)
    degree = plan.stages[0].segments[0].tp
    if plan.world > degree:
        raise UsageError(
            f"plan: it has {plan.world // degree} replicas, whose gradients parallelize() does not average; give "
            f"mesh=oases.parallel.mesh.Mesh.of(plan), and average them over mesh.data({degree})"
        )
    return Mesh.of(plan)


def require_layers(plan: Plan, counts: list[int]) -> None:
    """Raise UsageError unless the plan is of a model with one list of so many layers."""
    if counts != [plan.model.layers]:
        raise UsageError(
            f"plan: it is for {plan.model.layers} layers, the model has lists of {counts or 'no'} layers; plan for "
            "it with oases.plan(model, cluster, ...)"
        )
