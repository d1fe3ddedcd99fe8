"""Stage-aware recomputation: number of layers that each pipeline stage recomputes.

Earlier stages have more micro-batches in flight, so they can keep fewer activations than later ones.
Source of the closed form: Merak (arXiv 2206.04959).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oases.errors import UsageError
from oases.plans.pipelines import enough, in_flight
from oases.plans.plan import Plan, Stage
from oases.simulator.quantities import bytes_text

PeakBytes = Callable[[Plan, int], float]
"""Function from plan and stage to peak bytes, such as `Predictor.peak_bytes`."""


@dataclass(frozen=True)
class Recomputation:
    """Recomputation policy. kind: none, full, layers (the same number on every stage), merak, or fits.

    layers: of `layers`. first_share: of `merak`, the fraction of the first stage's layers.
    """

    kind: str
    layers: int = 0
    first_share: float = 0.0

    @staticmethod
    def parse(text: str) -> Recomputation:
        """Parse none, full, fits, a number of layers, or merak:SHARE. Raises UsageError."""
        if text in ("none", "full", "fits"):
            return Recomputation(text)
        if text.isdecimal() and len(text) < 10:
            return Recomputation("layers", layers=int(text))
        head, _, share = text.partition(":")
        if head == "merak":
            try:
                first_share = float(share)
            except ValueError as error:
                raise UsageError(f"recompute {text!r} needs a share from 0 to 1, e.g. merak:0.8") from error
            return Recomputation("merak", first_share=_checked(first_share))
        raise UsageError(f"recompute {text!r} is not none, full, fits, merak:SHARE or a number of layers per stage")

    def shares(self, num_stages: int, pipeline: str) -> tuple[float, ...] | None:
        """Fraction of layers that each stage recomputes, for balancing stages; None if memory decides."""
        if self.kind == "merak":
            return merak_shares(num_stages, self.first_share, shifted=is_shifted(pipeline, num_stages))
        return {"fits": None, "full": (1.0,) * num_stages}.get(self.kind, (0.0,) * num_stages)

    def applied(self, plan: Plan, budget: float, peak_bytes: PeakBytes) -> Plan:
        """The plan with this policy applied to each stage. budget: bytes of memory per rank.

        Raises UsageError if `fits` does not fit, or if a stage has fewer layers than required.
        """
        if self.kind == "fits":
            return as_much_as_fits(plan, budget, peak_bytes)
        shares = self.shares(len(plan.stages), plan.pipeline)
        assert shares is not None
        for number in range(len(plan.stages)):
            # Rounded up: no stage keeps more than its share.
            most = num_layers(plan, number)
            layers = self.layers if self.kind == "layers" else math.ceil(shares[number] * most - 1e-9)
            plan = recomputing(plan, number, layers)
        return plan


def is_shifted(pipeline: str, num_stages: int) -> bool:
    """Whether the stage before the last has as many micro-batches in flight as the one before it."""
    if num_stages < 3:
        return False
    many = enough(pipeline, num_stages)
    before, last_but_one, last = (in_flight(pipeline, num_stages, many, num_stages - n) for n in (3, 2, 1))
    return before == last_but_one > last


def merak_shares(num_stages: int, first_share: float, *, shifted: bool = False) -> tuple[float, ...]:
    """Merak's recomputed fraction of layers by stage, which equalises kept activations.

    first_share: of the first stage, from 0 to 1. With s counted from 1, r_s = 1 - (1 - r_1)(p - 1) / (p - s), at
    least 0, and r_p = 0. shifted: the stage before the last takes the fraction of the one before it.
    """
    p = num_stages
    if p < 1:
        raise UsageError(f"recompute: a pipeline has at least 1 stage, got {p}")
    _checked(first_share)
    if p == 1:
        return (first_share,)
    shares = [max(0.0, 1 - (1 - first_share) * (p - 1) / (p - s)) for s in range(1, p)] + [0.0]
    if shifted and p >= 3:
        shares[p - 2] = shares[p - 3]
    return tuple(shares)


def as_much_as_fits(plan: Plan, budget: float, peak_bytes: PeakBytes) -> Plan:
    """The plan in which every stage keeps the activations of as many layers as fit and recomputes the rest.

    budget: bytes of memory per rank. Raises UsageError if a stage does not fit with full recomputation.
    """
    for number in range(len(plan.stages)):
        least = math.inf
        for layers in range(num_layers(plan, number) + 1):
            changed = recomputing(plan, number, layers)
            needed = peak_bytes(changed, number)
            least = min(least, needed)
            if needed <= budget:
                plan = changed
                break
        else:
            raise UsageError(
                f"recompute fits: stage {number} needs at least {bytes_text(least)}, and {bytes_text(budget)} may be "
                "filled; give more memory, smaller micro-batches, a higher degree, more stages, or a sharded "
                "optimizer"
            )
    return plan


def recomputing(plan: Plan, number: int, layers: int) -> Plan:
    """The plan that recomputes the first `layers` layers of a stage. Raises UsageError if it has fewer."""
    left, most = layers, num_layers(plan, number)
    if not 0 <= layers <= most:
        raise UsageError(
            f"plan: stage {number}: recomputed_layers must be from 0 to the {most} layers of the stage, got {layers}"
        )
    segments = []
    for first, segment in plan.placed(number):
        here = min(left, plan.model.num_layers(first, segment.num_blocks))
        segments.append(replace(segment, recomputed_layers=here))
        left -= here
    stages: Sequence[Stage] = [*plan.stages[:number], Stage(tuple(segments)), *plan.stages[number + 1 :]]
    return replace(plan, stages=tuple(stages), prediction=None)


def num_layers(plan: Plan, number: int) -> int:
    """Number of layers that a stage can recompute: those of each segment, one that is split counted in both."""
    return sum(plan.model.num_layers(first, segment.num_blocks) for first, segment in plan.placed(number))


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise UsageError(f"recompute: the share of layers must be from 0 to 1, got {share}")
    return share
