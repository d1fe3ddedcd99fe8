"""Patches for tracing transformers layers: no export-only code paths, and a limit on calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

MOST_CALLS = 2000
"""Calls of torch's functions in a layer; the trace of a layer with more is given up.

Layers of XLNet, Llama, DeepSeek-V3 and Qwen3-Next have 31, 61, 124 and 200, whose traces took 1.2, 1.0, 0.5 and 2.1 s
of CPU time, and 2.4, 1.2, 2.8 and 6.9 where lengths vary: at 20 to 80 ms a call, 2000 take a minute or two. Layers
with more have loops over tokens or chunks, which a trace unrolls. A number of calls, unlike a time, is equal on all
ranks.
"""

_ASKED = ("is_torchdynamo_exporting", "is_torchdynamo_compiling")
"""Functions that transformers' layers import to ask whether they are exported."""
_PACKED = "find_packed_sequence_indices"
"""Function by which transformers' masks ask for the texts that position ids are of."""


class CallCounter(TorchFunctionMode):
    """Counts the calls of torch's functions; RuntimeError for each after the first MOST_CALLS."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.most = 0, MOST_CALLS

    @property
    def over(self) -> bool:
        """Whether there were too many."""
        return self.calls > self.most

    @property
    def why(self) -> str:
        """Continuation of a sentence about a layer that has too many."""
        return (
            f"calls more than {self.most} functions of torch, whose trace would take a minute or more: a trace "
            "unrolls loops (over tokens, say); make the loop one op by torch.library.custom_op"
        )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call and run it. Reading an attribute (`shape`) is no call."""
        self.calls += getattr(function, "__name__", "") != "__get__"
        if self.over:
            raise RuntimeError(f"more than {self.most} calls of torch's functions")
        return function(*args, **(kwargs or {}))


@contextmanager
def traced_as_run(module: nn.Module) -> Iterator[None]:
    """Context in which layers of transformers are traced as they run, not in the form that some have for exporting.

    That form avoids ops which other runtimes lack, and solves a triangular system in a thousand ops instead of one.
    """
    files = [sys.modules.get(name) for name in sorted({type(part).__module__ for part in module.modules()})]
    asking = [vars(file) for file in files if hasattr(file, _ASKED[0])]
    before = [{name: names[name] for name in _ASKED if name in names} for names in asking]
    for names, functions in zip(asking, before, strict=True):
        names.update(dict.fromkeys(functions, bool))  # bool() is False
    try:
        yield
    finally:
        for names, functions in zip(asking, before, strict=True):
            names.update(functions)


@contextmanager
def masks_as_run() -> Iterator[None]:
    """Context in which models of transformers make of samples without data the masks that they make of real ones.

    Without a mask they look whether position ids are those of packed texts, and where those have no data, make the
    mask of packed texts; layers have none where they run on texts that are not packed.
    """
    masking = sys.modules.get("transformers.masking_utils")
    names = {} if masking is None or not hasattr(masking, _PACKED) else vars(masking)
    before = names.get(_PACKED)
    if names:
        names[_PACKED] = lambda position_ids: None
    try:
        yield
    finally:
        if names:
            names[_PACKED] = before


def outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Lists of two layers or more, with their paths; none of those inside of another."""
    seen: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}." if other else "") for other in seen)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not inside:
            seen.append(path)
            yield path, module


def put_back(replaced: Sequence[tuple[nn.Module, Any]]) -> None:
    """Undo replacements of layers' forwards, each with the attribute before it, None for none; the last one first."""
    for layer, own in reversed(replaced):
        if own is None:
            del layer.forward
        else:
            layer.forward = own


@contextmanager
def layers_as_run(model: nn.Module) -> Iterator[list[str]]:
    """Context in which the layers of a model's lists are traced as they run, each within the bound.

    Yields a list that gets why a layer was given up, besides the RuntimeError in its forward.
    """
    given_up: list[str] = []
    before: list[tuple[nn.Module, Any]] = []
    try:
        for list_path, layers in outermost_lists(model):
            for number, layer in enumerate(layers):
                before.append((layer, vars(layer).get("forward")))
                path = f"{list_path}.{number}".lstrip(".")
                layer.forward = partial(_as_run, layer.forward, layer, path, given_up)
        yield given_up
    finally:
        put_back(before)


def _as_run(
    forward: Callable[..., Any], layer: nn.Module, path: str, given_up: list[str], *args: Any, **kwargs: Any
) -> Any:
    with traced_as_run(layer), CallCounter() as counter:
        try:
            return forward(*args, **kwargs)
        finally:
            if counter.over:
                given_up.append(f"its layer {path} {counter.why}")
