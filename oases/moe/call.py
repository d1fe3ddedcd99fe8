"""Call of an ExpertStack: the ops of its list on tensors, and its gradients, returned block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from oases.core.execution.call import ScheduledCall
from oases.core.execution.executor import Context, Program, Step
from oases.core.execution.failure import FailureMonitor
from oases.core.execution.gathering import BlockUnit
from oases.core.execution.piece import BlockParameters, Leaves
from oases.core.schedule import Op
from oases.moe.dispatch import RoutingError
from oases.moe.exchange import ExpertExchange
from oases.moe.exchange_work import ExchangeWork, RandomStates
from oases.moe.layer import OverlappedMoE

_AGAIN = {"RD": "D", "RE": "E", "R": "F"}
"""Recomputed piece, by op."""
_READERS = ("D", "F", "RD", "R", "B", "BF")


class ExpertProgram(Program):
    """Steps of an expert schedule."""

    def reads(self, op: Op) -> Sequence[int]:
        """The block of a piece besides the experts, which are never FSDP-sharded."""
        return (op.block,) if op.kind in _READERS else ()

    def makes_gradients(self, op: Op) -> Sequence[int]:
        """The block; for experts once the gradients of their copies are at the owner."""
        ends = op.kind in ("B", "BF", "BE") or (op.kind == "wait" and op.of == "return")
        return (op.block,) if ends else ()


class ExpertParameters(BlockParameters):
    """Parameters of a block, with the indices of its experts' weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        layer: OverlappedMoE = block.experts  # type: ignore[assignment]
        self.experts = [numbers[id(weight)] for weight in layer.experts.weights.given]


class ExpertWork:
    """Tensors of one call between ops, and the implementation of each op of an expert schedule.

    exchanges, parameters: of each block. x: input of the call. leaves: stand-ins of each block's parameters.
    """

    def __init__(
        self, exchanges: list[ExpertExchange], program: ExpertProgram, x: Tensor, leaves: list[Leaves],
        parameters: Sequence[ExpertParameters], *, differentiable: bool,
    ) -> None:  # fmt: skip
        again = differentiable and bool(program.schedule.recomputed)
        self._tokens = ExchangeWork(
            leaves, differentiable=differentiable, random=RandomStates(x.device) if again else None, own_labels=True
        )
        self.leaves, self._exchanges, self._parameters = leaves, exchanges, parameters
        self._last, self._read_again = len(exchanges) - 1, [x] if again else []
        # Inputs of blocks by number, the last one the output; their gradients; and inputs that are recomputed.
        self._x: dict[int, Tensor] = {0: x}
        self._g: dict[int, Tensor] = {}
        self._recomputed: dict[int, Tensor] = {}

    def handlers(self) -> dict[str, Callable[[Step], None]]:
        """Implementation of each op, by `Step.key`."""
        of = self._of
        return {
            "D": self._do_D, "E": self._do_E, "F": self._do_F, "P": of(ExpertExchange.plan),
            **dict.fromkeys(_AGAIN, self._do_again),
            "BF": self._do_BF, "BE": self._do_BE, "B": self._do_B,
            **{f"all_to_all {kind}": self._tokens.send for kind in ("D", "E", "BF", "BE")},
            **{f"wait {kind}": self._tokens.wait for kind in ("D", "E", "BF", "BE")},
            "share": of(ExpertExchange.share), "wait share": _arrives_later, "join": of(ExpertExchange.join),
            "wait join": of(ExpertExchange.joined), "split": of(ExpertExchange.split), "wait split": _arrives_later,
            "return": of(ExpertExchange.give_back), "wait return": of(ExpertExchange.given_back),
        }  # fmt: skip

    def output(self) -> Tensor:
        """Output of the last block."""
        for exchange in self._exchanges:
            if exchange.opened is not None:
                exchange.opened.done = True
        return self._x.pop(self._last + 1)

    def versions(self) -> list[int]:
        """Version of the input, which a recomputation reads."""
        return [x._version for x in self._read_again]

    def begin_backward(self, grad: Tensor) -> None:
        """Set the gradient of the output."""
        for exchange in self._exchanges:
            if exchange.opened is not None:
                exchange.opened.closed = True
        self._g[self._last + 1] = grad

    def input_gradient(self) -> Tensor:
        """Gradient of the input."""
        return self._g.pop(0)

    def gradients_of(self, block: int) -> list[Tensor | None]:
        """Complete gradients of a block, by parameter index."""
        found: list[Tensor | None] = self.leaves[block].take(False)
        for number, gradient in zip(self._parameters[block].experts, self._exchanges[block].gradients, strict=True):
            found[number] = gradient
        self._exchanges[block].gradients = []
        return found

    def forget(self) -> None:
        """Release every tensor."""
        for held in (
            self._tokens, self._exchanges, self._x, self._g, self._recomputed, self._read_again, self.leaves
        ):  # fmt: skip
            held.clear()

    def _of(self, act: Callable[[ExpertExchange], None]) -> Callable[[Step], None]:
        exchanges = self._exchanges
        return lambda step: act(exchanges[step.block])

    def _do_D(self, step: Step) -> None:  # noqa: N802
        block = step.block
        self._tokens.do_D(step.place, self._exchanges[block], self._x.pop(block), recomputed=block > 0)

    def _do_E(self, step: Step) -> None:  # noqa: N802
        self._tokens.do_E(step.place, *self._exchanges[step.block].inputs())

    def _do_F(self, step: Step) -> None:  # noqa: N802
        gather, given = self._tokens.arrived(step.place)
        (self._x[step.block + 1],) = self._tokens.run("F", step.place, lambda *given: (gather(*given),), given)

    def _do_again(self, step: Step) -> None:
        kind, block = _AGAIN[step.key], step.block
        given = (self._recomputed.pop(block),) if kind == "D" and block else None
        results = self._tokens.run_again(kind, step.place, given)
        if kind == "D" and not block:
            self._read_again.clear()
        if kind == "F" and block < self._last:
            (self._recomputed[block + 1],) = results

    def _do_BF(self, step: Step) -> None:  # noqa: N802
        self._tokens.begin_backward(step.place, self._tokens.backward("F", step.place, self._g.pop(step.block + 1)))

    def _do_BE(self, step: Step) -> None:  # noqa: N802
        self._exchanges[step.block].computed(self._tokens.do_BE(step.place))

    def _do_B(self, step: Step) -> None:  # noqa: N802
        self._g[step.block] = self._tokens.input_gradient(step.place)


def _arrives_later(step: Step) -> None:
    """Nothing: the op that forwards this result waits for it."""


class ExpertCall(ScheduledCall):
    """Call of an ExpertStack; used by its autograd nodes and by a pipeline."""

    RECOMPUTE = frozenset(_AGAIN)

    def __init__(
        self, program: ExpertProgram, work: ExpertWork, parameters: Sequence[ExpertParameters],
        units: Sequence[BlockUnit], *, monitor: FailureMonitor | None, context: Context, differentiable: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            "ExpertStack", program, work, parameters, monitor=monitor, context=context,
            units=units, differentiable=differentiable, unanimous=(RoutingError,),
        )  # fmt: skip
        self._blocks = work

    def entry_tensors(self) -> list[Tensor]:
        """Nothing: every parameter belongs to a block."""
        return []

    def block_tensors(self, block: int) -> list[Tensor]:
        """Parameters of a block that require gradients."""
        parameters = self._parameters[block]
        tensors = parameters.whole(self._units[block].parameters if self._units else None)
        return [tensors[number] for number in parameters.trained]

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; return the gradients of `block_tensors(block)`."""
        with self._together():
            self._run_to(self._ends[block])
            gradients = self._blocks.gradients_of(block)
            return [gradients[number] for number in self._parameters[block].trained]

    def finish(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the rest; return the gradient of the input."""
        with self._together():
            self._run_to(len(self._backward))
            return self._blocks.input_gradient(), []

    def defer_weights(self) -> None:
        """Nothing: expert schedules have no W op."""

    def compute_weights(self) -> None:
        """Nothing: no weight gradient was deferred."""
