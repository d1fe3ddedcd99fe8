"""The call of a stack as nodes of the outer autograd graph, which hand over parameter gradients block by block.

A call is a chain of nodes, entry -> block 0 -> ... -> block n-1 -> exit. The backward pass walks it from the exit;
the node of a block runs the schedule on until that block's gradients are whole and hands them over, so the hooks of
its parameters (DistributedDataParallel's, say) fire while the rest still runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.execution.piece import plain_name
from oases.execution.wire import Scheduler, Silence
from oases.parallel.autotune import Tuning, synchronize
from oases.parallel.blocks import Execution
from oases.parallel.fsdp import Unit
from oases.parallel.sharding import sharded_parameters


def deliver(call: Call, x: Tensor) -> Tensor:
    """Run the forward pass of a call on `x`, differentiable in `x`, its inputs and the parameters of its blocks."""
    execution = call.execution
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # so that the entry's backward, which ends the schedule, is called
    token = _Entry.apply(call, x, *call.handed_over_by_entry(), *execution.inputs.tensors)
    for b in range(call.num_blocks):
        token = _Block.apply(call, b, token, *call.handed_over_by(b))
    return cast(Tensor, _Exit.apply(call, token))


class Call:
    """One call of a stack: its execution and the hand-over of parameter gradients, block by block.

    tuning: takes the time of this call's forward and backward pass. units: those of the blocks, where weights are
    sharded.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        execution: Execution,
        scheduler: Scheduler,
        tuning: Tuning | None,
        units: Sequence[Unit | None] = (),
    ) -> None:
        self._units = units
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

    @property
    def num_blocks(self) -> int:
        """Of the stack."""
        return len(self._blocks)

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
        with self.execution.guard:
            return self._finish_block(block)

    def _finish_block(self, block: int) -> list[Tensor | None]:
        self.execution.run_backward_of(block)
        self.execution.guard.doing = f"the gradients of block {block}"
        replicated = self._summed(block + 1) if block + 1 < len(self._blocks) else []
        partial, combine = self.execution.gradients_of(block)
        shares = [name for name in self._replicated[block] if name in partial]
        silent = isinstance(self.scheduler, Silence) and not self.scheduler.pretends
        if shares and not silent:
            flat = torch.cat([partial[name].flatten() for name in shares])
            label = f"replicated gradients of block {block}"
            self._pending = (self.scheduler.all_reduce(flat, label), flat, shares)
        self._shares, self._whole = partial, combine
        inputs = self.execution.inputs
        if block == inputs.lowest_reader:  # the rest of the backward pass hides these sums
            inputs.start_sums(self.scheduler, "gradients of block inputs")
        return [self._gradient(name) for name in self._sharded[block]] + replicated

    def compute_weights(self) -> None:
        """After a backward pass that put weight gradients off: add them to the parameters', hooks included."""
        with self.execution.guard:
            for block in reversed(range(self.num_blocks)):
                self.execution.guard.doing = f"the weight gradients of block {block}"
                found = self.execution.weights_of(block)
                for name in found.keys() & set(self._replicated[block]):
                    label = f"replicated gradients of block {block}"
                    self.scheduler.wait(self.scheduler.all_reduce(found[name], label))
                if found:
                    torch.autograd.backward(self._find(block, list(found)), list(found.values()))

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
        """Run the rest; return the gradient of `x` and those of `handed_over_by_entry()` and of the inputs."""
        with self.execution.guard:
            grad = self.execution.run_backward_rest()
            others = self._summed(0) + self.execution.inputs.gradients(self.scheduler)
        if self._tuning is not None:
            synchronize(grad.device)
            self._tuning.note(self._seconds + time.perf_counter())
        return grad, others

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
        unit = self._units[block] if self._units else None
        if unit is not None:
            return [unit.parameters[plain_name(name)] for name in names]
        return [self._blocks[block].get_parameter(name.removeprefix("block.")) for name in names]

    def _gradient(self, name: str) -> Tensor | None:
        share, whole = self._shares.get(name), self._whole.get(name)
        if share is None or whole is None:
            return whole if share is None else share
        return share + whole


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        call.run_forward(x.device)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        grad, others = ctx.call.finish()
        return None, grad, *others


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, block: int, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.block = call, block
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        return None, None, token, *ctx.call.finish_block(ctx.block)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> Tensor:
        ctx.call = call
        output, call.output = call.output, None
        assert output is not None, "the entry has run"
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.call.begin(grad)
        return None, grad.new_zeros(())
