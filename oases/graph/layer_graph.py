"""Layer graph: the ops of a traced model in execution order with their inputs, FLOPs and bytes, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod

Shape = tuple[int, ...]
_LAYER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter, or buffer, under one of its names; tied ones have the same identity."""

    name: str
    shape: Shape
    dtype: str
    identity: int
    buffer: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Input:
    """Input tensor of the model."""

    name: str
    shape: Shape
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One op. inputs: names of the nodes and model inputs it reads, without duplicates. parameters: with buffers.

    shapes: of each output. num_bytes: of all outputs, views included; bytes_out: written, 0 if the output is a view
    of the input. floating: an output is of a floating-point dtype. module: path of the calling module, "" for the
    model itself. flops: of the forward pass.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    num_bytes: int
    floating: bool = True
    module: str = ""
    parameters: tuple[str, ...] = ()
    flops: int = 0
    bytes_out: int = 0


@dataclass(frozen=True)
class LayerGraph:
    """Graph of a model: nodes in execution order, inputs, and parameters under all their names."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]

    @cached_property
    def table(self) -> dict[str, Parameter]:
        """Parameters and buffers by name."""
        return {each.name: each for each in self.parameters}

    @cached_property
    def place(self) -> dict[str, int]:
        """Index of each node by its name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def value_bytes(self) -> dict[str, int]:
        """Bytes of each value (input or node), views included."""
        found = {each.name: each.num_bytes for each in self.inputs}
        return found | {node.name: node.num_bytes for node in self.nodes}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Values with gradients: floating-point, and computed from a parameter."""
        found: set[str] = set()
        for node in self.nodes:
            reads = any(not self.table[name].buffer for name in node.parameters)
            if (reads or not found.isdisjoint(node.inputs)) and node.floating:
                found.add(node.name)
        return frozenset(found)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once, without buffers."""
        return sum({each.identity: each.size for each in self.parameters if not each.buffer}.values())


def layer_of(module: str) -> str | None:
    """First module in a module list on a path: "model.layers.3" of "model.layers.3.mlp.act"; None without one."""
    match = _LAYER.match(module)
    return match[0] if match else None
