"""Learning-rate schedules: stateless functions of the step, as a fraction of the peak.

All begin with a linear warm-up. Sources: cosine of Loshchilov and Hutter (arXiv 1608.03983), wsd
(warmup-stable-decay) of Hu et al. (MiniCPM, arXiv 2404.06395).
"""

from __future__ import annotations

import math

from oases.errors import UsageError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""Schedules after warm-up; wsd is constant, then decays linearly in the last tenth."""
FLOOR = 0.1
"""Final rate as a fraction of the peak."""


def rate_factor(name: str, steps: int, warmup: int, step: int) -> float:
    """Learning rate in `step`, counted from 0, as a fraction of the peak, under the schedule `name`.

    steps: in all, `warmup` among them. UsageError for an unknown name.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown learning_rate_schedule {name!r}; known are {', '.join(SCHEDULES)}")
    if step < warmup:
        return (step + 1) / warmup
    rest = max(1, steps - warmup)
    done = min(1.0, (step - warmup) / rest)
    if name == "cosine":
        return FLOOR + (1 - FLOOR) / 2 * (1 + math.cos(math.pi * done))
    if name == "linear":
        return 1 - (1 - FLOOR) * done
    if name == "constant":
        return 1.0
    decay = min(max(1, steps // 10), rest)
    return 1 - (1 - FLOOR) * min(1.0, max(0.0, (step - (steps - decay)) / decay))
