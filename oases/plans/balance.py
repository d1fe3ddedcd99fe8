"""Division of a model's layers into consecutive runs, one for each part of a pipeline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate


def balanced_starts(costs: Sequence[float], count: int) -> list[int]:
    """Start indices of the runs after the first when costs are divided into `count` runs with the smallest maximum
    sum.

    Every run has at least one cost. Of equal divisions, one with small earlier runs.
    """
    ahead = list(accumulate(costs, initial=0.0))
    size = len(costs)
    best = ahead[:]  # best[j]: the largest sum of the first j costs in k runs
    cuts: list[list[int]] = []
    for runs in range(2, count + 1):
        earlier, best, chosen = best, [float("inf")] * (size + 1), [0] * (size + 1)
        for end in range(runs, size + 1):
            # Earlier runs grow with the start of the last run, which shrinks: the minimum is where they meet.
            growing = partial(_difference, earlier, ahead, end)
            meet = bisect_left(range(runs - 1, end), 0.0, key=growing)
            for at in range(max(runs - 1, runs - 2 + meet), min(end, runs + meet)):
                found = max(earlier[at], ahead[end] - ahead[at])
                if found < best[end]:
                    best[end], chosen[end] = found, at
        cuts.append(chosen)
    ends, end = [], size
    for chosen in reversed(cuts):
        end = chosen[end]
        ends.append(end)
    return ends[::-1]


def _difference(earlier: Sequence[float], ahead: Sequence[float], end: int, at: int) -> float:
    """Difference between the largest earlier run and the last one, from `at` to `end`."""
    return earlier[at] - (ahead[end] - ahead[at])
