"""One call of a stack: its forward and backward pass by a schedule, and its gradients, returned block by block.

In the outer autograd graph a call is a chain of nodes, entry -> block 0 -> ... -> block n-1 -> exit. The backward
pass walks it from the exit; the node of a block runs the schedule until that block's gradients are complete and
returns them, so hooks of its parameters (of DistributedDataParallel, say) fire while the rest still runs. During a
pass, stand-ins replace the blocks' parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from oases.core.execution.dtensors import local_of
from oases.core.execution.executor import Context, Executor, Handlers, Program, Step
from oases.core.execution.failure import FailTogether, FailureMonitor, unwatch_backward, watch_backward
from oases.core.execution.gathering import BlockUnit, UnitGatherer
from oases.core.execution.piece import BlockParameters, Leaves


class Work(Protocol):
    """Implementations of a schedule's ops on one call's tensors. leaves: the stand-ins of each block's parameters."""

    leaves: list[Leaves]

    def handlers(self) -> Handlers:
        """Implementation of each op, by `Step.key`."""

    def output(self) -> Tensor:
        """The output, after the last op of the forward pass."""

    def versions(self) -> list[int]:
        """Versions of the caller's tensors that recomputation reads, which changes in place increase."""

    def begin_backward(self, grad: Tensor) -> None:
        """Set the gradient of the output."""

    def input_gradient(self) -> Tensor:
        """Gradient of the input, after the last op."""

    def forget(self) -> None:
        """Release every tensor."""


_RECOMPUTE = frozenset(("R", "RC", "RD", "RE"))  # kinds of the recomputation ops


class ScheduledCall(ABC):
    """The passes of one call. Subclasses return the gradients of blocks in `finish_block`.

    units: by block, where weights are sharded over data-parallel ranks; else ().
    """

    def __init__(
        self, name: str, program: Program, work: Work, parameters: Sequence[BlockParameters], *,
        monitor: FailureMonitor | None, context: Context, units: Sequence[BlockUnit], differentiable: bool,
        unanimous: tuple[type[Exception], ...] = (),
    ) -> None:  # fmt: skip
        self.num_blocks = len(parameters)
        self.output: Tensor | None = None
        """Result of the forward pass, from the entry node to the exit node."""
        self._name, self._program, self._work, self._parameters = name, program, work, parameters
        self._differentiable = differentiable
        self._monitor, self._unanimous = monitor, unanimous
        self._units, self._context = units, context
        gathering = self._gathering = UnitGatherer(units) if units else None
        handlers = work.handlers()
        if differentiable and program.schedule.recomputed:
            handlers = _as_now(handlers, _RECOMPUTE)
        if gathering is not None:
            handlers = gathering.around(handlers, program, partial(_put, parameters, work.leaves))
        self._executor = Executor(handlers, program.schedule, program.label, context)
        self._backward, self._ends = program.backward, program.ends
        self._recomputes = differentiable and bool(program.schedule.recomputed)
        self._versions: tuple[list[int], list[int]] | None = None
        self._position = 0
        self._begun = False

    def apply(self, x: Tensor) -> Tensor:
        """Run the forward pass on `x`, as nodes of the outer graph that are differentiable in `x` and in the tensors
        below.
        """
        if not self._differentiable:
            return self.forward()
        self._context.handles.add(self)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the entry's backward, which ends the schedule, is called
        token = _Entry.apply(self, x, *self.entry_tensors())
        for block in range(self.num_blocks):
            token = _Block.apply(self, block, token, *self.block_tensors(block))
        return cast(Tensor, _Exit.apply(self, token))

    def entry_tensors(self) -> Sequence[Tensor]:
        """Tensors whose gradients `finish` returns."""
        return []

    def block_tensors(self, block: int) -> Sequence[Tensor]:
        """Tensors whose gradients `finish_block` returns: the block's parameters that require gradients."""
        return self._chosen(block, self._parameters[block].trained)

    @abstractmethod
    def finish_block(self, block: int) -> Sequence[Tensor | None]:
        """Run until the gradients of `block_tensors(block)` are complete; return them."""

    def finish(self) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Run the rest; return the gradients of the input and of `entry_tensors()`."""
        with self._together():
            self._run_to(len(self._backward))
            return self._work.input_gradient(), []

    @abstractmethod
    def defer_weights(self) -> None:
        """Skip W in the backward pass; `compute_weights` runs it later."""

    @abstractmethod
    def compute_weights(self) -> None:
        """Accumulate the weight gradients of a backward pass without W into the parameters; their hooks run."""

    def forward(self) -> Tensor:
        """Run the forward pass."""
        steps = self._program.forward
        with self._together(), self._stand_ins(range(self.num_blocks)), torch.set_grad_enabled(self._differentiable):
            if self._gathering is not None:
                self._gathering.begin(steps)
            self._executor.run(steps)
            self._executor.current_op = "the output"
            output = self._work.output()
        if self._recomputes:
            self._versions = self._current_versions()
        if self._differentiable:
            torch.clear_autocast_cache()  # it would keep a copy of this call's stand-ins until autocast's region ends
        return output

    def begin(self, grad: Tensor) -> None:
        """Begin the backward pass. RuntimeError for a second one, and for one that is to be differentiated."""
        unwatch_backward(self._monitor)  # what is refused here is refused on all ranks
        refuse_second_derivatives(self._name)
        if self._begun:
            raise RuntimeError(
                f"the backward pass of this {self._name} call has run already and freed its graphs; call the stack "
                "again for a second backward pass"
            )
        self._require_unchanged()
        self._begun = True
        watch_backward(self._monitor, self._program.label)
        self._work.begin_backward(grad)
        if self._gathering is not None:
            self._gathering.begin(self._backward[self._position :])

    def recompute(self) -> None:
        """Run the recomputation ops and their collectives now, in schedule order; for a pipeline."""
        rest = self._backward[self._position :]
        again = [step for step in rest if (step.op.of or step.op.kind) in _RECOMPUTE]
        if not again:
            return
        self._require_unchanged()
        left = tuple(step for step in rest if (step.op.of or step.op.kind) not in _RECOMPUTE)
        self._backward = self._backward[: self._position] + left
        self._ends = self._program.ends_of(self._backward)
        if self._gathering is not None:
            self._gathering.begin(again)
        with self._together():
            self._run(again)

    def _together(self) -> FailTogether:
        """Context of a part of the call. Not kept: it refers to the call, whose tensors a cycle would keep."""
        executor = self._executor
        return FailTogether(
            self._monitor, executor.place, remedy=executor.remedy, unanimous=self._unanimous, forget=self._forget
        )

    def _current_versions(self) -> tuple[list[int], list[int]]:
        """Versions of inputs and of recomputed blocks' parameters. Gathered weights are copied anew each time."""
        read = self._program.read_again if self._gathering is None else ()
        return self._work.versions(), [
            local_of(p)._version for block in read for p in self._parameters[block].parameters
        ]

    def _require_unchanged(self) -> None:
        """Raise RuntimeError where recomputation would read other values than the forward pass did."""
        before, self._versions = self._versions, None
        if before is None:
            return
        for what, then, now in zip(("inputs", "weights"), before, self._current_versions(), strict=True):
            if then != now:
                raise RuntimeError(
                    f"{what} of a stack were changed in place between its forward and its backward pass, and "
                    "recomputation would read the new values; change a copy, or change them after the backward pass"
                )

    def _chosen(self, block: int, numbers: Sequence[int]) -> list[Tensor]:
        tensors = self._parameters[block].whole(self._units[block].parameters if self._units else None)
        return [tensors[number] for number in numbers]

    def _run_to(self, end: int) -> None:
        begin, self._position = self._position, max(end, self._position)
        self._run(self._backward[begin : self._position])

    def _run(self, steps: Sequence[Step]) -> None:
        """Run a part of the backward pass. Recomputation reads parameters, through their stand-ins."""
        again: set[int] = set()
        if self._program.schedule.recomputed:
            again = {block for step in steps if step.op.kind in _RECOMPUTE for block in self._program.reads(step.op)}
        with torch.enable_grad(), self._stand_ins(again):
            self._executor.run(steps)

    @contextmanager
    def _stand_ins(self, blocks: Iterable[int]) -> Iterator[None]:
        """Context in which the stand-ins replace the parameters of these blocks."""
        if not self._work.leaves:
            yield
            return
        gathering = self._gathering
        try:
            for block in blocks if gathering is None else ():  # else each gather puts them
                _put(self._parameters, self._work.leaves, block)
            yield
        finally:
            for block in blocks if gathering is None else range(self.num_blocks):
                self._parameters[block].put_back(() if gathering is None else gathering.sharded(block))

    def _forget(self) -> None:
        """Release every tensor after a failure."""
        self._work.forget()
        if self._gathering is not None:
            self._gathering.forget()


def _as_now(handlers: Handlers, kinds: Collection[str]) -> Handlers:
    """Handlers of which those of `kinds` run under the autocast of this moment, whatever is on around backward()."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices]

    def wrapped(handler: Callable[[Step], None]) -> Callable[[Step], None]:
        def run(step: Step) -> None:
            with ExitStack() as contexts:
                for kind, enabled, dtype in states:
                    now = torch.is_autocast_enabled(kind)
                    if now != enabled or (enabled and torch.get_autocast_dtype(kind) != dtype):
                        # No cache: a cast weight would be shared by the graphs of sub-batches, which are freed apart.
                        contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
                handler(step)

        return run

    return {kind: wrapped(handler) if kind in kinds else handler for kind, handler in handlers.items()}


def refuse_second_derivatives(name: str) -> None:
    """In a backward pass: raise RuntimeError where it is recorded, by create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"second derivatives of {name} are not available: its backward pass runs collectives and in-place sums, "
            "which are not recorded; leave out create_graph=True"
        )


def _put(parameters: Sequence[BlockParameters], leaves: Sequence[Leaves], block: int) -> None:
    if leaves:  # a call without gradients has none
        parameters[block].put(leaves[block].stand_ins)


# --- nodes of the outer autograd graph ---


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ScheduledCall, x: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        call.output = call.forward()
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        grad, others = ctx.call.finish()
        return None, grad, *others


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ScheduledCall, block: int, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.block = call, block
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        return None, None, token, *ctx.call.finish_block(ctx.block)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ScheduledCall, token: Tensor) -> Tensor:
        ctx.call = call
        output, call.output = call.output, None
        assert output is not None, "the entry has run"
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.call.begin(grad)
        return None, grad.new_zeros(())
