"""`parallelize`: overlapped tensor parallelism for an unedited model, in phases of a file each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.checking import Options, ParallelSpec, check
from oases.autotp.export import twin_of
from oases.autotp.installation import install
from oases.autotp.shards import shard
from oases.autotp.signatures import trace_layers
from oases.core.execution.group import ProcessGroup
from oases.core.schedule import Schedule
from oases.distributed.mesh import Mesh
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
    inferred from the model. weights: folder or file of safetensors, or mapping of full tensors, of which this rank
    reads its shards (see `load_weights`) to `device`; None: the mesh's device, or the CPU. Without weights this
    rank's part of the model is moved to `device`, where it is given. pipeline, micro_batches: of a mesh with "pp":
    the schedule of its stages, and the number of parts that a step's samples are cut into, None for twice the stages.
    fsdp, zero: shard gradients and optimizer state over its "dp", balanced experts over the ranks that have the same
    ones, with fsdp weights, too; without "pp" zero shards optimizer state alone, and a model with fsdp is called,
    backwards and steps in a custom training loop. dtype: of weights and activations; bfloat16 has float32 masters and
    gradients. Make the optimizer by `oases.make_optimizer`, which heeds both. compile: backend of torch.compile for
    the blocks of layers, such as inductor; None for eager. experts: "sharded" over tensor-parallel ranks, whose
    results are summed, or "balanced": divided over expert_parallel ranks of "dp" x "tp" (None: all of them), to which
    tokens are sent, and busy ones copied by `placement`, a method of OverlappedMoE. gradient_wire: "int8" to average
    gradients over "dp" in fewer bits, with error feedback except where fsdp or a stage's zero shards them; None:
    exactly. pipeline_wire: the same for what the stages of "pp" send each other, without feedback. backend: of
    torch.distributed, e.g. "staged", for new groups of the mesh's ranks; "auto": `staged` where that sums sooner;
    None: the mesh's own groups. stack_options: of OverlappedStack, such as sub_batches.

    With "pp" every rank keeps one stage of the model and trains it by `model.train_step(**batch) -> loss` and
    `model.eval_step`, see `PipelineTraining`. Other stages' weights leave `model.named_parameters()`. Column-, row-
    and vocabulary-parallel modules are found from the model's graph. Layers are cut at their all-reduces and run as
    an OverlappedStack behind the model's own loop over them; what cannot be cut stays replicated.
    `model.oases_partition` reports all of it; `model.oases_mesh` is the mesh, one of "tp" alone where none was given.
    Parameters keep their names; sharded ones hold this rank's shard. Gradients, loss, logits are as of one process.

    Raises UsageError where sizes do not divide (with the degrees that do), where the model does not run on fake
    tensors, for quantised weights, and for a plan of another model; OverlapError with require_overlap=True for layers
    that stay replicated, of which a warning tells otherwise. Source: arXiv 2206.04959, section 4.
    """
    options = Options(
        schedule=schedule, pipeline=pipeline, micro_batches=micro_batches, zero=zero, fsdp=fsdp, dtype=dtype,
        compile=compile, experts=experts, expert_parallel=expert_parallel, placement=placement,
        gradient_wire=gradient_wire, pipeline_wire=pipeline_wire, backend=backend,
        weights=None if weights is None else "given", stack=stack_options,
    )  # fmt: skip
    setup = check(model, mesh, plan, spec or ParallelSpec(), options)
    vocabulary, twin = setup.spec.vocabulary_of(model), twin_of(model)
    found, outside_reads = trace_layers(model, twin, setup, vocabulary)
    sharded = shard(model, twin, setup, found, outside_reads, vocabulary, weights, device)
    install(model, setup, sharded)
    return model
