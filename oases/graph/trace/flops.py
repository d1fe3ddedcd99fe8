"""FLOPs of an op by the formulas of torch's own flop counter, which knows products, convolutions and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from oases.errors import UsageError


class FlopFormulas:
    """Counts the FLOPs of a traced op's forward pass, once for all that are alike."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, node: Any) -> int:
        """FLOPs of an fx node whose arguments carry their shapes; 0 where torch has no formula."""
        if not _may_count(node):
            return 0
        args, kwargs = tree_map(
            _shape_of, (node.args, node.kwargs), is_leaf=lambda arg: isinstance(arg, torch.fx.Node)
        )
        key = repr((str(node.target), tree_map(_sizes, (args, kwargs))))
        if key not in self._known:
            self._known[key] = _counted(node.target, args, kwargs)
        return self._known[key]


def _may_count(node: Any) -> bool:
    """Whether the op has a formula, or is made of several, of which one may have: then it reads two tensors."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.overloadpacket in flop_registry:
        return True
    reads = [arg for arg in tree_leaves((node.args, node.kwargs)) if isinstance(arg, torch.fx.Node)]
    return len(reads) >= 2 and target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


def _shape_of(arg: Any) -> Any:
    """A tensor on `meta` for a node, on which an op can be run for nothing."""
    if isinstance(arg, torch.fx.Node):
        return tree_map(
            lambda v: (
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
                if isinstance(v, torch.Tensor)
                else v
            ),
            arg.meta.get("val"),
        )
    return torch.device("meta") if isinstance(arg, torch.device) else arg


def _sizes(arg: Any) -> Any:
    return (tuple(arg.shape), str(arg.dtype)) if isinstance(arg, torch.Tensor) else arg


def _counted(target: Any, args: Any, kwargs: Any) -> int:
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            target(*args, **kwargs)
    except Exception as error:  # an op may raise anything
        shapes = [tuple(arg.shape) for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
        raise UsageError(f"the FLOPs of {target} on shapes {shapes} cannot be counted: {error}") from error
    return counter.get_total_flops()
