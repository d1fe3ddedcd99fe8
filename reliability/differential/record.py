"""Record of a training program on one process or a rank, and the comparison of both."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Values = dict[str, Tensor | None]
Event = tuple[str, Any]
"""A kind ("loss", "gradients", "weights", "state"), and a tensor or Values."""
BUFFER = "buffer "
"""Start of the names of buffers among weights."""


def load(path: Path) -> ModuleType:
    """Run the module of a program."""
    spec = importlib.util.spec_from_file_location("differential_program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Record:
    """Events of a run, in order: what its `log` was called with, as whole tensors. ranks: gather from all of them."""

    def __init__(self, ranks: bool) -> None:
        self.events: list[Event] = []
        self._ranks = ranks

    def __call__(self, kind: str, value: Any) -> None:
        """Add an event. Collective for models on ranks."""
        with torch.no_grad():
            if kind == "loss":
                self.events.append((kind, _whole(value).double()))
                return
            found: Values = {n: p.grad if kind == "gradients" else p for n, p in _named(value)}
            apart = self._apart(found) if self._ranks else set()
            whole: Values = {}
            for name, each in sorted(found.items()):
                if name in apart:
                    whole[name] = torch.tensor(torch.nan)  # a gradient that other ranks do not have
                else:
                    whole[name] = None if each is None else _whole(each)
            if kind == "weights":
                whole |= {BUFFER + n: _whole(b) for n, b in value.named_buffers()}
            self.events.append((kind, whole))

    def state(self, model: nn.Module) -> None:
        """Add the whole state of a model, on the first rank alone."""
        import oases

        found = oases.full_state_dict(model) if self._ranks else model.state_dict()
        if found:
            self.events.append(("state", {name: _whole(each) for name, each in found.items()}))

    def _apart(self, found: Values) -> set[str]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, {name: each is None for name, each in found.items()})
        known: dict[str, bool] = {}
        return {name for one in said for name, none in one.items() if known.setdefault(name, none) != none}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by all of their names: on a stage a tied one may have another first name than on one process."""
    return list(model.named_parameters(remove_duplicate=False))


def _whole(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    return (held.full_tensor() if isinstance(held, DTensor) else held).clone()


def reference(path: Path) -> list[Event]:
    """Events of a program in this process."""
    module = load(path)
    model, record = module.build(), Record(ranks=False)
    torch.manual_seed(1)
    module.train(model, None, record)
    record.state(model)
    return record.events


def on_rank(path: Path, record: Record) -> None:
    """Run a program on a rank of the default group, and record it."""
    module = load(path)
    model, replica = module.parallel(module.build())
    torch.manual_seed(1)
    module.train(model, replica, record)
    record.state(model)
    pipeline = getattr(model, "oases_pipeline", None)
    if pipeline is not None:
        pipeline.close()


def differences(
    wanted: list[Event],
    ranks: list[list[Event]],
    replicas: list[int],
    dtype: str,
    *,
    whole: bool = True,
    balanced: bool = False,
) -> list[str]:
    """What differs on any rank, in words, the first event first.

    ranks: events of each rank. replicas: its number. dtype: of the program, half of whose digits must agree. whole:
    the run came to its end, so that no event may be missing. balanced: ranks have experts of their own, of which the
    state alone is compared.
    """
    bound = torch.finfo(getattr(torch, dtype)).eps ** 0.5
    found: list[tuple[int, str]] = []
    stages: list[dict[int, set[str]]] = []
    buffers = {name for kind, value in wanted if kind == "weights" for name in value if name.startswith(BUFFER)}
    for rank, events in enumerate(ranks):
        mine = [each for each in wanted if each[0] != "state" or any(kind == "state" for kind, _ in events)]
        if whole and len(events) != len(mine):
            found.append((0, f"rank {rank} has {len(events)} events, one process {len(mine)}"))
        named: dict[int, set[str]] = {}
        for number, ((kind, value), (other, right)) in enumerate(zip(events, mine, strict=False)):
            if kind != other:
                found.append((number, f"rank {rank} event {number} is {kind}, not {other}"))
                break
            if kind == "loss":
                expected = right if right.dim() == 0 else right[replicas[rank]]
                apart = _apart(value, expected, float(expected.abs()))
                if not apart <= bound:
                    found.append(
                        (number, f"rank {rank} event {number} loss {float(value):.9g}, not {float(expected):.9g}")
                    )
                continue
            named[number] = set(value)
            largest = max((_largest(each) for each in right.values()), default=0.0)
            for name, each in value.items():
                is_buffer = name.startswith(BUFFER) or BUFFER + name in buffers
                if is_buffer and (len(set(replicas)) > 1 or name not in right):
                    continue
                if balanced and ".experts." in name and kind != "state":
                    continue
                reason = _wrong(each, right.get(name), name in right, bound, 1e-3 * largest)
                if reason:
                    found.append((number, f"rank {rank} event {number} {kind} {name}: {reason}"))
        stages.append(named)
    for number in stages[0] if whole else ():
        kind, right = wanted[number]
        missing = {n for n in right if not n.startswith(BUFFER)} - set().union(
            *(each.get(number, set()) for each in stages)
        )
        if missing:
            found.append((number, f"event {number} {kind}: no rank has {', '.join(sorted(missing)[:3])}"))
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.double().abs().max())


def _wrong(value: Tensor | None, right: Tensor | None, known: bool, bound: float, floor: float) -> str:
    if not known:
        return "one process has no such name"
    if right is None or value is None:
        zeros = [each for each in (value, right) if each is not None and bool(each.any())]
        return (
            f"{'none' if value is None else 'a tensor'} in place of {'none' if right is None else 'a tensor'}"
            if zeros
            else ""
        )
    if value.shape != right.shape:
        return f"shape {tuple(value.shape)}, not {tuple(right.shape)}"
    apart = _apart(value, right, max(_largest(right), floor))
    return "" if apart <= bound else f"differs by {apart:.2g} of its largest value"


def _apart(value: Tensor, right: Tensor, scale: float) -> float:
    if not (torch.isfinite(value).all() and torch.isfinite(right).all()):
        return 0.0 if not torch.isfinite(value).all() and not torch.isfinite(right).all() else torch.inf
    return float((value.double() - right.double()).abs().max()) / (scale or 1.0) if value.numel() else 0.0
