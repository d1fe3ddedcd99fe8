"""FSDP and ZeRO of a model that trains by `train_step`: weights, gradients and optimizer state over its replicas.

The blocks of stacks are units of their own, which the stack's schedule gathers and frees (`oases.parallel.fsdp`). All
other weights are one unit: embeddings, heads, and layers that do not run across layers. It stays gathered from the
first forward pass of a step until its gradients are averaged; with ZeRO all units do. Weights that are computed in
bfloat16 are gathered in it from float32 shards, which the optimizer updates: they are the master weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from oases.autotp.block import GraphBlock
from oases.autotp.program import mangled
from oases.autotp.runner import Runner
from oases.errors import UsageError
from oases.execution.group import group_size
from oases.parallel.fsdp import FsdpUnit
from oases.parallel.mesh import Mesh
from oases.parallel.precision import is_low
from oases.parallel.sharded_gradients import ShardedGradientAverager

Place = tuple[nn.Module, str, str]
"""Module that holds a parameter, its name there, and its name in the unit."""


class OuterWeights(FsdpUnit):
    """Unit of all weights outside of stacks. While gathered they are in the model's own modules.

    others: weights in stacks. read_beside: weights that a block reads, too, each with its name there.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[nn.Parameter],
        read_beside: Iterable[tuple[nn.Parameter, nn.Module, str]],
        mesh: Mesh,
        degree: int,
        **options: Any,
    ) -> None:
        inside, holder = {id(parameter) for parameter in others}, nn.Module()
        named: dict[int, str] = {}
        self._places: list[Place] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in inside:
                own = named.setdefault(id(parameter), mangled(name))
                holder.register_parameter(own, parameter)
                path, _, last = name.rpartition(".")
                self._places.append((model.get_submodule(path), last, own))
        self._places += [(block, name, named[id(parameter)]) for parameter, block, name in read_beside]
        self._holder = holder
        data, weights = mesh.data(degree), mesh.weights(degree)
        assert data is not None
        assert weights is not None
        super().__init__(holder, data, weights, "weights outside of layers", **options)
        self._put()

    def gather(self) -> None:
        """Wait until the full weights are in the model's modules."""
        super().gather()
        self._put()

    def free(self) -> None:
        """Free the full weights; the model's modules hold the shards again."""
        super().free()
        self._put()

    def _put(self) -> None:
        put_parameters(self._places, self._holder)


def put_parameters(places: Iterable[Place], unit: nn.Module) -> None:
    """Put the parameters that a unit holds now in the modules of the model."""
    for module, name, own in places:
        module._parameters[name] = unit._parameters[own]


def shard_weights(
    model: nn.Module,
    runners: Sequence[Runner],
    mesh: Mesh,
    degree: int,
    dtype: torch.dtype | None,
    *,
    keep: bool,
    gradient_wire: str = "",
) -> tuple[ShardedGradientAverager, OuterWeights | None, list[FsdpUnit]]:
    """Shard all weights of a stage over its replicas; returns the averager, the outer weights and all units.

    dtype: of gathered weights; None: that of the weights. keep: they stay gathered until the end of a step (ZeRO).
    gradient_wire: see `ShardedGradientAverager`.
    The model's parameters are DTensor shards afterwards, in float32 at least. UsageError without replicas, and for
    weights that layers share.
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
    inside: list[nn.Parameter] = []
    read_beside: list[tuple[nn.Parameter, nn.Module, str]] = []
    seen: dict[int, str] = {}
    for runner in runners:
        own: list[FsdpUnit] = []
        for number, block in enumerate(runner.stack.blocks):
            assert isinstance(block, GraphBlock)
            layer = runner.layers[runner.layer_of[number]]
            block.adopt(layer.module)  # weights that were on meta are other parameters once they are loaded
            for name in block.names:
                parameter = layer.module.get_parameter(name)
                where = f"{layer.path}.{name}"
                if seen.setdefault(id(parameter), where) != where or parameter.dim() == 0:
                    raise UsageError(
                        f"{what} cannot shard {where}, which is a scalar or also {seen[id(parameter)]}; leave "
                        "it out, and shard the optimizer's state by oases.make_optimizer(model, ..., zero=True)"
                    )
            # What a layer returns beside its activation is computed outside of the stack, by whole weights.
            beside = [name for name in block.names if name in runner.read_beside[runner.layer_of[number]]]
            places = [_place(layer.module, name) for name in block.names if name not in beside]
            others = {layer.module.get_parameter(name) for name in beside}
            read_beside += [(layer.module.get_parameter(name), block, mangled(name)) for name in beside]
            label = f"{runner.name} block {number}"
            part = runner.part
            own.append(FsdpUnit(block, data, weights, label, others, dtype=dtype, keep=keep, part=part))
            put_parameters(places, block)
            inside += [parameter for parameter in block.parameters() if parameter not in others]
        runner.stack.shard(own)
        runner.sharded = True
        units += own
    outside = [each for each in model.parameters() if all(each is not held for held in inside)]
    outer = None
    if outside:
        outer = OuterWeights(model, inside, read_beside, mesh, degree, dtype=dtype, keep=keep)
    if outer is not None:
        units.insert(0, outer)
    model.register_forward_pre_hook(_require_step(outer))
    return ShardedGradientAverager(units, gradient_wire), outer, units


def _place(layer: nn.Module, name: str) -> Place:
    path, _, last = name.rpartition(".")
    return layer.get_submodule(path), last, mangled(name)


def _require_step(outer: OuterWeights | None) -> Any:
    def check(module: nn.Module, args: Any) -> None:
        if outer is not None and not outer.is_whole:
            raise RuntimeError(
                f"{type(module).__name__} was called outside of train_step() and eval_step(), and its weights are "
                "sharded (fsdp or zero); call model.train_step(**batch) on all ranks"
            )

    return check
