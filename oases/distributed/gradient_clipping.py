"""Gradient norm and clipping for parameters sharded over tensor-parallel ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.sharding import holders
from oases.core.execution.dtensors import local_of
from oases.core.execution.group import ProcessGroup, group_size, resolve
from oases.distributed.collectives import all_reduce
from oases.distributed.dtensors import is_tensor_parallel


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    process_group: ProcessGroup | None = None,
    stages: int = 1,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Clip the global gradient norm of the whole model to `max_norm`, in place.

    process_group: all ranks that train the model. Each shard counts once, also where a layer is sharded over fewer
    ranks and its gradients are averages over data-parallel replicas; so does each replicated gradient and each FSDP
    shard. stages: pipeline stages, each with an equal number of ranks. counted_elsewhere: parameters that another
    stage holds and counts, too. A model that `parallelize` divided into stages knows all three. Returns the norm
    before clipping, equal on every rank.
    """
    group = _group_of(model, process_group)
    pipeline = getattr(model, "oases_pipeline", None)
    if pipeline is not None:
        stages, counted_elsewhere = pipeline.mesh.num_stages, pipeline.counted_elsewhere
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = norm_of(model, trained, group, stages, counted_elsewhere)
    if trained:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_of(parameter.grad) for parameter in trained], scale)  # type: ignore[arg-type]
    return norm


def _group_of(model: nn.Module, given: ProcessGroup | None) -> ProcessGroup | None:
    pipeline = getattr(model, "oases_pipeline", None)
    return resolve(given) if pipeline is None else pipeline.mesh.run


def norm_of_stage(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of the gradients of parameters of a model that `parallelize` divided, over all its ranks. Collective."""
    pipeline: Any = model.oases_pipeline
    elsewhere = pipeline.counted_elsewhere
    return norm_of(model, parameters, pipeline.mesh.run, pipeline.mesh.num_stages, elsewhere)


def norm_of(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    group: ProcessGroup | None,
    stages: int,
    counted_elsewhere: Collection[nn.Parameter],
) -> Tensor:
    """Norm of the gradients of parameters of a model, over all ranks that train it; see `clip_grad_norm`."""
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    ranks = group_size(group) // stages
    shards = holders(model)
    # Gradients by whether they are summed over the ranks and by copies; _foreach_norm takes one device and dtype.
    alike = defaultdict[tuple[bool, int, torch.device, torch.dtype], list[Tensor]](list)
    for parameter in parameters:
        if parameter.grad is None or id(parameter) in elsewhere:
            continue
        gradient = local_of(parameter.grad)
        holder = shards.get(id(parameter))
        mesh = getattr(parameter.grad, "device_mesh", None)
        # Ranks over which FSDP has sharded it; a mesh with a tensor-parallel dimension has that last.
        sharded = 1 if mesh is None else mesh.size() // (mesh.size(-1) if is_tensor_parallel(parameter) else 1)
        # A layer sharded over t of R ranks has R / t copies, all in the sum; so has a replicated parameter
        # that not every rank holds.
        copies = max(1, ranks // getattr(holder, "tensor_parallel", ranks))
        summed = holder is not None or stages > 1 or sharded > 1
        if holder is None and summed:
            copies = ranks
        copies //= sharded
        alike[summed, copies, gradient.device, gradient.dtype].append(gradient)
    # A stage without gradients, of frozen layers, too: the others wait for its sum.
    held = next((each for each in model.parameters() if not each.is_meta), torch.zeros(()))
    device, wide = held.device, torch.float64 if held.dtype == torch.float64 else torch.float32
    squares = {each: torch.zeros((), device=device, dtype=wide) for each in (True, False)}
    for (summed, copies, _, dtype), some in alike.items():
        norms = torch._foreach_norm(some, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares[summed] = squares[summed] + (torch.stack(norms).square().sum() / copies).to(device)
    cut = all_reduce(squares[True].reshape(1), group, "gradient norm")
    return (cut[0] + squares[False]).sqrt()
