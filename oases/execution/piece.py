"""Autograd graphs cut at the collectives: one per (block, sub-batch) and method, run backward when a schedule says.

Only graph edges are held, not the tensors at them, so memory goes as soon as no graph and no op to come needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from oases.execution.weight_gradient import PutOff

Gradients = dict[str, Tensor]
"""By the name of the leaf: of a parameter, that within its block's Method."""


@dataclass(frozen=True)
class Leaves:
    """Where graphs end that are not to run on into the caller's: stand-ins, and the sums of their gradients."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: Gradients = field(default_factory=dict)


# By block: its methods, compiled with the options that the block was compiled with.
_compiled_methods: WeakKeyDictionary[nn.Module, dict[str, Callable[..., Tensor]]] = WeakKeyDictionary()


def _compiled(block: Any, name: str) -> Callable[..., Tensor] | None:
    """The method of a block that was given to `torch.compile`; None for any other block.

    ValueError for one compiled in place, by `.compile()`: that covers forward(), which a stack never calls.
    """
    if block._compiled_call_impl is not None:
        raise ValueError(
            f"a block ({type(block).__name__}) was compiled by .compile(), which covers forward() alone; give the "
            "stack torch.compile(block) instead, whose partial() and combine() are then compiled"
        )
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # where it is not loaded, nothing is compiled
    if dynamo is None or not isinstance(block, dynamo.OptimizedModule):
        return None
    methods = _compiled_methods.setdefault(block, {})
    if name not in methods:
        methods[name] = block.dynamo_ctx(getattr(block._orig_mod, name))
    return methods[name]


# What makes autograd record a source; nobody asks for its gradient.
_anchor = torch.zeros((), requires_grad=True)


class _Source(torch.autograd.Function):
    """Where a graph begins: an input whose gradient can be asked for by its edge, without keeping its memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


class Graph:
    """One graph by its edges: where gradients enter and where those of the inputs leave."""

    def __init__(self, root: GradientEdge, inputs: list[GradientEdge]) -> None:
        self._root = root
        self._inputs = inputs

    def differentiate(self, grad: Tensor, *leaves: Leaves, put_off: PutOff | None = None) -> list[Tensor | None]:
        """Run it backward: gradients of its inputs; those of `leaves` are added to their sums.

        put_off: where this graph notes what it puts off.
        """
        wanted = [(part.sums, n, t) for part in leaves for n, t in part.tensors.items() if t.requires_grad]
        inputs: list[Any] = [*self._inputs, *(tensor for _, _, tensor in wanted)]
        found = torch.autograd.grad([self._root], inputs, [grad], allow_unused=True)
        noted = [] if put_off is None else [note.grad for note in put_off.notes]
        read = (grad, *found[: len(self._inputs)], *noted)
        own = {t.untyped_storage().data_ptr() for t in read if t is not None}
        for (sums, name, _), gradient in zip(wanted, found[len(self._inputs) :], strict=True):
            if gradient is None:
                continue
            if name in sums:
                sums[name].add_(gradient)
                continue
            # Autograd may hand one tensor to two leaves, or an expanded one: sums need memory of their own.
            memory = gradient.untyped_storage().data_ptr()
            fresh = memory not in own and gradient.is_contiguous()
            own.add(memory)
            sums[name] = gradient if fresh else gradient.clone(memory_format=torch.contiguous_format)
        return list(found[: len(self._inputs)])


def plain_name(name: str) -> str:
    """A parameter's name within its block, of that within the block's Method, be the block compiled or not."""
    return name.removeprefix("block.").removeprefix("_orig_mod.")


class Method(nn.Module):
    """A method of a block as a module of its own, with the parameters it runs on as an argument.

    The parameters are stand-ins (detached, sharing memory), so that the gradient hooks of the real ones fire once per
    step in the outer graph and not once per sub-batch in here.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block = block
        self.name = name

    def forward(self, *args: Tensor) -> Tensor:
        """Call the method, compiled if the block was given to `torch.compile`."""
        method = _compiled(self.block, self.name) or getattr(self.block, self.name)
        result: Tensor = method(*args)
        return result

    def run(self, leaves: Leaves, *inputs: Any) -> Tensor:
        """Call the method on the parameters `leaves` without recording a graph."""
        with torch.no_grad():
            result: Tensor = torch.func.functional_call(self, leaves.tensors, inputs)
        return result

    def record(self, leaves: Leaves, *inputs: Tensor, values: tuple[Any, ...] = ()) -> tuple[Tensor, Graph]:
        """Call the method on the parameters `leaves`; return its result, still part of the graph, and the graph.

        values: further arguments; tensors among them that are to get gradients are leaves themselves.
        """
        with torch.enable_grad():
            sources = tuple(_Source.apply(_anchor, data) for data in inputs)
            result: Tensor = torch.func.functional_call(self, leaves.tensors, (*sources, *values))
        return result, Graph(get_gradient_edge(result), [get_gradient_edge(source) for source in sources])

    def leaves(self, whole: Mapping[str, nn.Parameter] | None = None) -> Leaves:
        """Fresh stand-ins of all parameters, by name, without gradients.

        whole: by their names in the block, where shards stand in the block and these are gathered when they are read.
        """
        found = dict(self.named_parameters())
        if whole is not None:
            found = {name: whole[plain_name(name)] for name in found}
        return Leaves({name: _stand_in(parameter) for name, parameter in found.items()})


class Methods:
    """What an execution calls of one block.

    Under sequence parallelism a block may be halved at the gather: `prepare(x) -> h`, token by token, on the rank's
    part of the sequence (its norm), and `product(h) -> y` on all of it. The first block gets the whole input, and
    like a block without the two it runs `partial` on all of it.
    """

    def __init__(self, block: nn.Module, *, halved: bool) -> None:
        self.prepare = Method(block, "prepare") if halved else None
        self.partial = Method(block, "product" if halved else "partial")
        self.combine = Method(block, "combine")


def _stand_in(parameter: Tensor) -> Tensor:
    found = parameter.detach().requires_grad_(parameter.requires_grad)
    if parameter.grad_dtype != parameter.dtype:  # sums over sub-batches are of the type of those over micro-batches
        found.grad_dtype = parameter.grad_dtype
    return found
