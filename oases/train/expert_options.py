"""A training run's options for experts: sizes, router, placement; and what does not go with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from oases.errors import UsageError
from oases.models.moe_gpt import MoEGPTConfig
from oases.moe.placement_state import METHODS
from oases.moe.router import GATES
from oases.plans.shape import Experts
from oases.schedule import format_schedule, read_schedule
from oases.schedule.experts import EXPERT_SCHEDULES
from oases.train.model_options import ModelOptions, option, require_known

AUTO_SCHEDULE = "auto"
"""As a schedule of experts: the one that fits the placement."""
_NOT_WITH_EXPERTS: dict[str, Any] = {"sequence_parallel": False, "schedule": "oases", "wire_dtype": "none"}
"""Options that a mixture of experts must leave as they are."""


@dataclass(frozen=True)
class ExpertOptions(ModelOptions):
    """Sizes of the model, and of experts in the place of its layers' perceptrons."""

    experts: int = option(0, "experts of a layer, spread over all ranks, in the place of a perceptron; 0 = none")
    top_k: int = option(2, "experts of a token")
    expert_hidden: int = option(0, "width inside of an expert; 0 = 4 x hidden")
    shared_hidden: int = option(0, "width inside of an expert for every token; 0 = none")
    gate: str = option("softmax", f"of the router: {', '.join(GATES)}")
    balance_weight: float = option(0.01, "weight of the auxiliary loss that has the router spread tokens evenly")
    z_weight: float = option(0.0, "weight of the loss that keeps the router's logits small")
    bias_update_rate: float = option(
        0.0, "step of a bias by which experts with few tokens are chosen more often; 0 = no bias"
    )
    capacity_factor: float = option(
        0.0, "an expert takes so many times the mean of a rank's tokens and drops the rest; 0 = drops none"
    )
    placement: str = option("prophet", f"how busy experts are copied to other ranks: {', '.join(METHODS)}")
    expert_memory: int = option(-1, "bytes that copies of one layer's experts may take on a rank; -1 = any number")
    expert_schedule: str = option(
        AUTO_SCHEDULE,
        f"of what experts send: {', '.join(EXPERT_SCHEDULES)}, or a text's path; auto = block_wise, or plain where "
        "placement is none",
    )
    record_loads: str | None = option(
        None, "file for every step's tokens by layer, expert and rank, to look at with oases loads"
    )

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """What a model with experts must be built with, beside other sizes."""
        if not self.experts:
            return {}
        return {
            "experts": self.experts, "top_k": self.top_k, "expert_hidden": self.intermediate,
            "shared_hidden": self.shared_hidden, "gate": self.gate, "expert_bias": self.bias_update_rate > 0,
        }  # fmt: skip

    @property
    def intermediate(self) -> int:
        """Width inside of an expert."""
        return self.expert_hidden or 4 * self.hidden

    @property
    def expert_schedule_name(self) -> str:
        """The schedule of experts by its name."""
        if self.expert_schedule != AUTO_SCHEDULE:
            return self.expert_schedule
        return "plain" if self.placement == "none" else "block_wise"

    @property
    def plan_experts(self) -> Experts | None:
        """What a plan says of them; None without experts. UsageError, naming the field, for what cannot be."""
        if not self.experts:
            return None
        values, name = {item.name: getattr(self, item.name) for item in fields(Experts)}, self.expert_schedule_name
        text = name if name in EXPERT_SCHEDULES else format_schedule(read_schedule(name, "experts"))
        return Experts(**values | {"expert_schedule": text})

    @property
    def extra_flops_per_token(self) -> float:
        """Floating-point operations a token that experts add to the step of a GPT with perceptrons of 4 x hidden."""
        if not self.experts:
            return 0.0
        used = 2 * self.hidden * (self.top_k * self.intermediate + self.shared_hidden) + self.experts * self.hidden
        return 6.0 * self.layers * (used - 8 * self.hidden**2)

    def moe_gpt(self, seed: int) -> MoEGPTConfig:
        """The built-in GPT of these sizes with experts."""
        return MoEGPTConfig(
            vocabulary=self.rows, hidden=self.hidden, layers=self.layers, heads=self.heads, sequence=self.sequence,
            seed=seed, experts=self.experts, top_k=self.top_k, expert_hidden=self.expert_hidden,
            shared_hidden=self.shared_hidden, gate="sigmoid" if self.gate == "sigmoid" else "softmax",
        )  # fmt: skip

    def require_experts(self) -> None:
        """Raise UsageError, naming the field, for what cannot be, and for what needs experts and has none."""
        if self.experts < 0:
            raise UsageError(f"experts must be at least 1, or 0 for a dense model, got {self.experts}")
        if self.experts == 0:
            self._require_none()
            return
        require_known(self, {"gate": GATES, "placement": METHODS})
        require_known(self, {"expert_schedule": (AUTO_SCHEDULE, *EXPERT_SCHEDULES)}, or_file=True)
        assert self.plan_experts is not None  # or it says what cannot be
        for name, usual in _NOT_WITH_EXPERTS.items():
            if getattr(self, name, usual) != usual:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} and experts {self.experts} do not go together; leave out one"
                )

    def _require_none(self) -> None:
        for item in fields(ExpertOptions):
            own = item.name not in {known.name for known in fields(ModelOptions)} and item.name != "experts"
            if own and getattr(self, item.name) != item.default:
                raise UsageError(
                    f"{item.name} {getattr(self, item.name)!r} is for a mixture of experts; give --experts N, too"
                )
