"""Metrics of a run: step reports, model FLOPs utilization (MFU), and measured against predicted steps of a plan.

MFU is the FLOP/s of a step's matmuls as a fraction of the ranks' peak. A step of T tokens has 6 N T FLOPs in matmuls
with weights, N being the parameters of all matrices, head included and embeddings excluded; and 12 L S H T in
attention, for L layers of hidden size H and sequence length S: forward 2 N + 4 L S H per token, backward twice that.
Causal masking is not subtracted, and recomputation is not counted (Narayanan et al. 2021, Chowdhery et al. 2022).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import nn

from oases.checkpoint.metadata import Metadata
from oases.core.execution.executor import synchronize
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.distributed.collectives import all_reduce
from oases.plans.plan import Plan, Prediction
from oases.reporting import Report, Seconds, StepOverlap
from oases.simulator.peaks import peak_flops
from oases.simulator.quantities import rate_text, seconds_text
from oases.terminal import table
from oases_train.config import TrainConfig
from oases_train.load_balance import LoadBalance, StepLoadBalance
from oases_train.meter import Meter, StepParts
from oases_train.step_check import StepCheck

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
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured seconds of a step: in all, compute, exposed communication, bubble, optimizer.

    Exposed communication, bubble and optimizer are maxima over the ranks, as in a plan; compute is the rest.
    """

    parts: dict[str, Row]

    @staticmethod
    def of(plan: Plan, measured: Sequence[StepParts]) -> Comparison | None:
        """Compare a plan's prediction, None without one, with the measured steps of all ranks."""
        if plan.prediction is None:
            return None
        predicted = _predicted(plan.prediction)
        found = _measured(measured)
        return Comparison(
            {
                name: {
                    "predicted_seconds": seconds,
                    "measured_seconds": found[name],
                    "ratio": _ratio(seconds, found[name]),
                }
                for name, seconds in predicted.items()
            }
        )


def _predicted(found: Prediction) -> dict[str, float | None]:
    optimizer = found.optimizer_seconds
    rest = found.step_seconds - found.exposed_seconds - found.bubble_seconds - (optimizer or 0.0)
    return {
        "step": found.step_seconds,
        "compute": None if optimizer is None else rest,
        "exposed communication": found.exposed_seconds,
        "bubble": found.bubble_seconds,
        "optimizer": optimizer,
    }


def _measured(ranks: Sequence[StepParts]) -> dict[str, float | None]:
    step, exposed, bubble, optimizer = (
        max(getattr(parts, name) for parts in ranks) for name in ("seconds", "exposed", "bubble", "optimizer")
    )
    rest = step - exposed - bubble - optimizer
    return {
        "step": step, "compute": rest, "exposed communication": exposed, "bubble": bubble, "optimizer": optimizer,
    }  # fmt: skip


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured


def _is_logged(config: TrainConfig) -> bool:
    return any(each is not None for each in (config.step_log, config.tensorboard))


class Training(Protocol):
    """Run as reports, logs and checkpoints see it; documented in `oases_train.trainer.Trainer`."""

    config: TrainConfig
    plan: Plan
    group: ProcessGroup | None
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    meter: Meter
    balance: LoadBalance | None
    step_check: StepCheck
    steps_done: int
    gradient_norm: float
    evaluations: dict[int, float]
    resumed: Path | None

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""

    def overlap(self) -> Report:
        """Overlap so far."""

    def checkpoint_metadata(self) -> Metadata:
        """Metadata of a checkpoint of the current state."""

    def settle(self) -> None:
        """Apply pending updates before a checkpoint."""

    def unlock(self) -> None:
        """Let other runs have the checkpoint folder."""


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
    """Step reports of a trainer. Constructor and `report` are collectives over all ranks.

    watched: whether this rank wants reports. If no rank does and no log is written, a step has no extra collective.
    """

    def __init__(self, trainer: Training, *, watched: bool) -> None:
        config = trainer.config
        self.trainer = trainer
        asked = torch.tensor([float(watched)], device=trainer.device)
        self.watched = _is_logged(config) or bool(
            all_reduce(asked, trainer.group, "whether steps are reported", largest=True).item()
        )
        self.tokens = config.batch * config.sequence
        self.flops = step_flops(trainer.plan)
        """Model FLOPs per step."""
        self.peak = Peak.of(trainer.device, next(trainer.model.parameters()).dtype, trainer.group)
        logs = group_rank(trainer.group) == 0 and _is_logged(config)
        self._overlap = StepOverlap(trainer.overlap) if logs else None
        trainer.meter.reset()

    def report(self, loss: float) -> StepReport | None:
        """Report of the trainer's last step; None if no rank wants one. loss: of the step."""
        if not self.watched:
            return None
        trainer, step = self.trainer, self.trainer.steps_done
        ranks = trainer.meter.all_ranks(trainer.meter.last)
        seconds = max(rank.seconds for rank in ranks)
        return StepReport(
            step=step,
            loss=loss,
            learning_rate=trainer.learning_rate(step - 1),
            gradient_norm=trainer.gradient_norm,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            flops_per_second=self.flops / seconds,
            utilisation=self.flops / seconds / self.peak.flops_per_second,
            memory_bytes=round(max(rank.memory_bytes for rank in ranks)),
            exposed=sum(rank.exposed / rank.seconds for rank in ranks) / len(ranks),
            bubble=sum(rank.bubble / rank.seconds for rank in ranks) / len(ranks),
            skipped=step - 1 in trainer.step_check.skipped,
            validation_loss=trainer.evaluations.get(step),
            balance=None if trainer.balance is None else trainer.balance.last,
            overlap=None if self._overlap is None else self._overlap.take(),
        )

    def summary(self) -> dict[str, Any]:
        """Medians over the steps (NaN without steps), and the plan's prediction. Collective over all ranks."""
        meter, plan = self.trainer.meter, self.trainer.plan
        ranks = meter.all_ranks(meter.medians())
        step = max(rank.seconds for rank in ranks) or float("nan")
        comparison = Comparison.of(plan, ranks)
        return {
            "step_seconds": step,
            "tokens_per_second": self.tokens / step,
            "flops_per_second": self.flops / step,
            "utilisation": self.flops / step / self.peak.flops_per_second,
            "peak_flops": {"flops_per_second": self.peak.flops_per_second, "source": self.peak.source},
            "memory_bytes": round(max(rank.memory_bytes for rank in ranks)),
            "prediction": None if comparison is None else comparison.parts,
            "balance": None if self.trainer.balance is None else self.trainer.balance.summary(),
        }


def comparison_table(parts: dict[str, Row]) -> Table:
    """Table of predicted and measured seconds by part of the step."""
    rows = []
    for name, row in parts.items():
        seconds = (row["predicted_seconds"], row["measured_seconds"])
        texts = ("-" if each is None else f"{1e3 * each:.1f} ms" for each in seconds)
        rows.append((name, *texts, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"))
    return table(("part", "predicted", "measured", "ratio"), rows, title="the predicted step over the measured one")
