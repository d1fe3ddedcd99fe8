"""Division of a graph into pipeline stages: consecutive shards with the smallest maximum cost."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from oases.errors import UsageError
from oases.graph.layer_graph import LayerGraph, Node
from oases.graph.part import Part, Value, clean_borders, crossing, units
from oases.simulator.hardware import Device, Hardware

BALANCES = ("time", "parameters", "uniform")


@dataclass(frozen=True)
class Stage(Part):
    """Pipeline stage. cost: the cost that was balanced.

    receives, sends: values from the previous stage and to the next one, including those passed through. loads:
    model inputs that it uses first. returns: model outputs that it computes.
    """

    number: int
    cost: float
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    loads: tuple[str, ...]
    returns: tuple[str, ...]


@dataclass(frozen=True)
class SharedParameter:
    """Parameter on several stages, whose gradient must be summed over them. names: all of its names."""

    identity: int
    names: tuple[str, ...]
    stages: tuple[int, ...]
    num_bytes: int


def split(
    model: LayerGraph | Sequence[Part],
    stages: int,
    *,
    balance: str | Sequence[str] = "time",
    hardware: Hardware | None = None,
) -> tuple[Stage, ...]:
    """Divide a graph, or its shards, into consecutive pipeline stages.

    balance: cost whose maximum over stages is minimised: "time" (seconds by the rates of `hardware`, FLOPs without
    it), "parameters" (a tied one counts in every shard that reads it) or "uniform" (layers); or the module or node
    that each stage after the first begins with. Raises UsageError for more stages than there are borders.
    """
    graph, parts = _taken(model)
    if stages < 1:
        raise UsageError(f"stages must be at least 1, got {stages}")
    if stages > len(parts):
        raise UsageError(
            f"{stages} stages are more than {graph.name} allows: it has {len(parts)} parts that pass on one "
            f"value; give at most {len(parts)}"
        )
    by = "time" if not isinstance(balance, str) else balance
    costs = _costs(parts, by, hardware)
    if isinstance(balance, str):
        borders = [parts[end].start for end in balanced(costs, stages)]
    else:
        borders = _asked(graph, balance, stages)
    whole = [0, *borders, len(graph.nodes)]
    values = [(), *crossing(graph, borders), ()]
    firsts = {each.name: users[0] for each in graph.inputs if (users := graph.users[each.name])}
    return tuple(
        Stage(
            graph, start, stop, number, _cost(Part(graph, start, stop), parts, costs, by, hardware), values[number],
            values[number + 1], tuple(name for name, first in firsts.items() if start <= first < stop),
            tuple(name for name in graph.outputs if start <= graph.place.get(name, -1) < stop),
        )
        for number, (start, stop) in enumerate(pairwise(whole))
    )  # fmt: skip


def shared_parameters(stages: Sequence[Stage]) -> tuple[SharedParameter, ...]:
    """Parameters that several stages read, under one name or, if tied, several."""
    where: dict[int, list[int]] = {}
    for stage in stages:
        for each in stage.parameters:
            where.setdefault(each.identity, []).append(stage.number)
    shared = []
    for identity, numbers in where.items():
        if len(numbers) > 1:
            named = [each for each in stages[0].graph.parameters if each.identity == identity]
            shared.append(
                SharedParameter(identity, tuple(each.name for each in named), tuple(numbers), named[0].num_bytes)
            )
    return tuple(shared)


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """Start indices of the runs after the first when costs are divided into `count` runs with the smallest maximum
    sum.

    Every run has at least one cost. Of equal divisions, one with small earlier runs.
    """
    ahead = list(accumulate(costs, initial=0.0))
    size = len(costs)
    best = ahead[:]  # best[j]: the largest sum of the first j costs in k runs
    cuts: list[list[int]] = []
    for runs in range(2, count + 1):
        earlier, best, chosen = best, [float("inf")] * (size + 1), [0] * (size + 1)
        for end in range(runs, size + 1):
            # Earlier runs grow with the start of the last run, which shrinks: the minimum is where they meet.
            growing = partial(_difference, earlier, ahead, end)
            meet = bisect_left(range(runs - 1, end), 0.0, key=growing)
            for at in range(max(runs - 1, runs - 2 + meet), min(end, runs + meet)):
                found = max(earlier[at], ahead[end] - ahead[at])
                if found < best[end]:
                    best[end], chosen[end] = found, at
        cuts.append(chosen)
    ends, end = [], size
    for chosen in reversed(cuts):
        end = chosen[end]
        ends.append(end)
    return ends[::-1]


def _difference(earlier: Sequence[float], ahead: Sequence[float], end: int, at: int) -> float:
    """Difference between the largest earlier run and the last one, from `at` to `end`."""
    return earlier[at] - (ahead[end] - ahead[at])


def node_seconds(graph: LayerGraph, device: Device) -> Callable[[Node], float]:
    """Seconds of a node's forward pass alone: the larger of FLOPs and bytes moved over the device's rates.

    A view takes no time. An embedding reads as many bytes as it writes.
    """

    def seconds(node: Node) -> float:
        if not node.bytes_out:
            return 0.0
        read = sum(graph.value_bytes[name] for name in node.inputs)
        if node.op == "aten.embedding":
            read += node.bytes_out
        else:
            read += sum(graph.table[name].num_bytes for name in node.parameters)
        work = node.flops / device.rate(node.dtypes[0]) if node.flops else 0.0
        return max(work, (read + node.bytes_out) / device.bytes_per_second) + device.launch_seconds

    return seconds


def _taken(model: LayerGraph | Sequence[Part]) -> tuple[LayerGraph, Sequence[Part]]:
    if isinstance(model, LayerGraph):
        return model, units(model)
    if not model:
        raise UsageError("no shards given; create them with shards(graph)")
    graph = model[0].graph
    ends = [0, *(part.stop for part in model)]
    if ends[:-1] != [part.start for part in model] or ends[-1] != len(graph.nodes):
        raise UsageError("the shards are not those of a whole graph in order; create them with shards(graph)")
    return graph, model


def _costs(parts: Sequence[Part], by: str, hardware: Hardware | None) -> list[float]:
    if by not in BALANCES:
        raise UsageError(
            f"balance {by!r} is unknown; known are {', '.join(BALANCES)}, or the modules that stages begin with"
        )
    if by == "parameters":
        return [float(part.num_parameters) for part in parts]
    if by == "uniform":
        cut = Counter(layer for part in parts for layer in part.layers)
        return [sum(1 / cut[layer] for layer in part.layers) if cut else 1.0 for part in parts]
    if hardware is None:
        return [float(part.flops) for part in parts]
    seconds = node_seconds(parts[0].graph, hardware.device)
    return [sum(map(seconds, part.nodes)) for part in parts]


def _cost(stage: Part, parts: Sequence[Part], costs: Sequence[float], by: str, hardware: Hardware | None) -> float:
    inside = [cost for part, cost in zip(parts, costs, strict=True) if stage.start <= part.start < stage.stop]
    return sum(inside) if by != "time" else _costs([stage], by, hardware)[0]


def _asked(graph: LayerGraph, begins: Sequence[str], stages: int) -> list[int]:
    """Borders before the modules or nodes that stages begin with."""
    if len(begins) != stages - 1:
        raise UsageError(f"{stages} stages begin at {stages - 1} borders, got {len(begins)}: {', '.join(begins)}")
    clean = clean_borders(graph)
    borders: list[int] = []
    for begin in begins:
        border = graph.place.get(begin, -1)
        if border < 0:
            inside = (i for i, n in enumerate(graph.nodes) if n.module == begin or n.module.startswith(f"{begin}."))
            border = next(inside, -1)
        if border < 0:
            raise UsageError(f"balance: {begin!r} is not a node or module of {graph.name}, nor {', '.join(BALANCES)}")
        if border not in clean:
            others = [each for each in clean if each < border]
            node = graph.nodes[max(others)].name if others else None
            raise UsageError(
                f"balance: a stage cannot begin with {begin!r}, because more than one value crosses there"
                + (f"; the nearest place before it is the node {node!r}" if node else "")
            )
        if border <= (borders[-1] if borders else 0):
            raise UsageError(f"balance: {begin!r} is not after the start of the previous stage; give them in order")
        borders.append(border)
    return borders
