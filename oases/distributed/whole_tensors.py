"""Ops on DTensors that run on whole tensors, as in one process: where DTensor has no rule, or would lose a write.

Code outside of a model's layers reads and writes its weights: a loss computed from the head's weight in chunks, rows
of an embedding, a norm. What it computes with, beside weights, is the same on all ranks, so that each gathers the
weights of such an op, computes all of it, and keeps its part of what the op writes. Results are plain tensors, whose
gradients are whole, too: a hook of the weight takes this rank's part.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from oases.core.execution.dtensors import as_gradient, is_dtensor, local_of
from oases.errors import UsageError

_aten = torch.ops.aten
_SETS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.copy_.default)
"""Ops that write without reading."""


class View(Tensor):
    """Part of a sharded DTensor, as `weight[3]`, which DTensor would copy: reads gather it, and writes reach it."""

    base: Any
    views: list[Any]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(base: Any, *views: Any) -> View:
        """View of a DTensor. views: functions from its full tensor to the part."""
        part = _through(views, torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"))
        made: View = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            View, part.shape, part.stride(), part.storage_offset(), dtype=part.dtype, device=local_of(base).device
        )
        made.base, made.views = base, list(views)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape and type; values would have to be gathered."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the values that the DTensor has now."""
        return run_whole(op, args, kwargs or {})


def _through(views: Any, whole: Tensor) -> Tensor:
    return reduce(lambda part, view: view(part), views, whole)


def run_whole(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on whole tensors. Collective, but for views."""
    gives_tensors = any("Tensor" in str(each.type) for each in op._schema.returns)
    for each in tree_leaves((args, kwargs)) if gives_tensors else ():
        if isinstance(each, View) or is_dtensor(each):
            _place_gradients(each)
    with torch.no_grad():
        if (
            op in _SETS
            and isinstance(args[0], View)
            and not any(isinstance(each, View) or is_dtensor(each) for each in args[1:])
        ):
            return _set(op, *args)
        return (_views_of if op.is_view else _computed)(op, args, kwargs)


def _set(op: Any, view: View, *value: Any) -> View:
    """Set part of a DTensor to what is no DTensor. No collective: one rank may set numbers of its own part."""
    base, local = view.base, local_of(view.base)
    values, chosen = (torch.zeros(base.shape, dtype=dtype, device=local.device) for dtype in (base.dtype, torch.bool))
    op(_through(view.views, values), *value)
    _through(view.views, chosen).fill_(True)
    local.copy_(torch.where(part_of(base, chosen), part_of(base, values), local))
    return view


def refuse_collective(op: Any, args: Any, kwargs: Any) -> None:
    """Raise UsageError for an op of torch.distributed."""
    given: Any = next(each for each in tree_leaves((args, kwargs)) if is_dtensor(each))
    raise UsageError(
        f"{op} was given a DTensor of shape {tuple(given.shape)}, placed as {given.placements}; give it this rank's "
        "part, tensor.to_local(), or all of it, tensor.full_tensor(): gradients of a parallelized model are reduced "
        "already, and its replicated weights are equal"
    )


def _computed(op: Any, args: Any, kwargs: Any) -> Any:
    wholes: dict[int, tuple[Any, Tensor]] = {}

    def whole(each: Any) -> Any:
        if isinstance(each, View):
            return _through(each.views, whole(each.base))
        if not is_dtensor(each):
            return each
        if id(each) not in wholes:
            wholes[id(each)] = each, each.full_tensor()
        return wholes[id(each)][1]

    ours = tree_map(whole, (args, kwargs))
    result = op(*ours[0], **ours[1])
    for each in _written(op, args, kwargs):
        tensor, full = wholes[id(each.base if isinstance(each, View) else each)]
        if tensor.shape != full.shape:
            raise UsageError(
                f"{op} would give a DTensor of shape {tuple(tensor.shape)} another one, {tuple(full.shape)}; compute "
                "with tensor.full_tensor(), and copy_() the result"
            )
        keep_part(tensor, full)
    same = {id(new): old for new, old in zip(tree_leaves(ours), tree_leaves((args, kwargs)), strict=True)}
    return tree_map_only(Tensor, lambda each: same.get(id(each), each), result)


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """DTensors, and views of them, that an op writes."""
    schema = op._schema.arguments
    given = [*zip(schema, args, strict=False), *((each, kwargs[each.name]) for each in schema if each.name in kwargs)]
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [each for each in tree_leaves(written) if isinstance(each, View) or is_dtensor(each)]


def _views_of(op: Any, args: Any, kwargs: Any) -> Any:
    """Views of a DTensor, or of a view, by an op that has one or more."""
    of, rest = args[0], args[1:]
    base, before = (of.base, of.views) if isinstance(of, View) else (of, [])

    def view(whole: Tensor, at: int | None = None) -> Any:
        made = op(whole, *rest, **kwargs)
        return made if at is None else made[at]

    found = view(_through(before, torch.empty_strided(base.shape, base.stride(), device="meta")))
    if isinstance(found, Tensor):
        return View.of(base, *before, view)
    return [View.of(base, *before, partial(view, at=at)) for at in range(len(found))]


def keep_part(tensor: Any, whole: Tensor) -> None:
    """Give a DTensor this rank's part of a full tensor."""
    local_of(tensor).copy_(part_of(tensor, whole))


def part_of(tensor: Any, whole: Tensor) -> Tensor:
    """This rank's part of a full tensor that is placed as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(replicated.redistribute(placements=tensor.placements))


def _place_gradients(tensor: Tensor) -> None:
    """Have the DTensors that a tensor is computed from, and that require gradients, take their parts of them."""
    leaves = [tensor] if isinstance(tensor, nn.Parameter) and tensor.requires_grad else []
    # Views that were made without gradients do not tell how they were computed.
    nodes, seen = [tensor.grad_fn] if torch.is_grad_enabled() else [], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            nodes += [each for each, _ in node.next_functions]
    for leaf in leaves:
        known = (getattr(each, "func", None) for each in (leaf._backward_hooks or {}).values())
        if is_dtensor(leaf) and _placed not in known:
            leaf.register_hook(partial(_placed, leaf))


def _placed(leaf: Tensor, gradient: Tensor) -> Tensor | None:
    return None if is_dtensor(gradient) else as_gradient(leaf, part_of(leaf, gradient).contiguous())


def draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw a full tensor, as the first rank of the mesh does, and keep this rank's part."""
    this, *others = args
    whole = torch.empty(this.shape, dtype=this.dtype, device=local_of(this).device)
    op(whole, *others, **kwargs)
    for group in this.device_mesh.get_all_groups():
        dist.broadcast(whole, group=group, group_src=0)
    keep_part(this, whole)
    return this
