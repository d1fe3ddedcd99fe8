"""Options for mixture-of-experts models: sizes, router, expert placement; and options that exclude them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from oases.core.dtypes import WIRES
from oases.core.schedule import format_schedule
from oases.errors import UsageError
from oases.models.options import ModelOptions, option, require_known
from oases.moe.placement import METHODS
from oases.plans.expert_schedules import EXPERT_SCHEDULES
from oases.plans.schedule_files import read_schedule
from oases.plans.shape import Experts

AUTO = "auto"
"""Value of `schedule` and of `placement` that takes what fits the model."""
_WITH_EXPERTS: dict[str, tuple[Any, ...]] = {"sequence_parallel": (False,), "wire_dtype": WIRES}
"""Values that options of dense blocks may have in a mixture-of-experts model."""


@dataclass(frozen=True)
class ExpertOptions(ModelOptions):
    """Sizes of the model and of the experts that replace its MLPs."""

    experts: int = option(0, "experts per MoE layer, sharded over all ranks, in place of each MLP; 0 = dense model")
    top_k: int = option(2, "experts per token")
    expert_hidden: int = option(0, "intermediate size of an expert, features; 0 = 4 x hidden")
    balance_weight: float = option(0.01, "weight of the auxiliary load-balancing loss")
    placement: str = option(
        AUTO,
        "method that copies busy experts to other ranks. auto: prophet with --experts; a --model's own experts stay "
        "sharded over tensor-parallel ranks, with another method tokens are sent to them, over all ranks of a stage",
        (AUTO, *METHODS),
    )
    record_loads: str | None = option(
        None,
        "file for each step's tokens by layer, expert and rank; shown by oases bench loads",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts and self.placement == AUTO:
            object.__setattr__(self, "placement", "prophet")

    def plan_experts(self, schedule: str) -> Experts | None:
        """Experts section of a plan; None without experts. schedule: by name or file, or auto.

        UsageError names an invalid field.
        """
        if not self.experts:
            return None
        names = ("experts", "top_k", "expert_hidden", "balance_weight", "placement")
        if schedule == AUTO:
            schedule = "plain" if self.placement == "none" else "block_wise"
        if schedule not in EXPERT_SCHEDULES:
            schedule = format_schedule(read_schedule(schedule, "experts"))
        return Experts(**{name: getattr(self, name) for name in names}, expert_schedule=schedule)

    @property
    def model_experts(self) -> dict[str, Any]:
        """Arguments of `parallelize` for the experts of an unedited model."""
        return {} if self.placement == AUTO else {"experts": "balanced", "placement": self.placement}

    def require_experts(self, schedule: str, model: str | None) -> None:
        """Raise UsageError, naming the field, for invalid expert options, and for expert options without experts."""
        if self.experts == 0:
            self._require_none(model)
            return
        require_known(self, {"schedule": (AUTO, *EXPERT_SCHEDULES)}, or_file=True)
        self.plan_experts(schedule)  # raises for an invalid value
        for name, usual in _WITH_EXPERTS.items():
            if getattr(self, name, usual[0]) not in usual:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} and experts {self.experts} cannot be combined; leave out one"
                )

    def _require_none(self, model: str | None) -> None:
        others = {known.name for known in fields(ModelOptions)} | {"experts"}
        for item in fields(ExpertOptions):
            own = item.name not in others and not (item.name == "placement" and model is not None)
            if own and getattr(self, item.name) != item.default:
                raise UsageError(
                    f"{item.name} {getattr(self, item.name)!r} needs a mixture of experts; give --experts N, too"
                )
