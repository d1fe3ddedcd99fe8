"""Sharding rules of views, slices and concatenations."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from oases.autotp.export import UnsplittableError
from oases.autotp.rules import tensors
from oases.autotp.shapes import Copied, pieces, viewed
from oases.autotp.splitter import RULES, Split, Splitter, Value, args_of, keyword, name_of, rule


@rule("view", "reshape", "_unsafe_view", "unflatten", "flatten")
def view(s: Splitter, node: fx.Node) -> Value:
    """View of the same elements; its sizes become the rank's."""
    x = args_of(node)[0]
    value, before, after = s.value(x), s.shape(x), s.shape(node)
    if value.split is None and not value.partial:
        return Value(s.copy(node))
    if value.split is None:
        if before[-1] != after[-1] or any(len(shape_of_addend(each)) > 1 for each in value.addends):
            return Value(s.copy(node))
        return Value(_with_first(s, node, value.node), None, True, value.addends)
    if value.split.copies > 1:
        return _view_of_copies(s, node, value.node, value.split)
    found = viewed(before, after, value.split.dim, value.split.segments)
    if found is None:
        raise UnsplittableError(
            f"{node}: a view from {before} to {after} mixes the sharded dimension {value.split.dim}"
        )
    dim, segments = found
    sizes, at = args_of(node)[1], dim
    if name_of(node) == "flatten":
        return s.split(_with_first(s, node, value.node), dim, segments)
    if name_of(node) == "unflatten":
        sizes, at = args_of(node)[2], dim - int(args_of(node)[1]) % len(before)
    sizes = list(fx.map_arg(list(sizes), s.whole))
    if 0 <= at < len(sizes) and sizes[at] != -1:
        sizes[at] = _local(s, sizes[at])
    args = (value.node, sizes) if name_of(node) != "unflatten" else (value.node, args_of(node)[1], sizes)
    return s.split(s.emit(node, args), dim, segments)


def _view_of_copies(s: Splitter, node: fx.Node, x: fx.Node, split: Split) -> Value:
    """View of heads that are on several ranks each; of one that repeats keys, each rank takes its queries'."""
    before, after, copies = list(s.shape(args_of(node)[0])), s.shape(node), split.copies
    length, before[split.dim] = before[split.dim], before[split.dim] * copies
    for dim, size in enumerate(after):
        found = viewed(tuple(before), (*after[:dim], size * copies, *after[dim + 1 :]), split.dim, split.segments)
        inside = size > 1 and prod(after[:dim]) == prod(before[: split.dim])  # there are several heads
        if not inside or found is None or found[0] != dim or name_of(node) == "unflatten":
            continue
        if name_of(node) == "flatten":
            made = _with_first(s, node, x)
        else:
            sizes = list(fx.map_arg(list(args_of(node)[1]), s.whole))
            sizes[dim] = s.local(size * copies)
            made = s.emit(node, (x, sizes))
        segments = Copied(found[1], copies)
        value = s.split(made, dim, segments)
        return s.own(value.node, dim, segments) if size > length else value
    raise UnsplittableError(
        f"{node}: a view from {s.shape(args_of(node)[0])} to {after} mixes heads on several ranks"
    )


def shape_of_addend(addend: fx.Node) -> tuple[int, ...]:
    """Shape of a pending addend of a partial value."""
    return tuple(addend.meta["like"].meta["val"].shape)


def _local(s: Splitter, size: Any) -> Any:
    if isinstance(size, int):
        return s.local(size)
    return size if s.ranks == 1 else s.graph.call_function(_divided, (size, s.ranks))


def _divided(size: int, ranks: int) -> int:
    return size // ranks


def _with_first(s: Splitter, node: fx.Node, first: fx.Node) -> fx.Node:
    """Call the op with another first argument."""
    return s.emit(node, (first, *fx.map_arg(args_of(node)[1:], s.whole)), dict(fx.map_arg(node.kwargs, s.whole)))


def _moved(s: Splitter, node: fx.Node, dim: int) -> Value:
    """The op on a sharded value whose sharded dimension becomes `dim`."""
    value = s.value(args_of(node)[0])
    assert value.split is not None
    return s.split(_with_first(s, node, value.node), dim, value.split.segments)


@rule("transpose", "swapaxes", "permute", "t", "unsqueeze", "squeeze", "movedim")
def rearranged(s: Splitter, node: fx.Node) -> Value:
    """Permute dimensions, or add or remove dimensions of length one."""
    x, *rest = args_of(node)
    split, dims = s.value(x).split, len(s.shape(x))
    if split is None:
        return Value(s.copy(node))
    name = name_of(node)
    if name in ("transpose", "swapaxes", "t"):
        first, second = (d % dims for d in (rest or (0, 1)))
        return _moved(s, node, {first: second, second: first}.get(split.dim, split.dim))
    if name == "permute":
        return _moved(s, node, [d % dims for d in rest[0]].index(split.dim))
    if name == "unsqueeze":
        return _moved(s, node, split.dim + (int(rest[0]) % (dims + 1) <= split.dim))
    if name == "squeeze" and rest:
        gone = [d % dims for d in (rest[0] if isinstance(rest[0], (list, tuple)) else rest)]
        gone = [d for d in gone if s.shape(x)[d] == 1]
        return _moved(s, node, split.dim - len([d for d in gone if d < split.dim]))
    raise UnsplittableError(f"{node.target} of a sharded tensor")


@rule("expand", "expand_as", "repeat")
def expanded(s: Splitter, node: fx.Node) -> Value:
    """Expand or repeat along dimensions that are not sharded."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is None:
        return Value(s.copy(node))
    if name_of(node) == "expand_as":
        raise UnsplittableError(f"{node.target} of a sharded tensor")
    sizes = list(fx.map_arg(list(args_of(node)[1]), s.whole))
    at = split.dim + len(sizes) - len(s.shape(x))
    if name_of(node) == "repeat":
        if sizes[at] != 1:
            raise UnsplittableError(f"{node.target} repeats the sharded dimension")
    elif sizes[at] != -1:
        sizes[at] = _local(s, sizes[at] if split.copies == 1 else sizes[at] * split.copies)
    return s.split(s.emit(node, (s.value(x).node, sizes)), at, split.segments)


@rule("repeat_interleave")
def repeated(s: Splitter, node: fx.Node) -> Value:
    """repeat_interleave, as grouped-query attention uses it."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is None:
        return Value(s.copy(node))
    times, dim = args_of(node)[1], args_of(node)[2] if len(args_of(node)) > 2 else node.kwargs.get("dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        raise UnsplittableError(f"{node.target} of a sharded tensor")
    along = dim % len(s.shape(x)) == split.dim
    segments = tuple(length * times for length in split.segments) if along else split.segments
    if along and split.copies > 1:
        segments = Copied(segments, split.copies)
        made = s.split(_with_first(s, node, s.value(x).node), split.dim, segments)
        return s.own(made.node, split.dim, segments)
    return s.split(_with_first(s, node, s.value(x).node), split.dim, segments)


@rule("slice", "narrow", "select")
def sliced(s: Splitter, node: fx.Node) -> Value:
    """Slice along another dimension, or along the sharded one at segment ends."""
    x = args_of(node)[0]
    split, shape = s.value(x).split, s.shape(x)
    if split is None:
        return Value(s.copy(node))
    dim = int(args_of(node)[1] if len(args_of(node)) > 1 else 0) % len(shape)
    if dim != split.dim:
        return _moved(s, node, split.dim - (name_of(node) == "select" and dim < split.dim))
    if name_of(node) != "slice" or (len(args_of(node)) > 4 and args_of(node)[4] != 1):
        raise UnsplittableError(f"{node.target} runs along the sharded dimension")
    ends = [args_of(node)[at] if len(args_of(node)) > at else None for at in (2, 3)]
    if any(isinstance(end, fx.Node) for end in ends):
        raise UnsplittableError(f"{node.target} runs along the sharded dimension to a computed end")
    first, last, _ = slice(*ends).indices(shape[dim])
    inside = pieces(split.segments, [first, last - first, shape[dim] - last])
    if inside is None:
        raise UnsplittableError(f"{node.target} takes [{first}, {last}) of a tensor sharded in {split.segments}")
    if not inside[1]:
        raise UnsplittableError(f"{node.target} is empty along the sharded dimension")
    piece = s.emit(node, (s.value(x).node, dim, s.local(first), s.local(last)))
    return s.split(piece, dim, inside[1])


@rule("new_empty", "new_zeros")
def made_anew(s: Splitter, node: fx.Node) -> Value:
    """New tensor as long as a sharded one in its sharded dimension, to put heads together in, say."""
    x, sizes = args_of(node)[:2]
    split, shape = s.value(x).split, s.shape(x)
    if split is None:
        return Value(s.copy(node))
    if len(s.shape(node)) != len(shape) or s.shape(node)[split.dim] != shape[split.dim] or split.copies > 1:
        raise UnsplittableError(f"{node.target} of another shape than the sharded tensor {x}")
    sizes = list(fx.map_arg(list(sizes), s.whole))
    sizes[split.dim] = _local(s, sizes[split.dim])
    made = s.emit(node, (s.value(x).node, sizes), dict(fx.map_arg(node.kwargs, s.whole)))
    return s.split(made, split.dim, split.segments)


@rule("slice_scatter", "select_scatter")
def put_into(s: Splitter, node: fx.Node) -> Value:
    """Put a tensor into a part of another one along a dimension that is not sharded."""
    x, source, *rest = args_of(node)
    one, dim = name_of(node) == "select_scatter", int(rest[0] if rest else 0) % len(s.shape(x))
    split, given = s.value(x).split, s.value(source).split
    if split is None and given is not None:
        split = Split(given.dim + (one and dim <= given.dim), given.segments)
    if split is None:
        return Value(s.copy(node))
    if dim == split.dim:
        raise UnsplittableError(f"{node.target} runs along the sharded dimension")
    part = s.as_split(source, Split(split.dim - (one and dim < split.dim), split.segments))
    args = (s.as_split(x, split), part, *fx.map_arg(rest, s.whole))
    return s.split(s.emit(node, args, dict(fx.map_arg(node.kwargs, s.whole))), split.dim, split.segments)


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def taken_apart(s: Splitter, node: fx.Node) -> tuple[Value, ...]:
    """Split along another dimension, or along the sharded one at segment ends."""
    x = args_of(node)[0]
    split, outputs = s.value(x).split, node.meta["val"]
    name = name_of(node)
    at = 1 if name == "unbind" else 2
    dim = int(args_of(node)[at] if len(args_of(node)) > at else keyword(node, "dim", 0)) % len(s.shape(x))

    if split is None:
        return tuple(Value(each) for each in _several(s, node, s.copy(node)))
    if dim != split.dim:
        after = split.dim - (name == "unbind" and dim < split.dim)
        made = _with_first(s, node, s.value(x).node)
        return tuple(s.split(each, after, split.segments) for each in _several(s, node, made))
    if name == "unbind":
        raise UnsplittableError(f"{node.target} runs along the sharded dimension")
    lengths = [int(output.shape[dim]) for output in outputs]
    inside = pieces(split.segments, lengths)
    if inside is None:
        raise UnsplittableError(f"{node.target} into {lengths} of a tensor sharded in {split.segments}")
    made = s.call(
        torch.ops.aten.split_with_sizes.default, (s.value(x).node, [s.local(n) for n in lengths], dim), node
    )
    return tuple(s.split(each, dim, segments) for each, segments in zip(_several(s, node, made), inside, strict=True))


class _Like:
    """One of a node's several outputs."""

    def __init__(self, node: fx.Node, value: Any) -> None:
        self.name, self.meta = node.name, {"val": value}


def _several(s: Splitter, node: fx.Node, made: fx.Node) -> list[fx.Node]:
    """Outputs of `made`, which has as many as `node`."""
    found = []
    for place, output in enumerate(node.meta["val"]):
        one = s.graph.call_function(_item, (made, place))
        one.meta["like"] = _Like(node, output)
        found.append(one)
    return found


@rule("max", "min")
def extremes(s: Splitter, node: fx.Node) -> Value | tuple[Value, ...]:
    """Largest or smallest values along a dimension that is not sharded, with their places; or of two tensors."""
    x, *rest = args_of(node)
    if isinstance(node.meta["val"], torch.Tensor):
        if rest:  # element-wise
            return RULES["mul"](s, node)
        if s.value(x).split is not None:
            raise UnsplittableError(f"{node.target} needs a replicated input")
        return Value(s.copy(node))
    split, dims = s.value(x).split, len(s.shape(x))
    if split is None:
        return tuple(Value(each) for each in _several(s, node, s.copy(node)))
    dim = int(rest[0]) % dims
    if dim == split.dim:
        raise UnsplittableError(f"{node.target} runs along the sharded dimension")
    after = split.dim - (dim < split.dim and len(node.meta["val"][0].shape) < dims)
    made = s.copy(node, {x: s.value(x).node})
    return tuple(s.split(each, after, split.segments) for each in _several(s, node, made))


def _item(several: Any, place: int) -> Any:
    return several[place]


@rule("cat", "concat", "stack")
def joined(s: Splitter, node: fx.Node) -> Value:
    """Concatenate; replicated inputs are sliced, except along the sharded dimension."""
    given, found = args_of(node)[0], tensors(node)
    splits = {v.split for each in found if (v := s.value(each)).split is not None}
    if not splits:
        return Value(s.copy(node))
    dims = len(s.shape(node))
    dim = int(args_of(node)[1] if len(args_of(node)) > 1 else keyword(node, "dim", 0)) % dims
    stacked = name_of(node) == "stack"
    if {each.dim for each in splits if each is not None} == {dim} and not stacked:
        if any(s.value(each).split is None for each in found) or any(each.copies > 1 for each in splits if each):
            raise UnsplittableError(f"{node.target} joins sharded and replicated tensors")
        segments = tuple(n for each in given if (v := s.value(each)).split for n in v.split.segments)
        return s.split(s.copy(node, {each: s.value(each).node for each in found}), dim, segments)
    if len(splits) > 1:
        raise UnsplittableError(f"{node.target} joins tensors sharded along {splits}")
    (split,) = splits
    assert split is not None
    made = s.copy(node, {each: s.as_split(each, Split(split.dim, split.segments)) for each in found})
    return s.split(made, split.dim + (stacked and dim <= split.dim), split.segments)


@rule("view_as_complex", "view_as_real")
def complex_numbers(s: Splitter, node: fx.Node) -> Value:
    """Real pairs in the last dimension as complex numbers, and back."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is not None and name_of(node) == "view_as_complex" and split.dim == len(s.shape(x)) - 1:
        raise UnsplittableError(f"{node.target} of a sharded tensor")
    return Value(s.copy(node)) if split is None else _moved(s, node, split.dim)


@rule("tril", "triu")
def triangle(s: Splitter, node: fx.Node) -> Value:
    """tril and triu, of the last two dimensions."""
    x = args_of(node)[0]
    split = s.value(x).split
    if split is not None and split.dim >= len(s.shape(x)) - 2:
        raise UnsplittableError(f"{node.target} of a sharded tensor")
    return Value(s.copy(node)) if split is None else _moved(s, node, split.dim)
