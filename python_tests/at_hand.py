"""Commands on ranks that are there already, in place of ranks that each command starts and that import torch anew."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

from oases.launch.ranks import RankOptions
from oases.testbed import Backend
from oases.testing import RankPool


class RanksAtHand:
    """Stands in for `oases.launch.ranks.run_ranks`. pool: of so many ranks, the pool."""

    def __init__(self, pool: Callable[[int], RankPool]) -> None:
        self._pool = pool

    def __call__(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: RankOptions) -> Any:
        """Rank 0's result; what it printed is printed here."""
        # Two ranks have the same sums over both; more have others in their last bits.
        assert options.backend in (Backend(), Backend("staged")), "the ranks of a pool share a machine's CPU"
        assert options.nodes is None, "the ranks of a pool are on one node"
        result, printed = self._pool(options.size).run(_listened, os.getcwd(), function, arguments)[0]
        print(printed, end="")
        return result


def _listened(folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            result = function(*arguments)
    finally:
        os.chdir(before)
    return result, printed.getvalue()
