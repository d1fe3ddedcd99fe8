"""Metrics of a run: step reports, model FLOPs utilization (MFU), and measured against predicted steps of a plan.

MFU is the FLOP/s of a step's matmuls as a fraction of the ranks' peak. A step of T tokens has 6 N T FLOPs in matmuls
with weights, N being the parameters of all matrices, head included and embeddings excluded; and 12 L S H T in
attention, for L layers of hidden size H and sequence length S: forward 2 N + 4 L S H per token, backward twice that.
Causal masking is not subtracted, and recomputation is not counted (Narayanan et al. 2021, Chowdhery et al. 2022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from oases.core.execution.group import ProcessGroup, group_size
from oases.distributed.clock import timed
from oases.distributed.collectives import all_reduce
from oases.plans.plan import Plan
from oases.reporting import Report, Seconds, StepOverlap
from oases.simulator.peaks import peak_flops
from oases.simulator.quantities import rate_text, seconds_text
from oases.terminal import table
from oases_train.load_balance import StepLoadBalance
from oases_train.meter import Meter, StepParts

_MATMUL = {"cpu": 512, "cuda": 8192}
_SECONDS = 0.03
"""Duration of the matmul measurement."""
Row = dict[str, float | None]
"""predicted_seconds, measured_seconds, and ratio: predicted over measured. None: unknown."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank.

    step: counted from 1. loss: nats per token. seconds: of the slowest rank. flops_per_second: model FLOP/s of all
    ranks; utilisation: MFU, see the module. memory_bytes: peak of the rank with most: allocated by torch on its GPU,
    or the process's resident set. exposed, bubble: fractions of the step, means over ranks. skipped: the weights were
    not updated. validation_loss: of an evaluation after this step. balance: of a model with experts. overlap: of the
    rank that writes logs, exposed and hidden seconds by stack, layer, collective and pass.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    utilisation: float
    memory_bytes: int
    exposed: float
    bubble: float
    skipped: bool
    validation_loss: float | None = None
    balance: StepLoadBalance | None = None
    overlap: dict[str, Seconds] | None = None

    def values(self) -> dict[str, Any]:
        """Values by name for logs, those of the balance included."""
        found = asdict(self)
        return found | (found.pop("balance") or {})

    def text(self) -> str:
        """Format in a line, e.g. "loss 2.341  412 ms  9930 tokens/s  MFU 31 %  1.25 GB  exposed 4 %  bubble 12 %"."""
        parts = [
            f"loss {self.loss:.3f}", seconds_text(self.seconds), f"{rate_text(self.tokens_per_second)} tokens/s",
            f"MFU {_percent(self.utilisation)}", f"{self.memory_bytes / 1e9:.2f} GB",
            f"exposed {_percent(self.exposed)}", f"bubble {_percent(self.bubble)}",
        ]  # fmt: skip
        if self.balance is not None:
            parts.append(self.balance.text())
        if self.validation_loss is not None:
            parts.append(f"validation {self.validation_loss:.3f}")
        return "  ".join([*parts, *(["skipped"] if self.skipped else [])])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all ranks together, and the source of the number."""

    flops_per_second: float
    source: str

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype, process_group: ProcessGroup | None) -> Peak:
        """Peak of the ranks' devices. Collective over all ranks.

        From the data sheet of a known GPU, else measured with matmuls on all ranks at once, for some 30 ms. dtype: of
        the model's matmuls.
        """
        ranks, name = group_size(process_group), str(dtype).removeprefix("torch.")
        known = peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
        if known:
            return Peak(ranks * known, f"{ranks} x {known:.4g} FLOP/s in {name}, from its data sheet")
        mine = torch.tensor([_reached(device, dtype)], dtype=torch.float64, device=device)
        everyone = float(all_reduce(mine, process_group, "peak FLOP/s"))
        size = _MATMUL[device.type]
        return Peak(everyone, f"matmuls of {size} x {size} in {name}, measured on {ranks} ranks at once")


def _reached(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several matmuls."""
    size = _MATMUL[device.type]
    a = torch.ones(size, size, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + _SECONDS
    a @ a
    while best == float("inf") or time.perf_counter() < end:
        best = min(best, timed(lambda: a @ a, device))
    return 2 * size**3 / best


def compare(plan: Plan, ranks: Sequence[StepParts]) -> dict[str, Row] | None:
    """Predicted and measured seconds of a step: in all, compute, exposed communication, bubble, optimizer.

    None for a plan without a prediction. Exposed communication, bubble and optimizer are maxima over the ranks, as in
    a plan; compute is the rest.
    """
    found = plan.prediction
    if found is None:
        return None
    here = _parts(
        *(max(getattr(each, name) for each in ranks) for name in ("seconds", "exposed", "bubble", "optimizer"))
    )
    there = _parts(found.step_seconds, found.exposed_seconds, found.bubble_seconds, found.optimizer_seconds)
    return {
        name: {
            "predicted_seconds": predicted,
            "measured_seconds": measured,
            "ratio": None if predicted is None or not measured else predicted / measured,
        }
        for (name, predicted), measured in zip(there.items(), here.values(), strict=True)
    }


def _parts(step: float, exposed: float, bubble: float, optimizer: float | None) -> dict[str, float | None]:
    rest = None if optimizer is None else step - exposed - bubble - optimizer
    return {
        "step": step, "compute": rest, "exposed communication": exposed, "bubble": bubble, "optimizer": optimizer,
    }  # fmt: skip


def step_flops(plan: Plan) -> float:
    """Model FLOPs of a training step, see the module; with experts, of those that a token is routed to."""
    model, experts = plan.model, plan.experts
    found = model.step_flops(plan.global_batch)
    if experts is None:
        return found
    width = experts.top_k * (experts.expert_hidden or 4 * model.hidden) + experts.shared_hidden
    used = 2 * model.hidden * width + experts.experts * model.hidden
    return found + 6.0 * model.layers * (used - 8 * model.hidden**2) * plan.global_batch * model.sequence


class Reporter:
    """Step reports of a run. Constructor, `report` and `summary` are collectives over all ranks.

    meter: of the run's steps. dtype: of the model's matmuls. wanted: whether this rank wants reports; if no rank
    does, a step has no extra collective. overlap: overlap so far, on the rank that writes logs.
    """

    def __init__(
        self, plan: Plan, meter: Meter, dtype: torch.dtype, *, wanted: bool, overlap: Callable[[], Report] | None
    ) -> None:
        self.plan, self.meter = plan, meter
        asked = torch.tensor([float(wanted)], device=meter.device)
        self.watched = bool(all_reduce(asked, meter.process_group, "whether steps are reported", largest=True).item())
        self.tokens = plan.global_batch * plan.model.sequence
        self.flops = step_flops(plan)
        """Model FLOPs per step."""
        self.peak = Peak.of(meter.device, dtype, meter.process_group)
        self._overlap = None if overlap is None else StepOverlap(overlap)
        meter.reset()

    def report(self, **values: Any) -> StepReport | None:
        """Report of the last step; None if no rank wants one. values: fields that are not measured here."""
        if not self.watched:
            return None
        ranks = self.meter.all_ranks(self.meter.last)
        seconds = max(rank.seconds for rank in ranks)
        return StepReport(
            **values,
            seconds=seconds,
            **self._rates(seconds),
            memory_bytes=round(max(rank.memory_bytes for rank in ranks)),
            exposed=sum(rank.exposed / rank.seconds for rank in ranks) / len(ranks),
            bubble=sum(rank.bubble / rank.seconds for rank in ranks) / len(ranks),
            overlap=None if self._overlap is None else self._overlap.take(),
        )

    def summary(self) -> dict[str, Any]:
        """Medians over the steps (NaN without steps), and the plan's prediction."""
        ranks = self.meter.all_ranks(self.meter.medians())
        step = max(rank.seconds for rank in ranks) or float("nan")
        return {
            "step_seconds": step,
            **self._rates(step),
            "peak_flops": asdict(self.peak),
            "memory_bytes": round(max(rank.memory_bytes for rank in ranks)),
            "prediction": compare(self.plan, ranks),
        }

    def _rates(self, seconds: float) -> dict[str, Any]:
        flops = self.flops / seconds
        return {
            "tokens_per_second": self.tokens / seconds,
            "flops_per_second": flops,
            "utilisation": flops / self.peak.flops_per_second,
        }


def comparison_table(parts: dict[str, Row]) -> Table:
    """Table of predicted and measured seconds by part of the step."""
    rows = []
    for name, row in parts.items():
        seconds = (row["predicted_seconds"], row["measured_seconds"])
        texts = ("-" if each is None else f"{1e3 * each:.1f} ms" for each in seconds)
        rows.append((name, *texts, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"))
    return table(("part", "predicted", "measured", "ratio"), rows, title="the predicted step over the measured one")
