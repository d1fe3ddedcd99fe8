"""The page that shows what a run hid: a table, the measured timelines and the loss curves, in one HTML file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from oases.simulator.drawing import draw_curves, draw_timelines
from oases.simulator.timeline import Timeline

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .35em 1em; border-bottom: 1px solid #ddd }
th { font-weight: 600; text-align: right } td { text-align: right }
th:first-child, td:first-child { text-align: left } h1 { margin-bottom: 0 } .sub { color: #666; margin-top: .2em }
"""


def write_report(
    path: Path,
    *,
    title: str,
    subtitle: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    timelines: Sequence[Timeline],
    losses: Mapping[str, Sequence[float]],
) -> None:
    """Write a self-contained page to `path`; it loads nothing from anywhere.

    header, rows: the table of results. losses: training loss per step, nats per byte, by schedule.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    figures = [
        figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
        for figure in (
            draw_timelines(timelines),
            draw_curves(losses, x="step", y="training loss, nats per byte"),
        )
    ]
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>
<table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>
<h2>Where the time went</h2>
<p>One measured step of the transformer stack under each schedule, to one time scale. Orange: an all-reduce is on
the link. Pale: the compute stands still for it. Names are BLOCK.SUB-BATCH. Drag to zoom, hover for names and
times.</p>{figures[0]}
<h2>The same training</h2>
<p>Training loss per step. A schedule changes when things run, never what is computed, so the curves lie on each
other.</p>{figures[1]}
</body></html>
""",
        encoding="utf-8",
    )
