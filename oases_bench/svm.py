"""The nonconvex penalised SVM beside reweighted linear programs (HiGHS), LinearSVC and skglm, on the same splits.

Part one: one lambda, the same objective; ours beside local linear approximation, whose every step is a linear
program over all columns; and what a path of 50 lambdas costs in fits. Part two: five synthetic designs with known
support; every contestant's strength is chosen on the same validation rows (of equal accuracies, the fewest
non-zeros), the support and the accuracy on unseen rows are compared. Contestants that are not installed are left out,
and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType

from oases.errors import UsageError
from oases.models.options import option
from oases.terminal import progress, table
from oases_bench.harness import BenchConfig, Benchmark, Result

PENALTIES = ("scad", "mcp", "lsp", "capped_l1", "l1")
LARGE = {"tall": (20_000, 2_000, 1.0), "sparse": (2_000, 50_000, 0.01)}
"""Rows, columns, density."""


@dataclass(frozen=True)
class SvmBenchConfig(BenchConfig):
    """Penalties, data sets and repetitions."""

    penalties: str = option(",".join(PENALTIES), f"penalties of ours, of {', '.join(PENALTIES)}, comma-separated")
    repeats: int = option(3, "fits of each, of which the median second counts")
    seeds: int = option(3, "data sets of each synthetic design")
    recovery: bool = option(False, "compare support and accuracy on five synthetic designs, too")
    large: str = option("", f"compare on large data, too, of {', '.join(LARGE)}, comma-separated")
    large_lambda: float = option(0.01, "strength on large data")
    limit: float = option(600.0, "seconds that a linear program over all columns may take on large data")
    seed: int = option(0, "of the first data set")

    def __post_init__(self) -> None:
        self.require_least(1, "repeats", "seeds")
        if self.limit <= 0 or self.large_lambda <= 0:
            raise UsageError(f"--limit {self.limit:g} and --large-lambda {self.large_lambda:g} must be above 0")
        self.parse_list("penalties", PENALTIES)
        self.parse_list("large", tuple(LARGE))


def _objectives(config: SvmBenchConfig) -> Iterator[tuple[str, str, Any, Any]]:
    """Data and penalties of part one."""
    from oases_bench import svm_fits as fits
    from oases_svm.penalties import Penalty

    cancer, lam = fits.breast_cancer()
    wide = fits.synthetic("independent", config.seed, rows=225, columns=1000)
    for name in config.parse_list("penalties", PENALTIES):
        yield "breast_cancer", name, cancer, Penalty(name, lam)
        yield "wide", name, wide, Penalty(name, 0.08)


def run_svm_bench(config: SvmBenchConfig, shows: bool = True) -> Result:
    """Everything the configuration asks for."""
    from oases_bench import svm_fits as fits  # it needs scikit-learn
    from oases_svm.penalties import Penalty

    names = config.parse_list("penalties", PENALTIES)
    contestants, missing = fits.contestants(names)
    result: Result = {
        "config": asdict(config),
        "missing": missing,
        "objectives": [],
        "recovery": [],
        "large": [],
    }
    cases = list(_objectives(config))
    designs = [(kind, seed) for kind in fits.DESIGNS for seed in range(config.seed, config.seed + config.seeds)]
    designs = designs if config.recovery else []
    sizes = config.parse_list("large", tuple(LARGE))
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    with progress("fits", len(cases) + len(designs) + len(sizes) * len(names), shows) as advance:
        for done, (data, name, split, penalty) in enumerate(cases, 1):
            result["objectives"].append(fits.beside(data, name, split, penalty, config.repeats, None))
            advance(done)
        for done, (kind, seed) in enumerate(designs, len(cases) + 1):
            split = fits.synthetic(kind, seed)
            for name, fit in contestants.items():
                rows.setdefault((kind, name), []).append(fits.recovered(fit, split))
            advance(done)
        done = len(cases) + len(designs)
        for kind in sizes:
            split = fits.large(*LARGE[kind], config.seed)
            for name in names:
                penalty = Penalty(name, config.large_lambda)
                result["large"].append(fits.beside(kind, name, split, penalty, 1, config.limit))
                done += 1
                advance(done)
    for (kind, name), found in rows.items():
        mean = {key: float(np.mean([row[key] for row in found])) for key in found[0]}
        error = {
            f"{key}_error": float(np.std([row[key] for row in found], ddof=1) / np.sqrt(len(found)))
            for key in ("f1", "accuracy")
            if len(found) > 1
        }
        result["recovery"].append({"design": kind, "contestant": name} | mean | error)
    return result


def shown(result: Result) -> Iterator[RenderableType]:
    """One objective, paths, what is recovered, and who is missing."""
    rows = result["objectives"] + result["large"]
    columns: tuple[str, ...] = (
        "data", "penalty", "by", "objective", "non-zeros", "residual", "seconds", "faster"
    )  # fmt: skip
    cells = [each for row in rows for each in _beside_rows(row)]
    yield table(columns, cells, words=3, title="one objective; HiGHS: reweighted linear programs")
    paths = [
        (
            row["data"], row["penalty"], f"{row['path_seconds']:.3f}", f"{row['ours']['seconds']:.3f}",
            f"{row['path_fits']:.2f}",
        )
        for row in rows
        if row["path_fits"] is not None
    ]  # fmt: skip
    columns = ("data", "penalty", "path, s", "fit, s", "fits")
    yield table(columns, paths, words=2, title="paths of 50 lambdas beside one fit")
    recovered = [
        (
            row["design"], row["contestant"], _with_error(row["f1"], row.get("f1_error"), 3),
            _with_error(row["accuracy"], row.get("accuracy_error"), 4), f"{row['nonzeros']:.1f}",
            f"{row['seconds']:.2f}",
        )
        for row in result["recovery"]
    ]  # fmt: skip
    if recovered:
        title = "strength chosen on validation rows; means over the data sets, standard errors"
        columns = ("design", "contestant", "F1 of the support", "accuracy", "non-zeros", "seconds")
        yield table(columns, recovered, words=2, title=title)
    if result["missing"]:
        yield f"not installed, left out: {', '.join(result['missing'])}; pip install {' '.join(result['missing'])}"


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def _beside_rows(row: Result) -> Iterator[tuple[str, ...]]:
    """Ours, ours without search and reweighted programs on the same data."""
    own, other = row["ours"], row["reweighted"]
    cut = "" if other["complete"] else "> "
    proof = f"{max(own['primal_residual'], own['dual_residual']):.0e}"
    for names, by, found, residual, faster in (
        ((row["data"], row["penalty"]), "ours", own, proof, cut + f"{row['speedup']:.1f} x"),
        (("", ""), "no search", row["descent"], "", cut + f"{row['descent_speedup']:.1f} x"),
        (("", ""), "HiGHS", other, "", ""),
    ):
        known = found["objective"] is not None
        answer = (f"{found['objective']:.6f}", str(found["nonzeros"])) if known else ("-", "-")
        yield *names, by, *answer, residual, (cut if by == "HiGHS" else "") + f"{found['seconds']:.3f}", faster


BENCHMARK = Benchmark(
    "svm",
    "nonconvex penalised SVMs beside reweighted linear programs, LinearSVC and skglm",
    SvmBenchConfig(),
    run_svm_bench,
    shown,
    size=None,
)
