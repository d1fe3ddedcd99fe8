"""What stored tensors are called in the model that they are for, by the rules of transformers' `from_pretrained`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from oases.autotp.buffers import is_pretrained
from oases.errors import UsageError


def named_as(model: nn.Module, stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return ({name in the model's state_dict: stored name}, [stored names that the model has no place for]).

    For a transformers model old names are renamed, the prefix of its base model is added or taken away, and what it
    says may be there for nothing is left out. UsageError where tensors would have to be computed from stored ones.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not is_pretrained(model):
        names = list(stored)
        return {name: name for name in names if name in state}, [name for name in names if name not in state]
    found: dict[str, str] = {}
    extra: dict[str, str] = {}
    for theirs, ours in _renamed(model, stored, state):
        if ours not in state:
            extra[ours] = theirs
        elif ours in found:
            raise UsageError(
                f"tensors {found[ours]!r} and {theirs!r} are both {ours!r} in {type(model).__name__}; leave one out"
            )
        else:
            found[ours] = theirs
    pretrained: Any = model
    left = SimpleNamespace(missing_keys=set(), unexpected_keys=set(extra))
    pretrained._adjust_missing_and_unexpected_keys(left)
    return found, [extra[name] for name in extra if name in left.unexpected_keys]


def _renamed(model: Any, stored: Iterable[str], state: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    found = []
    for theirs in stored:
        ours, converter = loading.rename_source_key(theirs, renamings, converters, model.base_model_prefix, state)
        if ours not in state and theirs in state:
            ours, converter = theirs, None
        if converter is not None and ours in state:
            raise UsageError(
                f"tensor {theirs!r} is stored in the layout of the original {model.config.model_type}, and "
                f"{type(model).__name__} computes {ours!r} from it and others; write it anew in the model's own "
                "layout with transformers: from_pretrained, then save_pretrained(folder, save_original_format=False)"
            )
        found.append((theirs, ours))
    return found
