"""What runs while a stack's forward pass waits: steps of another pass, handed to it by who runs both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_steps: ContextVar[Iterator[None] | None] = ContextVar("steps under the forward pass", default=None)


@contextmanager
def under_forward(steps: Iterator[None]) -> Iterator[None]:
    """Forward passes of stacks in here take a step before they wait for a sum; what is left is taken at the end.

    All ranks of the stacks' groups must do so with steps of the same passes.
    """
    token = _steps.set(steps)
    try:
        yield
    finally:
        _steps.reset(token)
    for _ in steps:
        pass


def make_room() -> None:
    """Take a step, if there is one."""
    steps = _steps.get()
    if steps is not None:
        next(steps, None)
