"""Replicas of a module that average their gradients by themselves during each backward pass.

The module stays one that the user calls, backwards and steps as on one process, as in DistributedDataParallel but
without a wrapper. The first gradient of a backward pass begins the average, autograd's callback at its end finishes
it; the collectives are those of `GradientAverager`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oases.core.execution.failure import FailTogether, is_sampled, monitor_of
from oases.core.execution.group import ProcessGroup, group_name, group_of
from oases.distributed.expert_groups import averaged_parts
from oases.distributed.failures import watch_passes
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.parameter_hooks import DeferredHooks

DATA_DIMENSIONS = ("dp", "dp_replicate", "dp_shard")
"""Names of a DeviceMesh's data-parallel dimensions: oases' own, and accelerate's."""

_averaged: WeakKeyDictionary[nn.Module, Replicas] = WeakKeyDictionary()
"""Replicas of each module that averages its gradients."""
_seen: WeakSet[torch.optim.Optimizer] = WeakSet()
_before_steps: Any = None


class AverageSwitch:
    """Gradient averaging of a module, with `no_sync()`."""

    sync = True
    steps = False
    """Whether calls are those of a step that averages by itself."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients accumulate on each replica and are not averaged, as in DDP.

        The next backward pass outside of it averages the accumulated gradients.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before


class Replicas(AverageSwitch):
    """Averages the gradients of a module over a data-parallel group in every backward pass but those in `no_sync`.

    The trainable parameters are read in each forward pass, so that they may be moved, frozen or replaced between
    passes. A copy of the module gets a copy of this, with buckets of its own. wire: see `GradientAverager`.
    """

    def __init__(self, group: ProcessGroup | None, wire: str) -> None:
        self._group, self._wire = group_name(group), wire
        self._average: GradientAverager | None = None
        self._known: tuple[Any, ...] = ()
        self._handles: list[Any] = []
        self._task = -1
        self._hooks = DeferredHooks(self._accumulated)
        self._averages = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        """Replicas of a copied module; it finds its parameters in its first forward pass."""
        memo[id(self)] = made = Replicas(self.group, self._wire)
        return made

    @property
    def group(self) -> ProcessGroup | None:
        """Data-parallel ranks; None where the gradients of experts alone are averaged."""
        return group_of(self._group)

    def averaged_over(self) -> ProcessGroup | None:
        """A group over which the next backward pass averages."""
        return None if self._average is None else self._average.group

    def called(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: prepare for the module's trainable parameters of now."""
        _averaged.setdefault(module, self)
        if self.steps or not torch.is_grad_enabled():
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks.take(trained)
        self._hooks.wait = False  # after a backward pass that an exception has ended
        known = tuple(
            (id(parameter), parameter.dtype, parameter.grad_dtype, parameter.device) for parameter in trained
        )
        if known == self._known:
            return
        for handle in self._handles:
            handle.remove()
        if self._average is not None:
            self._average.remove()
        self._known = known
        # The hook that begins is registered before those that note a gradient.
        self._handles = [parameter.register_post_accumulate_grad_hook(self._accumulated) for parameter in trained]
        self._average = GradientAverager(averaged_parts(module, self.group), wire=self._wire)

    def _accumulated(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if self.steps or task in (-1, self._task) or self._average is None:
            return
        if not self.sync:
            self._hooks.accumulate()
            return
        self._task = task
        self._averages += 1
        if is_sampled(self._averages):
            self._average.require_equal_parameters()
        self._hooks.begin()
        self._average.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        assert self._average is not None
        self._average.finish()
        with FailTogether(monitor_of(self._average.group), "an exception in a hook of a gradient", keeps_type=True):
            self._hooks.end()


def average_replicas(module: nn.Module, mesh: object, wire: str = "") -> None:
    """Have a module, which is equal on all replicas, average its gradients in each backward pass.

    mesh: see `data_parallel_group`. Others as of `average_over`.
    """
    average_over(module, data_parallel_group(mesh), wire)


def average_over(module: nn.Module, group: ProcessGroup | None, wire: str = "") -> AverageSwitch | None:
    """Have a module average its gradients over a group in each backward pass.

    Without a group, and without replicated experts (`ExpertGroups.data`), the module stays as it is, and None is
    returned. Else it gets `no_sync()`. wire: see `GradientAverager`.
    """
    if all(each is None for _, each in averaged_parts(module, group)):
        return None
    global _before_steps
    if _before_steps is None:
        _before_steps = register_optimizer_step_pre_hook(_tell_of_others)
    replicas = Replicas(group, wire)
    # Before hooks that put local tensors in the places of parameters.
    module.register_forward_pre_hook(replicas.called, prepend=True)
    watch_passes(module, replicas.averaged_over)
    _averaged[module] = replicas
    object.__setattr__(module, "no_sync", replicas.no_sync)
    return replicas


def data_parallel_group(mesh: object) -> ProcessGroup | None:
    """Group of a DeviceMesh's dimension "dp", or of "dp_replicate" and "dp_shard", accelerate's names for it.

    None for a mesh without them or of one replica, for one with "pp", whose groups are those of its `Mesh`, and for
    all else.
    """
    if not isinstance(mesh, DeviceMesh) or "pp" in (mesh.mesh_dim_names or ()):
        return None
    found = [
        name for at, name in enumerate(mesh.mesh_dim_names or ()) if name in DATA_DIMENSIONS and mesh.size(at) > 1
    ]
    if not found:
        return None
    if len(found) == 1:
        return mesh.get_group(found[0])
    return mesh[tuple(found)]._flatten("dp").get_group()


def replicas_of(module: nn.Module) -> Replicas | None:
    """Replicas of a module, or of a part of it; None where nothing in it averages its gradients."""
    return next((found for part in module.modules() if (found := _averaged.get(part)) is not None), None)


def know_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Do not warn of an optimizer of master weights, which are of no model."""
    _seen.add(optimizer)


def _tell_of_others(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Warn once of an optimizer that updates parameters of averaging models and others: no wrapper may take both."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    held = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    averaged = averaged_parameters()
    others = [each for each in held if id(each) not in averaged]
    if 0 < len(others) < len(held):
        warnings.warn(
            f"{type(optimizer).__name__} updates {len(others)} parameters, such as one of shape "
            f"{list(others[0].shape)}, besides those of a model that averages its gradients over replicas: theirs "
            "are not averaged, so replicas go apart; parallelize() the module that holds all of them",
            stacklevel=4,
        )


def averaged_parameters() -> set[int]:
    """Ids of the parameters of modules that average their gradients."""
    return {id(parameter) for module in list(_averaged) for parameter in module.parameters()}
