"""The call of a stack as nodes of the outer autograd graph, which hand over parameter gradients block by block.

A call is a chain of nodes, entry -> block 0 -> ... -> block n-1 -> exit. The backward pass walks it from the exit;
the node of a block runs the schedule on until that block's gradients are whole and hands them over, so the hooks of
its parameters (DistributedDataParallel's, say) fire while the rest still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Delivered(Protocol):
    """A call that can be delivered: what its nodes do."""

    num_blocks: int
    output: Tensor | None
    """Of the forward pass, on its way to the exit."""

    def forward(self) -> Tensor:
        """Run the forward pass; its output."""

    def entry_tensors(self) -> Sequence[Tensor]:
        """Tensors whose gradients `finish` returns."""

    def block_tensors(self, block: int) -> Sequence[Tensor]:
        """Tensors whose gradients `finish_block` returns."""

    def begin(self, grad: Tensor) -> None:
        """Begin the backward pass with the gradient of the output."""

    def finish_block(self, block: int) -> Sequence[Tensor | None]:
        """Run on until the gradients of `block_tensors(block)` are whole; return them."""

    def finish(self) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Run the rest; the gradients of the input and of `entry_tensors()`."""


def deliver(call: Delivered, x: Tensor) -> Tensor:
    """Run the forward pass of a call on `x`, differentiable in `x` and in the tensors that it hands over."""
    if not x.requires_grad:
        x = x.detach().requires_grad_()  # so that the entry's backward, which ends the schedule, is called
    token = _Entry.apply(call, x, *call.entry_tensors())
    for block in range(call.num_blocks):
        token = _Block.apply(call, block, token, *call.block_tensors(block))
    return cast(Tensor, _Exit.apply(call, token))


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Delivered, x: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        call.output = call.forward()
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # type: ignore[override]
        grad, others = ctx.call.finish()
        return None, grad, *others


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Delivered, block: int, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.block = call, block
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        return None, None, token, *ctx.call.finish_block(ctx.block)


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Delivered, token: Tensor) -> Tensor:
        ctx.call = call
        output, call.output = call.output, None
        assert output is not None, "the entry has run"
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.call.begin(grad)
        return None, grad.new_zeros(())
