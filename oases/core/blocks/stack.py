"""OverlappedStack: transformer blocks run by a schedule, as one differentiable module."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import (
    BlockInputs,
    CallInputs,
    SequenceShard,
    SmallBatches,
    SubBatches,
    differentiable,
    refuse_mixing,
)
from oases.core.blocks.checks import (
    BlockList,
    BypassedHooks,
    checked_inputs,
    compared,
    form_of,
    needs_all_tokens,
    require_activation,
    require_blocks,
    require_options,
    require_overlap,
    require_sequence,
    require_sub_batches,
    says_tokens,
)
from oases.core.blocks.dropout import adopt_dropouts
from oases.core.blocks.gathering import BlockUnit
from oases.core.blocks.program import BlockProgram, laid_out
from oases.core.blocks.randomness import MethodName, Randomness
from oases.core.blocks.stack_call import CallOptions, StackCall, StackParameters, agree_on_seed, apart, leaves_of
from oases.core.blocks.tunings import AUTO, Asked, SubBatchCount, Tuning, Tunings, asked_for
from oases.core.blocks.work import BlockWork
from oases.core.dtypes import AUTO_LOSSY
from oases.core.execution.autotune import Turn
from oases.core.execution.call import apply_call, refuse_recomputation
from oases.core.execution.communication import NullScheduler, Scheduler, Wire, WireType, add_wire, wire_type
from oases.core.execution.executor import WHOLE_BATCH, Context
from oases.core.execution.failure import FailsTogether, begin_call, monitor_of
from oases.core.execution.group import ProcessGroup, group_of, refuse_capture, resolve
from oases.core.execution.piece import outside_of_dynamo
from oases.core.schedule import Recompute, Schedule, generate, validate
from oases.extension import OverlapScheduler

_numbers = itertools.count()


def _nothing() -> None:
    """Empty weak reference."""


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
        self._tunings: Tunings | None = None
        self.seed: int | None = None  # of the random streams; rank 0's initial seed from the first forward pass on
        self._agreed = False  # whether the ranks have agreed on seed and calls
        self.calls = 0
        """Number of forward passes, which selects the random streams."""
        self.run_as(schedule, sub_batches, recompute)

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
        caches: dict[str, Any] = {
            "_block_parameters": [], "_hooks": [], "_programs": {}, "_agreed": False,
            "_small": None, "_tunings": None if self._tunings is None else self._tunings.copied(),
        }  # fmt: skip
        return {**self.__dict__, **caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state with a new number: rows of a report are of one stack."""
        super().__setstate__({**state, "number": next(_numbers)})

    def run_as(
        self, schedule: str | Schedule, sub_batches: SubBatchCount | None = None, recompute: Recompute = "none"
    ) -> None:
        """Change the schedule of later calls."""
        resumed, self._tunings = self.choices, None
        self._programs = {}
        self._small: SmallBatches | None = None
        if isinstance(schedule, Schedule):
            validate(schedule, "block")
            if schedule.num_blocks != len(self.blocks):
                have = f"the stack has {len(self.blocks)}"
                raise ValueError(f"schedule '{schedule.name}' is for {schedule.num_blocks} blocks, {have}")
            asked: Asked = (str(schedule), schedule.num_sub_batches, recompute)
            only: Schedule | None = schedule
        else:
            asked, only = asked_for(schedule, sub_batches, recompute), None
            if AUTO not in asked[:2]:
                only = generate(asked[0], len(self.blocks), int(asked[1]), recompute, self.layer_of)
        self._only = only
        place, may_be_off = (self.name, self.first_block), not self.require_overlap
        tunings = Tunings(
            asked, len(self.blocks), self.layer_of, place, may_be_off=may_be_off, lossy=self._lossy, only=only
        )
        if only is None or self._lossy:
            self._tunings, tunings.resumed = tunings, resumed
        self.schedule = self._laid_out(tunings.candidates(2)[-1])

    def _laid_out(self, schedule: Schedule) -> Schedule:
        return laid_out(schedule, [*self.blocks], along=self.sequence_parallel and self.tensor_parallel > 1)

    @outside_of_dynamo
    def forward(
        self, x: Tensor, inputs: Sequence[BlockInputs] | None = None, *, context: Context | None = None
    ) -> Tensor:
        """[batch, ...] -> [batch, ...].

        inputs: further arguments of each block's methods, one for each block. Tensors among them that require grad
        get gradients: partial sums over the ranks from `partial`, complete ones from `combine`. context: spans to
        record, a pipeline's handles. ValueError where they do not fit the blocks, the batch or the sequence.
        """
        require_activation(x)
        refuse_capture(x)
        refuse_recomputation(self.label)
        given = checked_inputs(inputs, len(self.blocks))
        scheduler: Scheduler = OverlapScheduler.of(self._group_name) if self.tensor_parallel > 1 else NullScheduler()
        tuning = self._tuning(x, given, scheduler) if self._tunings is not None else None
        turn = None
        if tuning is not None and tuning.choice is None and self._with_gradients(x, given):
            turn = tuning.begin_turn()
        if tuning is not None:
            self.schedule, wire = tuning.settled if turn is None else tuning.candidates[turn.label]
            self.wire_dtype = wire if self._lossy else self.wire_dtype
        if self.require_overlap and (tuning is None or tuning.choice is not None):
            asked, run = self.schedule.num_sub_batches, self._schedule_for(x, given)
            small = asked if self._replacements.is_whole(run) else 0
            require_overlap(run, self.process_group, self.label, self.calls, small, tuning is not None)
        return self.run(x, scheduler, turn, given, context)

    def _tuning(self, x: Tensor, inputs: Sequence[BlockInputs], scheduler: Scheduler) -> Tuning:
        assert self._tunings is not None
        joint = self.joint_blocks if self._can_cut_tokens(x, 4, inputs) else None

        def agree() -> None:
            if isinstance(scheduler, OverlapScheduler):
                form = ("shape of the input", x.shape, "type of the input", x.dtype)  # as `form_of` begins
                begin_call(self.process_group, self.label, form)

        group = group_of(self.tuned_over if self.tensor_parallel > 1 else "") or self.process_group
        return self._tunings.of(x, joint, self.parameters, self._laid_out, group, agree, bool(self.tuned_over))

    def _with_gradients(self, x: Tensor, inputs: Sequence[BlockInputs]) -> bool:
        return torch.is_grad_enabled() and (
            x.requires_grad
            or any(each.trained for each in self._parameters_of(self._current_blocks()))
            or bool(differentiable(inputs))
        )

    @property
    def choices(self) -> dict[str, str]:
        """Choices of "auto" by configuration of blocks and input; set by a run that resumes another."""
        return {} if self._tunings is None else self._tunings.choices

    @choices.setter
    def choices(self, found: Mapping[str, str]) -> None:
        if self._tunings is not None:
            self._tunings.resumed = dict(found)

    def compile_blocks(self, **options: Any) -> None:
        """Compile the methods of every block; options: of torch.compile. Parameter names stay."""
        # In a plain list: torch.compile's wrapper would put a prefix before the names of a block's parameters.
        self._compiled = [cast(nn.Module, torch.compile(block, **options)) for block in self.blocks]

    @property
    def joint_blocks(self) -> frozenset[int]:
        """Blocks that need all tokens at once."""
        return frozenset(b for b, block in enumerate(self._compiled or self.blocks) if needs_all_tokens(block))

    def may_cut_tokens(self, x: Tensor) -> bool:
        """Whether a call may have sub-batches of tokens if all blocks' inputs say how they are cut."""
        if self._only is not None and self._only.along == "sequence":
            return True
        parts = 2 if self._only is None else self._only.num_sub_batches
        return x.shape[0] < parts and not self.sequence_parallel and x.dim() > 2

    def _can_cut_tokens(self, x: Tensor, parts: int, inputs: Sequence[BlockInputs]) -> bool:
        some = len(self.joint_blocks) < len(self.blocks) and all(map(says_tokens, inputs))
        return some and not self.sequence_parallel and x.dim() > 2 and x.shape[1] >= parts

    @property
    def _replacements(self) -> SmallBatches:
        if self._small is None:
            self._small = SmallBatches(len(self.blocks), self.layer_of, self._laid_out)
        return self._small

    def _schedule_for(self, x: Tensor, inputs: Sequence[BlockInputs]) -> Schedule:
        """The schedule, or its replacement for a batch too small to split.

        That is the same along the sequence, or with small_batch="whole" the unsplit batch. Raises ValueError where
        `x` and `inputs` cannot be split.
        """
        schedule, parts = self.schedule, self.schedule.num_sub_batches
        require_sequence(x, schedule, self.tensor_parallel, inputs, self.joint_blocks)
        if schedule.along == "sequence" or x.shape[0] >= parts:
            return schedule
        if schedule.name != "oases" or not self._can_cut_tokens(x, parts, inputs):
            if self.small_batch == "whole" and x.shape[0] > 0:
                return self._replacements.whole(schedule)
            raise ValueError(
                f"a batch of {x.shape[0]} cannot be cut into {parts} sub-batches; use a larger batch or fewer "
                "sub_batches, small_batch='whole' to run it unsplit, or with schedule='oases' token_wise = True in "
                "blocks that treat tokens independently, causal = True in those that call oases.causal_attention, "
                "and tokens in blocks' inputs, to split the sequence"
            )
        return self._replacements.by_tokens(schedule, self.joint_blocks)

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, inputs: Sequence[BlockInputs] = (),
        context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the forward pass with collectives by `scheduler`; `NullScheduler()` measures the compute alone.

        turn: receives the seconds of this call's forward and backward pass. inputs, context: as for `forward`.
        """
        schedule = self._schedule_for(x, inputs)
        blocks = self._current_blocks()
        parameters = self._parameters_of(blocks)
        with_gradients = self._with_gradients(x, inputs)
        program = self._program_of(schedule, blocks, x.device.type)
        rank, size = self._group_rank, self.tensor_parallel
        shard = SequenceShard(rank, size) if schedule.sequence_parallel else SequenceShard()
        cut = SubBatches(x.shape, schedule, shard)
        held = CallInputs(inputs, cut, with_gradients=with_gradients)
        monitor = None
        if isinstance(scheduler, OverlapScheduler):
            group = self.process_group
            monitor = monitor_of(group)
            form = form_of(
                x, inputs, parameters, schedule, program.order, self.wire_dtype, training=self.training,
                gradients=with_gradients,
            )  # fmt: skip
            begin_call(group, self.label, form, compared(x, inputs, self.calls + 1))
            if isinstance(self.wire_dtype, str):
                add_wire(cast(ProcessGroup, group))
        if not self._agreed:
            seed, self.calls = agree_on_seed(self.process_group, self.calls)
            self.seed = seed if self.seed is None else self.seed
            self._agreed = True
        assert self.seed is not None
        self.calls += 1
        leaves = leaves_of(parameters, self._units) if with_gradients else []
        randomness = Randomness(
            self.seed, self.calls, rank, x.device, self._draws[self.training], size=size,
            first_block=self.first_block, first_sample=self._replica * x.shape[0],
        )  # fmt: skip
        context = Context() if context is None else context
        work = BlockWork(
            blocks, program, Wire(scheduler, size, self.wire_dtype), x, leaves, differentiable=with_gradients,
            randomness=randomness, cut=cut, inputs=held,
        )  # fmt: skip
        options = CallOptions(scheduler, monitor, context, turn, self._units)
        call = StackCall(program, work, parameters, options, differentiable=with_gradients)
        if not with_gradients:
            return call.forward()
        context.handles.add(call)
        return apply_call(call, x)

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
            label = self.label + WHOLE_BATCH * self._replacements.is_whole(schedule)
            self._programs[key] = BlockProgram(schedule, blocks, label, self.layer_of, device)
        return self._programs[key]
