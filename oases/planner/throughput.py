"""What a predicted step comes to: samples and tokens per second, shares of the step, utilisation."""

from __future__ import annotations

from dataclasses import dataclass

from oases.plans.plan import Plan
from oases.simulator.hardware import Hardware
from oases.simulator.peaks import peak_flops


@dataclass(frozen=True)
class Throughput:
    """Of a plan with a prediction. exposed, bubble: shares of the step. utilisation: None without a known peak."""

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    exposed: float
    bubble: float
    utilisation: float | None


def throughput(plan: Plan, hardware: Hardware) -> Throughput:
    """What the prediction of `plan` on `hardware` comes to."""
    found = plan.prediction
    assert found is not None, "the plan has no prediction"
    step = found.step_seconds
    peak = peak_flops(hardware.device.name, plan.model.dtype)
    done = plan.model.step_flops(plan.global_batch)
    samples = plan.global_batch / step
    return Throughput(
        step, samples, samples * plan.model.sequence, found.exposed_seconds / step, found.bubble_seconds / step,
        done / (step * plan.world * peak) if peak else None,
    )  # fmt: skip
