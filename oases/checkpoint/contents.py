"""Contents of a parallelized model's checkpoint that ranks agree on: names of tensors, options of optimizers.

Ranks of different pipeline stages know different tensors, and different names of a tied one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oases.checkpoint.metadata import Metadata
from oases.checkpoint.state import state
from oases.core.blocks.stack import OverlappedStack
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank
from oases.distributed.optimizer import ShardedOptimizer, require_parameters_of, state_of
from oases.distributed.planned_stack import PlannedStack
from oases.distributed.shard_map import shard_map, united_names
from oases.errors import UsageError

Options = dict[str, Any]

_OF_A_RUN = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that are not saved: how a step is computed is for each run to choose."""


@dataclass
class Contents:
    """Contents of a rank, or of all of them. names: of tensors, each with the tensor's name in the checkpoint.

    optimizer, streams: as in `Metadata`. on_meta: tensors without a value.
    """

    step: int
    names: dict[str, str]
    optimizer: dict[str, Any]
    streams: dict[str, list[int | None]]
    on_meta: list[str]

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer | None, group: ProcessGroup | None, step: int
    ) -> Contents:
        """Describe this rank. UsageError for an optimizer of other parameters, or with state that cannot be saved."""
        shards = shard_map(model, group)
        held = [shard for shard in shards if not shard.tensor.is_meta]
        names = {name: shard.name for shard in held for name in shard.names}
        streams = {name: [each.calls, each.seed] for name, each in drawing_parts(model)}
        on_meta = [shard.name for shard in shards if shard.tensor.is_meta]
        if optimizer is None:
            return cls(step, names, {}, streams, on_meta)
        parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        require_parameters_of(model, parameters)
        state(model, optimizer, group)  # raises
        by_id = {id(shard.tensor): shard.name for shard in held}
        groups = [
            {"options": _options_of(each), "params": [by_id[id(one)] for one in each["params"] if id(one) in by_id]}
            for each in optimizer.param_groups
        ]
        numbers = {
            kind: type(value).__name__
            for parameter in parameters
            for kind, value in (state_of(optimizer, parameter) or {}).items()
            if isinstance(value, bool | int | float)
        }
        inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        described = {"class": type(inner).__name__, "groups": groups, "numbers": numbers}
        return cls(step, names, described, streams, on_meta)

    @classmethod
    def merged(cls, everyone: list[Contents]) -> Contents:
        """Contents of all ranks. UsageError for different steps and for tensors without a value on any rank."""
        if len({each.step for each in everyone}) > 1:
            steps = ", ".join(str(each.step) for each in everyone)
            raise UsageError(f"step is {steps} on the ranks, in rank order; save after the same step on all of them")
        if len({bool(each.optimizer) for each in everyone}) > 1:
            raise UsageError("an optimizer was given on some ranks alone; give it on all of them, or on none")
        names = united_names(each.names for each in everyone)
        lost = [name for each in everyone for name in each.on_meta if name not in names]
        if lost:
            raise UsageError(f"{lost[0]!r} is on meta on every rank and has no value to save; load weights first")
        optimizer = _united_optimizer([each.optimizer for each in everyone], names)
        streams: dict[str, list[int | None]] = {}
        for each in everyone:
            for name, found in each.streams.items():
                streams.setdefault(name, found)
        return cls(everyone[0].step, names, optimizer, streams, [])


def _united_optimizer(everyone: list[dict[str, Any]], names: Mapping[str, str]) -> dict[str, Any]:
    """Description of an optimizer, of which each rank has a part: groups of equal options are one."""
    if not everyone[0]:
        return {}
    groups: list[tuple[Options, dict[str, None]]] = []
    for one in (each for described in everyone for each in described["groups"]):
        params = next((params for options, params in groups if options == one["options"]), None)
        if params is None:
            groups.append((one["options"], params := {}))
        params |= dict.fromkeys(names[name] for name in one["params"])
    return {
        "class": everyone[0]["class"],
        "groups": [{"options": options, "params": [*params]} for options, params in groups],
        "numbers": {kind: name for each in everyone for kind, name in each["numbers"].items()},
    }


def _options_of(group: Options) -> Options:
    """Options of a parameter group as JSON values. UsageError for others."""
    found = {}
    for name, value in group.items():
        if name in _OF_A_RUN:
            continue
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        several = list(plain) if isinstance(plain, tuple | list) else [plain]
        if not all(isinstance(each, bool | int | float | str | None) for each in several):
            raise UsageError(
                f"the optimizer's parameter groups have {name} of type {type(value).__name__}, which a checkpoint "
                "cannot hold; leave it out of the groups"
            )
        found[name] = several if isinstance(plain, tuple | list) else plain
    return found


def set_options(group: Options, options: Options) -> None:
    """Set options of a parameter group as they were saved."""
    for name, value in options.items():
        if isinstance(group.get(name), Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value


def drawing_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parts whose random draws depend on a seed and on how often they were called: hooks of a model, "", and stacks.

    Names are those of the layers, which do not depend on the mesh.
    """
    if hasattr(model, "oases_partition"):
        partition: Any = model.oases_partition
        hooks: Any = model.oases_hooks
        yield "", hooks
        for each in partition.layers:
            if each.runner is not None:
                yield each.name, each.runner.stack
    for name, module in model.named_modules():
        if isinstance(module, OverlappedStack):
            yield name, module


def _stacks(model: nn.Module) -> Iterator[OverlappedStack]:
    yield from (part for _, part in drawing_parts(model) if isinstance(part, OverlappedStack))
    for module in model.modules():
        if isinstance(module, PlannedStack):
            yield from (each for each in module.segments if isinstance(each, OverlappedStack))


def choices_of(model: nn.Module, group: ProcessGroup | None) -> dict[str, str]:
    """Collect the choices of "auto" in the stacks of all ranks of a group, see `Chooser.choices`.

    The first rank's go by configuration; others' that differ, such as a replica's, by "RANK/STACK/CONFIGURATION".
    """
    found: dict[str, str] = {}
    for rank, stacks in enumerate(all_gather_objects([stack.chooser.choices for stack in _stacks(model)], group)):
        for number, choices in enumerate(stacks):
            for key, label in choices.items():
                if found.setdefault(key, label) != label:
                    found[f"{rank}/{number}/{key}"] = label
    return found


def set_choices(model: nn.Module, choices: Mapping[str, str], group: ProcessGroup | None) -> None:
    """Have the stacks of a resumed run keep the choices of the one that saved them, so that its sums repeat."""
    common = {key: label for key, label in choices.items() if "/" not in key}
    for number, stack in enumerate(_stacks(model)):
        mine = f"{group_rank(group)}/{number}/"
        own = {key.removeprefix(mine): label for key, label in choices.items() if key.startswith(mine)}
        stack.chooser.choices = common | own


def set_streams(model: nn.Module, streams: Mapping[str, Sequence[Any]]) -> None:
    """Have random draws go on as they were saved; parts of other names go on as the one called most."""
    most = max(streams.values(), key=lambda each: int(each[0]), default=(0, None))
    for name, each in drawing_parts(model):
        each.at_call(*streams.get(name, most))


def saved_groups(
    path: Path, record: Metadata, mine: Contents, optimizer: torch.optim.Optimizer
) -> list[tuple[Options, Options]]:
    """Each parameter group of an optimizer with its options in a checkpoint. UsageError for another optimizer."""
    saved, here = record.optimizer, mine.optimizer
    if not saved:
        raise UsageError(f"checkpoint {str(path)!r} holds no optimizer; leave it out")
    if saved["class"] != here["class"]:
        raise UsageError(
            f"checkpoint {str(path)!r} holds the state of {saved['class']}, the optimizer here is {here['class']}; "
            "make the optimizer that was saved, or leave it out to load the model alone"
        )
    numbers = {name: number for number, each in enumerate(saved["groups"]) for name in each["params"]}
    stored = ((main, record.names.get(name, name)) for name, main in mine.names.items())
    number_of = {main: numbers[name] for main, name in stored if name in numbers}
    found = []
    for group, described in zip(optimizer.param_groups, here["groups"], strict=True):
        of: dict[int, str] = {}
        for name in described["params"]:
            number = number_of.get(name)
            if number is None:
                raise UsageError(
                    f"checkpoint {str(path)!r}: {name!r} is among the optimizer's parameters here and not there; "
                    "give the optimizer the parameters that were saved"
                )
            of.setdefault(number, name)
        if len(of) > 1:
            one, other = list(of.values())[:2]
            raise UsageError(
                f"checkpoint {str(path)!r}: {one!r} and {other!r} are in one parameter group here, and had different "
                "options there; make the optimizer with the parameter groups that were saved"
            )
        found += [(group, saved["groups"][number]["options"]) for number in of]
    return found


def require_all_trained(path: Path, record: Metadata, everyone: list[Contents]) -> None:
    """Raise UsageError where a parameter of the saved optimizer is in none of the ranks'."""
    trained = set()
    for each in everyone:
        mains = {name for group in each.optimizer["groups"] for name in group["params"]}
        trained |= {record.names.get(name, name) for name, main in each.names.items() if main in mains}
    missing = [name for each in record.optimizer["groups"] for name in each["params"] if name not in trained]
    if missing:
        raise UsageError(
            f"checkpoint {str(path)!r}: {missing[0]!r} was among the optimizer's parameters and is not here; give "
            "the optimizer the parameters that were saved"
        )
