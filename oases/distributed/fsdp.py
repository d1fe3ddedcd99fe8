"""Fully sharded data parallelism: weights, gradients and optimizer state sharded over the data-parallel ranks.

ZeRO is the same with weights that stay gathered until the end of a step: gradients and optimizer state are sharded.

Weights use torch's FSDP2 (`fully_shard`): its parameters are DTensor shards for optimizer and checkpoint, and it
gathers and frees the full weights. The stack's schedule decides when, not a module's forward(), which stacks never
call: a block's weights are gathered ahead of its first op, overlapped with the previous block, and freed after its
last op. `sharded_gradients` reduces the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.group import ProcessGroup, group_name, group_of, scheduler_of
from oases.distributed.dtensors import is_tensor_parallel
from oases.distributed.precision import is_low
from oases.errors import UsageError

if TYPE_CHECKING:  # FSDP2 and DTensor take as long to import as all the rest, and most runs do not need them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


COMPUTED_IN = "oases_computed_in"
"""Attribute of a shard with the type of its gathered weight, where that is another one."""


class _TicketWork(dist.Work):
    """Ticket of a gather as the dist.Work that FSDP2 waits for."""

    def __init__(self, scheduler: Any, ticket: Any) -> None:
        super().__init__()
        self._scheduler, self._ticket = scheduler, ticket

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the weights; the group's own timeout applies."""
        self._scheduler.wait(self._ticket)
        return True


class _AllGather:
    """FSDP2's all-gather by the group's OverlapScheduler, so that `oases.report()` shows how much was hidden."""

    def __init__(self, label: str) -> None:
        self._label = f"{label}, gathered weights"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a new buffer, as FSDP2 does by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Start the all-gather; wait at once unless async_op."""
        scheduler = scheduler_of(group)
        ticket = scheduler.all_gather(output_tensor.view(group.size(), -1), input_tensor, self._label)
        work = _TicketWork(scheduler, ticket)
        return work if async_op or not work.wait() else None


class FsdpUnit:
    """Weights that are gathered and freed together: all of a module but those in `others`.

    group: data-parallel ranks, over which gradients are averaged. gathering: a separate group of the same ranks for
    the weights, so that they do not queue behind gradients. Parameters are sharded along their first dimension, as by
    torch.chunk. dtype: of the full weights, whose shards keep their own type; None: the same. keep: keep the full
    weights after their use, until `free` (ZeRO). part: of the model, in an interleaved pipeline; None: any. Create it
    on every rank, once the module is on its device.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        gathering: ProcessGroup,
        label: str,
        others: Collection[nn.Parameter] = (),
        *,
        dtype: torch.dtype | None = None,
        keep: bool = False,
        part: int | None = None,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.keep, self.part = keep, part
        self.computed: Callable[[], None] | None = None
        """Called when all gradients of a pass are there, where hooks cannot tell."""
        self.names = [name for name, parameter in module.named_parameters() if parameter not in set(others)]
        self.label = label
        self._group_name = group_name(group)
        device = next(module.parameters()).device.type
        # Named after the group: torch identifies meshes by ranks and names, and may use the group of an earlier equal
        # mesh, which may be destroyed by then.
        mesh = DeviceMesh.from_group(gathering, device, mesh_dim_names=(group_name(gathering),))
        precision = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=precision, ignored_params=set(others))
        self._module = cast("FSDPModule", module)
        self._module.set_custom_all_gather(cast(Any, _AllGather(label)))
        self._handle: Any = None
        self._whole: dict[str, nn.Parameter] = {}
        self.is_whole = False
        for name in self.names if dtype is not None else ():
            setattr(self._named(name), COMPUTED_IN, dtype)

    @property
    def group(self) -> ProcessGroup:
        """Data-parallel ranks."""
        group = group_of(self._group_name)
        assert group is not None
        return group

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Full parameters by name, the same objects in every step. They have memory while `is_whole`."""
        if not self._whole:
            self.gather()
            self.free()
        return self._whole

    @property
    def shards(self) -> dict[str, nn.Parameter]:
        """This rank's DTensor parameters by name. RuntimeError while the weights are gathered."""
        if self.is_whole:
            raise RuntimeError(f"{self.label} is gathered; release it first")
        return {name: self._named(name) for name in self.names}

    def gather_ahead(self) -> None:
        """Start the gather, unless it was started."""
        if not self.is_whole and self._handle is None:
            with torch.inference_mode(False):  # its buffers are those of later training, too
                self._handle = self._module.unshard(async_op=True)

    def gather(self) -> None:
        """Wait until the full weights are in the module."""
        if self.is_whole:
            return
        self.gather_ahead()
        with torch.inference_mode(False):
            self._handle.wait()
        self._handle, self.is_whole = None, True
        if not self._whole:
            self._whole = {name: self._named(name) for name in self.names}
            for parameter in self._whole.values():
                if is_low(parameter.dtype):
                    parameter.grad_dtype = torch.float32  # of sums over sub-batches

    def release(self) -> None:
        """Free the full weights and restore the shards, unless they are to be kept."""
        if not self.keep:
            self.free()

    def free(self) -> None:
        """Free the full weights and restore the shards."""
        if self.is_whole:
            self._module.reshard()
            self.is_whole = False

    def _named(self, name: str) -> nn.Parameter:
        return cast(nn.Module, self._module).get_parameter(name)


Place = tuple[nn.Module, str, str]
"""Module that holds a parameter, its name there, and its name in the unit."""


class HeldUnit(FsdpUnit):
    """Unit of parameters of several modules, which are in these modules' places while gathered, as are the shards.

    holder: module that has the parameters alone. group, gathering, label, options: as of `FsdpUnit`.
    """

    def __init__(
        self,
        holder: nn.Module,
        places: Iterable[Place],
        group: ProcessGroup,
        gathering: ProcessGroup,
        label: str,
        **options: Any,
    ) -> None:
        self._holder, self._places = holder, list(places)
        super().__init__(holder, group, gathering, label, **options)
        self._put()

    def gather(self) -> None:
        """Wait until the full weights are in the modules."""
        super().gather()
        self._put()

    def free(self) -> None:
        """Free the full weights; the modules hold the shards again."""
        super().free()
        self._put()

    def _put(self) -> None:
        put_parameters(self._places, self._holder)


def put_parameters(places: Iterable[Place], unit: nn.Module) -> None:
    """Put the parameters that a unit holds now in the modules of the model."""
    for module, name, own in places:
        module._parameters[name] = unit._parameters[own]


class JoinedUnits:
    """Units of one block over different ranks, gathered and released together: dense weights, and experts."""

    def __init__(self, units: Sequence[FsdpUnit]) -> None:
        self._units = list(units)
        self.names = [name for unit in units for name in unit.names]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Full parameters by name, as of each unit."""
        return {name: parameter for unit in self._units for name, parameter in unit.parameters.items()}

    def gather_ahead(self) -> None:
        """Start the gathers that were not started."""
        for unit in self._units:
            unit.gather_ahead()

    def gather(self) -> None:
        """Wait until the full weights are in the block."""
        self.gather_ahead()
        for unit in self._units:
            unit.gather()

    def release(self) -> None:
        """Free the full weights, unless they are to be kept."""
        for unit in self._units:
            unit.release()

    def computed(self) -> None:
        """Say that all gradients of a pass are there, where hooks cannot tell."""
        for unit in self._units:
            if unit.computed is not None:
                unit.computed()


def rows_of(tensor: Tensor, rows: int) -> tuple[int, int] | None:
    """[first, last) of the rows of a tensor that this rank has by FSDP; None without FSDP.

    rows: of this rank's tensor-parallel part. UsageError for a DTensor that is not sharded by rows over one dimension
    of a mesh.
    """
    tensor_parallel = is_tensor_parallel(tensor)
    if not is_dtensor(tensor) or (tensor_parallel and cast("DTensor", tensor).device_mesh.ndim == 1):
        return None
    mesh, placements = cast("DTensor", tensor).device_mesh, cast("DTensor", tensor).placements
    if mesh.ndim != 1 + tensor_parallel or not placements[0].is_shard(0):
        raise UsageError(
            f"a parameter is laid out as {placements} over {mesh}; checkpoints take parameters that fully_shard has "
            "sharded along dimension 0 over one dimension of a mesh"
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank has a shard"
    most = -(-rows // mesh.size(0))  # as by torch.chunk
    return min(rows, coordinate[0] * most), min(rows, (coordinate[0] + 1) * most)
