"""Drop-in replacements for torch's `ColwiseParallel` and `RowwiseParallel` with overlapped communication.

Parameters become the same DTensors as with torch's styles; only the matmul differs. It runs as the chunked ops of
csrc/linear.cpp on the local shards: replicated activations are all-reduced, those sharded along the sequence (dim -2)
are gathered and scattered, while other chunks are computed. Other layouts are redistributed to one of these first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from oases.layers.chunks import Chunks, Kind, NumChunks
from oases.layers.linear import under_autocast


class _Overlapped(ParallelStyle):
    """Base of both styles; precedes torch's style among the bases, which handles all but `nn.Linear`."""

    kind: ClassVar[Kind]
    # Of torch's style:
    input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    use_local_output: bool
    _partition_linear_fn: Callable[[str, nn.Module, DeviceMesh], None]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        num_chunks: NumChunks = "auto",
    ) -> None:
        torch_style: Any = super()
        torch_style.__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.num_chunks = num_chunks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            torch_style: Any = super()
            return torch_style._apply(module, device_mesh)
        self._partition_linear_fn("", module, device_mesh)
        given, wanted = self.input_layouts[0], self.output_layouts[0]
        name = device_mesh.get_group().group_name
        chunks = Chunks(self.kind)  # one for every module: a style may be applied to many

        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            # Of a DTensor or a row-parallel input the whole length is known; other shards are taken for even ones.
            even = x.dim() < 2 or x.shape[-2] % device_mesh.size() == 0
            even = even or not (isinstance(x, DTensor) or self.kind == "row")
            needed, made, sequence = self._layouts(x.dim(), even)
            x = _local(x, device_mesh, given, needed)
            y = chunks.linear(self.num_chunks, *under_autocast(x, *_weights(linear)), name, sequence)
            return _laid_out(y, device_mesh, made, wanted, self.use_local_output)

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module

    @abstractmethod
    def _layouts(self, ndim: int, even: bool) -> tuple[Placement, Placement, bool]:
        """Layouts of the op's input and output, and whether it is sequence-parallel; even: the sequence divides."""


class OverlappedColwiseParallel(_Overlapped, ColwiseParallel):
    """Drop-in for `ColwiseParallel`; on `nn.Embedding` it is torch's own.

    num_chunks: chunks of the matmul; "auto" measures. Other arguments are torch's.
    """

    kind = "column"

    def _layouts(self, ndim: int, even: bool) -> tuple[Placement, Placement, bool]:
        given = self.input_layouts[0]
        sequence = even and _is_sequence(given, ndim)
        return given if sequence else Replicate(), Shard(-1), sequence


class OverlappedRowwiseParallel(_Overlapped, RowwiseParallel):
    """Drop-in for `RowwiseParallel`; on `nn.Embedding` it is torch's own.

    num_chunks: chunks of the matmul; "auto" measures. Other arguments are torch's.
    """

    kind = "row"

    def _layouts(self, ndim: int, even: bool) -> tuple[Placement, Placement, bool]:
        wanted = self.output_layouts[0]
        sequence = even and _is_sequence(wanted, ndim)
        return Shard(ndim - 1), wanted if sequence else Replicate(), sequence


def _is_sequence(layout: Placement, ndim: int) -> bool:
    return isinstance(layout, Shard) and layout.dim % ndim == ndim - 2


def _same(a: Placement, b: Placement, ndim: int) -> bool:
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim % ndim == b.dim % ndim
    return a == b


def _local(x: Tensor, mesh: DeviceMesh, given: Placement, needed: Placement) -> Tensor:
    """This rank's part of `x` in the layout `needed`; a plain tensor is assumed to have the layout `given`."""
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
