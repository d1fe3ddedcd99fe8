"""Column- and row-parallel `nn.Linear`, in chunks that overlap with their own communication.

Column: the output features are sharded; the backward pass starts the all-reduce of each chunk of the input gradient
and computes the weight gradient meanwhile. Row: the input features are sharded; the forward pass starts the
all-reduce of chunk k before it computes chunk k + 1. The matmuls are C++ ops (csrc/linear.cpp).
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.blocks.sharding import register_shards
from oases.core.execution.call import refuse_second_derivatives
from oases.core.execution.communication import quantised_type
from oases.core.execution.failure import monitor_of, watch_backward
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_of, group_rank, group_size, resolve
from oases.distributed.collectives import agreed_group, form_of_input, gather, scatter
from oases.layers.chunks import Chunks, Kind, NumChunks, is_real
from oases.layers.weight_gradient import autocast, linear


class _OverlappedLinear(HoldsGroup, nn.Module):
    """Base of both linears: a weight shard, its options, and conversion from an `nn.Linear`."""

    kind: ClassVar[Kind]
    shard_dims: ClassVar[dict[str, int]]
    runs_without_forward: ClassVar[bool] = True  # in blocks of a stack
    """Sharded dimension of each sharded parameter, in rank order."""
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        shape: tuple[int, int],
        bias_features: int | None,
        process_group: ProcessGroup | None,
        num_chunks: NumChunks,
        sequence_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        wire_dtype: str | None,
    ) -> None:
        super().__init__()
        if wire_dtype is not None:
            quantised_type("wire_dtype of a linear", wire_dtype)
        if num_chunks != "auto" and num_chunks < 1:
            raise ValueError(f"num_chunks must be 'auto' or at least 1, got {num_chunks}")
        self.in_features = in_features
        self.out_features = out_features
        self.process_group = process_group
        self.wire_dtype = wire_dtype
        self.num_chunks = num_chunks
        self._chunks = Chunks(self.kind)
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias_features is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.empty(bias_features, device=device, dtype=dtype))
        self.reset_parameters()
        register_shards(self)

    def reset_parameters(self) -> None:
        """Draw a shard with `nn.Linear`'s bounds. For weights that do not depend on the degree use `from_linear`."""
        if self.weight.is_meta:
            return
        bound = self.in_features**-0.5 if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
            if "bias" not in self.shard_dims and self.process_group is not None:
                # A replicated bias must be equal on all ranks, whatever their random states.
                source = torch.distributed.get_global_rank(self.process_group, 0)
                torch.distributed.broadcast(self.bias.data, source, group=self.process_group)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, process_group: ProcessGroup | None = None, **options: Any) -> Any:
        """Shard a given layer: this rank's slice of its weight, without a new random draw.

        linear: an `nn.Linear` with the same weight on every rank. options: those of the constructor. Raises
        ValueError where the sharded dimension does not divide by the group size.
        """
        group = resolve(process_group)
        dtype = options.pop("dtype", None) or linear.weight.dtype
        device = options.pop("device", None) or linear.weight.device
        make: Any = cls  # the two cuts' own constructors
        # On meta: no random draw and no memory for values that are replaced below.
        layer = make(
            linear.in_features, linear.out_features, linear.bias is not None,
            process_group=process_group, device="meta", **options,
        )  # fmt: skip
        for name, whole in (("weight", linear.weight), ("bias", linear.bias)):
            if whole is not None:
                part = shard(whole.detach(), cls.shard_dims.get(name), group)
                part = part.to(device, dtype, copy=True)
                setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        return layer

    def _chunked_linear(self, x: Tensor) -> Tensor:
        x, weight, bias = under_autocast(x, self.weight, self.bias)
        y = self._chunks.linear(self.num_chunks, x, weight, bias, self._sending_group(x), self.sequence_parallel)
        if y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(partial(_begin_backward, f"Overlapped{self.kind.capitalize()}Linear", self._group_name))
        return y

    def _sending_group(self, x: Tensor) -> str:
        """Name of the group that sends what this pass over `x` sends; see `agreed_group`."""
        if not (self.kind == "row" or self.sequence_parallel or torch.is_grad_enabled()):
            return self._group_name  # the forward pass of a column-parallel linear sends nothing
        caller = f"the {self.kind}-parallel linear of {self.in_features} -> {self.out_features} features"
        if torch.compiler.is_dynamo_compiling():
            return agreed_at_trace(self._group_name, caller, self.wire_dtype)
        if is_real(x):
            return agreed_group(self._group_name, caller, self.wire_dtype, about=form_of_input(x))
        return self._group_name  # of a fake tensor nothing is sent

    def extra_repr(self) -> str:
        """Full sizes, then the sharding."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tensor_parallel={self.tensor_parallel}, "
            f"num_chunks={self.num_chunks}, sequence_parallel={self.sequence_parallel}"
        )


def _begin_backward(name: str, group: str, _: Tensor) -> None:
    """Hook of a result; raises where the backward op, which has no derivative, is recorded."""
    refuse_second_derivatives(name)
    watch_backward(monitor_of(group_of(group)), name)


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of a linear in autocast's type, where it is on: custom ops are not on its lists."""
    return autocast(x), autocast(weight), None if bias is None else autocast(bias)


def shard(whole: Tensor, dim: int | None, process_group: ProcessGroup | None) -> Tensor:
    """This rank's slice of `whole` along `dim` (None: all of it), a view."""
    if dim is None or group_size(process_group) == 1:
        return whole
    part = shard_size(f"dimension {dim} of a tensor of shape {tuple(whole.shape)}", whole.shape[dim], process_group)
    return whole.narrow(dim, group_rank(process_group) * part, part)


class OverlappedColumnLinear(_OverlappedLinear):
    """`nn.Linear` whose output features are sharded over the group.

    Input [..., in_features], replicated (with sequence_parallel: sharded along dim -2). Output [..., out_features /
    t], or [..., out_features] with gather_output. The all-reduce of the input gradient overlaps, chunk by chunk, with
    the weight gradient. With a group of 1: `nn.Linear` exactly. num_chunks: chunks of the matmul; "auto" measures 1,
    2 and 4 on the first call with gradients and keeps the fastest (see `oases.layers.chunks`). wire_dtype: int8
    quantises what these collectives send (not gather_output's), with an error of the sums.
    """

    kind = "column"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        process_group: ProcessGroup | None = None,
        num_chunks: NumChunks = "auto",
        gather_output: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        group = resolve(process_group)
        part = shard_size("out_features", out_features, group)
        super().__init__(
            in_features, out_features, (part, in_features), part if bias else None,
            group, num_chunks, sequence_parallel, device, dtype, wire_dtype,
        )  # fmt: skip
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features / t]."""
        if self.tensor_parallel == 1:
            return F.linear(x, self.weight, self.bias)
        y = self._chunked_linear(x)
        return gather(y, self.process_group) if self.gather_output else y

    def partial(self, x: Tensor) -> Tensor:
        """The matmul alone: the input gradient stays this rank's partial sum, for a caller that reduces it later."""
        return linear(x, self.weight, self.bias)


class OverlappedRowLinear(_OverlappedLinear):
    """`nn.Linear` whose input features are sharded over the group.

    Input [..., in_features / t] (replicated with input_is_parallel=False). Output [..., out_features], all-reduced
    chunk by chunk while the next chunk is computed; with sequence_parallel it is scattered along dim -2 instead. The
    bias is replicated and added once. With a group of 1: `nn.Linear` exactly. num_chunks, wire_dtype: as in
    `OverlappedColumnLinear`.
    """

    kind = "row"
    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        process_group: ProcessGroup | None = None,
        num_chunks: NumChunks = "auto",
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        group = resolve(process_group)
        part = shard_size("in_features", in_features, group)
        super().__init__(
            in_features, out_features, (out_features, part), out_features if bias else None,
            group, num_chunks, sequence_parallel, device, dtype, wire_dtype,
        )  # fmt: skip
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features / t] -> [..., out_features]."""
        if self.tensor_parallel == 1:
            return F.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter(x, self.process_group)
        return self._chunked_linear(x)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's partial sum, without bias, for a caller that reduces it and adds the bias."""
        return linear(x, self.weight)


def shard_size(what: str, size: int, process_group: ProcessGroup | None) -> int:
    """`size` divided by the group size; ValueError, with the degrees that divide it, where that is not whole."""
    parts = group_size(process_group)
    if size % parts:
        fits = [t for t in range(1, 65) if size % t == 0]
        raise ValueError(
            f"{what} is {size}, which does not divide by the tensor-parallel degree {parts}; "
            f"degrees that divide it: {', '.join(map(str, fits))}"
        )
    return size // parts


def agreed_at_trace(group_name: str, caller: str, code: str | None) -> str:
    """`agreed_group` for a compiled graph: the ranks compare once, when they first trace the caller."""
    group = group_of(group_name)
    known = _traced.setdefault(group, {})
    if (caller, code) not in known:
        known[caller, code] = agreed_group(group_name, caller, code)
    return known[caller, code]


# As torch.compiler.assume_constant_result marks it, which would load the compiler for all who compile nothing: half
# as long again as importing torch.
agreed_at_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]

_traced: WeakKeyDictionary[Any, dict[tuple[str, str | None], str]] = WeakKeyDictionary()
"""Groups of wires that ranks agreed on, by group."""
