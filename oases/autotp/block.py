"""GraphBlock: a traced part of a layer as a block of an OverlappedStack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.balanced import TokenExchange, state_of
from oases.autotp.program import Program, mangled
from oases.core.blocks.sharding import Cut
from oases.core.execution.dtensors import read
from oases.core.execution.group import HoldsGroup, ProcessGroup
from oases.core.execution.piece import Leaves
from oases.moe.dispatch import AllToAll
from oases.moe.exchange_work import ExchangeWork
from oases.plans.expert_schedules import exchanging

Programs = Callable[[Tensor, "tuple[Any, ...]"], Program]
"""(activation of a sub-batch, the call's other leaves for it) -> program."""


Known = tuple[Program, "dict[str, Any]"]
"""Program of a sub-batch's shape, and its values that are the same in all blocks and sub-batches."""


class LayerCall:
    """One call of a layer as its blocks see it: the program of each sub-batch and its inputs.

    parts: ranks that the sequence is divided over between blocks. by_tokens: program of the whole call, whose
    sub-batches may be of tokens; else None. The program of each sub-batch shape and the layer's buffers and constants
    are looked up once per call.
    """

    def __init__(
        self, layer: nn.Module, programs: Programs, parts: int = 1, by_tokens: Program | None = None
    ) -> None:
        self.layer = layer
        self.programs = programs
        self.parts = parts
        self.of_tokens = None if by_tokens is None else (by_tokens, dict[str, Any]())
        self._known: dict[torch.Size, Known] = {}

    def whole(self, part: Tensor) -> torch.Size:
        """Shape of an activation of which this rank has a part of the sequence."""
        batch, tokens, *rest = part.shape
        return torch.Size((batch, tokens * self.parts, *rest))

    def run(
        self, block: GraphBlock, name: str, x: Tensor, given: tuple[Tensor, ...], rest: tuple[Any, ...],
        whole: torch.Size | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a graph of a block, see `Program.reading`, on a sub-batch.

        whole: shape of the sub-batch's activation where `x` is this rank's part of it.
        """
        return self.read(self.known(x, rest, whole), block, name, (x, *given), rest)

    def known(self, x: Tensor, rest: tuple[Any, ...], whole: torch.Size | None = None) -> Known:
        """Program and fixed values of sub-batches like `x`, for `read`."""
        shape = x.shape if whole is None else whole
        known = self.of_tokens or self._known.get(shape)
        if known is None:
            if whole is not None:  # shape and type alone are read: no memory for the rest
                x_whole = x.detach().new_empty(()).expand(whole)
            known = self._known[shape] = (self.programs(x if whole is None else x_whole, rest), {})
        return known

    def read(
        self, known: Known, block: GraphBlock, name: str, given: tuple[Tensor, ...], rest: tuple[Any, ...]
    ) -> Any:
        """Run a graph of a block on the tensors that it is given; see `run`."""
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
                    fixed[source] = value_of(source, program, self.layer, {}, given[0].device)
                read.append(fixed[source])
        return piece.run(*given, *read)


def value_of(source: str, program: Program, layer: nn.Module, inputs: dict[Any, Any], device: torch.device) -> Any:
    """Value of a placeholder in a call: an input, or a parameter, buffer or constant of the layer."""
    if source in inputs:
        return inputs[source]
    exported = program.exported
    if source in exported.buffers:
        return layer.get_buffer(exported.buffers[source])
    if source in exported.parameters:
        return read(layer.get_parameter(exported.parameters[source]))
    if source in program.walk.states:
        return state_of(layer.get_submodule(program.walk.states[source]))
    return program.constant(source, device)


class GraphBlock(HoldsGroup, nn.Module):
    """Block `number` of a layer. Its parameters are those of the layer that its graphs read.

    balanced: paths of modules with experts of groups of their own. sends_tokens: whether the stack's schedule may run
    it in three pieces, with the all-to-alls of its tokens between them. has_prologue: whether `partial` and `combine`
    get the result of `prologue` in place of the activation.
    """

    def __init__(
        self,
        layer: nn.Module,
        number: int,
        names: Iterable[str],
        cuts: dict[str, Cut],
        group: ProcessGroup | None,
        balanced: Collection[str] = (),
        *,
        sends_tokens: bool = False,
        has_prologue: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.sends_tokens, self.has_prologue = number, sends_tokens, has_prologue
        self.process_group = group
        self.token_wise = self.causal = False
        """Whether it relates no tokens, or none to a later one, in the current call, if that may be cut into
        sub-batches of tokens."""
        self.names = tuple(sorted(names))
        self._paths = [(name, mangled(name), tuple(name.split("."))) for name in self.names]
        self.adopt(layer)
        self.local = frozenset(
            mangled(name) for name in self.names if name in cuts and name.rpartition(".")[0] in balanced
        )
        """Parameters that are not this block's group's shards, and whose gradients are not summed over it either."""
        dims = {mangled(name): cuts[name].dim for name in self.names if name in cuts}
        self.shard_dims = {name: dim for name, dim in dims.items() if name not in self.local}

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

    def prologue(self, x: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation -> activation behind what every rank computes in full, such as an attention that stays whole."""
        known = call.known(x, rest)
        if known[0].blocks[self.number].prologue is None:  # nothing is, with the arguments of this call
            return x
        found: Tensor = call.read(known, self, "prologue", (x,), rest)
        return found

    def partial(self, x: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation [batch, ...] -> this rank's partial sum."""
        return call.run(self, "partial" if call.of_tokens is None else "tokens.partial", x, (), rest)

    def combine(self, x: Tensor, y: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation and sum -> the next activation, [batch, ...]: all whole, or all a part of the sequence."""
        if call.parts > 1:
            return call.run(self, "part.combine", x, (y,), rest, call.whole(x))
        if call.of_tokens is not None:
            return call.run(self, "tokens.combine", x, (y,), rest)
        return call.run(self, "combine", x, (y,), rest)

    def prepare(self, x: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Activation of this rank's part of the sequence -> what is gathered for `product`, of the same shape."""
        return call.run(self, "part.prepare", x, (), rest, call.whole(x))

    def product(self, h: Tensor, call: LayerCall, *rest: Any) -> Tensor:
        """Result of `prepare` of the whole sequence -> this rank's partial sum."""
        return call.run(self, "part.product", h, (), rest)

    exchanging = staticmethod(exchanging)

    def token_work(self, leaves: list[Leaves], more: Sequence[Leaves], *, differentiable: bool) -> ExchangeWork:
        """Ops of a call's blocks that send tokens. leaves: stand-ins of parameters; more: of the blocks' inputs."""
        return ExchangeWork(leaves, more, differentiable=differentiable)

    def exchange(self, order: int, call: LayerCall, *rest: Any) -> BlockExchange:
        """The experts of a sub-batch, in three pieces. order: hash of the schedule."""
        return BlockExchange(self, order, call, rest)


class BlockExchange:
    """A sub-batch of a block that sends tokens to experts; see `oases.moe.exchange_work`."""

    bypasses = True
    dispatch: AllToAll
    combine: AllToAll
    _known: Known
    _tokens: TokenExchange

    def __init__(self, block: GraphBlock, order: int, call: LayerCall, rest: tuple[Any, ...]) -> None:
        self._block, self._order, self._call, self._rest = block, order, call, rest

    def route(self, h: Tensor) -> tuple[Tensor, ...]:
        """Block's input [batch, ...] -> rows to send, and what the other pieces take."""
        self._known = self._call.known(h, self._rest)
        x, index, weights = self._read("experts.before", h)
        state, *given = self._read("experts.given", h)
        self._tokens = tokens = TokenExchange(state, self._order)
        with state.together():
            share, routing, own = tokens.begin(x, index, weights, given)
            run = tokens.forward
            copies = run.send_copies(own)
            rows = run.route(share, routing)
        self.dispatch, self.combine, self.sent, self.together = run.dispatch, run.combine, tokens.sent, state.together
        return rows, routing.weights, *copies

    def compute(self, rows: Tensor, *others: Tensor) -> Tensor:
        """Received rows -> rows to send back."""
        state, *given = self._read("experts.given", rows)
        _, *copies = others
        with state.together():
            return self._tokens.forward.compute(rows, self._tokens.experts(given), *copies)

    def gather(self, *given: Tensor) -> Tensor:
        """Block's input, rows that came back, and the routing's weights -> this rank's partial sum."""
        h, rows, weights, *_ = given
        y = self._tokens.padded(self._tokens.forward.gather(rows, weights))
        found: Tensor = self._read("experts.after", h, y)
        return found

    def _read(self, name: str, *given: Tensor) -> Any:
        return self._call.read(self._known, self._block, name, given, self._rest)
