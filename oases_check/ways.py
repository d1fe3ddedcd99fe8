"""Ready ways to shard a model, by name: those of `oases check --with`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oases.errors import UsageError
from oases_check.case import Batch


@dataclass(frozen=True)
class Way:
    """A way to shard a model over (dp, tp), picklable. name: of WAYS. batch: see `Case`, for models to be traced."""

    name: str
    dp: int
    tp: int
    batch: Callable[[int], Batch] | Batch | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        """Shard the model; returns it."""
        mesh = init_device_mesh("cpu", (self.dp, self.tp), mesh_dim_names=("dp", "tp"))
        return WAYS[self.name](model, mesh, self.batch(0) if callable(self.batch) else self.batch)


def _oases(model: nn.Module, mesh: DeviceMesh, batch: Batch | None) -> nn.Module:
    import oases

    spec = None
    if batch is not None and not hasattr(model, "config"):
        spec = oases.ParallelSpec(inputs=((), dict(batch)) if isinstance(batch, Mapping) else (batch, {}))
    return oases.parallelize(model, mesh=mesh, spec=spec, schedule="oases")


def _ddp(model: nn.Module, mesh: DeviceMesh, batch: Batch | None) -> nn.Module:
    _require_one("ddp", mesh)
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: nn.Module, mesh: DeviceMesh, batch: Batch | None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    _require_one("fsdp2", mesh)
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _tp_plan(model: nn.Module, mesh: DeviceMesh, batch: Batch | None) -> nn.Module:
    """Shard by the plan that a transformers model carries, as transformers does."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if mesh["dp"].size() > 1:
        raise UsageError("tp_plan shards over tp alone; give --dp 1")
    resolve: Any = getattr(model, "_resolve_parallel_plans", None)
    if resolve is None:
        raise UsageError(
            f"{type(model).__name__} is no transformers model with a plan; choose another way than tp_plan"
        )
    plan, *_ = resolve(DistributedConfig(tp_size=mesh["tp"].size()))
    return apply_tensor_parallelism(model, mesh["tp"], plan)


def _require_one(name: str, mesh: DeviceMesh) -> None:
    if mesh["tp"].size() > 1:
        raise UsageError(f"{name} shards over dp alone; give --tp 1 --dp {mesh.size()}")


WAYS: dict[str, Callable[[nn.Module, DeviceMesh, Batch | None], nn.Module]] = {
    "oases": _oases, "ddp": _ddp, "fsdp2": _fsdp2, "tp_plan": _tp_plan,
}  # fmt: skip
