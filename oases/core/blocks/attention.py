"""Causal attention in sub-batches of tokens, which read the keys and values of the ones before.

A sub-batch's queries need no later key, so the all-reduce of one sub-batch is hidden under the attention of the next
as it is between samples. In the backward pass the last sub-batch goes first: a key's gradient is complete when every
later sub-batch has added its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from oases.core.execution.piece import Piece

current_prefix: ContextVar[KeyValuePrefix | None] = ContextVar("oases_key_value_prefix", default=None)
"""Tokens that attention in the current sub-batch of tokens reads, as `oases.causal_attention` does."""


class KeyValuePrefix:
    """Keys and values of one block by sub-batch of tokens, and their gradients. number: of sub-batches.

    It holds nothing for blocks whose attention does not ask for `current_prefix`.
    """

    def __init__(self, block: int, number: int) -> None:
        self._block, self._number = block, number
        self._made: dict[int, list[Tensor]] = {}  # by sub-batch, in the order of the calls
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._done: set[int] = set()  # sub-batches whose backward pass has run
        self._calls = 0
        self._now = 0
        self._piece: Piece | None = None

    def around(self, s: int, function: Callable[[], Tensor]) -> Tensor:
        """Call the forward pass of sub-batch `s`; it may be repeated."""
        self._made[s], self._now, self._piece = [], s, None
        token = current_prefix.set(self)
        try:
            return function()
        finally:
            current_prefix.reset(token)
            self._calls, self._piece = len(self._made[s]), None

    def end(self, s: int) -> None:
        """After the forward pass of sub-batch `s`: release what no later one reads."""
        if s == self._number - 1:
            self._made.clear()

    def record(self, piece: Piece) -> None:
        """Have a piece record what the sub-batch reads of others and makes for them."""
        self._piece = piece

    def after(self, tensor: Tensor) -> Tensor:
        """This sub-batch's keys or values [..., tokens, width], after the ones of earlier sub-batches."""
        own = self._made[self._now]
        self._require_order(range(self._now), self._made, "keys")
        before = [self._made[t][len(own)] for t in range(self._now)]
        if self._piece is None:
            own.append(tensor.detach())
        else:
            before = [self._piece.input(each) for each in before]
            own.append(self._piece.output(tensor, False))
        return torch.cat([*before, tensor], -2) if before else tensor

    def gradients(self, s: int) -> list[Tensor | None]:
        """Gradients of the keys and values of sub-batch `s` through later ones; taken once."""
        self._now = s
        if self._calls:
            self._require_order(range(s + 1, self._number), self._done, "gradients of keys")
        self._done.add(s)
        return self._gradients.pop(s, [None] * self._calls)

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add the gradients of what that sub-batch read of earlier ones."""
        for place, gradient in enumerate(found):
            if gradient is None:
                continue
            call, earlier = divmod(place, self._now)
            sums = self._gradients.setdefault(earlier, [None] * self._calls)
            held = sums[call]
            sums[call] = gradient if held is None else held.add_(gradient)

    def _require_order(self, needed: Iterable[int], held: Collection[int], what: str) -> None:
        missing = [s for s in needed if s not in held]
        if missing:
            raise RuntimeError(
                f"sub-batch {self._now} of block {self._block} needs {what} of sub-batch {missing[0]}, which the "
                "schedule runs later; list sub-batches of tokens in order in the forward pass, in reverse in the "
                "backward pass, or name the block in joint="
            )
