"""What a person sees in a terminal: a progress bar on long work and tables of results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, markup=False)  # paths may hold brackets
if not console.is_terminal:
    console = Console(
        highlight=False, markup=False, width=110
    )  # a log has no width of its own; 80 would cut the tables

console.quiet = os.environ.get("RANK", "0") != "0"  # under torchrun every rank runs the command; one speaks


class _WithNote(Progress):
    """A bar with a note of its own line below."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.note)


@contextmanager
def progress(
    what: str, total: int, visible: bool = True, *, done_before: int = 0, every: int = 0, below: bool = False
) -> Iterator[Callable[..., None]]:
    """A bar over `total` steps. Yields advance(done, note=""); where no terminal is, ten lines instead.

    done_before: steps that count, and took none of the time. every: steps from line to line where no terminal is; 0:
    ten in all. below: the note stands on a line of its own below the bar.
    """
    if not visible:
        yield lambda done, note="": None
        return
    if not console.is_terminal:
        every = every or max(1, total // 10)
        start = time.perf_counter()

        def line(done: int, note: str = "") -> None:
            if done % every == 0 or done == total:
                each = (time.perf_counter() - start) / max(1, done - done_before)
                left = f"  {timedelta(seconds=round(each * (total - done)))} left" if below and done < total else ""
                console.print(f"{what} {done}/{total} {note}{left}", soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    if below:
        with _WithNote(*columns[:-1], TextColumn("left"), console=console) as lines:
            task = lines.add_task(what, total=total, completed=done_before)

            def advance(done: int, note: str = "") -> None:
                lines.note = note
                lines.update(task, completed=done)

            yield advance
        return
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total, completed=done_before, note="")
        yield lambda done, note="": bar.update(task, completed=done, note=note)


def percent(share: float | None) -> str:
    """A share as "93 %"; "-" for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def kept(row: dict[str, Any]) -> str:
    """Units kept per layer, as "0.75 (3)" where the paper's formula says 3."""
    formula = row["formula_units"]
    return f"{row['kept_units']:.2f}" + ("" if formula is None else f" ({formula})")


def planner_table(result: dict[str, Any]) -> Table:
    """The result of a planner benchmark."""
    table = Table(title="forward + backward of the stack, measured and simulated", title_justify="left")
    for name in ("link", "model", "recompute", "schedule"):
        table.add_column(name, no_wrap=True)
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    for run in result["runs"]:
        sizes = "x".join(str(run[name]) for name in ("hidden", "layers", "sequence", "batch"))
        measured, predicted = run["measured_seconds"], run["predicted_seconds"]
        table.add_row(
            run["link"].removeprefix("over a link of "), sizes, run["recompute"], run["schedule"],
            f"{1e3 * measured:.0f} ms", f"{1e3 * predicted:.0f} ms", f"{100 * (predicted / measured - 1):+.1f} %",
        )  # fmt: skip
    table.caption = (
        f"error: median {percent(result['median_error'])}, worst {percent(result['worst_error'])}; of "
        f"{result['pairs']} pairs more than 5 % apart {percent(result['pairs_ordered_right'])} are in the right order"
    )
    return table


def overlap_table(result: dict[str, Any]) -> Table:
    """The result of an overlap benchmark."""
    table = Table(title="forward + backward of the stack, medians of one interleaved run", title_justify="left")
    table.add_column("schedule", no_wrap=True)  # the others have room to wrap their headers
    for name in ("step", "against sync", "hidden", "of ideal", "ARs per layer", "gradient error", "kept", "peak"):
        table.add_column(name, justify="right")
    for name, row in result["schedules"].items():
        table.add_row(
            name, f"{1e3 * row['step_seconds']:.0f} ms", f"{row['speedup']:.2f} x", percent(row["hidden"]),
            percent(row["of_ideal"]), f"{row['all_reduces_per_layer']:g}",
            f"{row['max_relative_gradient_error']:.1e}", kept(row), f"{row['peak_bytes'] / 1e6:.1f} MB",
        )  # fmt: skip
    for name, row in result.get("gpt", {}).get("schedules", {}).items():
        step, speedup = f"{1e3 * row['step_seconds']:.0f} ms", f"{row['speedup']:.2f} x"
        table.add_row(f"gpt {name}", step, speedup, percent(row["hidden"]), percent(row["of_ideal"]))
    sync = result["schedules"]["sync"]["step_seconds"]
    for name, row in result["peers"].items():
        table.add_row(name, f"{1e3 * row['step_seconds']:.0f} ms", f"{sync / row['step_seconds']:.2f} x")
    table.caption = (
        f"compute alone {1e3 * result['compute_seconds']:.0f} ms, communication alone "
        f"{1e3 * result['communication_seconds']:.0f} ms ({1e3 * result['communication_cpu_seconds']:.0f} ms of it "
        f"on the CPU), ideal {1e3 * result['ideal_seconds']:.0f} ms\n"
        "kept: for the backward pass, in sequence x batch x hidden per layer; in brackets by the paper's formula"
    )
    if "model" in result:
        model = result["model"]
        table.caption += f"\nthe {model['layers']} layers {model['list']} of an unedited {model['class']}"
    if "gpt" in result:
        shares = (f"{name} {row['speedup_over_gpt']:.3f}" for name, row in result["schedules"].items())
        table.caption += f"\nspeed-up over the built-in GPT's of its sizes: {', '.join(shares)}"
    if "auto" in result["schedules"]:
        table.caption += f"\nauto chose {result['schedules']['auto']['chosen']}"
    return table


def pipelines_table(result: dict[str, Any]) -> Table:
    """A pipeline benchmark: a row per pipeline."""
    table = Table(
        "pipeline", "step", "predicted", "over 1F1B", "predicted", "bubble", "predicted", "peak MB by stage"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in result["schedules"].items():
        faster = [f"{row[key]:.3f}" if key in row else "-" for key in ("speedup", "predicted_speedup")]
        table.add_row(
            name, f"{1e3 * row['step_seconds']:.0f} ms", f"{1e3 * row['predicted_seconds']:.0f} ms", *faster,
            percent(row["bubble"]), percent(row["predicted_bubble"]),
            " ".join(f"{num_bytes / 1e6:.2f}" for num_bytes in row["peak_bytes_per_stage"]),
        )  # fmt: skip
    for name, row in result["peers"].items():
        speedup = f"{row['speedup']:.3f}" if "speedup" in row else "-"
        table.add_row(name, f"{1e3 * row['step_seconds']:.0f} ms", "-", speedup, *["-"] * 4)
    return table


def nodes_table(result: dict[str, Any]) -> Table:
    """A benchmark over nodes: a row per contestant, peers below."""
    table = Table(
        "pipeline/tensor", "step", "predicted", "error", "speedup", "bubble", "predicted", "peak MB by stage"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in (*result["schedules"].items(), *result["peers"].items()):
        cells = ["-"] * 2
        if "predicted_seconds" in row:
            cells = [f"{1e3 * row['predicted_seconds']:.0f} ms", f"{100 * row['prediction_error']:+.1f} %"]
        table.add_row(
            name, f"{1e3 * row['step_seconds']:.0f} ms", *cells,
            f"{row['speedup']:.3f}" if "speedup" in row else "-",
            *([percent(row["bubble"]), percent(row["predicted_bubble"])] if "bubble" in row else ["-", "-"]),
            " ".join(f"{num_bytes / 1e6:.2f}" for num_bytes in row.get("peak_bytes_per_stage", ())) or "-",
        )  # fmt: skip
    return table


def experts_table(result: dict[str, Any]) -> Table:
    """A benchmark of blocks of experts: a row per placement and load, what it is made of below."""
    table = Table("load", "placement", "step", "modelled", "error", "speedup", "balance degree", "RB", "copies")
    for column in table.columns[2:]:
        column.justify = "right"
    parts = result.get("ablation", {})
    for kind in ("skewed", "even"):
        for name, row in (*result[kind].items(), *parts.get(kind, {}).items()):
            table.add_row(
                kind, name, f"{1e3 * row['step_seconds']:.0f} ms", f"{1e3 * row['modelled_seconds']:.0f} ms",
                f"{100 * row['prediction_error']:+.1f} %", f"{row['speedup']:.3f}" if "speedup" in row else "-",
                f"{row['balance_degree']:.0f}", f"{row['rb']:.2f}", f"{row['copies']:.1f}",
            )  # fmt: skip
    return table


def mixture_table(result: dict[str, Any]) -> Table:
    """A benchmark of a GPT with experts: a row per skew and placement."""
    table = Table("load", "placement", "step", "speedup", "balance degree", "RB", "copies", "loss", "differs by")
    for column in table.columns[2:]:
        column.justify = "right"
    for load, rows in result.items():
        for name, row in rows.items() if load != "config" else ():
            table.add_row(
                load, name, f"{1e3 * row['step_seconds']:.0f} ms",
                f"{row['speedup']:.3f}" if "speedup" in row else "-", f"{row['balance_degree']:.0f}",
                f"{row['rb']:.2f}", f"{row['copies']:.1f}", f"{row['loss']:.4f}",
                f"{row['loss_difference']:.1e}",
            )  # fmt: skip
    return table


def placements_table(result: dict[str, Any]) -> Table:
    """A benchmark of placements: a row per method and part of the cases."""
    table = Table(title="modelled; geometric means, RB and planning medians", title_justify="left")
    for name in ("devices or trace", "method"):
        table.add_column(name)
    for name in ("of none's time", "RB", "over bound", "at most", "within 3 %", "above it", "planning"):
        table.add_column(name, justify="right")
    for part, found in result["cases"].items():
        for method, row in found["methods"].items():
            beside = found.get("optimum", {}).get(method)
            cells = ["-"] * 3
            if beside is not None:
                cells = [f"{beside[key]:.3f}" for key in ("over_bound", "over_bound_max")]
                cells.append(percent(beside["within_3_percent"]))
            above = found["prophet_above"].get(method)
            table.add_row(
                part.rpartition("/")[2], method, f"{row['over_none']:.3f}", f"{row['rb']:.2f}", *cells,
                "-" if above is None else str(above), f"{1e3 * row['planning_seconds']:.2f} ms",
            )  # fmt: skip
        if "optimum" in found:
            sought = found["optimum"]
            table.add_row(part, f"bound: {percent(sought['solved_share'])} of {sought['cases']} solved", *["-"] * 7)
    return table


def speedups_table(result: dict[str, Any]) -> Table:
    """Modelled and published speed-ups; below, the errors under the assumptions and under others."""
    error = result["error"]
    table = Table(title=f"off by {percent(error['all'])}, geometric mean", title_justify="left")
    for name in ("model", "method"):
        table.add_column(name)
    for name in ("modelled", "published"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        model = f"{row['model']} top-{row['top_k']}"
        table.add_row(model, row["method"], f"{row['modelled']:.2f}", f"{row['published']:.2f}")
    for name, errors in {"these assumptions": error, **result["other_assumptions"]}.items():
        by_method = ", ".join(f"{method} {percent(errors[method])}" for method in ("faster_moe", "prophet"))
        table.add_row(f"error: {name}", by_method, percent(errors["all"]), "-")
    return table


def predictions_table(result: dict[str, Any]) -> Table:
    """Measured and predicted steps of an overlap benchmark."""
    table = Table(title="predicted beside measured", title_justify="left")
    table.add_column("schedule")
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    for name, row in result["schedules"].items():
        table.add_row(
            name, f"{1e3 * row['step_seconds']:.0f} ms", f"{1e3 * row['predicted_seconds']:.0f} ms",
            f"{100 * row['prediction_error']:+.1f} %",
        )  # fmt: skip
    return table


def comparison_table(parts: dict[str, dict[str, float | None]]) -> Table:
    """A training run's step by parts, as its plan predicted it and as it was measured."""
    table = Table(title="the predicted step over the measured one", title_justify="left")
    table.add_column("part", no_wrap=True)
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right")
    for name, row in parts.items():
        seconds = (row["predicted_seconds"], row["measured_seconds"])
        texts = ("-" if each is None else f"{1e3 * each:.1f} ms" for each in seconds)
        table.add_row(name, *texts, "-" if row["ratio"] is None else f"{row['ratio']:.2f}")
    return table


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner and the seconds since while work of unknown length goes on; where no terminal is, one line."""
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        bar.add_task(what, total=None)
        yield


def sparse_table(result: dict[str, Any]) -> Table:
    """A benchmark of sparse gradients: a row per way of averaging."""
    config, modes = result["config"], result["modes"]
    table = Table(title=config["words"] or "clicks of generated Zipf categories", title_justify="left")
    table.add_column("mode")
    for name in ("MB/step", "of them tables", "tables less", "step", "faster", "validation loss"):
        table.add_column(name, justify="right")
    beside = modes.get("ddp", {})
    for mode, row in modes.items():
        cells = ["-"] * 5
        if row["step_seconds"] is not None:
            sent = row["table_bytes_per_step"]
            cells = [
                f"{row['bytes_per_step'] / 1e6:.2f}",
                f"{sent / 1e6:.2f}",
                "-",
                f"{1e3 * row['step_seconds']:.0f} ms",
                "-",
            ]
            if beside:
                cells[2] = percent(1 - sent / beside["table_bytes_per_step"])
                cells[4] = f"{beside['step_seconds'] / row['step_seconds']:.2f}x"
        loss = row["validation_loss"]
        table.add_row(mode, *cells, "-" if loss is None else f"{loss:.4f}")
    return table


def svm_tables(result: dict[str, Any]) -> list[Table]:
    """A benchmark of support vector machines: one objective, paths, and what is recovered."""
    beside = Table(title="one objective; HiGHS: reweighted linear programmes", title_justify="left")
    paths = Table(title="paths of 50 lambdas beside one fit", title_justify="left")
    for name in ("data", "penalty", "by", "objective", "non-zeros", "residual", "seconds", "faster"):
        beside.add_column(name, justify="left" if name in ("data", "penalty", "by") else "right")
    for name in ("data", "penalty", "path, s", "fit, s", "fits"):
        paths.add_column(name, justify="left" if name in ("data", "penalty") else "right")
    for row in result["objectives"] + result["large"]:
        for cells in _svm_rows(row):
            beside.add_row(*cells)
        if row["path_fits"] is not None:
            seconds = row["path_seconds"], row["ours"]["seconds"]
            paths.add_row(row["data"], row["penalty"], *(f"{s:.3f}" for s in seconds), f"{row['path_fits']:.2f}")
    if not result["recovery"]:
        return [beside, paths]
    recovery = Table(
        title="strength chosen on validation rows; means over the data sets, standard errors", title_justify="left"
    )
    for name in ("design", "contestant"):
        recovery.add_column(name)
    for name in ("F1 of the support", "accuracy", "non-zeros", "seconds"):
        recovery.add_column(name, justify="right")
    for row in result["recovery"]:
        recovery.add_row(
            row["design"], row["contestant"],
            *(_with_error(row[key], row.get(f"{key}_error"), digits) for key, digits in (("f1", 3), ("accuracy", 4))),
            f"{row['nonzeros']:.1f}", f"{row['seconds']:.2f}",
        )  # fmt: skip
    return [beside, paths, recovery]


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "")


def _svm_rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Ours, ours without search and reweighted programmes on the same data."""
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
