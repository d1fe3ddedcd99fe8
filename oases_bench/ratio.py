"""Link whose rate gives a ratio of communication to compute on this machine, found among the contestants' steps.

Caches and allocator are warm in other ways where compute alone is all that runs, and compute is then faster than in
the measurement. So the last trials run every contestant in turns, as the measurement does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.profile.overlap import OverlapBench, run_round
from oases.profile.overlap_result import Passes, least_compute, median_of
from oases.testbed import set_rate

NEAR = 0.05
"""Largest relative error of the ratio that all contestants find; beyond it, the rate is corrected."""
_ROUGHLY = 0.1
"""Largest relative error of a trial of compute and communication alone."""
_MOST_BITS = 1e11
_ALONE, _TOGETHER = 6, 2
TRIALS = _ALONE + _TOGETHER
"""Most trials before a measurement."""


class RatioLink:
    """Link between all ranks, set for communication alone to take `asked` times compute alone."""

    def __init__(self, group: ProcessGroup, asked: float) -> None:
        self.group, self.asked = group, asked
        self.rate = ""
        self._bits = 1e9

    def set(self) -> None:
        """Set the rate. Called on every rank."""
        rate = [set_rate(self._bits) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(rate, group=self.group)
        self.rate = rate[0]

    def off(self, found: float) -> float:
        """Relative error of a ratio."""
        return abs(found / self.asked - 1)

    def correct(self, found: float) -> None:
        """Set another rate after a ratio was found with this one."""
        self._bits = min(self._bits * found / self.asked, _MOST_BITS)
        self.set()

    def calibrate(self, benches: Sequence[OverlapBench], advance: Callable[[int], None]) -> None:
        """Find the rate: roughly with compute and communication alone, then among all contestants.

        Called on every rank. advance: called with the number of trials done, of `TRIALS`. UsageError where no rate
        gives the ratio.
        """
        self.set()
        for trial in range(_ALONE):
            found = measured_ratio(benches, together=False)
            advance(trial + 1)
            if self.off(found) < _ROUGHLY:
                break
            self.correct(found)
        else:
            raise UsageError(
                f"--ratio {self.asked:g} is not reached: communication took {found:.2f} of compute over a link of "
                f"{self.rate}; give a larger ratio, or a larger --hidden"
            )
        for trial in range(_TOGETHER):  # the measurement finds what the ratio is, and may correct it once more
            found = measured_ratio(benches, together=True)
            advance(_ALONE + trial + 1)
            if self.off(found) < NEAR:
                break
            self.correct(found)
        advance(TRIALS)


def measured_ratio(benches: Sequence[OverlapBench], *, together: bool, rounds: int = 3) -> float:
    """Communication alone over compute alone of the first benchmark, medians of rounds after a warm-up.

    together: rounds of all contestants of all benchmarks.
    """
    contestants = [bench.steps() for bench in (benches if together else benches[:1])]
    if not together:
        alone = ("compute alone", "communication alone")
        contestants = [{name: run for name, run in contestants[0].items() if name.startswith(alone)}]
    times: list[dict[str, list[Passes]]] = [{name: [] for name in each} for each in contestants]
    for _ in range(rounds + 1):
        for bench, each, taken in zip(benches, contestants, times, strict=False):
            run_round(bench.group, each, taken)
    taken = {name: passes[1:] for name, passes in times[0].items()}
    return median_of(taken["communication alone"])[2] / least_compute(taken)[2]
