"""Call of an OverlappedStack: its ranks' agreement, and its gradients, returned block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import CallInputs, Given, SubBatches
from oases.core.blocks.block_list import StackParameters
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.randomness import Streams
from oases.core.blocks.work import BlockWork
from oases.core.execution.autotune import Turn
from oases.core.execution.call import ScheduledCall
from oases.core.execution.communication import NullScheduler, Wire, add_wire
from oases.core.execution.dtensors import as_gradient, is_dtensor
from oases.core.execution.executor import Context, mark, seconds_between
from oases.core.execution.failure import begin_call, is_sampled, monitor_of
from oases.core.execution.gathering import BlockUnit, leaves_of
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.core.schedule import ScheduleError
from oases.extension import OverlapScheduler


class StackCall(ScheduledCall):
    """Call of an OverlappedStack on `x`; used by its autograd nodes and by a pipeline.

    blocks, parameters: of the stack called `label`. units: by block, where weights are sharded over data-parallel
    ranks; else (). given: inputs of the blocks. wire: collectives over `group`, whose ranks agree on the form of the
    call. turn: receives the seconds of the forward and backward pass, while a schedule is being chosen. UsageError,
    on all ranks, where their calls differ; ScheduleError for a list without a backward pass where gradients are
    needed.
    """

    def __init__(
        self, program: BlockProgram, blocks: Sequence[nn.Module], parameters: Sequence[StackParameters],
        units: Sequence[BlockUnit], x: Tensor, given: Given, wire: Wire, group: ProcessGroup | None, streams: Streams,
        *, label: str, turn: Turn | None, context: Context, training: bool,
    ) -> None:  # fmt: skip
        schedule, kind, differentiable = program.schedule, x.device.type, given.differentiable
        cut = SubBatches(x.shape, schedule, group_rank(group), group_size(group))
        held = CallInputs(given.inputs, cut, with_gradients=differentiable)
        sampled = [x, *given.tensors()] if is_sampled(streams.calls + 1) else None
        monitor = None
        if isinstance(wire.scheduler, OverlapScheduler):
            trained = [each.form for each in parameters]
            form = (
                "shape of the input", x.shape, "type of the input", x.dtype,
                "computation of gradients", differentiable, "training mode", training,
                "autocast", torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
                "schedule", schedule.name, "number of sub-batches", schedule.num_sub_batches,
                "wire_dtype", wire.dtype, "order of ops", program.order,
                "number of parameters that require gradients", sum(number for number, _ in trained),
                "digest of the parameters that require gradients", tuple(digest for _, digest in trained),
                "form of the blocks' inputs", given.form(),
            )  # fmt: skip
            monitor = monitor_of(group)
            begin_call(group, label, form, sampled)
            if isinstance(wire.dtype, str):
                add_wire(cast(ProcessGroup, group))
        randomness = streams.next(x, group, training=training)
        if differentiable and not program.backward:
            raise ScheduleError(
                f"schedule '{program.schedule.name}' has no backward pass, and gradients were asked for"
            )
        placed = not units and any(is_dtensor(one) for each in parameters for one in each.parameters)
        leaves = leaves_of(parameters, units) if differentiable or placed else []
        self._blocks = BlockWork(
            blocks, program, wire, x, leaves, differentiable=differentiable, randomness=randomness, inputs=held
        )
        super().__init__(
            "OverlappedStack", program, self._blocks, parameters, monitor=monitor, context=context, units=units,
            differentiable=differentiable,
        )  # fmt: skip
        self._cut, self._scheduler, self._turn = parameters, wire.scheduler, turn
        self._marks, self._elements = list[Any](), 1
        # Of the block finished last: gradients by parameter index, and the all-reduce of the replicated ones.
        self._shares: list[Tensor | None] = []
        self._whole: list[Tensor | None] = []
        self._pending: tuple[Any, Tensor, list[int]] | None = None

    # --- the nodes of the outer graph ---

    def entry_tensors(self) -> list[Tensor]:
        """Replicated parameters of the first block, and differentiable inputs."""
        return self._chosen(0, self._cut[0].replicated) + self._blocks.inputs.tensors

    def block_tensors(self, block: int) -> list[Tensor]:
        """Parameters whose gradients the block's node returns.

        Replicated ones come one node later than sharded ones, which gives their small all-reduce time to complete.
        """
        sharded = self._chosen(block, self._cut[block].sharded)
        above = block + 1
        return sharded if above == self.num_blocks else sharded + self._chosen(above, self._cut[above].replicated)

    def forward(self) -> Tensor:
        """Run the forward pass, timed while a schedule is being chosen."""
        self._mark()
        output = super().forward()
        self._mark()
        self._elements = max(1, output.numel())
        return output

    def begin(self, grad: Tensor) -> None:
        """Begin the backward pass. RuntimeError for a second one."""
        self._mark()
        super().begin(grad)

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; return the gradients of `block_tensors(block)`."""
        parameters, above = self._cut[block], block + 1
        with self._together():
            self._run_to(self._ends[block])
            self._executor.current_op = f"the gradients of block {block}"
            replicated = self._summed(above) if above < self.num_blocks else []
            shares, whole = self._blocks.gradients_of(block)
            held = [number for number in parameters.replicated if shares[number] is not None]
            if held and not (isinstance(self._scheduler, NullScheduler) and not self._scheduler.allocate_buffers):
                flat = torch.cat([shares[number].flatten() for number in held])  # type: ignore[union-attr]
                summed = torch.view_as_real(flat) if flat.is_complex() else flat  # complex where any is
                label = self._label_of_replicated(block)
                self._pending = (self._scheduler.all_reduce(summed, label), flat, held)
            self._shares, self._whole = shares, whole
            if block == self._blocks.inputs.lowest_reader:  # these sums overlap with the rest of the backward pass
                self._blocks.inputs.start_sums(self._scheduler, "gradients of block inputs")
            return self._gradients(block, parameters.sharded) + replicated

    def finish(self) -> tuple[Tensor, list[Tensor | None]]:
        """Run the rest; return the gradients of `x` and of `entry_tensors()`."""
        with self._together():
            self._run_to(len(self._backward))
            self._executor.current_op = "the gradient of the input"
            grad = self._blocks.input_gradient()
            others = self._summed(0) + self._blocks.inputs.gradients(self._scheduler)
        self._mark()
        if not self._blocks.keep_deferred:
            self._note()
        return grad, others

    # --- for a pipeline, which splits the backward pass ---

    def recompute(self) -> None:
        """Run the recomputation ops and their collectives now, timed while a schedule is being chosen."""
        self._mark()
        super().recompute()
        self._mark()

    def defer_weights(self) -> None:
        """Skip W in the backward pass; `compute_weights` runs it later."""
        self._blocks.keep_deferred = True

    def compute_weights(self) -> None:
        """Accumulate the weight gradients of a backward pass without W into the parameters; their hooks run.

        Once for each: hooks take the gradient for complete, also where several blocks share a parameter.
        """
        self._mark()
        lowest = {
            id(parameter): block
            for block in reversed(range(self.num_blocks))
            for parameter in self._cut[block].parameters
        }
        sums: dict[int, Tensor] = {}
        with self._together():
            for block in reversed(range(self.num_blocks)):
                self._executor.current_op = f"the weight gradients of block {block}"
                found = self._blocks.weights_of(block)
                for number in self._cut[block].replicated:
                    gradient = found[number]
                    if gradient is not None:
                        label = self._label_of_replicated(block)
                        self._scheduler.wait(self._scheduler.all_reduce(gradient, label))
                keys = [id(parameter) for parameter in self._cut[block].parameters]
                for key, gradient in zip(keys, found, strict=True):
                    if gradient is not None:
                        sums[key] = sums[key].add_(gradient) if key in sums else gradient
                numbers = [number for number, key in enumerate(keys) if key in sums and lowest[key] == block]
                if numbers:
                    held = self._chosen(block, numbers)
                    made = [as_gradient(one, sums.pop(keys[n])) for one, n in zip(held, numbers, strict=True)]
                    torch.autograd.backward(held, made)
                computed = self._units[block].computed if self._units else None
                if computed is not None:
                    computed()
        self._mark()
        self._note()

    # --- inside ---

    def _label_of_replicated(self, block: int) -> str:
        return f"replicated gradients of {self._program.label} layer {self._program.layer(block)}"

    def _mark(self) -> None:
        """Note the time where a measured pass begins or ends."""
        if self._turn is not None:
            self._marks.append(mark(self._blocks.device))

    def _note(self) -> None:
        """Report the seconds of the passes; per element, because shapes that share a choice differ in size."""
        if self._turn is not None:
            took = partial(seconds_between, *self._marks, per=self._elements)
            self._turn.note(took() if isinstance(self._marks[0], float) else took)

    def _summed(self, block: int) -> list[Tensor | None]:
        """Gradients of the replicated parameters of `block`, the one finished last, summed over the ranks.

        Those of a norm that ran with the block below have come since.
        """
        late = self._blocks.leaves[block].take(True)
        self._whole = [
            one if other is None else other if one is None else one + other
            for one, other in zip(self._whole, late, strict=True)
        ]
        if self._pending is not None:
            ticket, flat, numbers = self._pending
            self._pending = None
            self._scheduler.wait(ticket)
            shares: Any = [self._shares[number] for number in numbers]
            for number, of, part in zip(numbers, shares, flat.split([of.numel() for of in shares]), strict=True):
                self._shares[number] = (part if of.is_complex() else part.real).view_as(of)
        return self._gradients(block, self._cut[block].replicated)

    def _gradients(self, block: int, numbers: Sequence[int]) -> list[Tensor | None]:
        """Gradients of parameters of the block finished last."""
        parts = [(self._shares[number], self._whole[number]) for number in numbers]
        sums = [whole if share is None else share if whole is None else share + whole for share, whole in parts]
        return [as_gradient(one, total) for one, total in zip(self._chosen(block, numbers), sums, strict=True)]
