"""Draws a graph collapsed by layer: what each holds, computes and keeps, and which values skip over others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from oases.graph.layer_graph import LayerGraph, layer_of
from oases.graph.part import Part, travels

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#72B7B2", "#E45756", "#9D755D", "#EECA3B")
_MOST_ARCS = 60
"""Arcs of one picture: more are a grey area."""


def groups(graph: LayerGraph) -> tuple[Part, ...]:
    """Runs of nodes of one layer, or of none: what a picture shows as one box."""
    found, start = [], 0
    for _, run in groupby(graph.nodes, key=lambda node: layer_of(node.module)):
        stop = start + len(list(run))
        found.append(Part(graph, start, stop))
        start = stop
    return tuple(found)


def name_of(part: Part) -> str:
    """Its layer, or the modules outside of layers whose parameters it reads, or what runs there."""
    if part.layers:
        return ", ".join(part.layers)
    owners = dict.fromkeys(each.name.rpartition(".")[0] for each in part.parameters)
    return ", ".join(owners) or next((node.module for node in part.nodes if node.module), part.graph.name)


def write_drawing(path: Path, graph: LayerGraph, parts: Sequence[Part], rows: Sequence[Sequence[str]]) -> None:
    """A page with a table of `rows`, the first of which is its header, and the graph coloured by `parts`.

    parts: stages or shards.
    """
    from oases.simulator.page import Section, write_page

    text = (
        "A bar for each layer, and for what lies between layers, in execution order; colours tell parts apart."
        " Squares hand a value to the next; arcs are values that skip over others, pale where they travel along, as "
        "masks do. Hover for names and sizes."
    )
    write_page(
        path, title=graph.name,
        subtitle=f"{graph.num_parameters / 1e6:,.1f} million parameters, {graph.flops / 1e9:,.1f} GFLOP and "
        f"{graph.activation_bytes / 1e6:,.1f} MB written by a forward pass, {len(graph.nodes)} ops",
        header=rows[0], rows=rows[1:], sections=[Section("Layers", text, draw_graph(graph, parts))],
    )  # fmt: skip


def draw_graph(graph: LayerGraph, parts: Sequence[Part]) -> Any:
    """The figure of `write_drawing`."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    boxes = groups(graph)
    places = list(range(len(boxes)))
    names = [name_of(box) for box in boxes]
    starts = [part.start for part in parts]
    colours = [_COLOURS[sum(start <= box.start for start in starts) % len(_COLOURS) - 1] for box in boxes]
    figure = make_subplots(rows=4, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.28, 0.24, 0.24, 0.24])
    _draw_arcs(figure, graph, boxes)
    figure.add_trace(
        go.Scatter(
            x=places, y=[0] * len(boxes), mode="markers", customdata=names,
            hovertemplate="%{customdata}<extra></extra>",
            marker={"symbol": "square", "size": max(4, min(16, 700 // len(boxes))), "color": colours, "opacity": 1},
        ), row=1, col=1,
    )  # fmt: skip
    for row, (title, sizes) in enumerate(
        {
            "million parameters": [box.num_parameters / 1e6 for box in boxes],
            "GFLOP": [box.flops / 1e9 for box in boxes],
            "MB written": [box.activation_bytes / 1e6 for box in boxes],
        }.items(),
        start=2,
    ):
        figure.add_trace(
            go.Bar(
                x=places, y=sizes, customdata=names, marker={"color": colours},
                hovertemplate=f"%{{customdata}}: %{{y:,.4g}} {title}<extra></extra>",
            ), row=row, col=1,
        )  # fmt: skip
        figure.update_yaxes(title_text=title, row=row, col=1)
    every = max(1, len(boxes) // 24)
    figure.update_xaxes(range=[-0.8, len(boxes) - 0.2])
    figure.update_xaxes(tickvals=places[::every], ticktext=[_short(name) for name in names[::every]], tickangle=-45)
    figure.update_yaxes(visible=False, row=1, col=1)
    figure.update_layout(
        template="plotly_white", height=780, showlegend=False, bargap=0.1,
        margin={"l": 70, "r": 20, "t": 10, "b": 110},
    )  # fmt: skip
    return figure


def _draw_arcs(figure: Any, graph: LayerGraph, boxes: Sequence[Part]) -> None:
    """Of every value that a box reads which the one before it has not made."""
    import plotly.graph_objects as go

    free = travels(graph)
    box_of = [number for number, box in enumerate(boxes) for _ in box.nodes]
    arcs: dict[tuple[int, int, bool], list[str]] = {}
    for index, node in enumerate(graph.nodes):
        for used in sorted({box_of[user] for user in graph.users[node.name]}):
            if used > box_of[index] + 1:
                arcs.setdefault((box_of[index], used, node.name in free), []).append(node.name)
    for (begin, end, along), values in sorted(arcs.items(), key=lambda arc: not arc[0][2]):
        middle, height = (begin + end) / 2, (end - begin) / len(boxes)
        colour = "rgba(180,180,180,0.35)" if along or len(arcs) > _MOST_ARCS else "#E45756"
        figure.add_trace(
            go.Scatter(
                x=[begin, begin + 0.1 * (end - begin), middle, end - 0.1 * (end - begin), end],
                y=[0, 0.6 * height, height, 0.6 * height, 0], mode="lines", hoverinfo="text",
                text=f"{', '.join(values[:4])}: {sum(graph.value_bytes[name] for name in values) / 1e6:,.3g} MB",
                line={"shape": "spline", "width": 1 if along else 2, "color": colour},
            ), row=1, col=1,
        )  # fmt: skip


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"...{name[-21:]}"
