"""One call of a stack: its executor, and the hand-over of parameter gradients block by block."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oases.execution.clock import synchronize
from oases.execution.executor import Context, Executor, Step
from oases.execution.failure import Guard, Watch
from oases.execution.piece import BlockParameters, Leaves
from oases.execution.wire import Scheduler, Silence
from oases.parallel.autotune import Tuning
from oases.parallel.blocks import BlockProgram, Blocks
from oases.parallel.fsdp import Gathers, Unit
from oases.parallel.sharding import sharded_parameters
from oases.schedule import ScheduleError

_AGAIN = ("R", "RC")


class StackParameters(BlockParameters):
    """A block's parameters, and which of them are cut over the tensor-parallel group.

    sharded, replicated: numbers of those that require gradients.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        cut = {id(parameter) for _, parameter, _ in sharded_parameters(block)}
        self.sharded = [number for number in self.trained if id(self.parameters[number]) in cut]
        self.replicated = [number for number in self.trained if id(self.parameters[number]) not in cut]


@dataclass
class CallOptions:
    """The call's surroundings: how its collectives go, who is told of a failure, what takes its time.

    tuning: takes the time of its forward and backward pass, where a choice of schedule is being made. units: by
    block, where weights are sharded over data-parallel ranks; nothing where none are.
    """

    scheduler: Scheduler
    watch: Watch | None
    context: Context
    tuning: Tuning | None = None
    units: Sequence[Unit | None] = ()


class StackCall:
    """A call of an OverlappedStack, as `execution.delivery` and a pipeline use it."""

    def __init__(
        self, program: BlockProgram, work: Blocks, parameters: Sequence[StackParameters], options: CallOptions,
        *, differentiable: bool,
    ) -> None:  # fmt: skip
        if differentiable and not program.backward:
            raise ScheduleError(
                f"schedule '{program.schedule.name}' has no backward pass, and gradients were asked for"
            )
        self.num_blocks = len(parameters)
        self.output: Tensor | None = None
        self._program, self._work, self._parameters = program, work, parameters
        self._scheduler, self._units = options.scheduler, options.units
        self._differentiable = differentiable
        self._guard = Guard(program.schedule, program.label, options.watch, self._forget)
        self._gathers: Gathers | None = None
        handlers = work.handlers()
        if any(options.units):
            self._gathers = Gathers(options.units, program.halved, partial(_put, parameters, work.leaves))
            handlers = self._gathers.around(handlers)
        self._executor = Executor(handlers, self._guard, options.context)
        tuning = options.tuning
        self._tuning = None if tuning is None or tuning.choice is not None else tuning
        self._seconds = 0.0
        self._backward = program.backward
        self._ends = program.ends
        self._position = 0
        self._begun = False
        # Of the block finished last: its gradients by number, and the all-reduce of its replicated ones.
        self._shares: list[Tensor | None] = []
        self._whole: list[Tensor | None] = []
        self._pending: tuple[Any, Tensor, list[int]] | None = None

    # --- the nodes of the outer graph ---

    def entry_tensors(self) -> list[Tensor]:
        """Replicated parameters of the first block, and differentiable inputs."""
        return self._chosen(0, self._parameters[0].replicated) + self._work.inputs.tensors

    def block_tensors(self, block: int) -> list[Tensor]:
        """The parameters whose gradients the block's node returns.

        Replicated ones come one node later than sharded ones: their small all-reduce has that long to end.
        """
        sharded = self._chosen(block, self._parameters[block].sharded)
        above = block + 1
        return (
            sharded if above == self.num_blocks else sharded + self._chosen(above, self._parameters[above].replicated)
        )

    def forward(self) -> Tensor:
        """Run the forward pass, timed where a choice of schedule is being made."""
        work, steps = self._work, self._program.forward
        with self._timed(), self._guard, self._stand_ins(), torch.set_grad_enabled(self._differentiable):
            work.randomness.begin()
            if self._gathers is not None:
                self._gathers.begin(steps)
            self._executor.run(steps)
            self._guard.doing = "the output"
            return work.output()

    def begin(self, grad: Tensor) -> None:
        """Begin the backward pass. RuntimeError for a second one."""
        if self._tuning is not None:
            synchronize(grad.device)
            self._seconds -= time.perf_counter()
        if self._begun or not self._work.deferred:
            raise RuntimeError(
                "the backward pass of this OverlappedStack call was run already; its graphs are freed as it "
                "goes, so call the stack again for a second backward pass"
            )
        self._begun = True
        self._work.begin_backward(grad)
        if self._gathers is not None:
            self._gathers.begin(self._backward[self._position :])

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; the gradients of `block_tensors(block)`."""
        guard, parameters, above = self._guard, self._parameters[block], block + 1
        with guard:
            self._run_to(self._ends[block])
            guard.doing = f"the gradients of block {block}"
            replicated = self._summed(above) if above < self.num_blocks else []
            shares, whole = self._work.gradients_of(block)
            held = [number for number in parameters.replicated if shares[number] is not None]
            if held and not (isinstance(self._scheduler, Silence) and not self._scheduler.pretends):
                flat = torch.cat([shares[number].flatten() for number in held])  # type: ignore[union-attr]
                label = f"replicated gradients of block {block}"
                self._pending = (self._scheduler.all_reduce(flat, label), flat, held)
            self._shares, self._whole = shares, whole
            if block == self._work.inputs.lowest_reader:  # the rest of the backward pass hides these sums
                self._work.inputs.start_sums(self._scheduler, "gradients of block inputs")
            return [self._gradient(number) for number in parameters.sharded] + replicated

    def finish(self) -> tuple[Tensor, list[Tensor | None]]:
        """Run the rest; the gradients of `x` and of `entry_tensors()`."""
        with self._guard:
            self._run_to(len(self._backward))
            self._guard.doing = "the gradient of the input"
            grad = self._work.input_gradient()
            others = self._summed(0) + self._work.inputs.gradients(self._scheduler)
        if self._tuning is not None:
            synchronize(grad.device)
            self._tuning.note(self._seconds + time.perf_counter())
        return grad, others

    # --- for a pipeline, which splits the backward pass ---

    def recompute(self) -> None:
        """Run every R and RC of the rest of the backward pass now, with their collectives, in the list's order."""
        rest = self._backward[self._position :]
        again = [step for step in rest if (step.op.of or step.op.kind) in _AGAIN]
        if not again:
            return
        left = tuple(step for step in rest if (step.op.of or step.op.kind) not in _AGAIN)
        self._backward = self._backward[: self._position] + left
        self._ends = self._program.ends_of(self._backward)
        if self._gathers is not None:
            self._gathers.begin(again)
        with self._guard:
            self._run(again)

    def defer_weights(self) -> None:
        """Leave W out of the backward pass; `compute_weights` does its work."""
        self._work.keep_deferred = True

    def compute_weights(self) -> None:
        """After a backward pass without W: add its weight gradients to the parameters', hooks included."""
        with self._guard:
            for block in reversed(range(self.num_blocks)):
                self._guard.doing = f"the weight gradients of block {block}"
                found = self._work.weights_of(block)
                for number in self._parameters[block].replicated:
                    gradient = found[number]
                    if gradient is not None:
                        label = f"replicated gradients of block {block}"
                        self._scheduler.wait(self._scheduler.all_reduce(gradient, label))
                numbers = [number for number, gradient in enumerate(found) if gradient is not None]
                if numbers:
                    torch.autograd.backward(self._chosen(block, numbers), [found[number] for number in numbers])

    # --- inside ---

    def _run_to(self, end: int) -> None:
        begin, self._position = self._position, max(end, self._position)
        self._run(self._backward[begin : self._position])

    def _run(self, steps: Sequence[Step]) -> None:
        """Part of the backward pass. What is computed again reads parameters, by their stand-ins."""
        again = {step.block for step in steps if step.op.kind in _AGAIN} if self._program.recomputed else ()
        with torch.enable_grad(), self._stand_ins(again):
            self._executor.run(steps)

    @contextmanager
    def _stand_ins(self, blocks: Any = None) -> Iterator[None]:
        """Have the stand-ins stand in the modules of these blocks, of all if none are named."""
        if not self._differentiable or self._gathers is not None:  # gathers put them where weights arrive
            yield
            return
        chosen = range(self.num_blocks) if blocks is None else blocks
        try:
            for block in chosen:
                _put(self._parameters, self._work.leaves, block)
            yield
        finally:
            for block in chosen:
                self._parameters[block].put_back()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self._tuning is None:
            yield
            return
        device = self._work.device
        synchronize(device)
        self._seconds -= time.perf_counter()
        yield
        synchronize(device)
        self._seconds += time.perf_counter()

    def _forget(self) -> None:
        """After a failure: let go of every tensor."""
        self._work.forget()
        if self._gathers is not None:
            self._gathers.forget()

    def _summed(self, block: int) -> list[Tensor | None]:
        """Gradients of the replicated parameters of `block`, the one finished last, summed over the ranks."""
        if self._pending is not None:
            ticket, flat, numbers = self._pending
            self._pending = None
            self._scheduler.wait(ticket)
            sizes = [self._shares[number].numel() for number in numbers]  # type: ignore[union-attr]
            for number, part in zip(numbers, flat.split(sizes), strict=True):
                self._shares[number] = part.view_as(self._shares[number])  # type: ignore[arg-type]
        return [self._gradient(number) for number in self._parameters[block].replicated]

    def _chosen(self, block: int, numbers: Sequence[int]) -> list[Tensor]:
        parameters, unit = self._parameters[block], self._units[block] if self._units else None
        tensors = parameters.whole(None if unit is None else unit.parameters)
        return [tensors[number] for number in numbers]

    def _gradient(self, number: int) -> Tensor | None:
        share, whole = self._shares[number], self._whole[number]
        if share is None or whole is None:
            return whole if share is None else share
        return share + whole


def _put(parameters: Sequence[StackParameters], leaves: Sequence[Leaves], block: int) -> None:
    """Have a block's stand-ins stand in its modules; nothing in a call without gradients, which has none."""
    if leaves:
        parameters[block].put(leaves[block].stand_ins)


def leaves_of(parameters: Sequence[StackParameters], units: Sequence[Unit | None]) -> list[Leaves]:
    """Each block's stand-ins, of whole weights where they are sharded."""
    if not any(units):
        return [Leaves(each.parameters) for each in parameters]
    return [
        Leaves(each.whole(None if unit is None else unit.parameters))
        for each, unit in zip(parameters, units, strict=True)
    ]
