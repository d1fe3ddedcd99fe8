"""What the benchmark of support vector machines fits; known without scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

from oases.errors import UsageError
from oases.train.sizes import option

PENALTIES = ("scad", "mcp", "lsp", "capped_l1", "l1")
DESIGNS = ("independent", "correlated", "blocks", "unbalanced", "noisy")
LARGE = {"tall": (20_000, 2_000, 1.0), "sparse": (2_000, 50_000, 0.01)}
"""Rows, columns, density."""


@dataclass(frozen=True)
class SvmBenchConfig:
    """What is fitted."""

    penalties: str = option(",".join(PENALTIES), f"penalties of ours, of {', '.join(PENALTIES)}, separated by commas")
    repeats: int = option(3, "fits of each, of which the median second counts")
    seeds: int = option(3, "data sets of each synthetic design")
    recovery: bool = option(False, "compare support and accuracy on five synthetic designs, too")
    large: str = option("", f"compare on large data, too, of {', '.join(LARGE)}, separated by commas")
    large_lambda: float = option(0.01, "strength on large data")
    limit: float = option(600.0, "seconds that a linear programme over all columns may take on large data")
    seed: int = option(0, "of the first data set")

    def __post_init__(self) -> None:
        for name in ("repeats", "seeds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.limit <= 0 or self.large_lambda <= 0:
            raise UsageError(f"--limit {self.limit:g} and --large-lambda {self.large_lambda:g} must be above 0")
        self.names("penalties", PENALTIES)
        self.names("large", tuple(LARGE))

    def names(self, field: str, known: tuple[str, ...]) -> list[str]:
        """What is listed in a field. UsageError for an unknown one."""
        found = [name.strip() for name in getattr(self, field).split(",") if name.strip()]
        for name in found:
            if name not in known:
                raise UsageError(f"--{field} {name!r} is unknown; known are {', '.join(known)}")
        return found
