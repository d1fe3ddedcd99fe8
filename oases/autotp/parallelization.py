"""`parallelize`: overlapped tensor parallelism for an unedited model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.backends import with_backend
from oases.autotp.balanced import ExpertOptions, expert_options
from oases.autotp.export import twin_of
from oases.autotp.installation import install_layers, outside_of_layers, signatures_of
from oases.autotp.layers import example_inputs, turn_off_inner_caches
from oases.autotp.local_weights import read_locally
from oases.autotp.lowering import GroupRank
from oases.autotp.model_hooks import ModelHooks
from oases.autotp.pipeline.building import (
    PipelineOptions,
    Stages,
    divide_model,
    pipeline_options,
    planned_dtype,
    planned_experts,
    segments_of,
)
from oases.autotp.pipeline.training import PipelineTraining
from oases.autotp.pipeline.units import install_units
from oases.autotp.preconditions import (
    require_alike,
    require_cuttable,
    require_same_options,
    require_token_wise,
    tensor_parallel_group,
)
from oases.autotp.report import PartitionReport, compare_with_plan
from oases.autotp.spec import ParallelSpec
from oases.autotp.standalone import StandaloneForward
from oases.autotp.tools.connection import ModelSaver, connect_tools, named_mesh, replace_functions, take_full_tensors
from oases.autotp.tools.recomputation import recomputing_options
from oases.autotp.vocabulary import Vocabulary, shard_vocabulary
from oases.autotp.weights import load_weights
from oases.core.dtypes import AUTO_LOSSY
from oases.core.execution.communication import WireType, quantised_type, wire_type
from oases.core.execution.group import ProcessGroup, group_size, resolve
from oases.core.execution.piece import require_compiler
from oases.core.schedule import Schedule
from oases.distributed.dtensors import mesh_of_group, to_dtensors
from oases.distributed.expert_groups import EXPERT_MODES
from oases.distributed.guards import register_replaced, register_stage
from oases.distributed.mesh import Mesh
from oases.distributed.precision import require_dtype, set_needs
from oases.distributed.replicas import average_replicas, data_parallel_group
from oases.errors import UsageError
from oases.plans.plan import AUTO, Plan


def parallelize(
    model: nn.Module,
    *,
    mesh: DeviceMesh | Mesh | ProcessGroup | None = None,
    plan: Plan | None = None,
    schedule: str | Schedule = AUTO,
    spec: ParallelSpec | None = None,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
    pipeline: str = "one_f_one_b",
    micro_batches: int | None = None,
    zero: bool = False,
    fsdp: bool = False,
    dtype: torch.dtype | None = None,
    compile: str | None = None,
    experts: str = "sharded",
    expert_parallel: int | None = None,
    placement: str = "prophet",
    gradient_wire: str | None = None,
    pipeline_wire: str | None = None,
    backend: str | None = None,
    **stack_options: Any,
) -> nn.Module:
    """Shard a model over the ranks of a mesh, in place, and return it.

    model: a transformers model or any nn.Module, the same on every rank; on `meta` where `weights` are given. mesh: a
    DeviceMesh (of several dimensions the one named "tp"; over "dp" the model averages its gradients in each backward
    pass but those in `model.no_sync()`), a process group, or None for the default group. plan: from `oases.plan`;
    sets schedule, recomputation, experts and dtype; one of stages, micro-batches, FSDP or, without a mesh that
    averages over "dp", replicas has `train_step`, too. schedule: as in OverlappedStack; "layers" overlaps
    communication inside each layer alone, and keeps the results of single layers readable. spec: what cannot be
    inferred from the model.
    weights: folder or file of safetensors, or mapping of full tensors, of which this rank reads its shards (see
    `load_weights`) to `device`; None: the mesh's device, or the CPU. Without weights this rank's part of the model is
    moved to `device`, where it is given. pipeline, micro_batches: of a mesh with "pp":
    the schedule of its stages, and the number of parts that a step's samples are cut into, None for twice the stages.
    fsdp, zero: shard gradients and optimizer state over its "dp", balanced experts over the ranks that have the same
    ones, with fsdp weights, too; without "pp" zero shards optimizer state alone, and a model with fsdp is called,
    backwards and steps in a custom training loop. dtype: of weights and activations;
    bfloat16 has float32 masters and gradients. Make the optimizer by `oases.make_optimizer`, which heeds both.
    compile: backend of torch.compile for the blocks of layers, such as inductor; None for eager.
    experts: "sharded" over tensor-parallel ranks, whose results are summed, or
    "balanced": divided over expert_parallel ranks of "dp" x "tp" (None: all of them), to which tokens are sent, and
    busy ones copied by `placement`, a method of OverlappedMoE. gradient_wire: "int8" to average gradients
    over "dp" in fewer bits, with error feedback except where fsdp or a stage's zero shards them; None:
    exactly. pipeline_wire: the same for what the stages of "pp" send each other, without feedback. backend: of
    torch.distributed, e.g. "staged", for new groups of the mesh's ranks; "auto": `staged` where that sums sooner;
    None: the mesh's own groups. stack_options: further options of OverlappedStack, such as sub_batches and
    sequence_parallel.

    With "pp" every rank keeps one stage of the model and trains it by `model.train_step(**batch) -> loss` and
    `model.eval_step`, see `PipelineTraining`. Other stages' weights leave `model.named_parameters()`.

    Column-, row- and vocabulary-parallel modules are found from the model's graph. Layers are cut at their
    all-reduces and run as an OverlappedStack behind the model's own loop over them; what cannot be cut stays
    replicated. `model.oases_partition` reports all of it; `model.oases_mesh` is the mesh, one of "tp" alone where
    none was given. Parameters keep their names and are DTensors on its tensor-parallel dimension, but for fused
    weights of unequal parts, balanced experts, and stages with fsdp or zero, which hold plain shards. Gradients,
    loss and logits are those of the unsharded model.

    Raises UsageError where sizes do not divide (with the degrees that do), where the model does not run on fake
    tensors, for quantised weights, and for a plan of another model; OverlapError with require_overlap=True for layers
    that stay replicated, of which a warning tells otherwise. Source: arXiv 2206.04959, section 4.
    """
    spec = spec or ParallelSpec()
    require_cuttable(model)
    given = {
        "schedule": schedule, "pipeline": pipeline, "micro_batches": micro_batches, "zero": zero, "fsdp": fsdp,
        "dtype": dtype, "compile": compile, "experts": experts, "expert_parallel": expert_parallel,
        "placement": placement, "gradient_wire": gradient_wire, "pipeline_wire": pipeline_wire, "backend": backend,
        "weights": "given" if weights is not None else None, **dict.fromkeys(_STACK), **stack_options,
    }  # fmt: skip
    require_same_options(_groups_of(mesh), given)
    mesh, measured = with_backend(mesh, backend, next((each.device for each in model.parameters()), None))
    stack_options = recomputing_options(model, stack_options)
    spec.require_names(model)
    experts, expert_parallel = planned_experts(plan, experts, expert_parallel)
    dtype = planned_dtype(plan, dtype)
    require_dtype(dtype)
    require_compiler(compile)
    recompute, wire = stack_options.get("recompute", "none"), stack_options.get("wire_dtype")
    steps = pipeline_options(mesh, plan, pipeline, micro_batches, recompute, fsdp=fsdp, zero=zero, dtype=dtype)
    steps = _with_wires(steps, mesh, gradient_wire, pipeline_wire, wire)
    group, options = tensor_parallel_group(mesh if steps is None else steps.mesh, plan, schedule, stack_options)
    if steps is not None and plan is None and not steps.recomputes:
        options = options | {"recompute": "none"}
    tp, run = GroupRank.of(group), group if steps is None else steps.mesh.run
    for ranks in (run, data_parallel_group(mesh)):
        require_alike(model, ranks, values=weights is None)
    report = PartitionReport(type(model).__name__, tp.ranks)
    report.notes += measured
    report.notes += [f"{name}.config.use_cache is False now" for name in turn_off_inner_caches(model)]
    vocabulary, twin = spec.vocabulary_of(model), twin_of(model)
    inputs = spec.inputs or example_inputs(model)
    names = [*vocabulary.tables, *vocabulary.heads] if vocabulary is not None else []
    if plan is not None and plan.wire != "none" and "wire_dtype" not in stack_options:
        wire = plan.wire
    balanced = _expert_options(mesh, steps, group, experts, expert_parallel, placement, compile, wire)
    found, outside_reads = signatures_of(model, twin, inputs, names, spec, plan, tp, options, balanced)

    hooks, stages, division, stage = ModelHooks(model, group), None, None, 0
    if steps is not None:
        stages = divide_model(model, twin, [each for each, _ in found], inputs, steps)
        division, stage = stages.division, steps.mesh.stage
        vocabulary = None if vocabulary is None else vocabulary.held_by(model)
    segments = segments_of(found, plan, options, division, stage)
    require_token_wise(segments, tp.ranks)
    install_layers(model, segments, group, compile, report, balanced)
    _cut_vocabulary(model, vocabulary, outside_reads, group, report)
    if tp.ranks > 1:
        report.plan_agrees, report.plan_differs = compare_with_plan(model)
    _place_weights(model, weights, device, mesh, run)
    named = mesh if steps is not None else named_mesh(mesh, model, group)
    if group is not None and (steps is None or not steps.shards):
        _show_dtensors(model, group, named, hooks)
    report.replicated = outside_of_layers(model, segments, report)

    hooks.begin(model)
    if steps is None or not steps.shards:
        set_needs(model, zero=zero or (plan is not None and plan.zero), dtype=dtype)
    if steps is not None and stages is not None:
        _train_in_stages(model, stages, steps, spec, report, hooks)
        take_full_tensors(model)
        replace_functions(model)
    else:
        average_replicas(model, mesh, gradient_wire or "")
        connect_tools(model, group)
    if callable(getattr(model, "save_pretrained", None)) and (tp.ranks > 1 or steps or balanced):
        _attach(model, save_pretrained=ModelSaver(model, group))
    mesh = named if steps is None else mesh or steps.mesh
    _attach(model, oases_mesh=mesh, oases_partition=report, oases_hooks=hooks)
    return model


_STACK = ("sub_batches", "recompute", "wire_dtype", "require_overlap", "small_batch", "sequence_parallel")
"""Options of stacks, which one rank may have left out."""


def _groups_of(mesh: Any) -> list[ProcessGroup | None]:
    """Groups that together connect all ranks of a mesh."""
    if isinstance(mesh, DeviceMesh):
        return [mesh.get_group(dim) for dim in range(mesh.ndim)]
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


def _expert_options(
    mesh: Any,
    steps: PipelineOptions | None,
    group: ProcessGroup | None,
    experts: str,
    degree: int | None,
    placement: str,
    compile: str | None,
    wire: WireType | None,
) -> ExpertOptions | None:
    """Options of balanced experts; None where they are summed. UsageError for what does not go with them."""
    if experts not in EXPERT_MODES:
        raise UsageError(f"unknown experts {experts!r}; known are {', '.join(EXPERT_MODES)}")
    if experts == "sharded":
        if degree is not None or placement != "prophet":
            raise UsageError("expert_parallel and placement are options of experts='balanced'; give that, too")
        return None
    if compile is not None:
        raise UsageError("experts='balanced' does not run with compile; leave one of them out")
    return expert_options(
        mesh,
        None if steps is None else steps.mesh,
        group,
        degree,
        placement,
        None if wire == AUTO_LOSSY else wire_type(wire),
        sharded=steps is not None and steps.shards,
    )


def _place_weights(model: nn.Module, weights: Any, device: Any, mesh: Any, run: ProcessGroup | None) -> None:
    """Read this rank's part of the weights that are given, or move what it has to `device`. run: all ranks."""
    if weights is not None:
        device = device or (mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu")
        load_weights(model, weights, device=device, process_group=run)
    elif device is not None:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def _show_dtensors(model: nn.Module, group: ProcessGroup, mesh: Any, hooks: ModelHooks) -> None:
    """Have a model of several tensor-parallel ranks show DTensors, and read local tensors."""
    some = next(model.parameters(), None)
    if some is not None and group_size(group) > 1:
        for replaced in to_dtensors(model, group, mesh_of_group(mesh, group, some.device)):
            register_replaced(replaced)
        hooks.weights = read_locally(model)


def _attach(model: nn.Module, **attributes: Any) -> None:
    """Set attributes without registering them: modules and parameters among them are not the model's."""
    for name, value in attributes.items():
        object.__setattr__(model, name, value)


def _train_in_stages(
    model: nn.Module,
    stages: Stages,
    steps: PipelineOptions,
    spec: ParallelSpec,
    report: PartitionReport,
    hooks: ModelHooks,
) -> None:
    """Give the model its `train_step` and `eval_step`. A model of one stage can be called, too."""
    if steps.mesh.num_stages > 1:
        install_units(model, stages.units, stages.names)
    runners = [each.runner for each in report.layers if each.runner is not None]
    training = PipelineTraining(model, stages, steps, spec.loss or (lambda result: result), runners, hooks)
    _attach(model, oases_pipeline=training, train_step=training.train_step, eval_step=training.eval_step)
    register_stage(model)
    of_rank = stages.division.layers_on(steps.mesh.stage)
    report.notes.append(
        f"stage {steps.mesh.stage} of {steps.mesh.num_stages}: layers "
        f"{', '.join(f'{layers[0]} to {layers[-1]}' for layers in of_rank)}"
    )


def _cut_vocabulary(
    model: nn.Module,
    vocabulary: Vocabulary | None,
    outside_reads: set[str],
    group: ProcessGroup | None,
    report: PartitionReport,
) -> None:
    """Shard embedding tables and heads; outside_reads: parameters that the model reads itself and needs in full."""
    if vocabulary is None or group is None or isinstance(model.forward, StandaloneForward):
        return
    read = sorted(outside_reads & {f"{name}.weight" for name in (*vocabulary.tables, *vocabulary.heads)})
    if read:
        report.notes.append(f"the vocabulary is replicated: {', '.join(read)} is read outside of its module")
        return
    try:
        shard_vocabulary(model, vocabulary, group)
    except ValueError as error:
        report.notes.append(f"the vocabulary is replicated: {error}")
    else:
        report.vocabulary = [*vocabulary.tables, *vocabulary.heads]
