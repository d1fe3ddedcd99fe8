"""Learning-rate schedules: stateless functions of the step, as a fraction of the peak.

All begin with a linear warm-up of `warmup` steps. Sources: cosine of Loshchilov and Hutter (arXiv 1608.03983), wsd
(warmup-stable-decay) of Hu et al. (MiniCPM, arXiv 2404.06395).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from oases.errors import UsageError


@dataclass(frozen=True)
class RateSchedule:
    """Parameters of a schedule: steps in all, warm-up steps, and `floor`, the final rate as a fraction of the peak.

    decay_steps: steps of linear decay at the end of `wsd`; 0 = a tenth of all.
    """

    steps: int
    warmup: int = 0
    floor: float = 0.1
    decay_steps: int = 0

    def progress(self, step: int) -> float:
        """Fraction of the steps after warm-up that lie before `step`, 0 to 1."""
        return min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))

    def decay_progress(self, step: int) -> float:
        """Fraction of the final decay before `step`, 0 to 1; a decay longer than the rest starts after warm-up."""
        length = min(self.decay_steps or max(1, self.steps // 10), max(1, self.steps - self.warmup))
        return min(1.0, max(0.0, (step - (self.steps - length)) / length))


def _cosine(schedule: RateSchedule, step: int) -> float:
    return schedule.floor + (1 - schedule.floor) / 2 * (1 + math.cos(math.pi * schedule.progress(step)))


def _linear(schedule: RateSchedule, step: int) -> float:
    return 1 - (1 - schedule.floor) * schedule.progress(step)


def _constant(schedule: RateSchedule, step: int) -> float:
    return 1.0


def _wsd(schedule: RateSchedule, step: int) -> float:
    return 1 - (1 - schedule.floor) * schedule.decay_progress(step)


SCHEDULES: dict[str, Callable[[RateSchedule, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
"""Schedules after warm-up: cosine decay, linear decay, constant, or constant with a linear decay at the end."""


def rate_factor(name: str, schedule: RateSchedule, step: int) -> float:
    """Learning rate in `step`, counted from 0, as a fraction of the peak, under the schedule `name`.

    UsageError for an unknown name.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown learning_rate_schedule {name!r}; known are {', '.join(SCHEDULES)}")
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    return SCHEDULES[name](schedule, step)
