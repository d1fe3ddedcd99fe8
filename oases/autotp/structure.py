"""Find the column- and row-parallel linears of a layer from its graph.

For every linear, the linears that feed it without another linear between them are tried as its column-parallel
partners; the `Splitter` decides whether the ops between keep the sharding (Megatron's pairs, arXiv 1909.08053,
without lists of names). Fused linears are tried in one segment and in the segments that the graph splits them into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from torch import fx

import oases.autotp.expert_rules  # noqa: F401  (fills the table of rules)
from oases.autotp.export import Exported, UnsplittableError, length_of, shape_of
from oases.autotp.op_table import args_of, name_of
from oases.autotp.rules import is_linear, linear_operands
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
    def degrees(self) -> list[int]:
        """Possible tensor-parallel degrees up to 1024."""
        common = gcd(*self.limits)
        return [degree for degree in range(1, 1025) if common % degree == 0]


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
    linears = [node for node in exported.graph.nodes if is_linear(node) and _has_weight(exported, node)]
    # The second of two linears in a row (an adapter, LoRA) last: it is rather cut as the linear that it is added to.
    for row in sorted(linears, key=lambda node: is_linear(_before(node))):
        weight = _weight(exported, row)
        if row in found.columns or row in found.rows or keep(weight):
            continue
        partners = _feeding(exported, row, linears)
        partners = [p for p in partners if p not in found.columns and p not in found.rows]
        if not partners or any(keep(_weight(exported, p)) for p in partners):
            continue
        structure = _paired(exported, found, row, partners, degree, sums)
        if isinstance(structure, Structure):
            found = structure
        else:
            found.refused[weight] = structure
    for node in [*found.columns, *found.rows, *({_before(each) for each in linears} & set(linears))]:
        found.refused.pop(_weight(exported, node), None)
    return found


def _paired(
    exported: Exported, found: Structure, row: fx.Node, partners: list[fx.Node], degree: int, sums: bool
) -> Structure | str:
    """`found` with these partners of `row` as columns; the reason where nothing works."""
    reason, best = "", None
    for columns in _subsets(partners):
        for choice in _choices(exported, columns):
            try:
                walk = Splitter(exported, {**found.columns, **choice}, plain, plain, sums=sums).run()
            except UnsplittableError as error:
                reason = reason or str(error)
                continue
            if row not in walk.rows:
                reason = reason or f"{row} has inputs that are not sharded"
                continue
            if best is None or gcd(*walk.limits) > gcd(*best.limits):
                best = Structure(dict(walk.columns), tuple(walk.rows), walk.limits, found.refused)
        if best is not None and gcd(*best.limits) % degree == 0:
            return best
        copied = _with_copies(exported, found, row, columns, degree, sums)
        if copied is not None:
            return copied
    return best or reason


def _with_copies(
    exported: Exported, found: Structure, row: fx.Node, columns: list[fx.Node], degree: int, sums: bool
) -> Structure | None:
    """`found` with these partners of `row` as columns, the narrower ones' heads (keys) on several ranks each."""
    widest = max(shape_of(node)[-1] for node in columns)
    narrow = [node for node in columns if shape_of(node)[-1] < widest]
    for copies in (n for n in range(2, degree) if narrow and degree % n == 0):
        choice: dict[fx.Node, Segments] = {node: (shape_of(node)[-1],) for node in columns}
        choice.update({node: Copied((shape_of(node)[-1] * copies,), copies) for node in narrow})
        try:
            walk = Splitter(exported, {**found.columns, **choice}, plain, plain, sums=sums).run()
        except UnsplittableError:  # these are replicated then, and `_paired` has the reason
            continue
        if row in walk.rows and gcd(*walk.limits) % degree == 0:
            return Structure(dict(walk.columns), tuple(walk.rows), walk.limits, found.refused)
    return None


def _subsets(partners: list[fx.Node]) -> list[list[fx.Node]]:
    """Candidates: all; those that feed no other (second of low-rank pairs); the widest (queries, with replicated
    keys).
    """
    above = {p for p in partners if any(p in _ancestors(other) for other in partners if other is not p)}
    widest = max(shape_of(p)[-1] for p in partners)
    found = [partners, [p for p in partners if p not in above], [p for p in partners if shape_of(p)[-1] == widest]]
    return [each for at, each in enumerate(found) if each and each not in found[:at]]


def _choices(exported: Exported, columns: list[fx.Node]) -> Iterable[dict[fx.Node, Segments]]:
    """Ways to cut these linears: in one segment, then as the graph splits their output."""
    options = [_segments(node) for node in columns]
    if prod(len(option) for option in options) > 16:
        options = [option[:2] for option in options]
    most = max(len(option) for option in options)
    for place in range(most):
        yield {node: option[min(place, len(option) - 1)] for node, option in zip(columns, options, strict=True)}


def _segments(column: fx.Node) -> list[Segments]:
    """One segment, and every way in which the graph splits a dimension of this length before the next linear."""
    features = shape_of(column)[-1]
    found: list[Segments] = [(features,)]
    seen, queue = {column}, [column]
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            found.extend(_taken_apart(user, features))
            if not is_linear(user):
                queue.append(user)
    boundaries = sorted({end for node in seen for end in _slice_ends(node, features)})
    if boundaries:
        ends = [0, *boundaries, features]
        found.append(tuple(last - first for first, last in itertools.pairwise(ends)))
    return list(dict.fromkeys(found))


def _taken_apart(node: fx.Node, features: int) -> list[Segments]:
    name, outputs = name_of(node), node.meta.get("val")
    if name in ("split", "split_with_sizes", "chunk", "tensor_split") and isinstance(outputs, (list, tuple)):
        given = shape_of(args_of(node)[0])
        for dim, length in enumerate(given):
            lengths = tuple(length_of(output.shape[dim]) for output in outputs)
            if length == features and sum(lengths) == features:
                return [lengths]
    if name in ("view", "reshape", "unflatten", "_unsafe_view"):
        return [(features // n,) * n for n in shape_of(node) if 1 < n <= 8 and features % n == 0]
    return []


def _slice_ends(node: fx.Node, features: int) -> list[int]:
    if name_of(node) != "slice":
        return []
    _, dim, *ends = [*args_of(node), 0][:4] if len(args_of(node)) > 1 else (None, 0)
    shape = shape_of(args_of(node)[0])
    if shape[dim % len(shape)] != features or any(isinstance(end, fx.Node) for end in ends):
        return []
    first, last, _ = slice(*(args_of(node)[at] if len(args_of(node)) > at else None for at in (2, 3))).indices(
        features
    )
    return [end for end in (first, last) if 0 < end < features]


def _has_weight(exported: Exported, node: fx.Node) -> bool:
    weight = linear_operands(node)[1]
    return isinstance(weight, fx.Node) and weight.name in exported.parameters and len(shape_of(weight)) == 2


def _weight(exported: Exported, node: fx.Node) -> str:
    return exported.parameters[linear_operands(node)[1].name]


def _feeding(exported: Exported, row: fx.Node, linears: list[fx.Node]) -> list[fx.Node]:
    """Linears whose outputs reach `row` through no other linear."""
    found, seen, queue = [], set[fx.Node](), [linear_operands(row)[0]]
    known = set(linears)
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in known:
            found.append(node)
        else:
            queue.extend(node.all_input_nodes)
    return sorted(found, key=linears.index)


def _before(linear: fx.Node) -> fx.Node:
    """Node that a linear takes its input from, through casts."""
    node: fx.Node = linear_operands(linear)[0]
    while name_of(node) in ("to", "_to_copy"):
        node = args_of(node)[0]
    return node


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, queue = set[fx.Node](), list(node.all_input_nodes)
    while queue:
        other = queue.pop()
        if other not in seen:
            seen.add(other)
            queue.extend(other.all_input_nodes)
    return seen
