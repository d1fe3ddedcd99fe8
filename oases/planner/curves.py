"""The pictures of a sweep: a PNG of three panels, and a page with the same curves to hover over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oases.planner.sweep import SERIES, Panel
from oases.simulator.page import Section, write_page
from oases.simulator.quantities import seconds_text

_STYLE = {
    "sync": ("#E45756", "solid", "o", "best synchronous plan"),
    "oases": ("#4C78A8", "solid", "s", "best oases plan of one degree"),
    "planner": ("#222222", "dot", "D", "planner's choice"),
}
"""Colour, dash, marker and words of each series."""


def write_png(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels beside each other; where nothing fits a curve has a gap."""
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _known(panel: Panel) -> list[float]:
    """Seconds of all points where something fits."""
    points = [point for series in panel.points.values() for point in series]
    return [point.step_seconds for point in points if point.step_seconds is not None]


def _round_values(panel: Panel, scale: float) -> list[float]:
    """Round numbers in the range of a panel, for its vertical axis: powers of ten alone would leave it bare."""
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
    """A self-contained page: a table of all points, and the curves with each plan where the pointer is."""
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
