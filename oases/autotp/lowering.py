"""Make of a rank's graph what runs: linears, collectives and dropout for its marks, and one op for a chain.

Models write an RMSNorm as eight ops, GPT-2's GELU as eight and SwiGLU as two, each of which reads and writes its
tensors whole and keeps them for the backward pass. One op each computes them in float32 and rounds once, where the
chains round between their ops: in float32 the results are equal but for the order of sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from oases.autotp.splitter import enter, reduce
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_rank, group_size
from oases.distributed.collectives import all_reduce
from oases.distributed.collectives import reduce as summed
from oases.kernels import swiglu
from oases.layers.dropout import masked
from oases.layers.fused_norm import FUSED_ON
from oases.layers.linear import under_autocast
from oases.layers.weight_gradient import linear

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass(frozen=True)
class GroupRank:
    """This process in a tensor-parallel group, which is held by name."""

    group: str = ""
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, group: ProcessGroup | None) -> GroupRank:
        """This process's rank in a group."""
        return cls(group_name(group), group_rank(group), group_size(group))


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x times a weight [out, in], or [in, out] if transposed; its weight gradient may be deferred."""
    return linear(x, weight, bias, transposed=transposed)


def block_dropout(x: Tensor, p: float, cut: int | Literal["whole", "unknown"]) -> Tensor:
    """Dropout with the mask of the unsharded model inside of a stack; cut: see `whole_batch_mask`."""
    return masked(x, p, cut)


class _Enter(torch.autograd.Function):
    """Identity whose gradient is all-reduced (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous().clone(), group_of(ctx.group), "entry backward"), None


def entered(x: Tensor, group: str) -> Tensor:
    """Identity, with a gradient that is all-reduced over the group."""
    return _Enter.apply(x, group)


def total(x: Tensor, group: str) -> Tensor:
    """All-reduce over the group, with the identity as gradient (Megatron's g)."""
    return summed(x, group_of(group), "layer sum")


def row_linear(x: Tensor, weight: Tensor, group: str, transposed: bool) -> Tensor:
    """Row-parallel linear whose all-reduce overlaps with its own chunks."""
    x, weight, _ = under_autocast(x, weight.t() if transposed else weight, None)
    found: Tensor = torch.ops.oases.row_linear(x, weight, None, group, 2, False)
    return found


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """Column-parallel linear whose input gradient's all-reduce overlaps with its weight gradient."""
    x, weight, bias = under_autocast(x, weight.t() if transposed else weight, bias)
    found: Tensor = torch.ops.oases.column_linear(x, weight, bias, group, 2, False)
    return found


def lower(graph: fx.Graph, tp: GroupRank) -> fx.Graph:
    """Graph with collectives in place of its marks; a linear next to a collective of its own becomes an overlapped
    one.
    """
    made = fx.Graph()
    values: dict[fx.Node, Any] = {}
    several = tp.ranks > 1
    inside = {node.args[0] for node in graph.nodes if several and node.target is reduce and _overlaps(node)}
    taken = {node for node in graph.nodes if several and node.target is enter and _overlaps(node)}
    for node in graph.nodes:
        if node in inside or node in taken:
            continue
        given = [values.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is reduce and node.args[0] in inside:
            x, weight, _, transposed = node.args[0].args  # type: ignore[union-attr]
            args = (values[x], values[weight], tp.group, transposed)  # type: ignore[index]
            values[node] = made.call_function(row_linear, args)
        elif node.target in (reduce, enter) and not several:
            values[node] = given[0]
        elif node.target is reduce:
            values[node] = made.call_function(total, (given[0], tp.group))
        elif node.target is enter:
            values[node] = made.call_function(entered, (given[0], tp.group))
        elif node.target is block_linear and node.args[0] in taken:
            x = values[node.args[0].args[0]]  # type: ignore[union-attr, index]
            values[node] = made.call_function(column_linear, (x, given[1], given[2], tp.group, given[3]))
        else:
            values[node] = made.node_copy(node, lambda each: values[each])
    return made


def _overlaps(node: fx.Node) -> bool:
    """Whether a collective is of one linear alone: of its result, or of its input."""
    if node.target is reduce:
        x: Any = node.args[0]
        return x.target is block_linear and len(x.users) == 1 and x.args[2] is None
    (user, *others) = node.users or (node,)
    return not others and user.target is block_linear and user.args[0] is node and user.args[1] is not node


def fuse(graph: fx.Graph) -> None:
    """Replace SwiGLU, RMSNorm and GELU by one op each, in place, on the devices of FUSED_ON."""
    if not any(_value(node).device.type in FUSED_ON for node in graph.nodes if _is_tensor(node)):
        return
    for node in list(graph.nodes):
        if node.target is _aten.mul.Tensor and _is_tensor(node):
            _fuse_swiglu(node) or _fuse_norm(node) or _fuse_weight(node) or _fuse_gelu(node)
    graph.eliminate_dead_code()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in the type of x also under autocast: one kernel on accelerators."""
    return torch.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)


def _fuse_swiglu(node: fx.Node) -> bool:
    """Replace silu(gate) * up of two linears' results, or of the halves of one."""
    for activated, up in _either(node):
        if not _calls(activated, _aten.silu.default) or not _alike(node, activated, up):
            continue
        gate = activated.args[0]
        whole = _halved(gate, up)
        if _value(node).dtype in _DTYPES and (whole or (_is_linear(gate) and _is_linear(up))):
            return _replace(node, swiglu, (whole,) if whole else (gate, up))
    return False


def _fuse_norm(node: fx.Node) -> bool:
    """Replace x * rsqrt(mean(x ** 2) + eps), without a weight."""
    for x, scale in _either(node):
        if not _calls(scale, _aten.rsqrt.default) or not _calls(shifted := scale.args[0], _aten.add.Tensor):
            continue
        mean, eps = shifted.args
        if not _calls(mean, _aten.mean.dim) or not isinstance(eps, float):
            continue
        square, dims, *keep = mean.args
        if not _calls(square, _aten.pow.Tensor_Scalar) or square.args[1] != 2 or keep != [True]:
            continue
        base = square.args[0]
        last = dims in ([-1], [_value(node).dim() - 1])
        if last and _uncast(base) is _uncast(x) and _alike(node, base) and _value(node).dtype.itemsize >= 4:
            return _replace(node, rms_norm, (base, None, eps))
    return False


def _fuse_weight(node: fx.Node) -> bool:
    """Replace weight * norm, with casts to float32 before the norm and back after it."""
    for normed, weight in _either(node):
        back = normed.args[0] if _calls(normed, _aten.to.dtype) else normed
        if not _calls(back, rms_norm) or back.args[1] is not None or not _is_vector(weight, _value(node).dtype):
            continue
        base = back.args[0]
        for x in (_uncast(base), base):
            if _alike(node, normed, x) and _value(x).dtype.itemsize <= _value(base).dtype.itemsize:
                return _replace(node, rms_norm, (x, weight, back.args[2]))
    return False


def _fuse_gelu(node: fx.Node) -> bool:
    """Replace 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    for half, other in _either(node):
        x = _times(half, 0.5)
        if x is None or not _calls(other, _aten.add.Tensor) or other.args[1] != 1:
            continue
        argument = other.args[0]
        if not _calls(argument, _aten.tanh.default):
            continue
        total = _times(argument.args[0], math.sqrt(2 / math.pi))
        if _calls(total, _aten.add.Tensor) and total.args[0] is x and _alike(node, x):
            cube = _times(total.args[1], 0.044715)
            if _calls(cube, _aten.pow.Tensor_Scalar) and cube.args == (x, 3):
                return _replace(node, _aten.gelu.default, (x,), approximate="tanh")
    return False


def _either(node: fx.Node) -> list[tuple[Any, Any]]:
    """Both orders of the factors of a product of two tensors."""
    left, right = node.args[:2]
    return [(left, right), (right, left)] if _is_tensor(left) and _is_tensor(right) else []


def _times(node: Any, factor: float) -> Any:
    """The tensor of which a node is that multiple; None for another."""
    if not _calls(node, _aten.mul.Tensor) or not isinstance(node.args[1], float):
        return None
    return node.args[0] if math.isclose(node.args[1], factor, rel_tol=1e-6) else None


def _calls(node: Any, target: Any) -> bool:
    """Whether a node calls a function, for one other node alone."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1 and not node.kwargs


def _is_tensor(node: Any) -> bool:
    like = node.meta.get("like") if isinstance(node, fx.Node) else None
    return like is not None and isinstance(like.meta.get("val"), Tensor)


def _is_vector(node: fx.Node, dtype: torch.dtype) -> bool:
    return _value(node).dim() == 1 and _value(node).dtype == dtype


def _value(node: fx.Node) -> Tensor:
    """Fake tensor of the whole layer's value; a rank's may be a part of it."""
    value: Tensor = node.meta["like"].meta["val"]
    return value


def _alike(node: fx.Node, *others: Any) -> bool:
    """Whether values have the shape and type of that of a node."""
    value = _value(node)
    return all(
        _is_tensor(each) and (_value(each).dtype, _value(each).shape) == (value.dtype, value.shape) for each in others
    )


def _uncast(node: Any) -> Any:
    """The tensor that a node is, or is a cast of."""
    return node.args[0] if node.target is _aten.to.dtype else node


def _is_linear(node: Any) -> bool:
    return node.target in (block_linear, column_linear, _aten.linear.default)


def _halved(gate: fx.Node, up: fx.Node) -> Any:
    """The tensor whose last dimension is split into gate and up alone; None where there is none."""
    split = gate.all_input_nodes[0] if len(gate.args) == 2 else gate
    if split.target is not _aten.split_with_sizes.default or [gate.args, up.args] != [(split, 0), (split, 1)]:
        return None
    args: Any = split.args
    x, (first, *others), *dim = args
    alone = len(split.users) == 2 and len(gate.users) == len(up.users) == 1
    return x if alone and others == [first] and dim in ([-1], [_value(gate).dim() - 1]) else None


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> bool:
    """Call another function in place of a node, which nothing reads then. Returns True."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    return True
