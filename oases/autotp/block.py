"""GraphBlock: a traced part of a layer as a block of an OverlappedStack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.program import Program, mangled
from oases.execution.group import HoldsGroup, ProcessGroup
from oases.parallel.sharding import Cut

Programs = Callable[[Tensor, "tuple[Any, ...]"], Program]
"""(activation of a sub-batch, the call's other leaves for it) -> program."""


class LayerCall:
    """One call of a layer as its blocks see it: the program of each sub-batch and its inputs.

    leaves: those of (args, kwargs) without the activation. The program of each sub-batch shape and the layer's
    buffers and constants are looked up once per call.
    """

    def __init__(self, layer: nn.Module, programs: Programs) -> None:
        self.layer = layer
        self.programs = programs
        self._known: dict[torch.Size, tuple[Program, dict[str, Any]]] = {}

    def run(
        self, block: GraphBlock, name: str, x: Tensor, given: tuple[Tensor, ...], rest: tuple[Any, ...]
    ) -> Tensor:
        """Run `partial` or `combine` of a block on a sub-batch."""
        known = self._known.get(x.shape)
        if known is None:
            known = self._known[x.shape] = (self.programs(x, rest), {})
        program, fixed = known
        piece, sources = program.reading(block.number, name)
        parameters = block._parameters
        read: list[Any] = []
        for leaf, parameter, source in sources:
            if leaf is not None:
                read.append(rest[leaf])
            elif parameter:
                read.append(parameters[parameter])
            else:
                if source not in fixed:
                    fixed[source] = value_of(source, program, self.layer, {}, x.device)
                read.append(fixed[source])
        return piece.run(x, *given, *read)


def value_of(source: str, program: Program, layer: nn.Module, inputs: dict[Any, Any], device: torch.device) -> Any:
    """Value of a placeholder in a call: an input, or a parameter, buffer or constant of the layer."""
    if source in inputs:
        return inputs[source]
    exported = program.exported
    if source in exported.buffers:
        return layer.get_buffer(exported.buffers[source])
    if source in exported.parameters:
        return layer.get_parameter(exported.parameters[source])
    return program.constant(source, device)


class GraphBlock(HoldsGroup, nn.Module):
    """Block `number` of a layer. Its parameters are those of the layer that its graphs read."""

    def __init__(
        self, layer: nn.Module, number: int, names: Iterable[str], cuts: dict[str, Cut], group: ProcessGroup | None
    ) -> None:
        super().__init__()
        self.number = number
        self.process_group = group
        self.names = tuple(sorted(names))
        self._paths = [(name, mangled(name), tuple(name.split("."))) for name in self.names]
        self.adopt(layer)
        self.shard_dims = {mangled(name): cuts[name].dim for name in self.names if name in cuts}

    def adopt(self, layer: nn.Module) -> None:
        """Register the layer's current parameters, which may have been replaced since the last call."""
        held = self._parameters
        for name, own, (*modules, last) in self._paths:
            part: nn.Module | None = layer
            for each in modules:  # as get_parameter, which costs as much as a small op
                part = None if part is None else part._modules.get(each)
            found = None if part is None else part._parameters.get(last)
            if found is None:
                found = layer.get_parameter(name)
            if held.get(own) is not found:
                self.register_parameter(own, found)

    def partial(self, x: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation [batch, ...] -> this rank's partial sum."""
        return call.run(self, "partial", x, (), rest)

    def combine(self, x: Tensor, y: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation and all-reduced sum -> the next activation, [batch, ...]."""
        return call.run(self, "combine", x, (y,), rest)
