"""Covering arrays: few rows in which every pair of choices of any two factors stands side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Row = dict[str, str]
"""The choice of each factor, by its name."""
Pair = frozenset[tuple[str, str]]
"""Two choices, each with its factor."""


def pairs_in(row: Row) -> set[Pair]:
    """The pairs of choices that a row holds."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def every_pair(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """All pairs of choices of two factors, in the order of the factors."""
    return [
        frozenset({(one, mine), (other, theirs)})
        for one, other in itertools.combinations(factors, 2)
        for mine, theirs in itertools.product(factors[one], factors[other])
    ]


def covering(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Mapping[str, str]], bool] = lambda row: True
) -> list[Row]:
    """Rows that hold every pair, made one by one, each by the choices that cover most of what is left.

    factors: of equally good choices the first is taken. allowed: whether a row, or a part of one, may be; a pair that
    no row may hold is left out. ValueError where a part was allowed and no row with it is.
    """
    missing = {pair for pair in every_pair(factors) if allowed(dict(pair))}
    rows: list[Row] = []
    for pair in every_pair(factors):
        if pair not in missing:
            continue
        row = {name: dict(pair)[name] for name in factors if name in dict(pair)}
        for name in sorted((name for name in factors if name not in row), key=lambda name: -len(factors[name])):
            possible = [choice for choice in factors[name] if allowed({**row, name: choice})]
            if not possible:
                raise ValueError(f"no choice of {name} goes with {row}")
            row[name] = max(possible, key=lambda choice: len(pairs_in({**row, name: choice}) & missing))
        rows.append({name: row[name] for name in factors})
        missing -= pairs_in(row)
    return rows


def covered(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Mapping[str, str]], bool] = lambda row: True
) -> list[Any]:
    """Parameters of every row that is allowed; those outside of the covering array are slow tests."""
    few = covering(factors, allowed)
    rows = [dict(zip(factors, choices, strict=True)) for choices in itertools.product(*factors.values())]
    return [
        pytest.param(*row.values(), id="-".join(row.values()), marks=() if row in few else pytest.mark.slow)
        for row in rows
        if allowed(row)
    ]
