"""Self-contained pages: a table and figures in one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .35em 1em; border-bottom: 1px solid #ddd }
th { font-weight: 600; text-align: right } td { text-align: right }
th:first-child, td:first-child { text-align: left } h1 { margin-bottom: 0 } .sub { color: #666; margin-top: .2em }
"""


@dataclass(frozen=True)
class Section:
    """A figure of plotly under a heading, with a text that says how to read it."""

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
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>
<table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>
{body}
</body></html>
""",
        encoding="utf-8",
    )
