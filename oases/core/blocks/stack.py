"""OverlappedStack: transformer blocks run by a schedule, as one differentiable module."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import BlockInputs, CallInputs, SubBatches, differentiable, refuse_mixing
from oases.core.blocks.call import StackCall, StackParameters, agree_on_seed, apart
from oases.core.blocks.checks import (
    BlockList,
    BypassedHooks,
    checked_inputs,
    compared,
    form_of,
    require_blocks,
    require_options,
    require_overlap,
    require_sub_batches,
)
from oases.core.blocks.chooser import Choice, Chooser, SubBatchCount
from oases.core.blocks.dropout import adopt_dropouts
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.randomness import MethodName, Randomness
from oases.core.dtypes import AUTO_LOSSY
from oases.core.execution.autotune import Turn
from oases.core.execution.communication import NullScheduler, Scheduler, Wire, WireType, add_wire, wire_type
from oases.core.execution.executor import WHOLE_BATCH, Context
from oases.core.execution.failure import FailsTogether, begin_call, monitor_of
from oases.core.execution.gathering import BlockUnit
from oases.core.execution.group import ProcessGroup, resolve
from oases.core.execution.piece import outside_of_dynamo
from oases.core.schedule import AUTO, Recompute, Schedule
from oases.extension import OverlapScheduler

_numbers = itertools.count()


class OverlappedStack(FailsTogether, nn.Module):
    """Stack of tensor-parallel blocks run by a schedule that overlaps all-reduces with other sub-batches.

    blocks: modules with `partial(x) -> y`, without communication, up to the row-parallel linear, and
        `combine(x, y_reduced) -> next x`. Blocks must treat samples (dimension 0) independently.
    process_group: the tensor-parallel group; None for the default group. schedule: "auto", name of a generator in
        `oases.core.schedule`, or a Schedule for len(blocks) blocks. sub_batches: number of parts of the batch ("sync"
        does not split it); None: "auto" of the schedule "auto", 2 of a named one. "auto" for either measures
        candidates in the first steps, "off" among them unless overlap is required, and keeps the fastest; later runs
        on the machine repeat these steps to the bit. $OASES_SCHEDULE (oases@2) replaces the schedule "auto".
    recompute: "full" keeps block inputs alone and recomputes the rest; a number does so for the first so many layers.
    wire_dtype: type in which sums are sent: a floating-point torch.dtype or its name, or "int8", which sends a byte
        per number, with errors. "auto:lossy" measures bfloat16 and int8 beside the sums' own type in the first steps,
        with each schedule.
    sequence_parallel: between blocks each rank holds its part of the sequence (dimension 1), and a reduce-scatter and
        an all-gather replace each all-reduce; they overlap best with three or more sub-batches. A block with the two
        halves of partial, prepare(x) -> h (its norm) and product(h) -> y, runs the first on that part. combine and
        prepare must treat tokens independently.
    small_batch: a batch smaller than sub_batches is split along the sequence in blocks with token_wise = True (an
        MLP) or causal = True (attention by `oases.causal_attention`), whose matmuls hide their own and their
        neighbours' all-reduces. Without such blocks "refuse" raises, and "whole" runs it by the schedule sync with
        the same recomputation; its collectives have a row of their own, "stack 0, whole batch", in `oases.report()`.
    require_overlap (or OASES_REQUIRE_OVERLAP=1): raise OverlapError where nothing overlaps.
    layer_of: layer of each block, in order; default: two blocks per layer. Used by recomputation and
        `oases.report()`, which shows the stack's `name`.
    first_block, replica: offset in the model and number of the batch's share, for random numbers.
    Input and output: [batch, ...], replicated. Further inputs of blocks (a mask, a position bias) are passed as one
    `BlockInputs` per block. Gradients of sharded parameters (`shard_dims` of their module) stay local; partial
    gradients of replicated ones are all-reduced.
    ValueError for a batch that cannot be split, ScheduleError for an invalid schedule. Source: arXiv 2305.16121.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        process_group: ProcessGroup | None = None,
        schedule: str | Schedule = AUTO,
        sub_batches: SubBatchCount | None = None,
        recompute: Recompute = "none",
        wire_dtype: WireType | None = None,
        sequence_parallel: bool = False,
        small_batch: Literal["refuse", "whole"] = "refuse",
        require_overlap: bool = False,
        layer_of: Sequence[int] | None = None,
        name: str = "",
        first_block: int = 0,
        replica: int = 0,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        require_sub_batches(2 if sub_batches is None else sub_batches)
        require_options(small_batch, layer_of, name, len(self.blocks))
        self.layer_of = None if layer_of is None else tuple(layer_of)
        self.name, self.process_group = name, resolve(process_group)
        self._adopt_blocks()
        self.sequence_parallel, self.small_batch = sequence_parallel, small_batch
        self._lossy = wire_dtype == AUTO_LOSSY
        self.wire_dtype = None if self._lossy else wire_type(wire_dtype)
        self.tuned_over = ""  # name of a wider group that agrees on choices of "auto", as blocks run its collectives
        self.require_overlap = require_overlap or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
        self.number = next(_numbers)
        """Number of this stack in the process, for errors and statistics."""
        self.first_block, self._replica = first_block, replica
        self._units: list[BlockUnit] = []  # by block, where weights are sharded
        self._compiled: list[nn.Module] = []
        self.seed: int | None = None  # of the random streams; rank 0's initial seed from the first forward pass on
        self._agreed = False  # whether the ranks have agreed on seed and calls
        self.calls = 0
        """Number of forward passes, which selects the random streams."""
        self.chooser = self._chooser(schedule, sub_batches, recompute)

    def _adopt_blocks(self) -> None:
        """Check the blocks and prepare them; drop what is known of earlier ones."""
        require_blocks([*self.blocks])
        refuse_mixing(self.blocks)
        adopt_dropouts(self.blocks)
        self._block_list = BlockList(self.blocks)
        self._block_parameters: list[StackParameters] = []
        self._hooks: list[BypassedHooks] = []
        self._programs: dict[tuple[int, str], BlockProgram] = {}  # by the id of the schedule, which they hold
        self._draws: dict[bool, dict[tuple[int, MethodName], bool]] = {True: {}, False: {}}  # by the mode

    @property
    def label(self) -> str:
        """Name of this stack in errors and statistics."""
        return f"stack {self.number} {self.name}".rstrip()

    def at_call(self, number: int, seed: int | None = None) -> None:
        """Set the number of forward passes, and the seed unless it is None, for a resumed run."""
        self.calls = number
        self.seed = self.seed if seed is None else seed

    def shard(self, units: Sequence[BlockUnit]) -> None:
        """Have a unit per block gather its weights as the schedule needs them."""
        self._units = list(units)

    def __getstate__(self) -> dict[str, Any]:
        """Leave caches of this process's groups, parameters and schedules out of copies and pickles."""
        return {**self.__dict__, "_block_parameters": [], "_hooks": [], "_programs": {}, "_agreed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state with a new number: rows of a report are of one stack."""
        super().__setstate__({**state, "number": next(_numbers)})

    def run_as(
        self, schedule: str | Schedule, sub_batches: SubBatchCount | None = None, recompute: Recompute = "none"
    ) -> None:
        """Change the schedule of later calls."""
        choices, self._programs = self.chooser.choices, {}
        self.chooser = self._chooser(schedule, sub_batches, recompute)
        self.chooser.choices = choices

    def _chooser(self, schedule: str | Schedule, sub_batches: SubBatchCount | None, recompute: Recompute) -> Chooser:
        return Chooser(
            [*self.blocks], schedule, sub_batches, recompute, layer_of=self.layer_of,
            place=(self.name, self.first_block), may_be_off=not self.require_overlap, lossy=self._lossy,
            small_batch=self.small_batch, sequence_parallel=self.sequence_parallel, ranks=self.tensor_parallel,
        )  # fmt: skip

    @property
    def schedule(self) -> Schedule:
        """Schedule of the last call, or of the first one, as if its batch were large enough."""
        return self.chooser.schedule

    @outside_of_dynamo
    def forward(
        self, x: Tensor, inputs: Sequence[BlockInputs] | None = None, *, context: Context | None = None
    ) -> Tensor:
        """[batch, ...] -> [batch, ...].

        inputs: further arguments of each block's methods, one for each block. Tensors among them that require grad
        get gradients: partial sums over the ranks from `partial`, complete ones from `combine`. context: spans to
        record, a pipeline's handles. ValueError where they do not fit the blocks, the batch or the sequence.
        """
        given = checked_inputs(x, inputs, len(self.blocks), self.label)
        blocks = self._current_blocks()
        chosen = self._choose(x, given, blocks)
        scheduler: Scheduler = OverlapScheduler.of(self._group_name) if self.tensor_parallel > 1 else NullScheduler()
        return self._call_of(blocks, chosen, x, given, scheduler, context).apply(x)

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, inputs: Sequence[BlockInputs] = (),
        context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the forward pass with collectives by `scheduler`; `NullScheduler()` measures the compute alone.

        turn: receives the seconds of this call's forward and backward pass. inputs, context: as for `forward`.
        """
        blocks = self._current_blocks()
        chosen = Choice(self.chooser.schedule_for(x, inputs, blocks), self.wire_dtype, turn)
        return self._call_of(blocks, chosen, x, inputs, scheduler, context).apply(x)

    def _choose(self, x: Tensor, inputs: Sequence[BlockInputs], blocks: Sequence[nn.Module]) -> Choice:
        """Choose schedule and wire. OverlapError where overlap is required, and they have none."""
        chooser = self.chooser
        chosen = chooser.choose(
            x, inputs, blocks, self.parameters, self.process_group, self.label, wider=self.tuned_over,
            differentiable=chooser.measures and _has_gradients(x, inputs, self._parameters_of(blocks)),
        )  # fmt: skip
        if chooser.lossy:
            self.wire_dtype = chosen.wire
        if self.require_overlap and (chosen.measured or not chooser.measures):
            small = self.schedule.num_sub_batches if chooser.is_whole(chosen.schedule) else 0
            require_overlap(chosen.schedule, self.process_group, self.label, self.calls, small, chosen.measured)
        return chosen._replace(wire=self.wire_dtype)

    def _call_of(
        self, blocks: Sequence[nn.Module], chosen: Choice, x: Tensor, inputs: Sequence[BlockInputs],
        scheduler: Scheduler, context: Context | None,
    ) -> StackCall:  # fmt: skip
        """Make a call, on which all ranks agree."""
        schedule, wire, turn, _ = chosen
        rank, size, parameters = self._group_rank, self.tensor_parallel, self._parameters_of(blocks)
        with_gradients = _has_gradients(x, inputs, parameters)
        program = self._program_of(schedule, blocks, x.device.type)
        held = CallInputs(inputs, SubBatches(x.shape, schedule, rank, size), with_gradients=with_gradients)
        monitor = None
        if isinstance(scheduler, OverlapScheduler):
            group = self.process_group
            monitor = monitor_of(group)
            form = form_of(
                x, inputs, parameters, schedule, program.order, wire, training=self.training, gradients=with_gradients
            )
            begin_call(group, self.label, form, compared(x, inputs, self.calls + 1))
            if isinstance(wire, str):
                add_wire(cast(ProcessGroup, group))
        if not self._agreed:
            seed, self.calls = agree_on_seed(self.process_group, self.calls)
            self.seed = seed if self.seed is None else self.seed
            self._agreed = True
        assert self.seed is not None
        self.calls += 1
        randomness = Randomness(
            self.seed, self.calls, rank, x.device, self._draws[self.training], size=size,
            first_block=self.first_block, first_sample=self._replica * x.shape[0],
        )  # fmt: skip
        return StackCall(
            program, blocks, parameters, self._units, x, held, Wire(scheduler, size, wire), randomness,
            turn=turn, monitor=monitor, context=context or Context(), differentiable=with_gradients,
        )  # fmt: skip

    def compile_blocks(self, **options: Any) -> None:
        """Compile the methods of every block; options: of torch.compile. Parameter names stay."""
        # In a plain list: torch.compile's wrapper would put a prefix before the names of a block's parameters.
        self._compiled = [cast(nn.Module, torch.compile(block, **options)) for block in self.blocks]

    def _current_blocks(self) -> Sequence[nn.Module]:
        """The blocks, or what torch.compile made of them. RuntimeError where their number has changed."""
        if not self._block_list.is_of(self.blocks):
            if self._compiled:
                raise RuntimeError("blocks were replaced after compile_blocks(); make a new OverlappedStack of them")
            self._adopt_blocks()
        return self._compiled or list(self.blocks)

    def _parameters_of(self, blocks: Sequence[nn.Module]) -> list[StackParameters]:
        """Current parameters of the blocks; refreshed where modules have changed."""
        if len(self._block_parameters) != len(blocks):
            self._block_parameters = apart(list(map(StackParameters, blocks)))
            self._hooks = [BypassedHooks(block) for block in blocks]
        elif not self._units:  # sharded parameters are not in their places between calls
            for number, known in enumerate(self._block_parameters):
                if not known.current:
                    self._block_parameters[number] = StackParameters(blocks[number])
        if not self._units:  # FSDP has hooks of its own
            for number, hooks in enumerate(self._hooks):
                hooks.refuse(number)
        return self._block_parameters

    def _program_of(self, schedule: Schedule, blocks: Sequence[nn.Module], device: str) -> BlockProgram:
        key = (id(schedule), device)
        if key not in self._programs:
            label = self.label + WHOLE_BATCH * self.chooser.is_whole(schedule)
            self._programs[key] = BlockProgram(schedule, blocks, label, self.layer_of, device)
        return self._programs[key]


def _has_gradients(x: Tensor, inputs: Sequence[BlockInputs], parameters: Sequence[StackParameters]) -> bool:
    """Whether there will be a backward pass of a call."""
    return torch.is_grad_enabled() and (
        x.requires_grad or any(each.trained for each in parameters) or bool(differentiable(inputs))
    )
