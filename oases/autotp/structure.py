"""Find the column- and row-parallel linears of a layer from its graph.

For every linear, the linears that feed it without another linear between them are tried as its column-parallel
partners; the `Splitter` decides whether the ops between keep the sharding (Megatron's pairs, arXiv 1909.08053,
without lists of names). Fused linears are tried in one segment and in the segments that the graph splits them into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import gcd, prod
from typing import Any

from torch import fx

import oases.autotp.expert_rules  # noqa: F401  (fills the table of rules)
from oases.autotp.cutting import ancestors
from oases.autotp.export import Exported, UnsplittableError, length_of, shape_of
from oases.autotp.op_table import VIEWS, argument, name_of
from oases.autotp.rules import is_linear, linear_operands, weight_of
from oases.autotp.shapes import Copied, Segments
from oases.autotp.splitter import Splitter


@dataclass
class Structure:
    """Sharding of a layer. columns: column-parallel linears with the segments of their output features; rows:
    row-parallel ones.

    limits: lengths that the degree must divide, with their names. refused: linears that are replicated, and why.
    """

    columns: dict[fx.Node, Segments] = field(default_factory=dict)
    rows: tuple[fx.Node, ...] = ()
    limits: dict[int, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def common(self) -> int:
        """Greatest common divisor of the limits, 0 without any; the possible degrees are its divisors."""
        return gcd(*self.limits)

    @property
    def degrees(self) -> list[int]:
        """Possible tensor-parallel degrees up to 1024."""
        return [degree for degree in range(1, 1025) if self.common % degree == 0]


def plain(*_: Any) -> Any:
    """Stand-in for a linear or a dropout while the structure is searched."""
    raise AssertionError("a mark that was not replaced")


def find(
    exported: Exported, keep: Callable[[str], bool] = lambda name: False, degree: int = 1, *, sums: bool = False
) -> Structure:
    """Find the column- and row-parallel linears of a layer.

    keep: names of weights to replicate. degree: the requested one; where there are fewer key heads than that (grouped
    queries), each is on several ranks, or keys are replicated. sums: see `Splitter`.
    """
    found = Structure()
    linears = [node for node in exported.graph.nodes if is_linear(node)]
    linears = [each for each in linears if weight_of(exported, each) and len(shape_of(linear_operands(each)[1])) == 2]
    # The second of two linears in a row (an adapter, LoRA) last: it is rather cut as the linear that it is added to.
    for row in sorted(linears, key=lambda node: is_linear(_before(node))):
        weight, x = weight_of(exported, row), linear_operands(row)[0]
        if row in found.columns or row in found.rows or keep(weight):
            continue
        # Those whose outputs reach it through no other linear.
        reached = {x, *(each for node in ancestors([x], set(linears)) for each in node.all_input_nodes)}
        partners = [each for each in linears if each in reached and each not in {*found.columns, *found.rows}]
        if not partners or any(keep(weight_of(exported, each)) for each in partners):
            continue
        structure = _paired(exported, found, row, partners, degree, sums)
        if isinstance(structure, Structure):
            found = structure
        else:
            found.refused[weight] = structure
    for node in [*found.columns, *found.rows, *({_before(each) for each in linears} & set(linears))]:
        found.refused.pop(weight_of(exported, node), None)
    return found


def _paired(
    exported: Exported, found: Structure, row: fx.Node, partners: list[fx.Node], degree: int, sums: bool
) -> Structure | str:
    """`found` with these partners of `row` as columns; the reason where nothing works."""
    tried = partial(_tried, exported, found, row, sums)
    reason, best = "", None
    for columns in _subsets(partners):
        for made in map(tried, _choices(columns)):
            if isinstance(made, str):
                reason = reason or made
            elif best is None or made.common > best.common:
                best = made
        if best is not None and best.common % degree == 0:
            return best
        for made in map(tried, _with_copies(columns, degree)):
            if isinstance(made, Structure) and made.common % degree == 0:
                return made
    return best or reason


def _tried(
    exported: Exported, found: Structure, row: fx.Node, sums: bool, choice: Mapping[fx.Node, Segments]
) -> Structure | str:
    """`found` with these columns of `row`; the reason where that does not work."""
    try:
        walk = Splitter(exported, {**found.columns, **choice}, plain, plain, sums=sums).run()
    except UnsplittableError as error:
        return str(error)
    if row not in walk.rows:
        return f"{row} has inputs that are not sharded"
    return Structure(dict(walk.columns), tuple(walk.rows), walk.limits, found.refused)


def _with_copies(columns: list[fx.Node], degree: int) -> Iterable[dict[fx.Node, Segments]]:
    """Ways to cut these linears with the narrower ones' heads (keys) on several ranks each."""
    widths = {node: shape_of(node)[-1] for node in columns}
    if len(set(widths.values())) == 1:
        return
    for copies in (n for n in range(2, degree) if degree % n == 0):
        yield {node: (width,) if width == max(widths.values()) else Copied((width * copies,), copies)
               for node, width in widths.items()}  # fmt: skip


def _subsets(partners: list[fx.Node]) -> list[list[fx.Node]]:
    """Candidates: all; those that feed no other (second of low-rank pairs); the widest (queries, with replicated
    keys).
    """
    above = {p for p in partners for other in partners if other is not p and p in ancestors([other], set())}
    widest = max(shape_of(p)[-1] for p in partners)
    found = [partners, [p for p in partners if p not in above], [p for p in partners if shape_of(p)[-1] == widest]]
    return [each for at, each in enumerate(found) if each and each not in found[:at]]


def _choices(columns: list[fx.Node]) -> Iterable[dict[fx.Node, Segments]]:
    """Ways to cut these linears: in one segment, then as the graph splits their output."""
    options = [_segments(node) for node in columns]
    if prod(len(option) for option in options) > 16:
        options = [option[:2] for option in options]
    for place in range(max(len(option) for option in options)):
        yield {node: option[min(place, len(option) - 1)] for node, option in zip(columns, options, strict=True)}


def _segments(column: fx.Node) -> list[Segments]:
    """One segment, and every way in which the graph splits a dimension of this length before the next linear."""
    features = shape_of(column)[-1]
    found: list[Segments] = [(features,)]
    seen, queue = {column}, [column]
    while queue:
        for user in queue.pop(0).users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            found.extend(_taken_apart(user, features))
            if not is_linear(user):
                queue.append(user)
    ends = sorted({0, features, *(end for node in seen for end in _slice_ends(node, features))})
    if len(ends) > 2:
        found.append(tuple(last - first for first, last in itertools.pairwise(ends)))
    return list(dict.fromkeys(found))


def _taken_apart(node: fx.Node, features: int) -> list[Segments]:
    name, outputs = name_of(node), node.meta.get("val")
    if name in ("split", "split_with_sizes", "chunk", "tensor_split") and isinstance(outputs, (list, tuple)):
        for dim, length in enumerate(shape_of(argument(node, 0))):
            lengths = tuple(length_of(output.shape[dim]) for output in outputs)
            if length == features and sum(lengths) == features:
                return [lengths]
    if name in VIEWS and name != "flatten":
        return [(features // n,) * n for n in shape_of(node) if 1 < n <= 8 and features % n == 0]
    return []


def _slice_ends(node: fx.Node, features: int) -> list[int]:
    if name_of(node) != "slice":
        return []
    shape, dim, ends = shape_of(argument(node, 0)), argument(node, 1, "dim", 0), node.args[2:4]
    if shape[dim % len(shape)] != features or any(isinstance(end, fx.Node) for end in ends):
        return []
    return [end for end in slice(*(*ends, None, None)[:2]).indices(features)[:2] if 0 < end < features]


def _before(linear: fx.Node) -> fx.Node:
    """Node that a linear takes its input from, through casts."""
    node: fx.Node = linear_operands(linear)[0]
    while name_of(node) in ("to", "_to_copy"):
        node = argument(node, 0)
    return node
