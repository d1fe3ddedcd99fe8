"""Makes a step's report of what the ranks measured, and a run's summary of its steps."""

from __future__ import annotations

from typing import Any

import torch

from oases.parallel.collectives import all_reduce
from oases.planner.explain import model_flops
from oases.plans.shape import ModelShape
from oases.train.comparison import Comparison
from oases.train.measures import StepReport
from oases.train.underway import Underway
from oases.train.utilisation import Peak


class Reporter:
    """Reports the steps of a trainer. All ranks make it together and ask for every step's report.

    watched: whether somebody on this rank looks at them. Where nobody does on any rank, and no log is kept, a step
    costs nothing more: there is no report, and no collective for one.
    """

    def __init__(self, trainer: Underway, *, watched: bool) -> None:
        config = trainer.config
        self.trainer = trainer
        asked = torch.tensor([float(watched)], device=trainer.device)
        self.watched = (
            config.step_log is not None
            or config.tensorboard is not None
            or bool(all_reduce(asked, trainer.group, "whether steps are watched", largest=True).item())
        )
        self.tokens = config.batch * config.sequence
        sizes = {name: trainer.sizes[name] for name in ("hidden", "layers", "heads", "sequence", "vocabulary")}
        self.flops = model_flops(ModelShape(**sizes), config.batch) + self.tokens * config.flops_beside
        """Of the model, a step."""
        self.peak = Peak.of(trainer.device, next(trainer.model.parameters()).dtype, trainer.group, config.peak_flops)
        trainer.meter.forget()

    def report(self, loss: float) -> StepReport | None:
        """Of the step that the trainer has done last; None where nobody wants one. loss: the step's."""
        if not self.watched:
            return None
        trainer, step = self.trainer, self.trainer.steps_done
        ranks = trainer.meter.everywhere(trainer.meter.last)
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
            skipped=step - 1 in trainer.guard.skipped,
            validation_loss=trainer.evaluations.get(step),
            balance=None if trainer.balance is None else trainer.balance.last,
        )

    def summary(self) -> dict[str, Any]:
        """Medians over the steps, NaN where there were none; beside them what a plan had predicted. All ranks."""
        meter, plan = self.trainer.meter, self.trainer.plan
        ranks = meter.everywhere(meter.medians())
        step = max(rank.seconds for rank in ranks) or float("nan")
        comparison = None if plan is None else Comparison.of(plan, ranks)
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
