"""Experts of one rank: stacked weights, and their grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.blocks.sharding import register_shards
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_rank, group_size, resolve
from oases.errors import UsageError
from oases.moe.gradients import with_gradients
from oases.moe.placement import owner_ranks


class ExpertWeights(NamedTuple):
    """Weights of L experts: up [L, i or 2 i, hidden], down [L, hidden, i], biases [L, i or 2 i] and [L, hidden].

    Gated experts have both first matmuls in `up`, the gate's rows first.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def given(self) -> list[Tensor]:
        """The weights that are not None, in order."""
        return [weight for weight in self if weight is not None]

    def like(self, given: Sequence[Tensor]) -> ExpertWeights:
        """The same structure with other tensors, in the order of `given`."""
        left = iter(given)
        up, down, *biases = (None if weight is None else next(left) for weight in self)
        assert up is not None
        assert down is not None
        return ExpertWeights(up, down, *biases)


class Experts(HoldsGroup, nn.Module):
    """`num_experts` MLPs, evenly over the ranks of a group, in rank order.

    Plain: down(gelu(up(x))); gated: down(silu(gate(x)) * up(x)). Initial weights of an expert do not depend on the
    number of ranks, if the ranks' seeds are equal. device, dtype: of the weights. UsageError where the ranks do not
    divide the experts.
    """

    shard_dims: ClassVar[dict[str, int]] = {"up": 0, "down": 0, "up_bias": 0, "down_bias": 0}
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self, hidden: int, intermediate: int, num_experts: int, *, gated: bool = False, bias: bool = False,
        process_group: ProcessGroup | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden < 1 or intermediate < 1:
            raise UsageError(f"experts: hidden and intermediate must be at least 1, got {hidden} and {intermediate}")
        self.process_group = resolve(process_group)
        size, rank = group_size(self.process_group), group_rank(self.process_group)
        local = (owner_ranks(num_experts, size) == rank).sum().item()
        self.num_experts, self.gated = num_experts, gated
        self.first = rank * local
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        width = 2 * intermediate if gated else intermediate
        self.up = nn.Parameter(torch.empty((local, width, hidden), **options))
        self.down = nn.Parameter(torch.empty((local, hidden, intermediate), **options))
        self.up_bias = nn.Parameter(torch.empty((local, width), **options)) if bias else None
        self.down_bias = nn.Parameter(torch.empty((local, hidden), **options)) if bias else None
        self.reset_parameters()
        register_shards(self)

    @property
    def local(self) -> int:
        """Number of experts owned by this rank."""
        return len(self.up)

    @property
    def weights(self) -> ExpertWeights:
        """The parameters, as `compute` takes them."""
        return ExpertWeights(self.up, self.down, self.up_bias, self.down_bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert with `nn.Linear`'s bounds, from a seed of its own; on the CPU, for equal values on all
        devices.

        Takes one number from torch's generator.
        """
        if self.up.is_meta:
            return
        seed = int(torch.randint(1 << 62, ()))
        for index in range(self.local):
            generator = torch.Generator().manual_seed((seed + 0x9E3779B97F4A7C15 * (self.first + index)) % (1 << 63))
            for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
                bound = weight.shape[2] ** -0.5
                for tensor in (weight, bias):
                    if tensor is not None:
                        drawn = torch.empty(tensor.shape[1:], dtype=tensor.dtype)
                        tensor[index] = drawn.uniform_(-bound, bound, generator=generator)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows: [sum of counts, hidden], the first counts[0] for this rank's first expert, and so on."""
        return compute(rows, counts, self.weights, middle_of(self.gated))

    def extra_repr(self) -> str:
        """Full sizes, then the expert-parallel degree."""
        return (
            f"{self.up.shape[2]}, {self.down.shape[2]}, {self.num_experts}, gated={self.gated}, "
            f"bias={self.up_bias is not None}, expert_parallel={self.tensor_parallel}"
        )


def middle_of(gated: bool, activation: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """Function between an expert's two matmuls. activation: default as in `Experts`."""
    activation = activation or (F.silu if gated else F.gelu)
    if not gated:
        return activation

    def middle(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate) * up

    return middle


def compute(
    rows: Tensor, counts: Sequence[int], weights: ExpertWeights, middle: Callable[[Tensor], Tensor], *,
    grouped: bool | None = None, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Run rows through their experts: [sum of counts, hidden] -> the same shape.

    counts: rows of each of the L experts, in order; may be 0. middle: see `middle_of`. grouped: use one grouped
    matmul for all experts; None: where this torch supports it (`can_group`), else a loop. transposed: up is [L,
    hidden, i or 2 i], down [L, i, hidden]. Every expert's weights get a gradient, zeros for one without rows.
    UsageError where counts do not have one entry per expert or do not sum to the rows.
    """
    counts = list(counts)
    if len(counts) != len(weights.up) or sum(counts) != len(rows):
        raise UsageError(
            f"experts: {len(rows)} rows for {len(weights.up)} experts do not fit counts {counts}; give one "
            "number of rows for each expert"
        )
    if not counts:
        return rows
    matmul = _grouped_matmul if (can_group(rows, weights) if grouped is None else grouped) else _looped_matmul
    up, down = weights.up, weights.down
    if not transposed:
        up, down = up.transpose(-2, -1), down.transpose(-2, -1)
    return matmul(middle(matmul(rows, counts, up, weights.up_bias)), counts, down, weights.down_bias)


def can_group(rows: Tensor, weights: ExpertWeights) -> bool:
    """Whether torch has a grouped matmul for these tensors."""
    if not hasattr(F, "grouped_mm") or rows.dtype != weights.up.dtype:
        return False
    # For other types, and on GPUs of other generations than Hopper and Blackwell's data centre parts, torch loops and
    # waits for the device.
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if rows.is_cpu else (torch.bfloat16,)
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) not in ((9, 0), (10, 0)):
        return False
    widths = (weights.up.shape[1], weights.up.shape[2], weights.down.shape[2])
    aligned = all(width * rows.element_size() % 16 == 0 for width in widths)  # rows must be multiples of 16 bytes
    return (rows.is_cpu or rows.is_cuda) and rows.dtype in dtypes and aligned


def _grouped_matmul(rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight: [L, in, out]."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if not rows.is_cpu:  # the host waits for a copy from memory that is not pinned
        ends = ends.pin_memory().to(rows.device, non_blocking=True)
    # The grouped matmul rejects gradients with strides of 0, such as those of a sum's.
    (result,) = with_gradients(lambda grad: [grad.contiguous()], F.grouped_mm(rows.contiguous(), weight, offs=ends))
    if bias is None:
        return result
    return torch.cat([part + b for part, b in zip(result.split(counts), bias.unbind(0), strict=True)])


def _looped_matmul(rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight: [L, in, out]."""
    biases = [None] * len(counts) if bias is None else bias.unbind(0)
    parts = zip(rows.split(counts), weight.unbind(0), biases, strict=True)
    return torch.cat([F.linear(part, w.t(), b) for part, w, b in parts])


class SharedExpert(nn.Module):
    """Expert for every token, replicated. scaled: multiply its output by a sigmoid gate."""

    def __init__(
        self, hidden: int, intermediate: int, *, gated: bool, bias: bool, scaled: bool, **options: Any
    ) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(hidden, 2 * intermediate if gated else intermediate, bias=bias, **options)
        self.down = nn.Linear(intermediate, hidden, bias=bias, **options)
        self.gate = nn.Linear(hidden, 1, bias=False, **options) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        y = self.down(middle_of(self.gated)(self.up(x)))
        return y if self.gate is None else self.gate(x).sigmoid() * y
