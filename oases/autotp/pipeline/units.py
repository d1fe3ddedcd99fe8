"""Run the model's own forward on one pipeline stage; modules of other stages are stubs.

A unit of the part runs. One of an earlier part returns what that part passed on, or zeros of the right shape where
nothing of this part reads it. The first unit after the part ends the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.export import running_without_data, without_data
from oases.autotp.pipeline.dataflow import Dataflow, Value
from oases.autotp.pipeline.stages import Crossings, Division
from oases.autotp.trace_guard import recorders, unrecorded
from oases.distributed.failures import EarlyEnd


class StageExit(EarlyEnd):
    """End of the author's forward where everything that a part computes is there."""


@dataclass
class Pass:
    """Forward pass of one micro-batch through one part. values: received ones, and those that units have returned."""

    part: int
    flow: Dataflow
    crossings: Crossings
    values: dict[Value, Tensor]
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._passed_on = set(self.crossings.passed_on(self.part))
        self._last = max((at for at, part in enumerate(self.crossings.parts) if part == self.part), default=-1)

    def begin(self, unit: str) -> tuple[int, bool]:
        """Number of a call that begins, and whether it is of this part. StageExit after the part's last call."""
        occurrence = self.counts[unit]
        self.counts[unit] += 1
        try:
            number = self.flow.number_of(unit, occurrence)
        except KeyError:
            raise RuntimeError(
                f"{unit} is called {occurrence + 1} times in this pass, and fewer times in a pass on fake tensors; a "
                "pipeline needs a forward whose calls do not depend on data"
            ) from None
        if number > self._last:
            raise StageExit
        return number, self.crossings.parts[number] == self.part

    def note(self, number: int, result: Any) -> None:
        """Keep the results of a call that later parts read."""
        for leaf, each in enumerate(pytree.tree_leaves(result)):
            if Value(number, leaf) in self._passed_on:
                self.values[Value(number, leaf)] = each

    def outputs(self) -> list[Tensor]:
        """Values for the next part."""
        return [self.values[value] for value in self.crossings.passed_on(self.part)]


MOST_KNOWN = 1 << 14
"""Calls of units whose shapes are kept: samples of ever new lengths would fill the memory."""


class Units:
    """Units of a model, with fake copies that know the shapes of results that are not computed here."""

    def __init__(self, twin: nn.Module, names: Sequence[str]) -> None:
        self.current: Pass | None = None
        self.twins = {name: twin.get_submodule(name) for name in names}
        self.shapes: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}
        """Forms of results by calls. Their types depend on those of the parameters."""

    def called(self, module: UnitModule, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Result of a unit's call. compute: of this rank's weights, with hooks.

        Of hooks of a call that another part computes, those run by which transformers records hidden states.
        """
        current, unit = self.current, module._unit
        if current is None:
            raise RuntimeError(
                f"{unit} was called outside of train_step() and eval_step(): this rank has one stage of the model, "
                "which no rank can run whole; call model.train_step(**batch) on all ranks"
            )
        number, mine = current.begin(unit)
        if mine:
            result = compute(*args, **kwargs)
            current.note(number, result)
            return result
        result = self._stood_in(unit, number, current, args, kwargs)
        for hook in recorders(module).values():
            hook(module, args, result)
        return result

    def _stood_in(self, unit: str, number: int, current: Pass, args: Any, kwargs: Any) -> Any:
        """Result of a unit that another part computes: received tensors, else the argument of that shape or zeros."""
        given, tree = pytree.tree_flatten((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        wanted, result = self._result_of(unit, given, tree)
        found = []
        for leaf, want in enumerate(wanted):
            value = current.values.get(Value(number, leaf))
            if value is None and isinstance(want, Tensor):
                alike = (x for x in tensors if (x.shape, x.dtype) == (want.shape, want.dtype))
                value = next(alike, None)
                if value is None:
                    value = torch.zeros(want.shape, dtype=want.dtype, device=want.device)
            found.append(want if value is None else value)
        return pytree.tree_unflatten(found, result)

    def _result_of(self, unit: str, given: list[Any], tree: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        """Leaves, fake where they are tensors, and tree of a unit's result."""
        form = tuple((each.shape, each.dtype) if isinstance(each, Tensor) else repr(each) for each in given)
        device = next((each.device.type for each in given if isinstance(each, Tensor)), "cpu")
        key = (unit, str(tree), form, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if key not in self.shapes:
            if len(self.shapes) >= MOST_KNOWN:
                del self.shapes[next(iter(self.shapes))]
            args, kwargs = pytree.tree_unflatten([without_data(each) for each in given], tree)
            with running_without_data(), unrecorded(self.twins[unit]):
                self.shapes[key] = pytree.tree_flatten(self.twins[unit](*args, **kwargs))
        return self.shapes[key]


class UnitModule(nn.Module):
    """Unit that computes in calls of this rank's parts, and stands in, without its hooks, for those of others."""

    _units: Units
    _unit: str

    @classmethod
    def replace(cls, module: nn.Module, units: Units, unit: str) -> None:
        """Make a unit of a module in place, wherever the model keeps it; its class remains a base."""
        vars(module).update(_units=units, _unit=unit)
        module.__class__ = _unit_class(cls, type(module))  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, or stand in where the call is of another part."""
        return self._units.called(self, super().__call__, args, kwargs)


_OF_CONTAINERS = ("__getitem__", "__len__", "__iter__", "__contains__", "keys", "values", "items")


@cache
def _unit_class(kind: type[UnitModule], base: type[nn.Module]) -> Any:
    """Class of units of another class: one, for layers are compared by it. A stub's items are those of its copy."""
    of_twin = {
        name: lambda self, *args, name=name: getattr(self._units.twins[self._unit], name)(*args)
        for name in _OF_CONTAINERS
        if kind is StubModule and hasattr(base, name)
    }
    made: Any = type(base.__name__, (kind, base), {**of_twin, "__module__": base.__module__})
    made.forward = base.forward  # transformers wraps that of every new class
    return made


class StubModule(UnitModule):
    """Unit without weights on this rank. Its parts are those of its fake copy."""

    @classmethod
    def replace(cls, module: nn.Module, units: Units, unit: str) -> None:
        """Make a stub of a module in place, without weights. Code around layers may ask for its class."""
        for each in (module._parameters, module._buffers, module._modules):
            each.clear()
        super().replace(module, units, unit)

    def __getattr__(self, name: str) -> Any:
        """Attribute of the unit; its weights have no data."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self._units.twins[self._unit], name)

    def extra_repr(self) -> str:
        """Name of the unit."""
        return f"{self._unit}, on another stage"


def take_stage(
    model: nn.Module, units: Units, names: Sequence[str], division: Division, stage: int, dtype: torch.dtype | None
) -> None:
    """Replace the units and free the parameters of other stages in place. dtype: of weights; None: as they are."""
    for name in names:
        if stage not in division.stages_of[name]:
            StubModule.replace(model.get_submodule(name), units, name)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if stage not in division.holders[name]:
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            del module._parameters[last]
            # Code between units may still compute with it, on values that nothing reads.
            kind = parameter.dtype if dtype is None or not parameter.is_floating_point() else dtype
            module.__dict__[last] = torch.zeros((), dtype=kind, device=parameter.device).expand(parameter.shape)


def install_units(model: nn.Module, units: Units, names: Sequence[str]) -> None:
    """Make units of the modules that have weights on this rank."""
    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, StubModule):
            UnitModule.replace(module, units, name)
