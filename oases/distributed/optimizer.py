"""Optimizers of any class over parameters that several ranks hold: sharded state (ZeRO-1), float32 master weights.

An update is often smaller than the spacing of bfloat16 numbers, so bfloat16 weights alone would not change. The
optimizer updates float32 master weights, and the model's weights are the master weights, rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.sharding import holders
from oases.core.execution.failure import is_sampled
from oases.core.execution.group import (
    ProcessGroup,
    all_gather_objects,
    group_name,
    group_of,
    group_rank,
    group_size,
)
from oases.distributed.collectives import broadcast_shares
from oases.distributed.dtensors import is_fsdp_shard, is_tensor_parallel, part_of_rank, with_local
from oases.distributed.expert_groups import averaging_group
from oases.distributed.mesh import mesh_of
from oases.distributed.precision import Originals, is_low, mark_handled, master_of, needs_of, state_now
from oases.distributed.replicas import know_optimizer, replicas_of
from oases.errors import UsageError

DataParallel = Callable[[nn.Parameter], ProcessGroup | None]
"""Ranks that hold the same parameter and share its optimizer state; None for this rank alone."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Optimizer with its state sharded over data-parallel ranks (ZeRO-1), with float32 master weights, or both.

    params: parameters or parameter groups, the same on all ranks of a data-parallel group. optimizer_class, options:
    of the optimizer that updates them. data_parallel: by parameter, the ranks over which its state is sharded; None:
    every rank has all state. master_weights: keep float32 copies of parameters of lower precision; their gradients
    are accumulated in float32. dtype: convert the parameters to it, after the master weights have been copied; None
    keeps each type. originals: see `Needs`. Create it on every rank, with the model on its device, before anything
    depends on dtypes. Shards of FSDP stay as they are.

    State and master weight of a parameter are on one rank of its group, which updates it and broadcasts it in the
    parameter's type. Gradients must be averages over the group. Learning rates are those of `param_groups`. Where
    parameters have changed since, by load_state_dict of the model, say, the next step begins from their new values.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        data_parallel: DataParallel | None = None,
        master_weights: bool = False,
        dtype: torch.dtype | None = None,
        originals: Originals | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._known = {*parameters}
        # By group name, for groups of several ranks: the parameters that each rank updates.
        self._owned: dict[str, list[list[nn.Parameter]]] = {}
        by_group: dict[str, tuple[ProcessGroup | None, list[nn.Parameter]]] = {}
        for parameter in parameters:
            group = None if data_parallel is None else data_parallel(parameter)
            group = group if group_size(group) > 1 else None
            by_group.setdefault(group_name(group), (group, []))[1].append(parameter)
        self._updated: dict[nn.Parameter, nn.Parameter] = {}
        self._copied: dict[nn.Parameter, tuple[int, int]] = {}  # state of each parameter after its last update
        for name, (group, held) in by_group.items():
            mine = held
            if group is not None:
                self._owned[name] = _distribute(held, group_size(group))
                mine = self._owned[name][group_rank(group)]
            for one in mine:
                rounded = master_weights and is_low(dtype or one.dtype) and not is_fsdp_shard(one)
                self._updated[one] = nn.Parameter(_placed(one, master_of(one, originals or {}))) if rounded else one
        for parameter in parameters:
            if dtype is not None and not is_fsdp_shard(parameter):
                parameter.data = parameter.data.to(dtype)
            if master_weights and is_low(parameter.dtype):
                parameter.grad_dtype = torch.float32
        groups = [each | {"params": self._here(each["params"])} for each in self.param_groups]
        for each in groups:
            each.pop("param_names", None)
        self._steps = 0
        self.inner = optimizer_class(groups, **options)
        """The optimizer of this rank's share: of master weights, and of parameters without."""
        mark_handled(self)
        mark_handled(self.inner)
        know_optimizer(self.inner)
        self._note_copies()
        self.defaults = self.inner.defaults
        for each, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            each.update({name: value for name, value in inner.items() if name != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, within the constructor only. UsageError later, when shares are fixed."""
        if hasattr(self, "inner"):
            raise UsageError("add_param_group: the shares of the ranks are fixed; make the optimizer with all groups")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update this rank's share and send it to the other ranks of each group. Collective over them.

        closure: computes the loss again, as in torch, at all weights that the optimizer tries.
        """
        if self._owned and isinstance(self.inner, torch.optim.LBFGS):
            raise UsageError("LBFGS computes with all parameters, and zero gives each rank a share; leave zero out")
        self._set_options()
        self._take_changes()
        masters = [(parameter, master) for parameter, master in self._updated.items() if master is not parameter]
        calls = itertools.count()

        def evaluate() -> Any:
            if next(calls):
                self._show()
            result = None if closure is None else closure()
            self._set_options()
            for parameter, master in masters:
                master.grad = parameter.grad
            return result

        if closure is None:
            evaluate()
        result: Any = self.inner.step() if closure is None else self.inner.step(evaluate)
        self._take_options()
        self._require_own_options()
        for _, master in masters:
            master.grad = None
        self._show()
        self._note_copies()
        self._link()
        return result

    def _show(self) -> None:
        """Put the updated weights into the model, of all ranks."""
        self.copy_masters_to_model()
        for name, owned in self._owned.items():
            broadcast_shares(owned, group_of(name))

    def updated(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return what is updated for a parameter: its master weight, or itself; None where another rank has that."""
        self._take_changes()
        return self._updated.get(parameter) if parameter in self._known else parameter

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Round this rank's master weights into its parameters."""
        pairs = [(parameter, master) for parameter, master in self._updated.items() if master is not parameter]
        if pairs:
            rounded, exact = ([part_of_rank(pair[at]).detach() for pair in pairs] for at in (0, 1))
            torch._foreach_copy_(rounded, exact)
        self._note_copies()

    def _note_copies(self) -> None:
        """Note that parameters are their masters, rounded."""
        self._copied = {one: state_now(one) for one, master in self._updated.items() if master is not one}

    @torch.no_grad()
    def _take_changes(self) -> None:
        """Set the masters of parameters that were changed by others. Masters that round to them stay."""
        for one, state in self._copied.items():
            now = state_now(one)
            if now != state:
                master, held = part_of_rank(self._updated[one]).detach(), part_of_rank(one).detach()
                master.copy_(torch.where(master.to(held.dtype) == held, master, held.float()))
                self._copied[one] = now

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's share, in the form of torch, with "master_weights" by number of the parameter."""
        self._take_changes()
        self._link()
        numbers = self._numbers()
        masters = {numbers[one]: m.detach() for one, m in self._updated.items() if m is not one}
        return super().state_dict() | {"master_weights": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what `state_dict` returned on this rank of the same number of ranks. UsageError for another's."""
        state_dict = dict(state_dict)
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = prepare(self, state_dict) or state_dict
        numbers = self._numbers()
        given, states = state_dict["param_groups"], state_dict["state"]
        if [len(group["params"]) for group in given] != [len(group["params"]) for group in self.param_groups]:
            raise UsageError("load_state_dict: the parameter groups are of other sizes; give those that were saved")
        self._require_mine(states.keys(), state_dict.get("master_weights", {}).keys())
        for group, values in zip(self.param_groups, given, strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        share = [number for one, number in numbers.items() if one in self._updated]
        state = {at: states[number] for at, number in enumerate(share) if number in states}
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})
        for one, master in self._updated.items():
            if master is not one:
                master.copy_(state_dict["master_weights"][numbers[one]])
        self._set_options()
        self.state.clear()
        self._link()
        self.copy_masters_to_model()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _require_mine(self, states: Collection[int], masters: Collection[int]) -> None:
        """Raise UsageError for numbers of parameters with state, or masters, that are not those of this rank."""
        numbers = self._numbers()
        mine = {numbers[one] for one in self._updated}
        kept = {numbers[one] for one, master in self._updated.items() if master is not one}
        if not kept <= {*masters} or not ({*states} <= mine or mine <= {*states}):
            raise UsageError(
                "load_state_dict: it is the state of another rank, or of an optimizer without master weights; each "
                "rank loads what it saved. oases.save_checkpoint and load_checkpoint take any number of ranks"
            )

    @property
    def shares_state(self) -> bool:
        """Whether other ranks have a part of the state."""
        return bool(self._owned)

    def _numbers(self) -> dict[nn.Parameter, int]:
        """Number of each parameter over all groups, as in torch's state dicts."""
        return {one: at for at, one in enumerate(one for group in self.param_groups for one in group["params"])}

    def _here(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._updated[parameter] for parameter in parameters if parameter in self._updated]

    def _set_options(self) -> None:
        """Take over options that were changed in `param_groups`."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_without_parameters(group))

    def _take_options(self) -> None:
        """Show what the optimizer keeps in its groups, as schedule-free ones their counts, in `param_groups`."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_without_parameters(inner))

    def _require_own_options(self) -> None:
        """Raise UsageError, on all ranks, where an optimizer keeps numbers of all parameters, as Prodigy its rate."""
        self._steps += 1
        if not is_sampled(self._steps) or type(self.inner).__module__.startswith("torch.optim."):
            return
        mine = [(name, str(value)) for each in self.param_groups for name, value in _without_parameters(each).items()]
        for group in self._owned:
            for rank, theirs in enumerate(all_gather_objects(mine, group_of(group))):
                for (name, value), (_, other) in zip(mine, theirs, strict=False):
                    if value != other:
                        raise UsageError(
                            f"{type(self.inner).__name__} computes {name} with all parameters, and zero gives "
                            f"each rank a share: {value} here, {other} on rank {rank}; leave zero out"
                        )

    def _link(self) -> None:
        """Show the state of this rank's share as `state`, by parameter."""
        if len(self.state) != len(self.inner.state):
            for parameter, updated in self._updated.items():
                if updated in self.inner.state:
                    self.state[parameter] = self.inner.state[updated]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def weight_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> nn.Parameter | None:
    """Weight that the optimizer updates: the parameter, or its master; None where another rank has that."""
    return optimizer.updated(parameter) if isinstance(optimizer, ShardedOptimizer) else parameter


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """State of a parameter, empty before the first step; None where another rank has it."""
    weight = weight_of(optimizer, parameter)
    if weight is None:
        return None
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    state: dict[str, Any] = inner.state.get(weight, {})
    return state


def set_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
    """Replace the state of a parameter whose state this rank has. Empty as before the first step."""
    weight = weight_of(optimizer, parameter)
    assert weight is not None, "another rank has the state"
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    for states, key in ((inner.state, weight), (optimizer.state, parameter)):  # the same, or views of the same
        states.pop(key, None)
        if state:
            states[key] = state


def make_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    params: Any = None,
    zero: bool | None = None,
    master_weights: bool | None = None,
    data_parallel: ProcessGroup | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Make an optimizer of any class for a parallelized model that has its weights. All ranks call it.

    params: parameters or parameter groups of the model; None: all that require gradients. zero: shard the state over
    the data-parallel ranks (ZeRO-1). master_weights: keep float32 copies of parameters of lower precision and
    accumulate their gradients in float32. data_parallel: the ranks that hold the same weights and train on other
    samples; None: those of the model's mesh. options: of the class, such as lr. zero, master_weights None: as the
    model needs them, by the zero and dtype that it was parallelized with. Without both it is
    `optimizer_class(params, **options)`, also where the parameters themselves are sharded (FSDP, ZeRO with stages);
    there, balanced experts are in parameter groups of their own, behind those that were given.

    UsageError for parameters that are not the model's, for zero without a data-parallel group, and for master_weights
    where all weights are float32.
    """
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    given = [parameter for parameter in held if parameter.requires_grad] if params is None else _listed(params)
    flat = [_unnamed(one) for each in given for one in (each["params"] if isinstance(each, dict) else [each])]
    require_parameters_of(model, flat)
    pipeline = getattr(model, "oases_pipeline", None)
    if not flat and pipeline is not None and pipeline.mesh.num_stages > 1:  # a stage of frozen layers
        return optimizer_class(given or [{"params": []}], **options)
    needs = needs_of(model)
    originals = {} if needs is None else needs.originals
    if needs is not None:
        zero = needs.zero if zero is None else zero
        master_weights = any(is_low(one.dtype) for one in flat) if master_weights is None else master_weights
    if any(map(is_tensor_parallel, flat)):  # the CPU's default, a loop, takes six times as long
        given = _by_mesh(given)
        if "foreach" in signature(optimizer_class).parameters and not {"foreach", "fused"} & options.keys():
            options["foreach"] = True
    if any(map(is_fsdp_shard, flat)) and not any(is_low(one.dtype) for one in flat):
        # Shards of FSDP2, and experts that no other rank has: with their state, and their own masters.
        return optimizer_class(_by_mesh(given), **options)
    if master_weights and not any(is_low(parameter.dtype) for parameter in flat):
        raise UsageError(
            "master_weights: all parameters are float32 already; leave it out, or build the model in bfloat16 before "
            "parallelize"
        )
    if not (zero or master_weights):
        return optimizer_class(given, **options)
    groups = _data_parallel(model, data_parallel) if zero else None
    made = ShardedOptimizer(
        given,
        optimizer_class,
        data_parallel=groups,
        master_weights=bool(master_weights),
        originals=originals,
        **options,
    )
    for one in flat:  # another optimizer may take the rest
        originals.pop(one, None)
    return made


def _listed(params: Iterable[Any]) -> list[Any]:
    """Parameters or groups as torch takes them, those of generators and of single tensors in lists."""
    found: list[Any] = []
    for each in params:
        if isinstance(each, dict) and not isinstance(each["params"], set):  # which torch refuses
            held = each["params"]
            each = {**each, "params": [held] if isinstance(held, Tensor) else list(held)}
        found.append(each)
    return found


def _unnamed(one: Any) -> Any:
    """Parameter of a pair of its name and itself."""
    return one[1] if isinstance(one, tuple) else one


def _placed(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """This rank's part of a master as a tensor laid out as the parameter."""
    return with_local(parameter, local) if is_tensor_parallel(parameter) else local


def _by_mesh(given: Sequence[Any]) -> list[Any]:
    """Parameter groups with shards of one mesh each, as a fused update needs; what experts add comes last."""
    groups = list(given) if isinstance(given[0], dict) else [{"params": given}]
    kept: list[Any] = []
    added: list[Any] = []
    for group in groups:
        by_mesh: dict[Any, list[Any]] = {}
        for one in group["params"]:
            by_mesh.setdefault(getattr(_unnamed(one), "device_mesh", None), []).append(one)
        made = [{**group, "params": found} for found in by_mesh.values()]
        kept += made[:1]
        added += made[1:]
    return kept + added


def require_parameters_of(model: nn.Module, parameters: Iterable[Any]) -> None:
    """Raise UsageError for parameters of an optimizer that are not the model's."""
    held = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(_unnamed(one)) not in held for one in parameters)
    if strange:
        raise UsageError(
            f"{strange} parameters of the optimizer are not among those of {type(model).__name__}: parallelize() "
            "replaces parameters by this rank's shards; make the optimizer after it"
        )


def _data_parallel(model: nn.Module, given: ProcessGroup | None) -> DataParallel:
    mesh, shards = mesh_of(model), holders(model)
    if given is not None:
        return lambda parameter: given
    replicas = replicas_of(model)
    if mesh is None and replicas is not None:
        return lambda parameter: averaging_group(model, parameter, replicas.group)
    if mesh is None:
        raise UsageError(
            "zero: the data-parallel ranks are unknown; parallelize the model over a mesh with the dimension 'dp', "
            "or give data_parallel=mesh.get_group('dp')"
        )
    most = max(mesh.degrees)

    def group(parameter: nn.Parameter) -> ProcessGroup | None:
        degree = getattr(shards.get(id(parameter)), "tensor_parallel", most)
        # Experts have a degree of their own.
        data = mesh.data(degree if degree in mesh.degrees else most)
        return averaging_group(model, parameter, data)

    return group


def _distribute(parameters: list[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Distribute parameters over ranks by size: largest first, each to the rank with the fewest elements."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        rank = held.index(min(held))
        shares[rank].append(parameter)
        held[rank] += parameter.numel()
    return shares
