"""Gradient norm and clipping for parameters sharded over tensor-parallel ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor, nn

from oases.core.blocks.sharding import holders
from oases.core.execution.group import ProcessGroup, group_size, resolve
from oases.distributed.collectives import all_reduce
from oases.distributed.fsdp import local


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
    pipeline = getattr(model, "oases_pipeline", None)
    if pipeline is not None:
        process_group, stages = pipeline.mesh.run, pipeline.mesh.num_stages
        counted_elsewhere = pipeline.counted_elsewhere
    elsewhere = {id(parameter) for parameter in counted_elsewhere}
    group = resolve(process_group)
    ranks = group_size(group) // stages
    shards = holders(model)
    # Gradients by whether they are summed over the ranks and by copies; _foreach_norm takes one device and dtype.
    alike = defaultdict[tuple[bool, int, torch.device, torch.dtype], list[Tensor]](list)
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradients.append(gradient)
            sharded = gradient is not parameter.grad
            holder = shards.get(id(parameter))
            # A layer sharded over t of R ranks has R / t copies, all in the sum; so has a replicated parameter
            # that not every rank holds.
            copies = max(1, ranks // getattr(holder, "tensor_parallel", ranks))
            summed = holder is not None or stages > 1 or sharded
            if holder is None and summed:
                copies = ranks
            if sharded:
                copies //= parameter.grad.device_mesh.size()  # type: ignore[attr-defined]
            if id(parameter) not in elsewhere:
                alike[summed, copies, gradient.device, gradient.dtype].append(gradient)
    # A stage without gradients, of frozen layers, too: the others wait for its sum.
    held = gradients or [parameter for parameter in model.parameters() if not parameter.is_meta]
    example = held[0] if held else torch.zeros(())
    device, wide = example.device, torch.float64 if example.dtype == torch.float64 else torch.float32
    squares = {each: torch.zeros((), device=device, dtype=wide) for each in (True, False)}
    for (summed, copies, _, dtype), some in alike.items():
        norms = torch._foreach_norm(some, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares[summed] = squares[summed] + (torch.stack(norms).square().sum() / copies).to(device)
    cut = all_reduce(squares[True].reshape(1), group, "gradient norm")
    norm = (cut[0] + squares[False]).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, scale)
    return norm
