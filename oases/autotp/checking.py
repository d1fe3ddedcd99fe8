"""First phase of `parallelize`: options, mesh and plan, checked and the same on all ranks; groups of a backend."""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from statistics import median
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.balanced import ExpertOptions, expert_options
from oases.autotp.layers import Inputs, example_inputs, turn_off_inner_caches
from oases.autotp.lowering import GroupRank
from oases.autotp.pipeline.building import (
    PipelineOptions,
    pipeline_options,
    planned_dtype,
    planned_experts,
    require_runnable,
)  # fmt: skip
from oases.autotp.tools.recomputation import recomputing_options
from oases.autotp.vocabulary import Vocabulary, find_vocabulary, holds_weight
from oases.core.dtypes import AUTO_LOSSY
from oases.core.execution.communication import WireType, quantised_type, wire_type
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_of, group_size, resolve
from oases.core.execution.piece import require_compiler
from oases.core.schedule import Schedule
from oases.distributed.expert_groups import EXPERT_MODES
from oases.distributed.mesh import Mesh
from oases.distributed.precision import require_dtype
from oases.distributed.replicas import DATA_DIMENSIONS, data_parallel_group
from oases.errors import UsageError
from oases.plans.check import check as require_valid
from oases.plans.plan import Plan

_STACK = ("sub_batches", "recompute", "wire_dtype", "require_overlap", "small_batch", "sequence_parallel")
"""Options of stacks."""
_OTHERS = ("pp", *DATA_DIMENSIONS)
"""Dimensions of meshes beside the tensor-parallel one."""
_SAMPLED = 4096
"""Elements per tensor that are compared across ranks; another seed changes all of them."""
_NUMBERS = 1 << 20
"""float32 numbers of an all-reduce that is timed: 4 MB, some thousand tokens of a layer."""
_WIDTH, _MATMULS = 1024, 4
"""Matmuls beside it, of square float32 matrices: a backend that slows them is no faster."""
_ROUNDS = 5
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ParallelSpec:
    """Properties that `parallelize` cannot infer of a module that is not from transformers.

    inputs: (args, kwargs) of a sample call, tensors of the right shapes and types, with or without data; batch size
        and lengths may differ in later calls.
    layers: names of the lists of layers ("encoder.blocks"); None: every outermost list of modules of one class.
    replicate: patterns of parameter names in the model ("*.gate.weight") to replicate.
    vocabulary: name of the embedding to shard over the vocabulary; "" for none; None: the model's input embedding.
    heads: names of the linears that give logits over that vocabulary.
    loss: takes the loss of `train_step` from the model's result; None: its `loss`, first element, or itself.

        class Encoder(nn.Module):        # not from transformers, no recognisable names
            ...
        spec = ParallelSpec(inputs=((torch.empty(2, 64, 32),), {}), replicate=("*.gate.weight",))
        oases.parallelize(Encoder(), mesh=mesh, spec=spec)
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    layers: tuple[str, ...] | None = None
    replicate: tuple[str, ...] = ()
    vocabulary: str | None = None
    heads: tuple[str, ...] = ()
    loss: Callable[[Any], Any] | None = None

    def vocabulary_of(self, model: nn.Module) -> Vocabulary | None:
        """Embedding tables and heads to shard. UsageError for names of other modules."""
        if self.vocabulary == "":
            return None
        if self.heads and self.vocabulary is None:
            raise UsageError(f"spec names the heads {self.heads}; name the table of their vocabulary, too")
        if self.vocabulary is None:
            found = find_vocabulary(model)
            cut = found is not None and not any(self.keeps_whole(f"{name}.weight") for name in found.tables)
            return found if cut else None
        table, heads = _module(model, self.vocabulary or "", nn.Embedding), {}
        for name in self.heads:
            heads[name] = _module(model, name, nn.Linear)
            if heads[name].out_features != table.num_embeddings:
                raise UsageError(
                    f"spec: head {name!r} gives {heads[name].out_features} logits, and the vocabulary "
                    f"{self.vocabulary!r} has {table.num_embeddings} rows"
                )
        tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and holds_weight(m, table)}
        tied = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and holds_weight(m, table)}
        return Vocabulary(table.num_embeddings, tables, {**tied, **heads})

    def require_names(self, model: nn.Module) -> None:
        """Raise UsageError for a pattern that matches no parameter of the model."""
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for pattern in self.replicate:
            if not any(fnmatch(name, pattern) for name in names):
                raise UsageError(f"spec.replicate has {pattern!r}, which matches no parameter of the model")

    def keeps_whole(self, name: str) -> bool:
        """Whether a parameter is to be replicated."""
        return any(fnmatch(name, pattern) for pattern in self.replicate)


def _module(model: nn.Module, name: str, kind: type[M]) -> M:
    found = dict(model.named_modules()).get(name)
    if not isinstance(found, kind):
        raise UsageError(f"spec names {name!r}, which is {type(found).__name__} and not {kind.__name__}")
    return found


@dataclass(frozen=True)
class Options:
    """Options of `parallelize`, which documents them. stack: of OverlappedStack."""

    schedule: str | Schedule
    pipeline: str
    micro_batches: int | None
    zero: bool
    fsdp: bool
    dtype: torch.dtype | None
    compile: str | None
    experts: str
    expert_parallel: int | None
    placement: str
    gradient_wire: str | None
    pipeline_wire: str | None
    backend: str | None
    weights: str | None
    stack: dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """Result of `check`, from which a model is sharded, and sharded again once its layers have changed.

    inputs: of a sample call. stack: options of its stacks. steps: options of its `train_step`, None without.
    experts: None where their results are summed. notes: for the report.
    """

    mesh: Any
    plan: Plan | None
    spec: ParallelSpec
    tp: GroupRank
    inputs: Inputs
    stack: dict[str, Any]
    steps: PipelineOptions | None
    experts: ExpertOptions | None
    compile: str | None
    dtype: torch.dtype | None
    zero: bool
    gradient_wire: str
    notes: list[str]

    def __deepcopy__(self, memo: dict[int, Any]) -> Setup:
        """Return self: a copied model was made alike."""
        return self

    @property
    def group(self) -> ProcessGroup | None:
        """Tensor-parallel group."""
        return group_of(self.tp.group)

    @property
    def run(self) -> ProcessGroup | None:
        """All ranks that have a part of the model."""
        return self.group if self.steps is None else self.steps.mesh.run


def check(model: nn.Module, mesh: Any, plan: Plan | None, spec: ParallelSpec, options: Options) -> Setup:
    """Check what `parallelize` was given. Collective: creates groups. Raises UsageError as it documents."""
    _require_cuttable(model)
    _require_group(mesh)
    said = {**vars(options), **dict.fromkeys(_STACK), **options.stack}
    _require_same_options(_groups_of(mesh), {name: value for name, value in said.items() if name != "stack"})
    mesh, notes = with_backend(mesh, options.backend, next((each.device for each in model.parameters()), None))
    stack = recomputing_options(model, options.stack)
    spec.require_names(model)
    experts, degree = planned_experts(plan, options.experts, options.expert_parallel)
    dtype = planned_dtype(plan, options.dtype)
    require_dtype(dtype)
    require_compiler(options.compile)
    wire = stack.get("wire_dtype")
    steps = pipeline_options(
        mesh, plan, options.pipeline, options.micro_batches, stack.get("recompute", "none"),
        fsdp=options.fsdp, zero=options.zero, dtype=dtype,
    )  # fmt: skip
    steps = _with_wires(steps, mesh, options.gradient_wire, options.pipeline_wire, wire)
    group, chosen = _tensor_parallel_group(mesh if steps is None else steps.mesh, plan, options.schedule, stack)
    if steps is not None and plan is None and not steps.recomputes:
        chosen = chosen | {"recompute": "none"}
    for ranks in (group if steps is None else steps.mesh.run, data_parallel_group(mesh)):
        require_alike(model, ranks, values=options.weights is None)
    notes = [*notes, *(f"{name}.config.use_cache is False now" for name in turn_off_inner_caches(model))]
    inputs = spec.inputs or example_inputs(model)
    if plan is not None and plan.wire != "none" and "wire_dtype" not in stack:
        wire = plan.wire
    balanced = _expert_options(mesh, steps, group, experts, degree, options, wire)
    zero = options.zero or (plan is not None and plan.zero)
    return Setup(
        mesh, plan, spec, GroupRank.of(group), inputs, chosen, steps, balanced, options.compile, dtype, zero,
        options.gradient_wire or "", notes,
    )  # fmt: skip


def _require_group(mesh: Any) -> None:
    """Raise UsageError in inference mode, and for a rank of several without a group, which would train alone."""
    if torch.is_inference_mode_enabled():
        raise UsageError("parallelize() in inference_mode() makes weights that cannot be trained; call it outside")
    ranks = os.environ.get("WORLD_SIZE", "")
    if mesh is None and resolve(None) is None and ranks.isdecimal() and int(ranks) > 1:
        raise UsageError(
            f"parallelize() got no mesh and there is no process group, but WORLD_SIZE is {ranks}: each rank would "
            "train the whole model alone; call torch.distributed.init_process_group() before parallelize()"
        )


def _require_cuttable(model: nn.Module) -> None:
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
        if type(part).__name__ == "ParamWrapper" and type(part).__module__.startswith("peft."):
            raise UsageError(
                f"{name} adapts the parameter {part.parameter_name!r}, named in target_parameters of its LoraConfig, "
                "which is not available; name linears in target_modules instead, without target_parameters"
            )
        forward = vars(part).get("forward")
        own = isinstance(forward, MethodType) and forward.__self__ is part
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        if compiled or (forward is not None and not own):
            raise UsageError(
                f"{name or what}: its forward was {'compiled' if compiled else 'replaced on the object'} (by "
                "torch.compile, a hook of accelerate, or a patch), so it cannot be traced: parallelize "
                "the model first, or patch its class, or assign a method of the module itself"
            )


def _require_same_options(groups: Sequence[ProcessGroup | None], options: dict[str, Any]) -> None:
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


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, len(flat) // _SAMPLED)].cpu().contiguous()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _groups_of(mesh: Any) -> list[ProcessGroup | None]:
    """Groups that together connect all ranks of a mesh."""
    if isinstance(mesh, DeviceMesh):
        return [*mesh.get_all_groups()]
    return [mesh.run if isinstance(mesh, Mesh) else resolve(mesh)]


def _with_wires(
    steps: PipelineOptions | None, mesh: Any, gradients: str | None, messages: str | None, sums: WireType | None
) -> PipelineOptions | None:
    """The options with the codes of gradients and of messages between stages.

    sums: code of the layers' all-reduces. UsageError for an unknown code, where there is nothing to send (no
    replicas, or no stages), and for sums that are chosen by measuring whole passes where there are stages.
    """
    if gradients is not None:
        quantised_type("gradient_wire", gradients)
        replicas = group_size(data_parallel_group(mesh)) if steps is None else steps.mesh.replicas(steps.degree)
        if replicas < 2:
            raise UsageError(
                f"gradient_wire {gradients!r}: there are no data-parallel ranks; give a mesh with 'dp', or leave it "
                "out"
            )
    if messages is not None:
        quantised_type("pipeline_wire", messages)
        if steps is None or steps.mesh.num_stages < 2:
            raise UsageError(
                f"pipeline_wire {messages!r}: there is one stage; give a mesh with a 'pp' above 1, or leave it out"
            )
    if sums == AUTO_LOSSY and steps is not None and steps.mesh.num_stages > 1:
        raise UsageError(
            f"wire_dtype {AUTO_LOSSY!r} measures whole passes and does not work with a pipeline; name one"
        )
    return None if steps is None else replace(steps, gradient_wire=gradients or "", pipeline_wire=messages or "")


def _tensor_parallel_group(
    mesh: Any, plan: Plan | None, schedule: str | Schedule, options: Mapping[str, Any]
) -> tuple[ProcessGroup | None, dict[str, Any]]:
    """Tensor-parallel group of `parallelize`, and the options of its stacks.

    Raises UsageError for a mesh without a tensor-parallel dimension and a plan that does not fit it.
    """
    strange = sorted(set(options) - set(_STACK))
    if strange:
        raise UsageError(
            f"parallelize() does not take {', '.join(strange)}; options of its stacks are {', '.join(_STACK)}"
        )
    if plan is not None:
        require_runnable(plan)
        require_valid(plan)
        mesh = Mesh.of(plan) if mesh is None else mesh
    if isinstance(mesh, Mesh):
        group = mesh.tensor(mesh.degrees[-1])
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if "tp" not in names and (mesh.ndim > 1 or {*names} & {*_OTHERS}):
            what = f"mesh has the dimensions {names or mesh.ndim}"
            raise UsageError(f"{what}; name the tensor-parallel one 'tp', of size 1 where there is none")
        strange = [
            each for at, each in enumerate(names) if mesh.ndim > 1 < mesh.size(at) and each not in ("tp", *_OTHERS)
        ]
        if strange and mesh.ndim > 1:
            raise UsageError(
                f"mesh has the dimension {strange[0]!r}, over which nothing would be averaged; replicas are those of "
                f"{', '.join(map(repr, DATA_DIMENSIONS))}; give mesh['tp'] where another tool averages them"
            )
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
    return group, {"schedule": schedule, "small_batch": "whole", **options}


def warn_of_slow_collectives(group: ProcessGroup | None) -> None:
    """Warn of a NCCL group whose collectives queue behind the matmuls that are to hide them."""
    if group is None or group_size(group) == 1 or "nccl" not in dist.get_backend_config(group):
        return
    backend: Any = group._get_backend(torch.device("cuda"))
    if not backend.options.is_high_priority_stream:
        warnings.warn(
            "the tensor-parallel group's collectives run at normal priority and wait for the matmuls under which "
            "they should be hidden; create it with oases.nccl_options(): init_process_group(pg_options=...), "
            "new_group(pg_options=...), or init_device_mesh(backend_override={'tp': ...})",
            stacklevel=5,
        )


def _expert_options(
    mesh: Any, steps: PipelineOptions | None, group: ProcessGroup | None, experts: str, degree: int | None,
    options: Options, wire: WireType | None,
) -> ExpertOptions | None:  # fmt: skip
    """Options of balanced experts; None where they are summed. UsageError for what does not go with them."""
    if experts not in EXPERT_MODES:
        raise UsageError(f"unknown experts {experts!r}; known are {', '.join(EXPERT_MODES)}")
    if experts == "sharded":
        if degree is not None or options.placement != "prophet":
            raise UsageError("expert_parallel and placement are options of experts='balanced'; give that, too")
        return None
    if options.compile is not None:
        raise UsageError("experts='balanced' does not run with compile; leave one of them out")
    wire = None if wire == AUTO_LOSSY else wire_type(wire)
    of_stage, sharded = (None, False) if steps is None else (steps.mesh, steps.shards)
    return expert_options(mesh, of_stage, group, degree, options.placement, wire, sharded=sharded)


def with_backend(mesh: Any, backend: str | None, device: torch.device | None = None) -> tuple[Any, list[str]]:
    """Make new groups of a mesh's ranks over a backend, e.g. "staged". Collective over them. None: the mesh itself.

    mesh: a DeviceMesh without "pp", a process group, or None for the default group. "auto": `staged`, unless the
    mesh's own tensor-parallel group sums tensors of `device` sooner, measured here. Returns the mesh, and what was
    measured in a line. UsageError for anything else, for an unknown backend, and where there is no group.
    """
    if backend is None:
        return mesh, []
    if backend != "auto" and backend not in dist.Backend.backend_list:
        known = ", ".join(name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED)
        raise UsageError(f"unknown backend {backend!r:.80}; known are {known}, and auto")
    of_mesh = isinstance(mesh, DeviceMesh) and "pp" not in (mesh.mesh_dim_names or ())
    if mesh is not None and not of_mesh and not isinstance(mesh, ProcessGroup):
        start = "" if backend == "auto" else f", and start the run over it: init_process_group({backend!r})"
        raise UsageError(
            f"backend {backend!r} is for tensor-parallel groups and meshes of torch without 'pp'; leave it out{start}"
        )
    own = None if of_mesh else resolve(mesh)
    groups = [*mesh.get_all_groups()] if of_mesh else [] if own is None else [own]
    if not groups:
        raise UsageError(
            f"backend {backend!r} needs ranks; start them, e.g. by torchrun, and call init_process_group"
        )
    if backend != "auto":
        return _of_groups(mesh, [_again(group, backend) for group in groups]), []
    names = mesh.mesh_dim_names or () if of_mesh else ()
    at = names.index("tp") if "tp" in names else 0
    if device is None or device.type == "meta":
        device = torch.device(mesh.device_type if of_mesh else "cpu")
    trial, said = _tried(groups, at, device)
    if trial is None:
        return mesh, [said]
    made = [trial if of == at else _again(group, "staged") for of, group in enumerate(groups)]
    return _of_groups(mesh, made), [said]


def _tried(groups: list[ProcessGroup], at: int, device: torch.device) -> tuple[ProcessGroup | None, str]:
    """Group of `staged` of the ranks of groups[at] where it is the faster one, else None, and why. Collective.

    groups: of all dimensions of a mesh. Replicas choose alike, for their groups are made together. A trial that lost
    is kept, asleep: torch names groups by how many there are, and the next one of its name would read its addresses.
    """
    trial, why = None, "staged cannot join other ranks of the mesh"
    try:
        trial = _again(groups[at], "staged")
    except ValueError as error:  # of all ranks of the group: it cannot join them
        found, why = [0.0, math.inf], str(error).splitlines()[0]
    else:
        found = _seconds([groups[at], trial], device)
    for group in groups:
        found = [max(of) for of in zip(*all_gather_objects(found, group), strict=True)]
    own, staged = found
    if staged == math.inf:
        return None, f"backend auto: {why}; the mesh keeps its own groups"
    times = f"{1e3 * staged:.2f} ms by staged, {1e3 * own:.2f} ms by {dist.get_backend(groups[at])}"
    return trial if staged < own else None, f"backend auto: an all-reduce beside matmuls takes {times}"


def _of_groups(mesh: Any, groups: list[ProcessGroup]) -> Any:
    """Rebuild a DeviceMesh, or a group, from new process groups of its ranks, one for each dimension."""
    if not isinstance(mesh, DeviceMesh):
        return groups[0]
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    names = cast("tuple[str, ...]", mesh.mesh_dim_names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)


def _again(group: ProcessGroup, backend: str) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return cast(ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))


def _seconds(groups: list[ProcessGroup], device: torch.device) -> list[float]:
    """Median seconds of an all-reduce beside matmuls by each of some groups, on this rank. Collective.

    They take turns, so that a machine that slows down slows all.
    """
    summed = torch.zeros(_NUMBERS, device=device)
    matrix = torch.ones(_WIDTH, _WIDTH, device=device)

    def seconds(by: ProcessGroup) -> float:
        dist.barrier(by)
        start = time.perf_counter()
        work = dist.all_reduce(summed, group=by, async_op=True)
        for _ in range(_MATMULS):
            matrix @ matrix
        work.wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    turns = [[seconds(by) for by in groups] for _ in range(1 + _ROUNDS)]
    return [median(of) for of in zip(*turns[1:], strict=True)]  # the first makes connections and streams
