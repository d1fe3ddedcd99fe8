"""OverlappedStack: transformer blocks run by a schedule, as one differentiable module.

In the outer autograd graph a call is a chain of nodes, entry -> block 0 -> ... -> block n-1 -> exit. The backward
pass walks it from the exit; the node of a block runs the schedule on until that block's gradients are whole and
hands them over, so the hooks of its parameters (DistributedDataParallel's, say) fire while the rest still runs.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.errors import OverlapError
from oases.parallel.autotune import Autotune, cache_key, candidates, labelled, synchronize
from oases.parallel.execution import Execution, Method, Scheduler, Silence
from oases.parallel.group import HoldsGroup, ProcessGroup, group_rank, resolve, scheduler_of
from oases.parallel.randomness import Randomness, hash_of
from oases.parallel.statistics import report
from oases.schedule import Recompute, Schedule, ScheduleError, format_schedule, generate, validate

Tuning = Autotune[Schedule]
_numbers = itertools.count()


def _refuse_mixing(blocks: nn.ModuleList) -> None:
    """Raise ValueError for layers whose result for one sample depends on the others: cut batches would change it."""
    for name, module in blocks.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"block module '{name}' ({type(module).__name__}) mixes the samples of a batch, so sub-batches would "
                "change its result; use a norm per sample, such as LayerNorm"
            )


class _Call:
    """One call of a stack: its execution and the hand-over of parameter gradients, block by block."""

    def __init__(
        self, blocks: nn.ModuleList, execution: Execution, scheduler: Scheduler, tuning: Tuning | None
    ) -> None:
        self.execution = execution
        self._tuning = None if tuning is None or tuning.choice is not None else tuning
        self._seconds = 0.0
        self.scheduler = scheduler
        self.output: Tensor | None = None
        self._blocks = blocks
        # Trainable parameters per block by name, as `Method` sees them.
        self._sharded: list[list[str]] = []
        self._replicated: list[list[str]] = []
        for block in blocks:
            cut = {id(parameter) for _, parameter, _ in sharded_parameters(block)}
            trainable = [(n, p) for n, p in block.named_parameters(prefix="block") if p.requires_grad]
            self._sharded.append([name for name, parameter in trainable if id(parameter) in cut])
            self._replicated.append([name for name, parameter in trainable if id(parameter) not in cut])
        # Of the block finished last: gradients by name, and the all-reduce of the replicated ones.
        self._shares: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        self._pending: tuple[Any, Tensor, list[str]] | None = None

    def handed_over_by_entry(self) -> list[nn.Parameter]:
        """The parameters whose gradients the entry's backward returns."""
        return self._find(0, self._replicated[0])

    def handed_over_by(self, block: int) -> list[nn.Parameter]:
        """The parameters whose gradients the block's node returns.

        Replicated ones come one node later than sharded ones: their small all-reduce has that long to end.
        """
        sharded = self._find(block, self._sharded[block])
        last = block + 1 == len(self._blocks)
        return sharded if last else sharded + self._find(block + 1, self._replicated[block + 1])

    def finish_block(self, block: int) -> list[Tensor | None]:
        """Run to the end of `block`; return the gradients of `handed_over_by(block)`."""
        self.execution.run_backward_of(block)
        replicated = self._summed(block + 1) if block + 1 < len(self._blocks) else []
        partial, combine = self.execution.gradients_of(block)
        shares = [name for name in self._replicated[block] if name in partial]
        if shares and not isinstance(self.scheduler, Silence):
            flat = torch.cat([partial[name].flatten() for name in shares])
            label = f"replicated gradients of block {block}"
            self._pending = (self.scheduler.all_reduce(flat, label), flat, shares)
        self._shares, self._whole = partial, combine
        return [self._gradient(name) for name in self._sharded[block]] + replicated

    def run_forward(self, device: torch.device) -> None:
        """Run the forward pass, timed where a choice of schedule is being made."""
        with self._timed(device):
            self.output = self.execution.run_forward()

    def begin(self, grad: Tensor) -> None:
        """Begin the backward pass."""
        if self._tuning is not None:
            synchronize(grad.device)
            self._seconds -= time.perf_counter()
        self.execution.begin_backward(grad)

    def finish(self) -> tuple[Tensor, list[Tensor | None]]:
        """Run the rest; return the input's gradient and those of `handed_over_by_entry()`."""
        grad = self.execution.run_backward_rest()
        replicated = self._summed(0)
        if self._tuning is not None:
            synchronize(grad.device)
            self._tuning.note(self._seconds + time.perf_counter())
        return grad, replicated

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        if self._tuning is not None:
            synchronize(device)
            self._seconds -= time.perf_counter()
        yield
        if self._tuning is not None:
            synchronize(device)
            self._seconds += time.perf_counter()

    def _summed(self, block: int) -> list[Tensor | None]:
        """Gradients of the replicated parameters of `block`, the one finished last, summed over the ranks."""
        if self._pending is not None:
            ticket, flat, names = self._pending
            self._pending = None
            self.scheduler.wait(ticket)
            parts = flat.split([self._shares[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                self._shares[name] = part.view_as(self._shares[name])
        return [self._gradient(name) for name in self._replicated[block]]

    def _find(self, block: int, names: list[str]) -> list[nn.Parameter]:
        return [self._blocks[block].get_parameter(name.removeprefix("block.")) for name in names]

    def _gradient(self, name: str) -> Tensor | None:
        share, whole = self._shares.get(name), self._whole.get(name)
        if share is None or whole is None:
            return whole if share is None else share
        return share + whole


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *replicated: Tensor) -> Tensor:
        ctx.call = call
        call.run_forward(x.device)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        grad, replicated = ctx.call.finish()
        return None, grad, *replicated


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, block: int, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.block = call, block
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        return None, None, token, *ctx.call.finish_block(ctx.block)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor) -> Tensor:
        ctx.call = call
        output, call.output = call.output, None
        assert output is not None, "the entry has run"
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.call.begin(grad)
        return None, grad.new_zeros(())


class OverlappedStack(HoldsGroup, nn.Module):
    """A stack of tensor-parallel blocks run by a schedule that hides all-reduces under other sub-batches.

    blocks: modules with `partial(x) -> y`, without communication, up to the row-parallel product, and
        `combine(x, y_reduced) -> next x`. Blocks must treat samples (dimension 0) independently.
    process_group: the tensor-parallel group; None is the default group. schedule: the name of a generator in
        `oases.schedule` or a Schedule for len(blocks) blocks. sub_batches: how many parts the batch is cut into
        ("sync" runs it whole). "auto" for either measures the candidates on the first steps, "off" among them, and
        keeps the fastest. recompute: "full" keeps block inputs alone and computes the rest again.
    wire_dtype: send sums in this type, at its bytes. require_overlap (or OASES_REQUIRE_OVERLAP=1): raise OverlapError
        where nothing overlaps.
    Input and output: [batch, ...], the same on every rank. Gradients of sharded parameters (`shard_dims` of
    their module) stay this rank's; those of replicated ones are summed over the group where they are shares.
    Raises ValueError for a batch smaller than the number of sub-batches, ScheduleError for a bad schedule.
    Source: arXiv 2305.16121.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        process_group: ProcessGroup | None = None,
        schedule: str | Schedule = "oases",
        sub_batches: int | Literal["auto"] = 2,
        recompute: Recompute = "none",
        wire_dtype: torch.dtype | None = None,
        require_overlap: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        if sub_batches != "auto" and sub_batches < 1:
            raise ValueError(f"sub_batches must be at least 1 or 'auto', got {sub_batches}")
        if wire_dtype is not None and not wire_dtype.is_floating_point:
            raise ValueError(f"wire_dtype must be a floating-point type, got {wire_dtype}")
        for index, block in enumerate(self.blocks):
            for name in ("partial", "combine"):
                if not callable(getattr(block, name, None)):
                    raise ValueError(f"block {index} ({type(block).__name__}) has no method {name}()")
        self.process_group = resolve(process_group)
        _refuse_mixing(self.blocks)
        self.wire_dtype = wire_dtype
        self.require_overlap = require_overlap or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
        self.run_as(schedule, sub_batches, recompute)
        self.number = next(_numbers)
        """Counts the stacks of this process, so that errors and statistics can tell them apart."""
        self._seed: int | None = None
        self._agreed: set[Schedule] = set()
        self._calls = 0
        self.spans: list[tuple[str, float, float]] | None = None
        """Set to a list to have (op, start, end) of every compute op and wait appended, monotonic seconds."""

    def run_as(
        self,
        schedule: str | Schedule,
        sub_batches: int | Literal["auto"] = 2,
        recompute: Recompute = "none",
    ) -> None:
        """Change the schedule for the calls to come."""
        self._tunings: dict[str, Tuning] | None = None
        if isinstance(schedule, Schedule):
            validate(schedule)
            if schedule.num_blocks != len(self.blocks):
                raise ValueError(
                    f"schedule '{schedule.name}' is for {schedule.num_blocks} blocks, the stack has "
                    f"{len(self.blocks)}"
                )
            self.schedule = schedule
        elif "auto" in (schedule, sub_batches):
            self._tunings, self._asked = {}, (schedule, sub_batches, recompute)
            self.schedule = candidates(len(self.blocks), 2, *self._asked)[-1]
        else:
            self.schedule = generate(schedule, len(self.blocks), int(sub_batches), recompute)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, ...] -> [batch, ...]."""
        tuning = self._tuning(x) if self._tunings is not None else None
        if tuning is not None:
            self.schedule = tuning.current
        if x.shape[0] < self.schedule.num_sub_batches:
            raise ValueError(
                f"a batch of {x.shape[0]} cannot be cut into {self.schedule.num_sub_batches} sub-batches; "
                "use a larger batch or fewer sub_batches"
            )
        scheduler: Scheduler = Silence()
        if self.tensor_parallel > 1:
            scheduler = scheduler_of(cast(ProcessGroup, self.process_group))
        if self.require_overlap and (tuning is None or tuning.choice is not None):
            self._require_overlap()
        return self.run(x, scheduler, tuning)

    def _tuning(self, x: Tensor) -> Tuning:
        assert self._tunings is not None
        sizes = [tuple(parameter.shape) for parameter in self.parameters()]
        key = cache_key(repr((self._asked, len(self.blocks), sizes)), x.shape, x.dtype, self.process_group)
        if key not in self._tunings:
            schedules = candidates(len(self.blocks), x.shape[0], *self._asked)
            self._tunings[key] = Tuning(
                labelled(schedules), self.process_group, key, has_off=not schedules[0].overlaps
            )
        return self._tunings[key]

    def _agree(self) -> None:
        """Before a schedule's first run: every rank must run the same list, or sums would mix; one seed for all."""
        schedule, group = self.schedule, self.process_group
        mine = (schedule.name, schedule.num_sub_batches, hash_of(format_schedule(schedule)), str(self.wire_dtype))
        everyone: list[Any] = [(mine, torch.initial_seed())]
        if group is not None and self.tensor_parallel > 1:
            everyone *= self.tensor_parallel
            dist.all_gather_object(everyone, (mine, torch.initial_seed()), group=group)
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != everyone[0][0]:
                first = everyone[0][0]
                raise ScheduleError(
                    f"rank 0 runs schedule '{first[0]}' with {first[1]} sub-batches and wire dtype {first[3]}, rank "
                    f"{rank} runs '{theirs[0]}' with {theirs[1]} and {theirs[3]}"
                    + ("" if first[:2] != theirs[:2] else ", of another order")
                    + "; all ranks of a group must run the same list"
                )
        self._seed = everyone[0][1] if self._seed is None else self._seed
        self._agreed.add(schedule)

    def _require_overlap(self) -> None:
        """Raise OverlapError if this stack's communication cannot, or did not, run under compute."""
        why = None
        if self.tensor_parallel == 1:
            why = "the group has one rank, so nothing is communicated"
        elif not self.schedule.overlaps:
            schedule = self.schedule
            why = f"schedule '{schedule.name}' with {schedule.num_sub_batches} sub-batches overlaps nothing"
            if self._tunings is not None:
                why += "; it was chosen because it measured fastest here"
        elif self._calls >= 4:
            rows = [row for row in report(self.process_group).stacks if row.where == f"stack {self.number}"]
            if rows and rows[0].hidden is not None and rows[0].hidden < 0.01:
                waited, busy = rows[0].blocked_seconds, rows[0].link_seconds
                why = f"the compute waited {waited:.2f} s for {busy:.2f} s of communication"
        if why is not None:
            raise OverlapError(f"overlap is required, but {why} (stack {self.number}; see oases.report())")

    def run(self, x: Tensor, scheduler: Scheduler, tuning: Tuning | None = None) -> Tensor:
        """Forward with collectives by `scheduler`; `Silence()` measures the compute alone.

        tuning: takes the time of this call's forward and backward pass.
        """
        tracked = [x, *self.parameters()]
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tracked)
        methods = [(Method(block, "partial"), Method(block, "combine")) for block in self.blocks]
        if self.schedule not in self._agreed:
            self._agree()
        assert self._seed is not None
        self._calls += 1
        rank = group_rank(self.process_group)
        randomness = Randomness(self._seed, self._calls, rank, x.device, active=self.training)
        execution = Execution(
            methods, self.schedule, scheduler, x,
            differentiable=differentiable, randomness=randomness, wire_dtype=self.wire_dtype,
            label=f"stack {self.number}", spans=self.spans,
        )  # fmt: skip
        if not differentiable:
            return execution.run_forward()
        call = _Call(self.blocks, execution, scheduler, tuning)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the entry's backward, which ends the schedule, is called
        token = _Entry.apply(call, x, *call.handed_over_by_entry())
        for b in range(len(self.blocks)):
            token = _Block.apply(call, b, token, *call.handed_over_by(b))
        return cast(Tensor, _Exit.apply(call, token))


def sharded_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter, int]]:
    """(name, parameter, dimension that is cut over the tensor-parallel group), each parameter once.

    A module says which of its parameters are cut, and where, by its attribute `shard_dims`.
    """
    found: dict[int, tuple[str, nn.Parameter, int]] = {}
    for prefix, child in module.named_modules():
        for name, dim in getattr(child, "shard_dims", {}).items():
            parameter = getattr(child, name, None)
            if parameter is not None:
                found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter, dim))
    return list(found.values())
