"""Ops that tests count."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from oases.layers.fused_norm import FUSED_ON


class CalledOps(TorchDispatchMode):
    """Context that counts the ops that are dispatched in it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the op and run it."""
        self.ops[function.name()] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def fused_on_cpu() -> Iterator[None]:
    """Context in which fused ops are used on the CPU, too, where they are slower than torch's."""
    FUSED_ON.add("cpu")
    try:
        yield
    finally:
        FUSED_ON.discard("cpu")
