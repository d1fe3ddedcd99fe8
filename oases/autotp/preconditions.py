"""Checks of a model, mesh and plan before sharding; each error names its remedy."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.export import UnsplittableError
from oases.autotp.layers import LayerList, first_leaf
from oases.autotp.signatures import LayerSignature
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_size, resolve
from oases.core.schedule import Schedule, is_text
from oases.distributed.mesh import Mesh
from oases.errors import UsageError
from oases.plans.check import check
from oases.plans.plan import Experts, Plan, Segment

_SAMPLED = 4096
"""Elements per tensor that are compared across ranks; another seed changes all of them."""


def require_cuttable(model: nn.Module) -> None:
    """Raise UsageError for a model that is parallelized, compiled, patched or quantised."""
    what = type(model).__name__
    if getattr(model, "oases_partition", None) is not None:
        raise UsageError(f"{what} is parallelized already; build a new model")
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise UsageError(f"{what} has quantised weights, which cannot be trained; load it unquantised")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise UsageError(f"{name} is of type {parameter.dtype}, a quantised weight; load the model unquantised")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(f"{name} has hooks, and parallelize() puts a new parameter there; add them afterwards")
    for name, part in model.named_modules():
        forward = vars(part).get("forward")
        own = isinstance(forward, MethodType) and forward.__self__ is part
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        if compiled or (forward is not None and not own):
            raise UsageError(
                f"{name or what}: its forward was {'compiled' if compiled else 'replaced on the object'} (by "
                "torch.compile, a hook of accelerate, or a patch), so it cannot be traced: parallelize "
                "the model first, or patch its class, or assign a method of the module itself"
            )


def checkpoints(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on in a transformers model; the attribute's name depends on the version."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    name = next((name for name in names if hasattr(type(model), name)), "")
    return bool(name and getattr(model, name))


def require_alike(model: nn.Module, group: ProcessGroup | None, *, values: bool) -> None:
    """Raise UsageError on all ranks, naming the first tensor, unless the model is equal on all ranks of a group.

    values: compare a sample of each tensor's values too; else names, shapes and types alone.
    """
    if group is None or group_size(group) == 1:
        return
    mine = [
        (name, tuple(tensor.shape), str(tensor.dtype), _digest(tensor) if values else "")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    if len(set(all_gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest(), group))) == 1:
        return
    said = all_gather_objects(mine, group)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            pairs = zip(said[0], theirs, strict=False)
            other = next(((mine, its) for mine, its in pairs if mine != its), (said[0][-1], theirs[-1]))
            raise UsageError(
                f"{type(model).__name__} is not the same on all ranks: {other[0][0]} {other[0][1]} of rank 0 differs "
                f"from {other[1][0]} {other[1][1]} of rank {rank}; call torch.manual_seed with one seed before "
                "building the model, or give weights=..."
            )


def require_same_options(groups: Sequence[ProcessGroup | None], options: dict[str, Any]) -> None:
    """Raise UsageError on all ranks, naming both values, unless all ranks give the same options.

    groups: one for each dimension of a mesh; what a rank hears over one it tells over the next.
    """
    said: list[Any] = [{name: f"{value!s:.80}" for name, value in options.items()}]
    for group in groups:
        said = [each for of_rank in all_gather_objects(said, group) for each in of_rank]
    for theirs in said:
        for name, value in said[0].items():
            if theirs[name] != value:
                raise UsageError(
                    f"parallelize: {name} is {value} on one rank and {theirs[name]} on another; give all ranks the "
                    "same options"
                )


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, len(flat) // _SAMPLED)].cpu().contiguous()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def tensor_parallel_group(
    mesh: DeviceMesh | Mesh | ProcessGroup | None,
    plan: Plan | None,
    schedule: str | Schedule,
    options: dict[str, Any],
) -> tuple[ProcessGroup | None, dict[str, Any]]:
    """Tensor-parallel group of `parallelize`, and the options of its stacks.

    Raises UsageError for a mesh without a tensor-parallel dimension and a plan that does not fit it.
    """
    known = ("sub_batches", "recompute", "wire_dtype", "require_overlap", "small_batch", "sequence_parallel")
    strange = sorted(set(options) - set(known))
    if strange:
        raise UsageError(
            f"parallelize() does not take {', '.join(strange)}; options of its stacks are {', '.join(known)}"
        )
    options = {"schedule": schedule, "small_batch": "whole", **options}
    if plan is not None:
        require_runnable(plan)
        check(plan)
        mesh = Mesh.of(plan) if mesh is None else mesh
    if isinstance(mesh, Mesh):
        group = mesh.tensor(mesh.degrees[-1])
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and "tp" not in names:
            raise UsageError(f"mesh has the dimensions {names or mesh.ndim}; name the tensor-parallel one 'tp'")
        group = mesh.get_group("tp" if "tp" in names else 0)
    else:
        group = resolve(mesh)
    if not isinstance(mesh, Mesh):  # whose groups have the options
        warn_of_slow_collectives(group)
    if plan is not None and group_size(group) != plan.stages[0].segments[0].tp:
        raise UsageError(
            f"plan: its tensor-parallel degree is {plan.stages[0].segments[0].tp}, the mesh has {group_size(group)} "
            "ranks; give the mesh of the plan, oases.distributed.mesh.Mesh.of(plan)"
        )
    return group, options


def warn_of_slow_collectives(group: ProcessGroup | None) -> None:
    """Warn of a NCCL group whose collectives queue behind the matmuls that are to hide them."""
    if group is None or group_size(group) == 1 or "nccl" not in dist.get_backend_config(group):
        return
    if not backend_options(group).is_high_priority_stream:
        warnings.warn(
            "the tensor-parallel group's collectives run at normal priority and wait for the matmuls under which "
            "they should be hidden; create it with oases.nccl_options(): init_process_group(pg_options=...), "
            "new_group(pg_options=...), or init_device_mesh(backend_override={'tp': ...})",
            stacklevel=4,
        )


def backend_options(group: ProcessGroup) -> Any:
    """Options that a NCCL group was created with."""
    backend: Any = group._get_backend(torch.device("cuda"))
    return backend.options


def require_runnable(plan: Plan) -> None:
    """Raise UsageError, naming the field, for a plan that parallelize() cannot run."""
    segments = [segment for stage in plan.stages for segment in stage.segments]
    if plan.uniform_tp is None:
        raise UsageError(
            f"plan: its segments have the tensor-parallel degrees {sorted({each.tp for each in segments})}; "
            "parallelize() runs plans of one degree: plan with one, by oases plan --tp"
        )
    remedies = {
        "experts": (plan.experts, "leave them out; parallelize() keeps the model's own experts"),
        "num_blocks": (
            next((segment.num_blocks for segment in segments if plan.model.mixed and segment.num_blocks % 2), 0),
            "give segments of whole layers, of two blocks each",
        ),
    }
    for name, (value, remedy) in remedies.items():
        if value:
            shown = value.experts if isinstance(value, Experts) else value
            raise UsageError(f"plan: parallelize() does not do {name} {shown} for such a model; {remedy}")


def require_planned(model: nn.Module, lists: Sequence[LayerList], plan: Plan) -> None:
    """Raise UsageError, with both sizes, for a plan of a model whose layers are others than those in `lists`.

    Compares their number, the features between them and, of a traced model, the parameters of each; those of
    adapters, which are added to a planned model, do not count.
    """
    calls = [call for each in lists for call in each.calls]
    planned, remedy = plan.model, f"plan for {type(model).__name__} by oases.plan(model, cluster, ...)"
    if len(calls) != planned.layers:
        raise UsageError(f"plan: it is for {planned.layers} layers, the model has {len(calls)} in lists; {remedy}")
    paths = [path for each in lists for path in each.paths]
    if paths == [""]:  # the whole model, as one layer
        return
    x = first_leaf(calls[0].result)
    if isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] != planned.hidden:
        width = x.shape[-1]
        raise UsageError(f"plan: it is for layers of width {planned.hidden}, the model's have {width}; {remedy}")
    if planned.sizes is not None or getattr(model, "peft_config", None) is not None:
        return
    for layer, (path, call) in enumerate(zip(paths, calls, strict=True)):
        kinds = planned.layer_kinds[planned.layer_order[layer]]
        wanted = sum(share.parameters for kind in kinds for share in planned.block(kind).shares)
        found = sum(parameter.numel() for parameter in call.module.parameters())
        if wanted != found:
            raise UsageError(
                f"plan: layer {layer} of {planned.name} has {wanted} parameters there, {path} has {found}; {remedy}"
            )


def require_token_wise(
    segments: Sequence[tuple[LayerList, Sequence[LayerSignature | UnsplittableError], dict[str, Any]]], ranks: int
) -> None:
    """Raise UsageError, naming list and op, for layers that are to run on parts of a sequence and cannot."""
    for found, signatures, options in segments:
        if not options.get("sequence_parallel") or ranks == 1:
            continue
        where = found.name or "the model"
        why = found.broken or next((str(each) for each in signatures if isinstance(each, UnsplittableError)), "")
        if options["schedule"] == "layers":
            why = "schedule='layers' runs each layer alone"
        for signature, call, at in zip(signatures, found.calls, found.activations, strict=True) if not why else ():
            assert isinstance(signature, LayerSignature)
            program = signature.sample(call, at)
            why = program.why_not_in_a_stack
            if why:
                break
            _ = program.tokens
        if why:
            raise UsageError(
                f"sequence_parallel: {where} does not run across its layers ({why}); leave sequence_parallel out, or "
                "name the lists to shard in spec=ParallelSpec(layers=...)"
            )


def options_of(segment: Segment, wire: str = "none") -> dict[str, Any]:
    """Stack options for running all layers as the segment specifies. wire: the plan's."""
    options: dict[str, Any] = {
        "recompute": segment.recomputed_layers, "sequence_parallel": segment.sequence_parallel
    }  # fmt: skip
    if wire != "none":
        options["wire_dtype"] = wire
    if is_text(segment.schedule):
        return options | {"schedule": segment.generated()}
    return options | {"schedule": segment.schedule, "sub_batches": segment.sub_batches or None}
