"""Option `--graph` of plan: read or trace a model's graph, split it into shards or stages, print and draw it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from oases.cli.options import is_given, require_writable
from oases.cli.plan_options import cluster_of, require_count
from oases.errors import UsageError
from oases.files import write_text
from oases.graph.layer_graph import FORMAT, LayerGraph, layer_of, read_graph
from oases.graph.part import Part, shards, travels
from oases.graph.stages import BALANCES, Stage, shared_parameters, split
from oases.limits import flag_of

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#72B7B2", "#E45756", "#9D755D", "#EECA3B")
_MOST_ARCS = 60
"""Maximum number of coloured arcs; more are drawn grey."""


def groups(graph: LayerGraph) -> tuple[Part, ...]:
    """Split a graph into runs of nodes of the same layer, or of none; each is drawn as one box."""
    found, start = [], 0
    for _, run in groupby(graph.nodes, key=lambda node: layer_of(node.module)):
        stop = start + len(list(run))
        found.append(Part(graph, start, stop))
        start = stop
    return tuple(found)


def name_of(part: Part) -> str:
    """Label of a box: its layers, else the modules whose parameters it reads, else a module that runs in it."""
    if part.layers:
        return ", ".join(part.layers)
    owners = dict.fromkeys(each.name.rpartition(".")[0] for each in part.parameters)
    return ", ".join(owners) or next((node.module for node in part.nodes if node.module), part.graph.name)


def write_drawing(path: Path, graph: LayerGraph, parts: Sequence[Part], rows: Sequence[Sequence[str]]) -> None:
    """Write an HTML page with a table and the graph coloured by `parts`, stages or shards. rows: header first."""
    from oases.simulator.drawing import Section, write_page

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
    """Draw the figure of `write_drawing`."""
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
    """Draw an arc for every value that skips boxes."""
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


_OF_GRAPHS = ("stages", "balance", "html")
_OF_CLUSTERS = ("world", "ranks_per_node", "link")
_OF_PLANS = (
    "model", "hidden", "layers", "heads", "vocabulary", "global_batch", "memory", "degrees", "micro_batches",
    "pipelines", "no_recompute", "no_zero", "no_fsdp", "no_sequence_parallel", "wire", "expert_parallel",
    "allow_lossy", "explain", "sweep",
)  # fmt: skip


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Add the options of --graph."""
    parser.add_argument(
        "--graph", metavar="MODEL",
        help="instead of a plan, show a model's graph: a config.json of transformers, a folder with one, or JSON "
        "of --json; takes --sequence and --dtype, and balances by --cluster or --profile if given",
    )  # fmt: skip
    parser.add_argument("--stages", type=int, metavar="N", help="with --graph: split it into pipeline stages")
    parser.add_argument(
        "--balance", metavar="HOW",
        help=f"with --stages: balance {', '.join(BALANCES)}; or comma-separated first modules of the stages "
        "(default: time)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="with --graph: write a page that draws it, collapsed by layer")


def require_no_graph(options: argparse.Namespace) -> None:
    """Raise UsageError for options that need --graph."""
    for name in _OF_GRAPHS:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} {getattr(options, name)} needs --graph MODEL; give that, or leave it out")


def show_graph(options: argparse.Namespace) -> None:
    """Print the shards or stages of the graph of --graph; write and draw it."""
    from oases.terminal import console

    given = [flag_of(name) for name in _OF_PLANS if is_given(options, name)]
    if given:
        raise UsageError(
            f"--graph shows a model's graph and makes no plan; leave out {', '.join(given)}, or "
            "plan for it in Python: oases.plan(graph, cluster, global_batch=N)"
        )
    if options.balance is not None and options.stages is None:
        raise UsageError(f"--balance {options.balance} balances stages; give --stages N, too")
    if options.stages is not None:
        require_count("--stages", options.stages)
    require_writable("--html", options.html)
    timed = options.cluster is not None or options.profile is not None
    of_cluster = [flag_of(name) for name in _OF_CLUSTERS if getattr(options, name) is not None]
    if of_cluster and not timed:
        raise UsageError(f"{', '.join(of_cluster)}: of which cluster? Give --cluster or --profile, too")
    hardware = cluster_of(options, world=1)[0] if timed else None
    graph = _graph(options)
    console.print(
        f"{graph.name}: {len(graph.layers)} layers, {_millions(graph.num_parameters)} million parameters, "
        f"{graph.flops / 1e9:,.1f} GFLOP a forward pass of {_inputs(graph)}", soft_wrap=True,
    )  # fmt: skip
    parts: Sequence[Part]
    if options.stages is None:
        parts, rows = shards(graph), _shard_rows(shards(graph))
    else:
        balance = options.balance or "time"
        stages = split(
            graph, options.stages, balance=balance if balance in BALANCES else balance.split(","), hardware=hardware
        )
        parts, rows = stages, _stage_rows(stages)
    console.print(_table(rows))
    for line in _remarks(parts):
        console.print(line, soft_wrap=True)
    if options.json is not None:
        write_text(options.json, graph.to_json(), "--json")
        console.print(f"written to {options.json}; read it with: oases plan --graph {options.json}", soft_wrap=True)
    if options.html is not None:
        write_drawing(Path(options.html), graph, parts, rows)
        console.print(f"written to {options.html}", soft_wrap=True)


def _graph(options: argparse.Namespace) -> LayerGraph:
    """Read a graph, or trace it from a configuration."""
    from oases.graph.trace.configuration import read_configuration

    path = Path(options.graph)
    data = read_configuration(path, "--graph", "a config.json or a graph's JSON")
    if data.get("format") == FORMAT:
        for name in ("sequence", "dtype"):
            if getattr(options, name) is not None:
                raise UsageError(f"--graph {options.graph} is traced already; leave out --{name}, or trace it again")
        return read_graph(path)
    if options.sequence is not None:
        require_count("--sequence", options.sequence)
    return _traced(data, options.dtype or "float32", options.sequence)


def _traced(data: dict[str, Any], dtype: str, sequence: int | None) -> LayerGraph:
    from oases.graph.trace import trace
    from oases.graph.trace.configuration import configured_model
    from oases.terminal import working

    with working(f"tracing {data.get('model_type')}"):
        return trace(configured_model(data, dtype), sequence=sequence)


def _inputs(graph: LayerGraph) -> str:
    return ", ".join(f"{each.name} {'x'.join(map(str, each.shape))}" for each in graph.inputs) or "no inputs"


def _shard_rows(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """Table rows, one per run of equal shards."""
    rows: list[tuple[str, ...]] = [("shards", "what", "params (M)", "GFLOP", "MB written")]
    first = 0
    for _, run in groupby(parts, key=lambda part: (*_sizes(part), len(part.layers), part.embedding)):
        same = list(run)
        last = first + len(same) - 1
        number = str(first) if last == first else f"{first}-{last}"
        rows.append((number, _held(same[0].start, same[-1].stop, same[0]), *_sizes(same[0])))
        first = last + 1
    return rows


def _stage_rows(stages: Sequence[Stage]) -> list[tuple[str, ...]]:
    mean = sum(stage.cost for stage in stages) / len(stages)
    rows: list[tuple[str, ...]] = [("stage", "what", "params (M)", "GFLOP", "MB written", "x mean", "sends", "along")]
    for stage in stages:
        handed = [value for value in stage.sends if not value.along]
        along = [value for value in stage.sends if value.along]
        rows.append(
            (
                str(stage.number), _held(stage.start, stage.stop, stage), *_sizes(stage),
                f"{stage.cost / mean:.3f}" if mean else "-", _sent(handed), _sent(along),
            )
        )  # fmt: skip
    return rows


def _sent(values: Sequence[Any]) -> str:
    if not values:
        return "-"
    return f"{len(values)}: {sum(value.num_bytes for value in values) / 1e6:,.1f} MB"


def _held(start: int, stop: int, part: Part) -> str:
    """Layers of a part, as ranges per list; else its label."""
    layers = Part(part.graph, start, stop).layers
    if not layers:
        return name_of(part)
    lists = []
    for path, run in groupby(layers, key=lambda layer: layer.rpartition(".")[0]):
        numbers = [layer.rpartition(".")[2] for layer in run]
        where = f"{path}." if path else ""
        lists.append(where + (numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"))
    return ", ".join(lists)


def _sizes(part: Part) -> tuple[str, str, str]:
    return _millions(part.num_parameters), f"{part.flops / 1e9:,.2f}", f"{part.activation_bytes / 1e6:,.1f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def _table(rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table()
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=name != "what", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _remarks(parts: Sequence[Part]) -> list[str]:
    """Remarks below the table: parameters shared by stages."""
    stages = [part for part in parts if isinstance(part, Stage)]
    return [
        f"{' = '.join(each.names)} ({each.num_bytes / 1e6:,.1f} MB) is on stages "
        f"{', '.join(map(str, each.stages))}: its gradient must be summed over them"
        for each in shared_parameters(stages)
    ]
