"""The step that a plan predicts laid over the one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from oases.plans.plan import Plan, Prediction
from oases.terminal import table
from oases.train.measures import StepParts

Row = dict[str, float | None]
"""predicted_seconds, measured_seconds, and ratio: predicted over measured. None: not known."""


@dataclass(frozen=True)
class Comparison:
    """What becomes of a step, by part: the whole step, compute, exposed communication, bubble, optimizer.

    Exposed communication, bubble and optimizer are each those of the rank with most, as a plan has them; compute is
    the rest of the step.
    """

    parts: dict[str, Row]

    @staticmethod
    def of(plan: Plan, measured: Sequence[StepParts]) -> Comparison | None:
        """None where the plan has no prediction. measured: every rank's."""
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


def comparison_table(parts: dict[str, Row]) -> Table:
    """A training run's step by parts, as its plan predicted it and as it was measured."""
    rows = []
    for name, row in parts.items():
        seconds = (row["predicted_seconds"], row["measured_seconds"])
        texts = ("-" if each is None else f"{1e3 * each:.1f} ms" for each in seconds)
        rows.append((name, *texts, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"))
    return table(("part", "predicted", "measured", "ratio"), rows, title="the predicted step over the measured one")
