"""Top-k router with auxiliary losses, loss-free balancing and capacity.

Sources: softmax gate and auxiliary loss: Switch Transformers (arXiv 2101.03961); z-loss: ST-MoE (arXiv 2202.08906);
sigmoid gate and loss-free balancing: arXiv 2408.15664; capacity: GShard (arXiv 2006.16668), but tokens with the
lowest weights are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.execution.group import ProcessGroup
from oases.distributed.collectives import all_reduce
from oases.errors import UsageError
from oases.kernels.permute import histogram
from oases.moe.gradients import with_gradients

Gate = Literal["softmax", "sigmoid"]
GATES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """Routing of T tokens, each to k of E experts.

    experts: int64 [T, k]. weights: [T, k], differentiable, of the router's type; they carry the gradients of the
    losses. counts: int64 [E], slots ((token, expert) pairs) that are sent; demand: [E], slots before any was dropped.
    kept: bool [T, k], None where every slot is sent. balance_loss, z_loss: unweighted values; None where unused.
    faulty: bool [], whether a gate is not finite or an expert not one of E.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    demand: Tensor
    kept: Tensor | None
    balance_loss: Tensor | None
    z_loss: Tensor | None
    faulty: Tensor

    def part(self, first: int, last: int, weights: Tensor) -> Routing:
        """Routing of tokens [first, last) with the given weights; losses and demand stay those of all tokens."""
        experts, kept = self.experts[first:last], None if self.kept is None else self.kept[first:last]
        number = len(self.counts)
        sent = experts if kept is None else torch.where(kept, experts, number)
        counts = histogram(sent, number + 1, check=False)[:number]
        return replace(self, experts=experts, weights=weights, kept=kept, counts=counts)


class Router(nn.Module):
    """Routes each token to the `top_k` of `num_experts` with the largest gates.

    gate: "softmax" over all experts, or "sigmoid" of each. normalised: a token's weights sum to 1. scale: factor on
    every weight. balance_weight: of the auxiliary loss E sum_e f_e p_e, with f_e the fraction of slots and p_e the
    mean gate (normalised over experts) of expert e, 1 where both are uniform. z_weight: of the mean square of the
    logits' log-sum-exp. Both losses are added to the gradient, times `loss_scale`, for callers that divide the loss
    by a number of micro-batches. bias_update_rate: above 0, experts (not weights) are chosen by gate plus `bias`,
    which `update_bias` moves. capacity_factor: an expert takes at most that times T k / E slots, rounded up, of a
    call's T tokens; None drops nothing. device, dtype: of the weight; gates are computed in float32 or wider.
    UsageError for invalid arguments.
    """

    bias: Tensor | None
    demand: Tensor | None

    def __init__(
        self, hidden: int, num_experts: int, *, top_k: int = 2, gate: Gate = "softmax", normalised: bool = True,
        scale: float = 1.0, balance_weight: float = 0.0, z_weight: float = 0.0, bias_update_rate: float = 0.0,
        capacity_factor: float | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden < 1 or num_experts < 1:
            raise UsageError(f"router: hidden and num_experts must be at least 1, got {hidden} and {num_experts}")
        if not 1 <= top_k <= num_experts:
            raise UsageError(f"router: top_k must be from 1 to num_experts = {num_experts}, got {top_k}")
        if gate not in GATES:
            raise UsageError(f"router: unknown gate {gate!r}; known are {', '.join(GATES)}")
        for name, value in (("balance_weight", balance_weight), ("z_weight", z_weight),
                            ("bias_update_rate", bias_update_rate)):  # fmt: skip
            if not value >= 0:
                raise UsageError(f"router: {name} must be at least 0, got {value}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise UsageError(
                f"router: capacity_factor must be above 0, or None to drop nothing, got {capacity_factor}"
            )
        self.top_k, self.gate, self.normalised, self.scale = top_k, gate, normalised, scale
        self.balance_weight, self.z_weight, self.loss_scale = balance_weight, z_weight, 1.0
        self.bias_update_rate, self.capacity_factor = bias_update_rate, capacity_factor
        self.weight = nn.Parameter(torch.empty((num_experts, hidden), device=device, dtype=dtype))
        biased = bias_update_rate > 0
        self.register_buffer("bias", torch.zeros(num_experts, device=device) if biased else None)
        # Slots since the last bias update; saved with it, so that a resumed run continues exactly.
        demand = torch.zeros(num_experts, dtype=torch.int64, device=device) if biased else None
        self.register_buffer("demand", demand)
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Draw the weight with `nn.Linear`'s bounds; set the bias to 0."""
        if self.weight.is_meta:
            return
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        for buffer in (self.bias, self.demand):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> Routing:
        """x: [T, hidden], T may be 0. bias: [E] instead of the router's own, for recomputation.

        Gates that are not finite do not raise here: the other ranks would wait for ever.
        """
        if x.dim() != 2 or x.shape[1] != self.weight.shape[1]:
            raise UsageError(
                f"router: x must be [tokens, {self.weight.shape[1]}], got {list(x.shape)}; "
                "its last dimension must be the layer's hidden size"
            )
        logits = self._logits(x)
        scores = logits.softmax(-1) if self.gate == "softmax" else logits.sigmoid()
        bias = self.bias if bias is None else bias
        preferred = scores.detach() if bias is None else scores.detach() + bias
        # A stable order: of equal gates the expert with the lower number, on every device.
        experts = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k].contiguous()
        weights = scores.gather(1, experts)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        if self.scale != 1.0:
            weights = weights * self.scale
        demand = histogram(experts, self.num_experts, check=False)
        kept = None if self.capacity_factor is None else self._kept(experts, weights.detach(), demand)
        counts = demand if kept is None else demand.clamp_max(self._capacity(len(x)))
        balance_loss = z_loss = None
        if self.balance_weight:
            balance_loss = self._balance_loss(scores, demand)
            weights = attached(weights, balance_loss, self.balance_weight * self.loss_scale)
        if self.z_weight:
            z_loss = logits.logsumexp(-1).square().sum() / max(len(x), 1)
            weights = attached(weights, z_loss, self.z_weight * self.loss_scale)
        return Routing(
            experts, weights, counts, demand, kept, None if balance_loss is None else balance_loss.detach(),
            None if z_loss is None else z_loss.detach(), ~preferred.isfinite().all(),
        )  # fmt: skip

    @torch.no_grad()
    def note(self, demand: Tensor) -> None:
        """Add a call's demand [E] for the next bias update."""
        if self.demand is not None:
            self.demand += demand

    @torch.no_grad()
    def update_bias(self, group: ProcessGroup | None = None) -> None:
        """Move the bias by `bias_update_rate` towards experts below the mean of the accumulated demand. Collective.

        group: ranks with the same router; their demand is summed.
        """
        if self.bias is None or self.demand is None:
            return
        total = all_reduce(self.demand.clone(), group, "demand for experts").double()
        self.bias += self.bias_update_rate * (total.mean() - total).sign()
        self.demand.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and not bias.is_meta and not self.bias.is_meta:
            self.bias = bias.to(self.bias.device)  # always float32: bias updates are lost in lower precision
        return self

    def _logits(self, x: Tensor) -> Tensor:
        # Not under autocast: low precision would swap experts with close gates.
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))

    def _balance_loss(self, scores: Tensor, demand: Tensor) -> Tensor:
        tokens = max(len(scores), 1)
        shares = scores if self.gate == "softmax" else scores / scores.sum(-1, keepdim=True)
        fractions = demand.to(scores.dtype) / (tokens * self.top_k)
        return self.num_experts * (fractions * shares.sum(0) / tokens).sum()

    def _capacity(self, tokens: int) -> int:
        assert self.capacity_factor is not None
        return ceil(self.capacity_factor * tokens * self.top_k / self.num_experts)

    def _kept(self, experts: Tensor, weights: Tensor, demand: Tensor) -> Tensor:
        """Slots with the largest weights per expert, up to the capacity; of equal ones the first."""
        flat = experts.flatten()
        heaviest = weights.flatten().sort(descending=True, stable=True).indices
        order = heaviest[flat[heaviest].sort(stable=True).indices]  # by expert, then by weight
        place = torch.arange(len(flat), device=flat.device) - (demand.cumsum(0) - demand)[flat[order]]
        kept = torch.empty_like(flat, dtype=torch.bool)
        kept[order] = place < self._capacity(len(experts))
        return kept.view_as(experts)

    def extra_repr(self) -> str:
        """Sizes and the gate."""
        return f"{self.weight.shape[1]}, {self.num_experts}, top_k={self.top_k}, gate={self.gate!r}"


def attached(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """`x`, whose backward pass adds the gradient of `weight * loss`."""
    dtype, device = loss.dtype, loss.device
    return with_gradients(lambda grad, _: (grad, torch.full((), weight, dtype=dtype, device=device)), x, loss)[0]
