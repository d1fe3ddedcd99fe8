"""Record of a training program on one process or a rank, and the comparison of both."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Values = dict[str, Tensor | None]
Event = tuple[str, Any]
"""A kind ("loss", "gradients", "weights", "random", "state"), and a tensor or Values."""
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
        """Add the state of the generator, and the whole one of a model on the first rank alone."""
        import oases

        self.events.append(("random", torch.get_rng_state()))
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


@dataclass(frozen=True)
class Comparison:
    """Comparison of ranks with the events of one process.

    replicas: number of the replica of each rank. dtype: of the program, half of whose digits must agree. balanced:
    ranks have experts of their own, of which the state alone is compared.
    """

    wanted: list[Event]
    replicas: list[int]
    dtype: str = "float64"
    balanced: bool = False

    def differences(self, ranks: list[list[Event]], *, whole: bool) -> list[str]:
        """List what differs on any rank, the first event first. whole: no event may be missing."""
        found = [each for rank, events in enumerate(ranks) for each in self._of_rank(rank, events, whole)]
        if whole:
            found += self._missing(ranks)
        return [text for _, text in sorted(found, key=lambda each: each[0])]

    def _of_rank(self, rank: int, events: list[Event], whole: bool) -> Iterator[tuple[int, str]]:
        has_state = any(kind == "state" for kind, _ in events)
        mine = [each for each in self.wanted if each[0] != "state" or has_state]
        if whole and len(events) != len(mine):
            yield 0, f"rank {rank} has {len(events)} events, one process {len(mine)}"
        for number, ((kind, value), (other, right)) in enumerate(zip(events, mine, strict=False)):
            where = f"rank {rank} event {number}"
            if kind != other:
                yield number, f"{where} is {kind}, not {other}"
                return
            if kind == "loss":
                expected = right if right.dim() == 0 else right[self.replicas[rank]]
                if not _apart(value, expected, float(expected.abs())) <= self._bound:
                    yield number, f"{where} loss {float(value):.9g}, not {float(expected):.9g}"
                continue
            if kind == "random":
                yield from [] if torch.equal(value, right) else [(number, f"{where} has another random state")]
                continue
            floor = 1e-3 * max((_largest(each) for each in right.values()), default=0.0)
            for name, each in value.items():
                if self._is_compared(name, kind, right):
                    reason = self._wrong(each, right.get(name), name in right, floor)
                    yield from [(number, f"{where} {kind} {name}: {reason}")] if reason else []

    def _is_compared(self, name: str, kind: str, right: Values) -> bool:
        if name.startswith(BUFFER) or BUFFER + name in self._buffers:
            return len(set(self.replicas)) == 1 and name in right
        return not (self.balanced and ".experts." in name and kind != "state")

    def _missing(self, ranks: list[list[Event]]) -> Iterator[tuple[int, str]]:
        """Names that no rank has."""
        for number, (kind, right) in enumerate(self.wanted[: len(ranks[0])]):
            if kind in ("loss", "random"):
                continue
            held = set().union(*(events[number][1] for events in ranks if number < len(events)))
            lost = sorted(name for name in right if not name.startswith(BUFFER) and name not in held)
            if lost:
                yield number, f"event {number} {kind}: no rank has {', '.join(lost[:3])}"

    @property
    def _bound(self) -> float:
        return float(torch.finfo(getattr(torch, self.dtype)).eps) ** 0.5

    @cached_property
    def _buffers(self) -> set[str]:
        return {name for kind, value in self.wanted if kind == "weights" for name in value if name.startswith(BUFFER)}

    def _wrong(self, value: Tensor | None, right: Tensor | None, known: bool, floor: float) -> str:
        if not known:
            return "one process has no such name"
        if right is None or value is None:  # zeros are as good as none, if weights say so
            words = ["none" if each is None else "a tensor" for each in (value, right)]
            same = not any(each is not None and bool(each.any()) for each in (value, right))
            return "" if same else f"{words[0]} in place of {words[1]}"
        if value.shape != right.shape:
            return f"shape {tuple(value.shape)}, not {tuple(right.shape)}"
        apart = _apart(value, right, max(_largest(right), floor))
        return "" if apart <= self._bound else f"differs by {apart:.2g} of its largest value"


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.double().abs().max())


def _apart(value: Tensor, right: Tensor, scale: float) -> float:
    if not (torch.isfinite(value).all() and torch.isfinite(right).all()):
        return 0.0 if not torch.isfinite(value).all() and not torch.isfinite(right).all() else torch.inf
    return float((value.double() - right.double()).abs().max()) / (scale or 1.0) if value.numel() else 0.0
