"""Draws timelines to one time scale, and curves, as plotly figures that a page can hold without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from oases.simulator.timeline import Timeline

COLOURS = {
    "forward": "#4C78A8",
    "combine": "#9ECAE9",
    "recompute": "#72B7B2",
    "backward": "#54A24B",
    "weight gradient": "#B279A2",
    "waiting": "#EEEEEE",
    "all-reduce": "#F58518",
    "other": "#BAB0AC",
}
CURVES = ("#E45756", "#4C78A8", "#54A24B", "#B279A2", "#F58518")


def draw_timelines(timelines: Sequence[Timeline]) -> Any:
    """One panel per timeline, one bar row per rank's compute and link, all panels to one time scale."""
    figure = make_subplots(
        rows=len(timelines),
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=[f"{t.name}: one step in {t.total_seconds * 1e3:.0f} ms" for t in timelines],
    )
    shown: set[str] = set()
    for row, timeline in enumerate(timelines, start=1):
        for kind in COLOURS:
            spans = [span for span in timeline.spans if span.kind == kind]
            if not spans:
                continue
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    base=[span.start * 1e3 for span in spans],
                    x=[span.seconds * 1e3 for span in spans],
                    y=[f"rank {span.rank} {span.lane}" for span in spans],
                    customdata=[[span.name, span.start * 1e3] for span in spans],
                    hovertemplate="%{customdata[0]}<br>from %{customdata[1]:.1f} ms for %{x:.1f} ms",
                    marker={"color": COLOURS[kind], "line": {"width": 0.5, "color": "white"}},
                    name=kind,
                    legendgroup=kind,
                    showlegend=kind not in shown,
                ),
                row=row,
                col=1,
            )
            shown.add(kind)
        lanes = [f"rank {rank} {lane}" for rank, lane in timeline.lanes]
        figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], row=row, col=1)
    longest = max(timeline.total_seconds for timeline in timelines) * 1e3
    figure.update_xaxes(range=[0, longest], showgrid=True)
    figure.update_xaxes(title_text="milliseconds", row=len(timelines), col=1)
    lanes_drawn = sum(len(timeline.lanes) for timeline in timelines)
    figure.update_layout(
        barmode="overlay",
        bargap=0.15,
        template="plotly_white",
        height=130 * len(timelines) + 28 * lanes_drawn,
        margin={"l": 110, "r": 20, "t": 60, "b": 40},
        legend={"orientation": "h", "y": 1.08, "yanchor": "bottom", "x": 0},
    )
    return figure


def draw_curves(curves: Mapping[str, Sequence[float]], *, x: str, y: str) -> Any:
    """Lines over 1, 2, ...; later ones are dashed and thinner, so that curves that coincide both show."""
    figure = go.Figure()
    for index, (name, values) in enumerate(curves.items()):
        figure.add_trace(
            go.Scatter(
                x=list(range(1, len(values) + 1)),
                y=list(values),
                name=name,
                mode="lines",
                line={
                    "color": CURVES[index % len(CURVES)],
                    "width": max(2, 7 - 4 * index),
                    "dash": "solid" if index == 0 else "dot",
                },
            )
        )
    figure.update_layout(
        template="plotly_white",
        height=340,
        margin={"l": 60, "r": 20, "t": 20, "b": 40},
        xaxis_title=x,
        yaxis_title=y,
        legend={"x": 1, "xanchor": "right", "y": 1},
    )
    return figure
