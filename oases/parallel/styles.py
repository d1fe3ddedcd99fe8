"""`ColwiseParallel` and `RowwiseParallel` of torch, with their communication overlapped: change two names in a plan.

Parameters become the same DTensors as with torch's styles; only the product differs. It runs as the chunked ops of
csrc/linear.cpp on the local shards: replicated activations are all-reduced, those sharded along the sequence (dim -2)
are gathered and scattered, while other chunks are computed. Any other layout is redistributed to one of these first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from oases.parallel.linear import NumChunks, chunks_for

Product = Callable[..., Tensor]


class OverlappedColwiseParallel(ColwiseParallel):
    """Drop-in for `ColwiseParallel`; on `nn.Embedding` it is torch's own.

    num_chunks: pieces the product is cut into, "auto" chooses by size. The other arguments are torch's.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        num_chunks: NumChunks = "auto",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.num_chunks = num_chunks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        self._partition_linear_fn("", module, device_mesh)
        given, wanted = self.input_layouts[0], self.output_layouts[0]
        name = device_mesh.get_group().group_name

        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            sequence = _is_sequence(given, x.dim())
            x = _local(x, device_mesh, given, given if sequence else Replicate())
            product: Product = torch.ops.oases.column_linear
            y = product(x, *_weights(linear), name, chunks_for(self.num_chunks, x), sequence)
            return _laid_out(y, device_mesh, Shard(-1), wanted, self.use_local_output)

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


class OverlappedRowwiseParallel(RowwiseParallel):
    """Drop-in for `RowwiseParallel`; on `nn.Embedding` it is torch's own.

    num_chunks: pieces the product is cut into, "auto" chooses by size. The other arguments are torch's.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        num_chunks: NumChunks = "auto",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.num_chunks = num_chunks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return super()._apply(module, device_mesh)
        self._partition_linear_fn("", module, device_mesh)
        given, wanted = self.input_layouts[0], self.output_layouts[0]
        name = device_mesh.get_group().group_name

        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            sequence = _is_sequence(wanted, x.dim())
            x = _local(x, device_mesh, given, Shard(x.dim() - 1))
            product: Product = torch.ops.oases.row_linear
            y = product(x, *_weights(linear), name, chunks_for(self.num_chunks, x), sequence)
            return _laid_out(y, device_mesh, wanted if sequence else Replicate(), wanted, self.use_local_output)

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


def _is_sequence(layout: Placement, ndim: int) -> bool:
    return isinstance(layout, Shard) and layout.dim % ndim == ndim - 2


def _same(a: Placement, b: Placement, ndim: int) -> bool:
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim % ndim == b.dim % ndim
    return a == b


def _local(x: Tensor, mesh: DeviceMesh, given: Placement, needed: Placement) -> Tensor:
    """This rank's part of `x` under the layout `needed`; a plain tensor is taken to have the layout `given`."""
    if not isinstance(x, DTensor):
        if _same(given, needed, x.dim()):
            return x
        x = DTensor.from_local(x, mesh, [given], run_check=False)
    return x.redistribute(placements=[needed]).to_local(grad_placements=[needed])


def _laid_out(y: Tensor, mesh: DeviceMesh, has: Placement, wanted: Placement, local: bool) -> Tensor:
    if local and _same(has, wanted, y.dim()):
        return y
    whole = DTensor.from_local(y, mesh, [has], run_check=False).redistribute(placements=[wanted])
    return whole.to_local() if local else whole


def _weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    def local(parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    return local(linear.weight), None if linear.bias is None else local(linear.bias)
