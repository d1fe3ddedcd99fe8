"""Step time against link speed, tensor-parallel degree and model size: synchronous, overlapped and planned.

All steps are predicted. Takes the options of oases plan:

    python benchmarks/sweep.py --model gpt-1.3b --cluster 8x3090 --global-batch 32 --out curves
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oases.cli.options import Parser, fail, require_writable, write_json
from oases.cli.plan import space_of
from oases.cli.plan_options import add_cluster, add_limits, add_model, batch_of, cluster_of, model_of
from oases.errors import UsageError, make_folder
from oases.files import unwritable
from oases.planner.choose import rank_plans, seconds_of
from oases.planner.space import Space, degrees_to_try
from oases.plans.check import require_trainable
from oases.plans.layered import Model
from oases.plans.plan import Plan
from oases.simulator.drawing import Section, write_page
from oases.simulator.hardware import Hardware
from oases.simulator.links import LinkModel
from oases.simulator.quantities import seconds_text
from oases.terminal import console, working

SPEEDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Factors by which the speed of all links is scaled."""
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors by which the number of layers is scaled; the width stays, so that measured blocks remain valid."""
SERIES = ("sync", "oases", "planner")
"""Series: the best uniform plan of each schedule, and the best of all plans."""


@dataclass(frozen=True)
class Point:
    """Result at one point of a panel: a plan in one line and its seconds, None if nothing fits."""

    step_seconds: float | None
    plan: str


@dataclass(frozen=True)
class Panel:
    """Panel of the figure. x: positions; points: by series, one for each x."""

    name: str
    label: str
    x: tuple[float, ...]
    points: dict[str, tuple[Point, ...]]


@dataclass(frozen=True)
class Problem:
    """Planning problem: the arguments of rank_plans."""

    model: Model
    hardware: Hardware
    world: int
    global_batch: int
    budget: int | None = None
    space: Space = field(default_factory=Space)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the model and the hardware support."""
        return tuple(
            tp
            for tp in degrees_to_try(self.model, self.hardware, self.world, self.space)
            if self.world % tp == 0 and self.model.fits_degree(tp) and self.hardware.has_block(self.model, tp)
        )


def sweep(problem: Problem, on_point: Callable[[int, int], None] | None = None) -> list[Panel]:
    """Compute the three panels. on_point(done, total): progress callback."""
    model, layers = problem.model, sorted({max(1, round(size * problem.model.layers)) for size in SIZES})
    models = [model.with_layers(count) for count in layers]
    total, done = 3 * (len(SPEEDS) + len(problem.degrees) + len(models)), 0
    known: dict[tuple[int, str], Point] = {}

    def points(problems: list[Problem], series: str) -> Iterator[Point]:
        nonlocal done
        for each in problems:
            if (id(each), series) not in known:
                known[id(each), series] = _best(each, series)
            yield known[id(each), series]
            done += 1
            if on_point is not None:
                on_point(done, total)

    def panel(name: str, label: str, x: list[float], of: dict[str, list[Problem]]) -> Panel:
        return Panel(name, label, tuple(x), {series: tuple(points(of[series], series)) for series in SERIES})

    speeds = [replace(problem, hardware=faster(problem.hardware, speed)) for speed in SPEEDS]
    degrees = [replace(problem, space=replace(problem.space, degrees=(tp,))) for tp in problem.degrees]
    sizes = [replace(problem, model=each) for each in models]
    free = {"planner": [problem] * len(degrees)}  # the planner chooses the degrees
    return [
        panel("link_speed", "speed of all links, times the cluster's", list(SPEEDS), dict.fromkeys(SERIES, speeds)),
        panel(
            "degree", "tensor-parallel degree of all blocks", [float(tp) for tp in problem.degrees],
            dict.fromkeys(SERIES, degrees) | free,
        ),
        panel(
            "size", "parameters, billions", [each.num_parameters / 1e9 for each in models],
            dict.fromkeys(SERIES, sizes),
        ),
    ]  # fmt: skip


def as_data(problem: Problem, panels: list[Panel]) -> dict[str, Any]:
    """The results as JSON data."""
    return {
        "model": asdict(problem.model), "hardware": problem.hardware.name, "world": problem.world,
        "global_batch": problem.global_batch, "panels": [asdict(panel) for panel in panels],
    }  # fmt: skip


def faster(hardware: Hardware, factor: float) -> Hardware:
    """The hardware with links `factor` times as fast; start-up times stay."""

    def link(model: LinkModel) -> LinkModel:
        samples = tuple(
            replace(each, seconds=least + max(0.0, each.seconds - least) / factor)
            for each in model.samples
            for least in [min(each.seconds, model.startup_seconds)]
        )
        return replace(model, bytes_per_second=factor * model.bytes_per_second, samples=samples)

    return replace(hardware, node=link(hardware.node), cluster=link(hardware.cluster))


def _best(problem: Problem, series: str) -> Point:
    """Best plan of a series. Other schedules compete with the planner's uniform plans."""
    space = problem.space if series == "planner" else replace(problem.space, schedules=(series,))
    try:
        plans = rank_plans(
            problem.model, problem.hardware, problem.world, problem.global_batch, budget=problem.budget, space=space
        )
    except UsageError as error:
        return Point(None, str(error))
    found = [plan for plan in plans if series == "planner" or plan.uniform_tp is not None]
    return _point(min(found, key=seconds_of)) if found else Point(None, "no plan of one degree fits")


def _point(plan: Plan) -> Point:
    return Point(seconds_of(plan), plan.text())


_STYLE = {
    "sync": ("#E45756", "solid", "o", "best synchronous plan"),
    "oases": ("#4C78A8", "solid", "s", "best oases plan of one degree"),
    "planner": ("#222222", "dot", "D", "planner's choice"),
}
"""Colour, dash, marker and label of each series."""


def write_png(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side; a curve has a gap where nothing fits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.4), layout="constrained")
    scale, unit = _scale(panels)
    for axis, panel in zip(axes, panels, strict=True):
        for number, series in enumerate(SERIES):
            colour, dash, marker, words = _STYLE[series]
            seconds = [point.step_seconds for point in panel.points[series]]
            y = [float("nan") if each is None else scale * each for each in seconds]
            style = {"solid": "-", "dot": ":"}[dash]
            axis.plot(panel.x, y, style, color=colour, marker=marker, markersize=8 - 2 * number, lw=2.2, label=words)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_locator(FixedLocator(list(panel.x)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(FixedLocator(_round_values(panel, scale)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(panel.label)
        axis.grid(True, which="both", color="#DDDDDD", lw=0.6)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel(f"step, {unit}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SERIES), frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise unwritable("sweep", path, error) from error
    finally:
        pyplot.close(figure)


def _known(panel: Panel) -> list[float]:
    """Seconds of all points at which something fits."""
    points = [point for series in panel.points.values() for point in series]
    return [point.step_seconds for point in points if point.step_seconds is not None]


def _round_values(panel: Panel, scale: float) -> list[float]:
    """Round tick values in the range of a panel; powers of ten alone would leave the axis bare."""
    known = [scale * seconds for seconds in _known(panel)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    steps = (1, 1.5, 2, 3, 5, 7) if high < 8 * low else (1, 2, 5)
    return [step * 10.0**power for power in range(-6, 9) for step in steps if low <= step * 10.0**power <= high]


def _scale(panels: Sequence[Panel]) -> tuple[float, str]:
    known = [seconds for panel in panels for seconds in _known(panel)]
    return (1.0, "seconds") if max(known, default=1.0) >= 2 else (1e3, "milliseconds")


def _tick(x: float) -> str:
    return f"1/{round(1 / x)}" if x in (0.125, 0.25, 0.5) else f"{x:.3g}"


def write_curves(path: Path, title: str, subtitle: str, panels: Sequence[Panel]) -> None:
    """Write a self-contained page: a table of all points and interactive curves."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    scale, unit = _scale(panels)
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.06)
    rows = []
    for column, panel in enumerate(panels, start=1):
        for series in SERIES:
            colour, dash, _, words = _STYLE[series]
            points = panel.points[series]
            figure.add_trace(
                go.Scatter(
                    x=panel.x, y=[None if p.step_seconds is None else scale * p.step_seconds for p in points],
                    mode="lines+markers", name=words, legendgroup=series, showlegend=column == 1,
                    line={"color": colour, "dash": dash, "width": 2.5}, customdata=[_wrapped(p.plan) for p in points],
                    hovertemplate=f"%{{y:.4g}} {unit}<br>%{{customdata}}",
                ),
                row=1, col=column,
            )  # fmt: skip
        ticks = {"tickmode": "array", "tickvals": panel.x, "ticktext": [_tick(x) for x in panel.x]}
        figure.update_xaxes(type="log", title_text=panel.label, **ticks, row=1, col=column)
        values = _round_values(panel, scale)
        texts = [f"{value:g}" for value in values]
        figure.update_yaxes(type="log", tickmode="array", tickvals=values, ticktext=texts, row=1, col=column)
        rows += [
            (f"{panel.label}: {_tick(x)}", *(_shown(panel.points[series][place].step_seconds) for series in SERIES))
            for place, x in enumerate(panel.x)
        ]
    figure.update_yaxes(title_text=f"step, {unit}", row=1, col=1)
    figure.update_layout(
        template="plotly_white", height=460, margin={"l": 70, "r": 20, "t": 60, "b": 60},
        legend={"orientation": "h", "y": 1.06, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    text = (
        "Best predicted step of each kind. Where a curve has a gap, nothing fits. Hover for the plan behind a point."
    )
    write_page(
        path, title=title, subtitle=subtitle, header=("", *(_STYLE[series][3] for series in SERIES)), rows=rows,
        sections=[Section("Step time", text, figure)],
    )  # fmt: skip


def _shown(seconds: float | None) -> str:
    return "does not fit" if seconds is None else seconds_text(seconds)


def _wrapped(text: str, width: int = 70) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return "<br>".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    """Write the figures and numbers of a sweep to the folder of --out."""
    parser = Parser(prog="python benchmarks/sweep.py", description="Step time against links, degree and size.")
    for add in (add_model, add_cluster, add_limits):
        add(parser)
    parser.add_argument("--out", metavar="DIR", default="sweep", help="folder for figures and JSON (default: sweep)")
    options = parser.parse_args(given)
    try:
        (hardware, world), batch = cluster_of(options), batch_of(options)
        model = model_of(options)  # last: it may be traced
        require_trainable(model)
        write_sweep(options.out, Problem(model, hardware, world, batch, options.memory, space_of(options)))
    except UsageError as error:
        fail(str(error))


def write_sweep(out: str, problem: Problem) -> None:
    """Sweep, and write sweep.png, sweep.html and sweep.json to a folder. UsageError if nothing fits anywhere."""
    folder = make_folder(out, "--out")
    paths = {kind: folder / f"sweep.{kind}" for kind in ("png", "html", "json")}
    for path in paths.values():
        require_writable("--out", str(path))
    with working("planning the sweep, point") as update:
        panels = sweep(problem, update)
    if all(point.step_seconds is None for panel in panels for each in panel.points.values() for point in each):
        raise UsageError(panels[0].points["planner"][0].plan)
    title = (
        f"{problem.model.name} on {problem.world} x {problem.hardware.name}, {problem.global_batch} samples a step"
    )
    write_png(paths["png"], f"{title}: predicted", panels)
    write_curves(paths["html"], title, "Predicted, not measured.", panels)
    write_json(str(paths["json"]), as_data(problem, panels))
    console.print("written to " + ", ".join(map(str, paths.values())), soft_wrap=True)


if __name__ == "__main__":
    main()
