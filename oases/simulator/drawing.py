"""Plotly figures of timelines to one time scale and of curves, in self-contained pages."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from oases.files import write_text
from oases.simulator.timeline import Timeline

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .35em 1em; border-bottom: 1px solid #ddd }
th { font-weight: 600; text-align: right } td { text-align: right }
th:first-child, td:first-child { text-align: left } h1 { margin-bottom: 0 } .sub { color: #666; margin-top: .2em }
"""


@dataclass(frozen=True)
class Section:
    """Section of a page: a heading, an explanation and a plotly figure."""

    heading: str
    text: str
    figure: Any


def write_page(
    path: Path, *, title: str, subtitle: str, header: Sequence[str], rows: Sequence[Sequence[str]],
    sections: Sequence[Section],
) -> None:  # fmt: skip
    """Write a page to `path`. header, rows: the table of results. Texts are escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(
        f"<h2>{html.escape(section.heading)}</h2>\n<p>{html.escape(section.text)}</p>"
        + section.figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
        for section in sections
    )
    write_text(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>
<table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>
{body}
</body></html>
""",
        "page",
    )


COLOURS = {
    "forward": "#4C78A8",
    "combine": "#9ECAE9",
    "recompute": "#72B7B2",
    "backward": "#54A24B",
    "weight gradient": "#B279A2",
    "embedding and head": "#439894",
    "optimizer": "#79706E",
    "other": "#BAB0AC",
    "waiting": "#F6D5D0",
    "bubble": "#EEEEEE",
    "experts": "#2C7C79",
    "all-reduce": "#F58518",
    "all-to-all": "#D6616B",
    "send": "#EECA3B",
    "gradients": "#E45756",
    "parameters": "#FF9DA6",
    "reshard": "#9D755D",
}
CURVES = ("#E45756", "#4C78A8", "#54A24B", "#B279A2", "#F58518")
_LANE, _MEMORY, _GAP, _ABOVE, _BELOW = 24, 130, 56, 140, 50
"""Pixels: of a lane, of a memory panel, between panels, and of the margins."""
_BORDERED = 100
"""Spans of a lane above which white borders would cover them."""
_WIDEST = 800
"""Maximum number of columns of a heat map."""
_LANES = {"node": "link in its node", "cluster": "link between nodes", "exposed": "exposed sums"}
"""Labels of the lanes of a plan's program."""


def draw_timelines(timelines: Sequence[Timeline], capacity: int | None = None) -> Any:
    """Draw one panel per timeline with one row per rank's compute and link, all to one time scale.

    A panel below shows the memory of a timeline that has it; capacity: bytes of memory, drawn there.
    """
    longest = max(timeline.total_seconds for timeline in timelines)
    scale, unit = (1.0, "s") if longest >= 10 else (1e3, "ms")
    rows: list[tuple[Timeline, bool]] = []
    for timeline in timelines:
        rows += [(timeline, False)] + ([(timeline, True)] if _knows_memory(timeline) else [])
    pixels = [_MEMORY if memory else _LANE * len(timeline.lanes) + 10 for timeline, memory in rows]
    inside = sum(pixels) + _GAP * (len(rows) - 1)
    figure = make_subplots(
        rows=len(rows),
        shared_xaxes=True,
        row_heights=pixels,
        vertical_spacing=_GAP / inside if len(rows) > 1 else 0.0,
        subplot_titles=[
            "memory"
            if memory
            else f"{t.name}: one step in {scale * t.total_seconds:{'.1f' if unit == 's' else '.0f'}} {unit}"
            for t, memory in rows
        ],
    )
    shown: set[str] = set()
    for row, (timeline, memory) in enumerate(rows, start=1):
        if memory:
            _draw_memory(figure, row, timeline, scale, unit, capacity)
        else:
            _draw_lanes(figure, row, timeline, scale, unit, shown)
    figure.update_xaxes(range=[0, scale * longest], showgrid=True)
    figure.update_xaxes(title_text={"s": "seconds", "ms": "milliseconds"}[unit], row=len(rows), col=1)
    figure.update_layout(
        barmode="overlay",
        bargap=0.15,
        template="plotly_white",
        height=inside + _ABOVE + _BELOW,
        margin={"l": 170 if _widest(timelines) > 16 else 110, "r": 20, "t": _ABOVE, "b": _BELOW},
        legend={"orientation": "h", "y": 1 + 34 / inside, "yanchor": "bottom", "x": 0},
    )
    return figure


def _knows_memory(timeline: Timeline) -> bool:
    return any(held.num_bytes for held in timeline.held)


def _widest(timelines: Sequence[Timeline]) -> int:
    return max((len(_lane(t, *lane)) for t in timelines for lane in t.lanes), default=0)


def _lane(timeline: Timeline, rank: int, lane: str) -> str:
    return f"{timeline.who} {rank} {_LANES.get(lane, lane)}"


def _draw_lanes(figure: Any, row: int, timeline: Timeline, scale: float, unit: str, shown: set[str]) -> None:
    fullest = max(Counter((span.rank, span.lane) for span in timeline.spans).values(), default=0)
    border = 0.5 if fullest <= _BORDERED else 0
    by_kind = {kind: [span for span in timeline.spans if span.kind == kind] for kind in COLOURS}
    for kind, spans in by_kind.items():
        if not spans:
            continue
        figure.add_trace(
            go.Bar(
                orientation="h",
                base=[scale * span.start for span in spans],
                x=[scale * span.seconds for span in spans],
                y=[_lane(timeline, span.rank, span.lane) for span in spans],
                customdata=[[span.name, scale * span.start] for span in spans],
                hovertemplate=f"%{{customdata[0]}}<br>from %{{customdata[1]:.4g}} {unit} for %{{x:.4g}} {unit}",
                marker={"color": COLOURS[kind], "line": {"width": border, "color": "white"}},
                name=kind,
                legendgroup=kind,
                showlegend=kind not in shown,
            ),
            row=row,
            col=1,
        )
        shown.add(kind)
    lanes = [_lane(timeline, rank, lane) for rank, lane in timeline.lanes]
    figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], row=row, col=1)


def _draw_memory(figure: Any, row: int, timeline: Timeline, scale: float, unit: str, capacity: int | None) -> None:
    """Draw memory as steps, one line per rank: the later its stage, the darker."""
    ranks = sorted({held.rank for held in timeline.held})
    for place, rank in enumerate(ranks):
        steps = [(held.time, held.num_bytes) for held in timeline.held if held.rank == rank]
        steps.append((timeline.total_seconds, steps[-1][1]))
        name = f"{timeline.who} {rank}"
        figure.add_trace(
            go.Scatter(
                x=[scale * time for time, _ in steps],
                y=[num_bytes / 2**30 for _, num_bytes in steps],
                mode="lines",
                line={"shape": "hv", "width": 1.5, "color": _shade(place, len(ranks))},
                name=name,
                hovertemplate=f"{name}: %{{y:.4g}} GiB at %{{x:.4g}} {unit}<extra></extra>",
                showlegend=False,
            ),
            row=row,
            col=1,
        )
    if capacity is not None:
        figure.add_hline(y=capacity / 2**30, line={"color": "#E45756", "dash": "dot"}, row=row, col=1)
    figure.update_yaxes(title_text="GiB", rangemode="tozero", row=row, col=1)


def _shade(place: int, count: int) -> str:
    share = place / max(1, count - 1)
    low, high = (158, 202, 233), (31, 58, 95)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(low, high, strict=True))
    return f"rgb({red},{green},{blue})"


def draw_curves(curves: Mapping[str, Sequence[float]], *, x: str, y: str) -> Any:
    """Draw lines over 1, 2, ...; later ones are dashed and thinner, so that coinciding curves both show."""
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


def draw_heat_map(values: Any, *, first: int, x: str, y: str, what: str) -> Any:
    """Draw a matrix [row, step] as a heat map, rows numbered from 0, steps from `first`. what: label of the values.

    Steps in excess of the page width are averaged with their neighbours.
    """
    rows, steps = values.shape
    each = -(-steps // _WIDEST)
    means = [values[:, start : start + each].mean(1) for start in range(0, steps, each)]
    figure = go.Figure(
        go.Heatmap(
            z=[[float(column[row]) for column in means] for row in range(rows)],
            x=[first + start for start in range(0, steps, each)],
            colorscale="Viridis",
            zmin=0,
            colorbar={"title": what},
            hovertemplate=f"{y} %{{y}}, {x} %{{x}}: %{{z:.3g}}<extra></extra>",
        )
    )
    figure.update_layout(
        template="plotly_white",
        height=_ABOVE + max(160, min(600, 12 * rows)),
        margin={"l": 60, "r": 20, "t": 20, "b": 40},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure
