"""Options for mixture-of-experts models: sizes, router, expert placement; and options that exclude them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from oases.core.dtypes import WIRES
from oases.core.schedule import format_schedule
from oases.distributed.expert_groups import EXPERT_MODES
from oases.errors import UsageError
from oases.models.moe_gpt import MoEGPTConfig
from oases.models.options import ModelOptions, option, require_known
from oases.moe.placement import METHODS
from oases.moe.router import GATES
from oases.plans.expert_schedules import EXPERT_SCHEDULES
from oases.plans.schedule_files import read_schedule
from oases.plans.shape import Experts

AUTO_SCHEDULE = "auto"
"""Value of `expert_schedule` that selects the schedule by the placement."""
_WITH_EXPERTS: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,), "schedule": ("oases", AUTO_SCHEDULE), "wire_dtype": WIRES,
}  # fmt: skip
"""Values of options for dense blocks in a mixture-of-experts model: their defaults, of older versions too."""


@dataclass(frozen=True)
class ExpertOptions(ModelOptions):
    """Sizes of the model and of the experts that replace its MLPs."""

    experts: int = option(0, "experts per MoE layer, sharded over all ranks, in place of each MLP; 0 = dense model")
    top_k: int = option(2, "experts per token")
    expert_hidden: int = option(0, "intermediate size of an expert, features; 0 = 4 x hidden")
    shared_hidden: int = option(0, "intermediate size of the shared expert, features; 0 = no shared expert")
    gate: str = option("softmax", "router gate", GATES)
    balance_weight: float = option(0.01, "weight of the auxiliary load-balancing loss")
    z_weight: float = option(0.0, "weight of the router z-loss")
    bias_update_rate: float = option(
        0.0, "update rate of the router bias (auxiliary-loss-free load balancing); 0 = no bias"
    )
    capacity_factor: float = option(0.0, "capacity factor: maximum tokens per expert over the mean; 0 = no drops")
    placement: str = option("prophet", "method that replicates busy experts on other ranks", tuple(METHODS))
    expert_memory: int = option(-1, "memory for expert replicas per rank and layer, bytes; -1 = unlimited")
    expert_schedule: str = option(
        AUTO_SCHEDULE,
        f"schedule of expert communication: {', '.join(EXPERT_SCHEDULES)}, or the path of a schedule file; auto = "
        "block_wise, or plain with placement none",
        metavar="NAME|FILE",
    )
    experts_mode: str = option(
        "sharded",
        "experts of --model: sharded over tensor-parallel ranks, whose results are summed, or balanced: tokens are "
        "sent to them, and busy ones copied by --placement",
        EXPERT_MODES,
    )
    expert_parallel: int = option(
        0, "with --experts-mode balanced: ranks that hold every expert once; 0 = all ranks of a pipeline stage"
    )
    record_loads: str | None = option(
        None,
        "file for each step's tokens by layer, expert and rank; shown by oases bench loads",
        metavar="FILE",
    )

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """Further arguments to build a model with experts; empty for a dense model."""
        if not self.experts:
            return {}
        return {
            "experts": self.experts, "top_k": self.top_k, "expert_hidden": self.intermediate,
            "shared_hidden": self.shared_hidden, "gate": self.gate, "expert_bias": self.bias_update_rate > 0,
        }  # fmt: skip

    @property
    def intermediate(self) -> int:
        """Intermediate size of an expert, features."""
        return self.expert_hidden or 4 * self.hidden

    @property
    def expert_schedule_name(self) -> str:
        """Name or path of the expert schedule, with auto resolved."""
        if self.expert_schedule != AUTO_SCHEDULE:
            return self.expert_schedule
        return "plain" if self.placement == "none" else "block_wise"

    @property
    def plan_experts(self) -> Experts | None:
        """Experts section of a plan; None without experts. UsageError names an invalid field."""
        if not self.experts:
            return None
        values, name = {item.name: getattr(self, item.name) for item in fields(Experts)}, self.expert_schedule_name
        text = name if name in EXPERT_SCHEDULES else format_schedule(read_schedule(name, "experts"))
        return Experts(**values | {"expert_schedule": text})

    @property
    def extra_flops_per_token(self) -> float:
        """Training FLOPs per token of experts minus those of MLPs of 4 x hidden."""
        if not self.experts:
            return 0.0
        used = 2 * self.hidden * (self.top_k * self.intermediate + self.shared_hidden) + self.experts * self.hidden
        return 6.0 * self.layers * (used - 8 * self.hidden**2)

    def moe_gpt(self, seed: int) -> MoEGPTConfig:
        """Configuration of the built-in GPT with experts."""
        return MoEGPTConfig(
            vocabulary=self.rows, hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence,
            seed=seed, experts=self.experts, top_k=self.top_k, expert_hidden=self.expert_hidden,
            shared_hidden=self.shared_hidden, gate="sigmoid" if self.gate == "sigmoid" else "softmax",
        )  # fmt: skip

    @property
    def model_experts(self) -> dict[str, Any]:
        """Arguments of `parallelize` for the experts of an unedited model."""
        if self.experts_mode == "sharded":
            return {}
        degree = self.expert_parallel or None
        return {"experts": self.experts_mode, "expert_parallel": degree, "placement": self.placement}

    def require_experts(self) -> None:
        """Raise UsageError, naming the field, for invalid expert options, and for expert options without experts."""
        if self.experts_mode != "sharded" and getattr(self, "model", None) is None:
            raise UsageError(
                f"experts_mode {self.experts_mode!r} is for a model's own experts; give --model, or --experts N alone"
            )
        if self.expert_parallel and self.experts_mode == "sharded":
            raise UsageError(f"expert_parallel {self.expert_parallel} needs --experts-mode balanced; give that, too")
        if self.experts == 0:
            self._require_none()
            return
        require_known(self, {"expert_schedule": (AUTO_SCHEDULE, *EXPERT_SCHEDULES)}, or_file=True)
        assert self.plan_experts is not None  # raises for an invalid value
        for name, usual in (_WITH_EXPERTS | {"sub_batches": (self.default_sub_batches,)}).items():
            if getattr(self, name, usual[0]) not in usual:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} and experts {self.experts} cannot be combined; leave out one"
                )

    def _require_none(self) -> None:
        others = {known.name for known in fields(ModelOptions)} | {"experts", "experts_mode", "expert_parallel"}
        for item in fields(ExpertOptions):
            own = item.name not in others and not (item.name == "placement" and self.model_experts)
            if own and getattr(self, item.name) != item.default:
                raise UsageError(
                    f"{item.name} {getattr(self, item.name)!r} needs a mixture of experts; give --experts N, too"
                )
