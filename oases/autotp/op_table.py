"""Op table: how each aten op maps the dimensions of its arguments to those of its results.

Dimensions of one call that run together have one letter, as in an einsum. Three clients ask the same rows: `splitter`
follows the sharded dimension, `tokens` that of the sequence, and for that of the batch reads along which lengths an
op relates elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from oases.autotp.shapes import Split

Letters = tuple[int | str, ...]
"""A letter for each dimension; numbers are those from the end, by which tensors are broadcast."""
Effect = Literal["contracts", "runs along", "cuts or joins", "repeats"]
"""Effect along a letter where a result depends on elements of other indices."""


@dataclass(frozen=True)
class Dims:
    """Dimensions of one call. given: letters of its tensors; results: letters of each result.

    along: letters along which the op relates elements. results: None where it is not known which letters remain.
    """

    given: Sequence[tuple[fx.Node, Letters]]
    results: Sequence[Letters] | None
    along: Mapping[int | str, Effect] = field(default_factory=dict)


@dataclass(frozen=True)
class Path:
    """Where a split of a call's inputs goes. results: split of each result.

    beside: place of the dimension in each other tensor, None where it has none or is broadcast. why: an Effect along
    the dimension, "combines" for splits that do not fit, "unknown" for an op that is not known; else "".
    """

    results: Sequence[Split] = ()
    beside: Mapping[fx.Node, int | None] = field(default_factory=dict)
    why: Effect | Literal["combines", "unknown", ""] = ""


def follow(node: fx.Node, splits: Mapping[fx.Node, Split]) -> Path:
    """Path of a split through a call. splits: of those inputs that have one."""
    dims = dims_of(node)
    if dims is None or dims.results is None or any(each not in dict(dims.given) for each in splits):
        return Path(why="unknown")
    found = {(letters[splits[each].dim], splits[each].segments) for each, letters in dims.given if each in splits}
    for letter, _ in found:
        if letter in dims.along:
            return Path(why=dims.along[letter])
    (letter, segments), *others = found
    if others or any(letter not in result for result in dims.results):
        return Path(why="combines" if others else "unknown")
    beside = {each: letters.index(letter) if letter in letters and _is_long(each, letters.index(letter)) else None
              for each, letters in dims.given if each not in splits}  # fmt: skip
    return Path([Split(result.index(letter), segments) for result in dims.results], beside)


def _is_long(node: fx.Node, dim: int) -> bool:
    """Whether a dimension is not broadcast. A copy of a pending addend has the shape of the sum in its trace."""
    rank = len(lengths_in(node))
    while name_of(node) in ("clone", "alias", "detach", "contiguous", "to", "_to_copy"):
        node = args_of(node)[0]
    lengths = lengths_in(node)
    return rank - dim <= len(lengths) and lengths[dim - rank] != 1


Row = Callable[[fx.Node], Dims]
_ROWS: dict[str, Row] = {}


def dims_of(node: fx.Node) -> Dims | None:
    """Dimensions of a call, in a layer's graph or in a rank's; None for an op that is not known."""
    name = name_of(node)
    row = _ROWS.get("scaled_dot_product_attention" if "scaled_dot_product" in name else name)
    if row is None and is_element_wise(node):
        row = _element_wise
    return None if row is None else row(node)


def name_of(node: fx.Node) -> str:
    """`aten.add.Tensor` -> `add`; the name of a function that is no op."""
    parts = str(node.target).split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return parts[1]
    return str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a node."""
    return node.args


def argument(node: fx.Node, place: int, name: str = "", default: Any = None) -> Any:
    """Argument of a node by its place or name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def value_in(node: Any) -> Any:
    """Traced value of a node: fake tensors, of full shape also in a rank's graph, or a length."""
    return node.meta.get("like", node).meta.get("val") if isinstance(node, fx.Node) else None


def lengths_in(node: Any) -> tuple[Any, ...]:
    """Full shape of a node; a dynamic length is its expression. () for what is no tensor."""
    value = value_in(node)
    return tuple(map(expression, value.shape)) if isinstance(value, Tensor) else ()


def expression(length: Any) -> Any:
    """A dynamic length's expression; others themselves."""
    return length.node.expr if isinstance(length, (torch.SymInt, torch.SymFloat)) else length


def tensors(node: fx.Node) -> list[fx.Node]:
    """The arguments that are tensors, each once."""
    return [each for each in node.all_input_nodes if isinstance(value_in(each), Tensor)]


def is_element_wise(node: fx.Node) -> bool:
    """Whether each element of the result depends on those of the same place, broadcast."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in ELEMENT_WISE


ELEMENT_WISE = (
    *("mul", "multiply", "div", "divide", "floor_divide", "add", "sub", "subtract", "rsub", "neg", "pow", "where"),
    *("masked_fill", "silu", "softplus", "relu6", "hardtanh", "hardswish", "polar", "real", "imag", "fill", "copy"),
    *("__and__", "__or__", "__xor__", "to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach"),
    *("lift_fresh_copy", "full_like", "zeros_like", "ones_like"),
)
"""Ops besides those that torch tags as pointwise."""
_BROADCAST = (
    *("expand", "expand_as", "broadcast_to", "empty_like", "rand_like", "randn_like", "bernoulli", "dropout"),
    *("native_dropout", "enter", "block_dropout"),
)
"""Others whose results have the dimensions of their arguments."""
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
"""Ops that split and merge dimensions, which `shapes.viewed` follows."""
_APART = (
    *(*VIEWS, "view_as", "tile", "feature_dropout", "embedding", "one_hot", "bucketize", "prelu", "getitem"),
    *("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"),
    "oases.experts.default",
)
"""Other ops that relate no elements of a dimension."""
_PLACES = {
    **dict.fromkeys(("sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "max", "min", "aminmax"), 1),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "median", "nanmedian", "argmax", "argmin", "any"), 1),
    **dict.fromkeys(("all", "count_nonzero", "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp"), 1),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "mode", "glu"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm", "topk", "kthvalue"), 2),
    **dict.fromkeys((f"fft_{kind}{of}" for kind in ("fft", "ifft", "rfft", "irfft") for of in ("", "2", "n")), 2),
}
"""Ops that run along some dimensions, or all, and the place of these among the arguments."""
_LAST = ("sort", "argsort", "mode", "glu", "topk", "kthvalue", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft")
"""Those of them that run along the last dimension where none is given."""
_BY_INDEX = (
    *("index_select", "gather", "unfold", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"),
    "index_fill",
)
"""Ops that take or put elements along a dimension, whose other dimensions may change, too."""
_TAKES = {
    **dict.fromkeys(("slice", "narrow", "select", "unbind", "flip", "cat", "concat", "concatenate", *_BY_INDEX), 1),
    **dict.fromkeys(("roll", "split", "split_with_sizes", "chunk", "tensor_split"), 2),
    **dict.fromkeys(("select_scatter", "slice_scatter"), 2),
}
"""Ops that take, put, reorder or join elements along a dimension, and the place of that among the arguments."""


def _row(*names: str) -> Callable[[Row], Row]:
    def register(function: Row) -> Row:
        _ROWS.update(dict.fromkeys(names, function))
        return function

    return register


def _letters(node: Any) -> Letters:
    return tuple(range(-len(lengths_in(node)), 0))


def _several(node: fx.Node, letters: Letters) -> list[Letters]:
    """The same letters for each result."""
    found = value_in(node)
    return [letters] * (len(found) if isinstance(found, (list, tuple)) else 1)


def _numbers(dims: Any, rank: int) -> list[int]:
    """Dimensions from the end; all for None."""
    if dims is None or isinstance(dims, bool) or dims == []:  # bool: std(unbiased)
        return list(range(-rank, 0))
    return [int(d) % rank - rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])] if rank else []


@_row(*ELEMENT_WISE, *_BROADCAST)
def _element_wise(node: fx.Node) -> Dims:
    value = value_in(node)
    first = value[0] if isinstance(value, (list, tuple)) else value
    rank = len(first.shape) if isinstance(first, Tensor) else 0
    return Dims([(each, _letters(each)) for each in tensors(node)], _several(node, tuple(range(-rank, 0))))


@_row(*_APART)
def _apart(node: fx.Node) -> Dims:
    return Dims([(each, _letters(each)) for each in tensors(node)], None)


@_row("transpose", "swapaxes", "swapdims", "t", "mT", "numpy_T", "permute", "movedim")
def _permuted(node: fx.Node) -> Dims:
    x, *rest = args_of(node)
    letters, name = _letters(x), name_of(node)
    order: list[Any] = list(letters)
    if name == "permute":
        order = _numbers(rest[0], len(letters))
    elif name == "numpy_T":
        order.reverse()
    elif name == "movedim":
        source, target = (_numbers(dims, len(letters)) for dims in rest)
        order = [each for each in letters if each not in source]
        for at, each in sorted(zip(target, source, strict=True)):
            order.insert(at + len(letters), each)
    elif len(letters) > 1:
        one, other = _numbers(rest or ((0, 1) if name == "t" else (-2, -1)), len(letters))
        order[one], order[other] = order[other], order[one]
    return Dims([(x, letters)], [tuple(order)])


@_row("unsqueeze", "stack", "squeeze", "view_as_real", "view_as_complex")
def _of_length_one(node: fx.Node) -> Dims:
    """A dimension more or less."""
    found, name = tensors(node), name_of(node)
    letters = list(_letters(found[0]))
    given, rank = [(each, tuple(letters)) for each in found], len(letters)
    if name in ("unsqueeze", "stack"):
        letters.insert(int(argument(node, 1, "dim", 0)) % (rank + 1), "new")
    elif name == "view_as_real":
        letters.append("new")
    elif name == "view_as_complex":
        return Dims(given, [tuple(letters[:-1])], {-1: "runs along"})
    else:
        ones = [d for d in _numbers(argument(node, 1, "dim", None), rank) if lengths_in(found[0])[d] == 1]
        letters = [each for each in letters if each not in ones]
    return Dims(given, [tuple(letters)])


@_row("repeat", "repeat_interleave")
def _repeated(node: fx.Node) -> Dims:
    x, times, *_ = args_of(node)
    letters = _letters(x)
    if name_of(node) == "repeat":
        result = tuple(range(-len(times), 0))
        return Dims([(x, letters)], [result], {at: "repeats" for at in result if times[at] != 1})
    dim = argument(node, 2, "dim", None)
    if not isinstance(times, int) or dim is None:
        return Dims([(x, letters)], None)
    return Dims([(x, letters)], [letters], {_numbers(dim, len(letters))[0]: "repeats"})


@_row(*_PLACES, *_TAKES)
def _along(node: fx.Node) -> Dims:
    (x, *others), name, value = tensors(node), name_of(node), value_in(node)
    if others and name in _PLACES:  # the larger one of two
        return _element_wise(node)
    letters, default = _letters(x), -1 if name in _LAST else None if name in ("roll", *_PLACES) else 0
    dims = argument(node, (_PLACES | _TAKES)[name], "dim", node.kwargs.get("dims", default))
    along = _numbers(dims, len(letters))
    fewer = tuple(each for each in letters if each not in along)
    effect: Effect = "cuts or joins" if name in _TAKES else "runs along"
    if name in _BY_INDEX:
        return Dims([(x, letters)], None, dict.fromkeys(along, effect))
    if name == "slice" and lengths_in(node) == lengths_in(x):  # of everything
        along = []
    given = [(x, letters), *((each, fewer if name == "select_scatter" else letters) for each in others)]
    first = value[0] if isinstance(value, (list, tuple)) else value
    result = letters if len(first.shape) == len(letters) else fewer
    return Dims(given, _several(node, result), dict.fromkeys(along, effect))


@_row("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "tril", "triu", "pad", "constant_pad_nd")
def _over_last(node: fx.Node) -> Dims:
    x, *rest = args_of(node)
    name = name_of(node)
    last = 2 if name in ("tril", "triu") else len(rest[0]) // (2 if "pad" in name else 1)
    given = [(each, _letters(each)) for each in tensors(node)]
    return Dims(given, _several(node, _letters(x)), dict.fromkeys(range(-last, 0), "runs along"))


@_row("group_norm", "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "convolution",
      *(f"conv{dims}d" for dims in (1, 2, 3)))  # fmt: skip
def _of_channels(node: fx.Node) -> Dims:
    """Samples are dimension 0, where there are any, and channels dimension 1."""
    x, other = args_of(node)[:2]
    letters, name = _letters(x), name_of(node)
    along = letters[1:] if name == "group_norm" or len(letters) == len(lengths_in(other)) else letters
    if "batch_norm" in name:
        training = next(each for each in node.args[3:] if isinstance(each, bool))
        along = (letters[0], *letters[2:]) if training else ()
    return Dims([(x, letters)], None, dict.fromkeys(along, "runs along"))


@_row("index", "index_put", "_unsafe_index")
def _indexed(node: fx.Node) -> Dims:
    x, indices = args_of(node)[:2]
    letters = _letters(x)
    by = [letter for letter, index in zip(letters, indices, strict=False) if index is not None]
    return Dims([(x, letters)], None, dict.fromkeys(by, "cuts or joins"))


def _last(node: Any, names: str) -> Letters:
    """Letters of which the last ones are given, for as many dimensions as there are."""
    rank = len(lengths_in(node))
    return (*range(len(names) - rank, 0), *names[max(len(names) - rank, 0) :])


def _formula(node: fx.Node, formula: str, along: str = "", names: Callable[[Any, str], Letters] = _last,
             arguments: Sequence[Any] = ()) -> Dims:  # fmt: skip
    """Dimensions by a formula of the last ones of each argument. along: letters that the op runs along, besides those
    that it contracts.
    """
    terms, _, result = formula.partition("->")
    given = [(each, names(each, term)) for each, term in zip(arguments or node.args, terms.split(","), strict=False)
             if isinstance(each, fx.Node)]  # fmt: skip
    effects: dict[int | str, Effect] = dict.fromkeys(set(terms) - set(result) - {","}, "contracts")
    results = [names(node, result)] if isinstance(value_in(node), Tensor) else None
    return Dims(given, results, {**effects, **dict.fromkeys(along, "runs along")})


@_row("linear", "block_linear")
def _linear(node: fx.Node) -> Dims:
    return _formula(node, "i,io,o->o" if len(node.args) > 3 and node.args[3] else "i,oi,o->o")


@_row("mm", "bmm", "matmul", "addmm", "baddbmm")
def _product(node: fx.Node) -> Dims:
    if "add" in name_of(node):
        return _formula(node, "nk,ni,ik->nk")
    return _formula(node, "ni,ik->nk" if len(lengths_in(node.args[1])) > 1 else "ni,i->n")


@_row("einsum")
def _einsum(node: fx.Node) -> Dims:
    formula, factors = str(args_of(node)[0]).replace(" ", ""), args_of(node)[1]
    if "->" not in formula or "." in formula:
        return Dims([], None)
    return _formula(node, formula, names=lambda _, letters: tuple(letters), arguments=factors)


@_row("linalg_solve_triangular")
def _solved(node: fx.Node) -> Dims:
    return _formula(node, "nn,nk->nk" if node.kwargs.get("left", True) else "nn,kn->kn", "n")


@_row("scaled_dot_product_attention")
def _attention(node: fx.Node) -> Dims:
    return _formula(node, "qd,kd,ke,qk->qe", "qk")
