"""FSDP and ZeRO of a model that trains by `train_step`: weights, gradients and optimizer state over its replicas.

The blocks of stacks are units of their own, which the stack's schedule gathers and frees (`oases.distributed.fsdp`).
Experts of a degree of their own are a second unit of their block, over the ranks that have the same ones. All other
weights are one unit: embeddings, heads, and layers that do not run across layers. It stays gathered from the
first forward pass of a step until its gradients are averaged; with ZeRO all units do. Weights that are computed in
bfloat16 are gathered in it from float32 shards, which the optimizer updates: they are the master weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.block import GraphBlock
from oases.autotp.program import mangled
from oases.autotp.runner import Runner
from oases.core.execution.gathering import BlockUnit
from oases.core.execution.group import group_of, group_size
from oases.distributed.expert_groups import ExpertGroups, groups_of_experts
from oases.distributed.failures import differentiable
from oases.distributed.fsdp import FsdpUnit, HeldUnit, JoinedUnits, Place, put_parameters
from oases.distributed.mesh import Mesh
from oases.distributed.parameter_hooks import DeferredHooks
from oases.distributed.precision import is_low
from oases.distributed.replicas import AverageSwitch
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.errors import UsageError


def _outer_weights(
    model: nn.Module,
    others: Iterable[nn.Parameter],
    read_beside: Iterable[tuple[nn.Parameter, nn.Module, str]],
    mesh: Mesh,
    degree: int,
    **options: Any,
) -> HeldUnit:
    """Unit of all weights outside of stacks. While gathered they are in the model's own modules.

    others: weights in stacks. read_beside: weights that a block reads, too, each with its name there. UsageError for
    experts of a degree of their own.
    """
    inside, holder = {id(parameter) for parameter in others}, nn.Module()
    named: dict[int, str] = {}
    places: list[Place] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in inside:
            own = named.setdefault(id(parameter), mangled(name))
            holder.register_parameter(own, parameter)
            path, _, last = name.rpartition(".")
            places.append((model.get_submodule(path), last, own))
            groups = groups_of_experts(places[-1][0])
            if groups is not None and groups.degree != degree:
                raise UsageError(
                    f"fsdp and zero with stages shard {name}, which no stack of layers runs, over replicas, and "
                    f"expert_parallel {groups.degree} is not the tensor-parallel degree; give "
                    f"expert_parallel={degree}, or another schedule than 'layers'"
                )
    places += [(block, name, named[id(parameter)]) for parameter, block, name in read_beside]
    data, weights = mesh.data(degree), mesh.weights(degree)
    assert data is not None
    assert weights is not None
    return HeldUnit(holder, places, data, weights, "weights outside of layers", **options)


def _block_units(
    block: GraphBlock, layer: nn.Module, others: Iterable[nn.Parameter], mesh: Mesh, degree: int, label: str,
    **options: Any,
) -> list[FsdpUnit]:  # fmt: skip
    """Units of all weights of a block but `others`: dense ones, and experts that have other replicas than these.

    Experts of which each rank has others, and in the type that they are computed in, are in no unit.
    """
    holder, places = nn.Module(), list[Place]()
    alike: ExpertGroups | None = None
    for name in block.names:
        module, last, own = _place(layer, name)
        groups = groups_of_experts(module) if own in block.local else None
        if groups is not None and groups.degree != degree:
            alike = groups
            holder.register_parameter(own, layer.get_parameter(name))
            places += [(module, last, own), (block, own, own)]
    experts: list[FsdpUnit] = []
    if alike is not None:
        data, weights = group_of(alike.data), group_of(alike.weights)
        assert data is not None
        assert weights is not None
        if data.size() > 1 or options["dtype"] is not None:
            experts = [HeldUnit(holder, places, data, weights, f"{label}, experts", **options)]
    data, weights = mesh.data(degree), mesh.weights(degree)
    assert data is not None
    assert weights is not None
    return [FsdpUnit(block, data, weights, label, {*others, *holder.parameters()}, **options), *experts]


def shard_weights(
    model: nn.Module,
    runners: Sequence[Runner],
    mesh: Mesh,
    degree: int,
    dtype: torch.dtype | None,
    *,
    keep: bool,
    gradient_wire: str = "",
) -> tuple[ShardedGradientAverager, HeldUnit | None, list[FsdpUnit]]:
    """Shard all weights of a stage over its replicas; returns the averager, the outer weights and all units.

    dtype: of gathered weights; None: that of the weights. keep: they stay gathered until the end of a step (ZeRO).
    gradient_wire: see `ShardedGradientAverager`.
    The model's parameters are DTensor shards afterwards, in float32 at least, but for those of one number, which all
    ranks keep. Weights that several modules share are among the outer ones. UsageError without replicas.
    """
    what = "zero" if keep else "fsdp"
    data, weights = mesh.data(degree), mesh.weights(degree)
    if group_size(data) < 2 or data is None or weights is None:
        raise UsageError(f"{what} shards over data-parallel replicas, of which there is 1; leave out {what}")
    low = [name for name, each in model.named_parameters() if is_low(each.dtype)]
    if low and dtype is None:
        raise UsageError(
            f"{what}: {low[0]} is {model.get_parameter(low[0]).dtype}, and the optimizer would update it without "
            "float32 master weights; give parallelize() dtype=torch.bfloat16"
        )
    for name in low:
        model.get_parameter(name).data = model.get_parameter(name).data.float()
    dtype = None if dtype is None or not is_low(dtype) else dtype
    units: list[FsdpUnit] = []
    scalars = [each for each in model.parameters() if not each.dim()]  # which fully_shard refuses
    inside = [*scalars]
    read_beside: list[tuple[nn.Parameter, nn.Module, str]] = []
    places = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for runner in runners:
        own: list[BlockUnit] = []
        for number, block in enumerate(runner.stack.blocks):
            assert isinstance(block, GraphBlock)
            layer = runner.layers[runner.layer_of[number]]
            block.adopt(layer.module)  # weights that were on meta are other parameters once they are loaded
            held = {name: layer.module.get_parameter(name) for name in block.names}
            # What a layer returns beside its activation is computed outside of the stack, by whole weights.
            outside_too = runner.read_beside[runner.layer_of[number]]
            beside = {
                name: each for name, each in held.items()
                if each.dim() and (name in outside_too or places[id(each)] > 1)
            }  # fmt: skip
            others = {*beside.values(), *scalars}
            read_beside += [(each, block, mangled(name)) for name, each in beside.items()]
            label = f"{runner.name} block {number}"
            options = {"dtype": dtype, "keep": keep, "part": runner.part}
            made = _block_units(block, layer.module, others, mesh, degree, label, **options)
            units += made
            own.append(made[0] if len(made) == 1 else JoinedUnits(made))
            put_parameters([_place(layer.module, name) for name in held if name not in beside], block)
            inside += [parameter for parameter in block.parameters() if parameter not in others]
        runner.stack.shard(own)
        runner.sharded = True
    outside = [each for each in model.parameters() if all(each is not held for held in inside)]
    outer = None
    if outside:
        outer = _outer_weights(model, inside, read_beside, mesh, degree, dtype=dtype, keep=keep)
    if outer is not None:
        units.insert(0, outer)
    return ShardedGradientAverager(units, gradient_wire, (scalars, data)), outer, units


def _place(layer: nn.Module, name: str) -> Place:
    path, _, last = name.rpartition(".")
    return layer.get_submodule(path), last, mangled(name)


def require_steps(model: nn.Module, outer: HeldUnit | None) -> None:
    """Have a model of several stages raise RuntimeError where it is called outside of its steps."""

    def check(module: nn.Module, args: Any) -> None:
        if outer is not None and not outer.is_whole:
            raise RuntimeError(
                f"{type(module).__name__} was called outside of train_step() and eval_step(), and its weights are "
                "sharded (fsdp or zero); call model.train_step(**batch) on all ranks"
            )

    model.register_forward_pre_hook(check)


class CallsOfShards(AverageSwitch):
    """Forward and backward passes of a model of one stage with sharded weights, in a loop of the user's own.

    Weights outside of stacks are gathered for the forward pass and again for the backward pass; between them, and
    after it, the model holds shards alone. Those have the average of their gradients over the replicas at the end of
    a backward pass, but in `model.no_sync()`, as in DDP. average, outer, units: as of `shard_weights`.
    """

    def __init__(
        self, model: nn.Module, average: ShardedGradientAverager, outer: HeldUnit | None, units: Sequence[FsdpUnit]
    ) -> None:
        self._average, self._outer, self._units = average, outer, units
        self._hooks = DeferredHooks(lambda _: None)
        self._task = -1
        self._trained: set[str] | None = None
        self._trains = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        object.__setattr__(model, "no_sync", self.no_sync)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self.steps:
            return
        self._require_trained(module)
        self._hooks.take(self._average.scalars)
        if self._task != -1:  # of a backward pass that an exception has ended
            self._average.forget()
            self._task = -1
        if self._outer is not None:
            self._outer.gather()

    def _require_trained(self, module: nn.Module) -> None:
        """Raise UsageError where parameters were frozen since a call with gradients, or unfrozen since any."""
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if self._trained is None or (not self._trains and trained < self._trained):
            self._trained = trained
        if not torch.is_grad_enabled():
            return
        if trained != self._trained:
            raise UsageError(
                f"{min(trained ^ self._trained)} was frozen or unfrozen after the first call of the model, which "
                "sharded weights and optimizer state cannot follow; do so before it, or leave out fsdp and zero"
            )
        self._trains = True

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if self.steps:
            return
        for tensor in differentiable(result) if torch.is_grad_enabled() else ():
            tensor.register_hook(self._arrived)
        self._free()

    def _arrived(self, grad: Tensor) -> None:
        task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]
        if task == self._task:
            return
        self._task = task
        if self._outer is not None:
            self._outer.gather()
        self._average.begin_pass(None)
        (self._hooks.begin if self.sync else self._hooks.accumulate)()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        self._task = -1
        self._average.end_pass()
        if self.sync:
            self._average.deliver()
            self._hooks.end()
        self._free()

    def _free(self) -> None:
        for unit in self._units:
            unit.free()
