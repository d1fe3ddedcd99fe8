"""Adapters that peft adds to a parallelized model: its layers are traced again, with the adapters sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any

import torch
from torch import nn

from oases.autotp.export import twin_of, without_data
from oases.autotp.vocabulary import become_plain, is_vocabulary_parallel
from oases.core.blocks.sharding import cuts, sharded_modules, sharded_parameters
from oases.errors import UsageError

_SHARDING = ("shard_dims", "shard_segments", "tensor_parallel", "_group_name", "_group_rank")
_FREE = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    "runtime_config",
}
"""Fields of a LoraConfig that may have any value."""
FIRST = "add adapters before: model = get_peft_model(model, config), then oases.parallelize(model)"


def whole_twin(model: nn.Module) -> nn.Module:
    """Fake copy of the unsharded model that a sharded one is a part of. Its layers have their own forward."""
    twin = twin_of(model)
    by_id, whole = cuts(twin), dict[int, nn.Parameter]()
    for _, parameter, _ in sharded_parameters(twin):
        shape = list(parameter.shape)
        shape[by_id[id(parameter)].dim] = by_id[id(parameter)].size
        full = without_data(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.device)
        whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    for part, _ in sharded_modules(twin):
        become_plain(part)
        for name in _SHARDING:
            vars(part).pop(name, None)
    for part in twin.modules():
        for name, held in part._parameters.items():
            part._parameters[name] = whole.get(id(held), held)
    return twin


def guard_adapters(module: Any) -> None:
    """Replace `inject_adapter` of `peft.tuners.tuners_utils`, once, for parallelized models.

    Their attribute `oases_adapt` shards what was added; models of one stage have none.
    """
    tuner: Any = module.BaseTuner
    inject = tuner.inject_adapter
    if hasattr(inject, "__wrapped__"):
        return

    @wraps(inject)
    def injected(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if all(getattr(part, "oases_partition", None) is None for part in model.modules()):
            inject(self, model, adapter_name, *args, **kwargs)
            return
        adapt: Callable[[nn.Module, nn.Module], None] | None = getattr(model, "oases_adapt", None)
        what = f"{type(self).__name__} would put adapters into layers that are sharded"
        if adapt is None:
            raise UsageError(f"{what}, of one stage or inside of a part of this model; {FIRST}")
        _require_pairs(self.peft_config[adapter_name], what)
        before = {id(parameter) for parameter in model.parameters()}
        with _of_full_shapes(model):
            inject(self, model, adapter_name, *args, **kwargs)
        for name, part in model.named_modules():
            base = getattr(part, "base_layer", None)
            if isinstance(base, (nn.Embedding, nn.Linear)) and is_vocabulary_parallel(base):
                raise UsageError(f"{what}: {name}, which holds rows of the vocabulary; {FIRST}")
        new = nn.Module()
        for name, parameter in model.named_parameters():
            if id(parameter) not in before:
                new.register_parameter(name.replace(".", "/"), parameter)
        adapt(model, new)

    tuner.inject_adapter = injected


def _require_pairs(config: Any, what: str) -> None:
    """Raise UsageError for adapters other than pairs of linears, and for initial values that need whole weights."""
    kind = type(config).__name__
    plain = type(config)() if kind == "LoraConfig" else None
    strange = [
        f"{each.name}={getattr(config, each.name)!r}"
        for each in fields(config)
        if plain is not None and each.name not in _FREE and getattr(config, each.name) != getattr(plain, each.name)
    ]
    if plain is None or strange or config.init_lora_weights not in (True, False, "gaussian"):
        raise UsageError(f"{what}, by {kind}({', '.join(strange)}), which may need whole weights; {FIRST}")


@contextmanager
def _of_full_shapes(model: nn.Module) -> Iterator[None]:
    """Context in which peft reads full shapes of shards, by an attribute that it knows of DeepSpeed's."""
    by_id = cuts(model)
    shards: list[Any] = [parameter for _, parameter, _ in sharded_parameters(model)]
    for shard in shards:
        cut, shape = by_id[id(shard)], list(shard.shape)
        shape[cut.dim] = cut.size
        shard.ds_shape = torch.Size(shape)
    try:
        yield
    finally:
        for shard in shards:
            del shard.ds_shape
