"""OverlappedStack: transformer blocks run by a schedule, as one differentiable module."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import BlockInputs, Given, checked
from oases.core.blocks.block_list import BlockList, StackParameters, preparations, require_apart, require_blocks
from oases.core.blocks.call import StackCall
from oases.core.blocks.chooser import Choice, Chooser, SubBatchCount
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.randomness import Streams
from oases.core.dtypes import AUTO_LOSSY
from oases.core.execution.autotune import Turn
from oases.core.execution.communication import NullScheduler, Scheduler, Wire, WireType, wire_type
from oases.core.execution.executor import AT_ONCE, WHOLE_BATCH, Context
from oases.core.execution.failure import FailsTogether, is_sampled
from oases.core.execution.gathering import BlockUnit
from oases.core.execution.group import ProcessGroup, resolve
from oases.core.execution.piece import outside_of_dynamo
from oases.core.schedule import AUTO, Recompute, Schedule
from oases.errors import OverlapError
from oases.extension import OverlapScheduler
from oases.limits import require_numbers

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
        _require_options(2 if sub_batches is None else sub_batches, small_batch, layer_of, name, len(self.blocks))
        self.layer_of = None if layer_of is None else tuple(layer_of)
        self.name, self.process_group = name, resolve(process_group)
        self.first_block = first_block
        self._streams = Streams(first_block, replica)
        self._adopt_blocks()
        self.sequence_parallel, self.small_batch = sequence_parallel, small_batch
        self._lossy = wire_dtype == AUTO_LOSSY
        self.wire_dtype = None if self._lossy else wire_type(wire_dtype)
        self.tuned_over = ""  # name of a wider group that agrees on choices of "auto", as blocks run its collectives
        self.require_overlap = require_overlap or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
        self.number = next(_numbers)
        """Number of this stack in the process, for errors and statistics."""
        self._units: list[BlockUnit] = []  # by block, where weights are sharded
        self._compiled: list[nn.Module] = []
        self.chooser = self._chooser(schedule, sub_batches, recompute)

    def _adopt_blocks(self) -> None:
        """Check the blocks and prepare them; drop what is known of earlier ones."""
        require_blocks(self.blocks)
        for prepare in preparations:
            prepare(self.blocks)
        self._block_list = BlockList([*self.blocks], StackParameters)
        self._apart = False  # whether the blocks were found to share no module
        self._programs: dict[tuple[int, str], BlockProgram] = {}  # by the id of the schedule, which they hold
        self._streams.forget()

    @property
    def label(self) -> str:
        """Name of this stack in errors and statistics."""
        return f"stack {self.number} {self.name}".rstrip()

    @property
    def calls(self) -> int:
        """Number of forward passes, which selects the random streams."""
        return self._streams.calls

    @property
    def seed(self) -> int | None:
        """Seed of the random streams; rank 0's initial seed from the first forward pass on."""
        return self._streams.seed

    def at_call(self, number: int, seed: int | None = None) -> None:
        """Set the number of forward passes, and the seed unless it is None, for a resumed run."""
        self._streams.calls = number
        self._streams.seed = self.seed if seed is None else seed

    def shard(self, units: Sequence[BlockUnit]) -> None:
        """Have a unit per block gather its weights as the schedule needs them."""
        self._units = list(units)

    def compile_blocks(self, **options: Any) -> None:
        """Compile the methods of every block; options: of torch.compile. Parameter names stay."""
        # In a plain list: torch.compile's wrapper would put a prefix before the names of a block's parameters.
        self._compiled = [cast(nn.Module, torch.compile(block, **options)) for block in self.blocks]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the programs of this process's schedules out of copies and pickles."""
        return {**self.__dict__, "_programs": {}}

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
        given = checked(x, inputs, self._current_parameters, len(self.blocks), self.label)
        chosen = self._choose(x, given)
        scheduler: Scheduler = OverlapScheduler.of(self._group_name) if self.tensor_parallel > 1 else NullScheduler()
        return self._call(chosen, x, given, scheduler, context).apply(x)

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, inputs: Sequence[BlockInputs] = (),
        context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the forward pass with collectives by `scheduler`; `NullScheduler()` measures the compute alone.

        turn: receives the seconds of this call's forward and backward pass. inputs, context: as for `forward`.
        """
        given = Given.of(x, inputs, self._current_parameters())
        chosen = Choice(self.chooser.schedule_for(x, inputs, self._compiled or self.blocks), self.wire_dtype, turn)
        return self._call(chosen, x, given, scheduler, context).apply(x)

    def _choose(self, x: Tensor, given: Given) -> Choice:
        """Choose schedule and wire. OverlapError where overlap is required, and they have none."""
        chooser = self.chooser
        chosen = chooser.choose(
            x, given.inputs, self._compiled or self.blocks, self.parameters, self.process_group, self.label,
            wider=self.tuned_over, differentiable=given.differentiable,
        )  # fmt: skip
        if chooser.lossy:
            self.wire_dtype = chosen.wire
        if self.require_overlap and (chosen.measured or not chooser.measures):
            self._require_overlap(chosen)
        return chosen._replace(wire=self.wire_dtype)

    def _call(
        self, chosen: Choice, x: Tensor, given: Given, scheduler: Scheduler, context: Context | None
    ) -> StackCall:
        """Make a call, on which all ranks agree."""
        blocks, key = self._compiled or list(self.blocks), (id(chosen.schedule), x.device.type)
        if key not in self._programs:
            label = self.label + WHOLE_BATCH * self.chooser.is_whole(chosen.schedule)
            self._programs[key] = BlockProgram(chosen.schedule, blocks, label, self.layer_of, x.device.type)
        return StackCall(
            self._programs[key], blocks, self._block_list.known, self._units, x, given,
            Wire(scheduler, self.tensor_parallel, chosen.wire), self.process_group, self._streams, label=self.label,
            turn=chosen.turn, context=context or Context(), training=self.training,
        )  # fmt: skip

    def _current_parameters(self) -> list[StackParameters]:
        """Parameters of the blocks as they are now. RuntimeError where the number of blocks has changed."""
        if not self._block_list.is_of(self.blocks):
            if self._compiled:
                raise RuntimeError("blocks were replaced after compile_blocks(); make a new OverlappedStack of them")
            self._adopt_blocks()
        found = self._block_list.parameters(gathered=bool(self._units))
        if not self._apart:
            require_apart(found)
            self._apart = True
        return found

    def _require_overlap(self, chosen: Choice) -> None:
        """Raise OverlapError if the schedule cannot overlap communication, or the stack did not so far."""
        schedule, calls, why = chosen.schedule, self.calls, None
        if self.tensor_parallel == 1:
            why = "the group has one rank, so nothing is communicated"
        elif not schedule.overlaps:
            why = f"schedule '{schedule.name}' with {schedule.num_sub_batches} sub-batches overlaps nothing"
            if self.chooser.is_whole(schedule):
                why += f"; the batch has fewer samples than the {self.schedule.num_sub_batches} sub-batches"
            elif chosen.measured:
                why += "; it was chosen as the fastest in measurements"
        elif calls >= 4 and is_sampled(calls):  # not in each: the times of collectives on a device are waited for
            totals = OverlapScheduler.of(self._group_name).totals().items()
            mine = [(label.endswith(f"{AT_ONCE})"), each) for label, each in totals if f" ({self.label}, l" in label]
            busy = sum(each.link_seconds for _, each in mine)
            waited = sum(max(each.blocked_seconds, each.link_seconds * at_once) for at_once, each in mine)
            if busy and waited > 0.99 * busy:
                why = f"the compute waited {waited:.2f} s for {busy:.2f} s of communication"
        if why is not None:
            raise OverlapError(f"overlap is required, but {why} ({self.label}; see oases.report())")


def _require_options(
    sub_batches: int | str, small_batch: str, layer_of: Sequence[int] | None, name: str, num_blocks: int
) -> None:
    """Raise ValueError, or UsageError beyond a limit, for options of a stack of so many blocks that are none."""
    if sub_batches != "auto" and (not isinstance(sub_batches, int) or sub_batches < 1):
        raise ValueError(f"sub_batches must be at least 1 or 'auto', got {sub_batches!r:.80}")
    require_numbers({"sub_batches": sub_batches})
    if small_batch not in ("refuse", "whole"):
        raise ValueError(f"small_batch must be 'refuse' or 'whole', got {small_batch!r}")
    if layer_of is not None and len(layer_of) != num_blocks:
        raise ValueError(f"layer_of has {len(layer_of)} entries for {num_blocks} blocks; give one for each")
    if not re.fullmatch(r"[\w .-]*", name):
        raise ValueError(f"name must be of letters, digits, spaces and any of _.-, got {name!r}")
