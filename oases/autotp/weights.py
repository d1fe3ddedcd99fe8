"""Load weights into a sharded model: each rank reads its own shard of each tensor in place."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.autotp.gathering import base_of, is_adapted, is_pretrained, materialize_buffers, wire_device
from oases.core.execution.group import ProcessGroup, group_rank, group_size, resolve
from oases.distributed.dtensors import is_tensor_parallel, part_of_rank, renewed, with_local
from oases.distributed.failures import raise_together
from oases.distributed.shard_map import TensorShard, shard_map
from oases.errors import UsageError
from oases.safetensors_files import Index, Stored, configuration, stored_tensors

_ADAPTED = "base_model.model."
"""Prefix that a PeftModel of adapters gives to the names of its own model."""


def named_as(model: nn.Module, stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return ({name in the model's state_dict: stored name}, [stored names without a place in the model]).

    For a transformers model old names are mapped, the prefix of its base model is added or removed, and names that it
    ignores are left out. Names of a PeftModel's own model are those without adapters. UsageError where tensors would
    have to be converted.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True) | getattr(model, "oases_elsewhere", {})
    names = list(stored)
    if is_adapted(model) and not any(name in state for name in names):
        places = {name.removeprefix(_ADAPTED).replace(".base_layer.", "."): name for name in state}
        found, extra = _named(base_of(model), names, {plain: state[name] for plain, name in places.items()})
        return {places[name]: theirs for name, theirs in found.items()}, extra
    return _named(model, names, state)


def _named(model: nn.Module, stored: list[str], state: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    if not is_pretrained(model):
        return {name: name for name in stored if name in state}, [name for name in stored if name not in state]
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
                f"tensor {theirs!r} is stored in the layout of the original {model.config.model_type}, but "
                f"{type(model).__name__} computes {ours!r} from it and others; convert it to the model's own "
                "layout with transformers: from_pretrained, then save_pretrained(folder, save_original_format=False)"
            )
        found.append((theirs, ours))
    return found


QUANTISED = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".scb", ".absmax", ".quant_map")
"""Name suffixes of quantised checkpoints, in lower case."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

LISTED = 8
"""Tensors listed in a message; the rest is counted."""


def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> list[str]:
    """Fill a sharded model from full tensors, of which every rank reads its shards alone. Collective.

    model: its sharded parameters have this rank's shape and its modules declare the sharding (`shard_dims`,
    `shard_segments`, `tensor_parallel` and their group); all else is replicated. Real tensors are filled in place.
    Tensors on `meta` become real on `device`: a parameter is then a new object, with requires_grad and attributes of
    the old one, under each of its names; so load before creating an optimizer. Buffers without a stored value are
    computed. source: folder of safetensors, a file of it, an index, or full tensors by name, equal on every rank.
    dtype: type of floating parameters and buffers of the state; None keeps each type. strict: raise for tensors
    without a place in the model. All tensors of the model must be stored, except those tied to a stored one. Returns
    the names that were ignored. process_group: all ranks of the model; shards where a module names no group.

    UsageError on every rank, before anything is filled, for files that are missing, truncated, pickled or quantised,
    and for tensors that are missing, unexpected, or of another shape or type. Adapters of a PeftModel that are not
    stored keep their values.
    """
    group = resolve(process_group)
    with raise_together(group):
        held = shard_map(model, group)
        _refuse_quantised(source)
        stored = stored_tensors(source)
        chosen, passed = _choose(model, held, stored, strict)
        _require_equal_ties(chosen, {one.name: [whole for whole, _ in one.pieces()] for one in held})
    with raise_together(group):
        materialize_buffers(model, device)
        places = _places(model)
        for shard in (each for each in held if chosen[each.name]):
            _fill(shard, chosen[shard.name][0], _materialized(shard, places, device, dtype))
    return passed


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    process_group: ProcessGroup | None = None,
) -> None:
    """Fill a sharded model from the first rank's full state, as `full_state_dict` returns it. Collective.

    `state` of other ranks is ignored. Rows are broadcast in blocks, and each rank keeps its shard; model, device and
    errors are those of `load_weights`.
    """
    group = resolve(process_group)
    if group is None or group_size(group) == 1:
        load_weights(model, state, device=device, process_group=group)
        return
    said: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    with raise_together(group):
        held = shard_map(model, group)
        if group_rank(group) == 0:
            said = [{name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}]
    dist.broadcast_object_list(said, group=group, group_src=0)
    given = said[0]
    with raise_together(group):
        theirs = {name: Stored("the first rank's state", *what, _unread) for name, what in given.items()}
        chosen, _ = _choose(model, held, theirs if group_rank(group) else stored_tensors(state), strict=True)
        if group_rank(group) == 0:
            _require_equal_ties(chosen, {one.name: [(slice(None),) * len(one.shape)] for one in held})
    with raise_together(group):
        materialize_buffers(model, device)
        places = _places(model)
        held = [shard for shard in held if chosen[shard.name]]
        local = [_materialized(shard, places, device, None) for shard in held]
    for shard, part in zip(held, local, strict=True):
        _receive(shard, chosen[shard.name][0], part, group)


def _choose(
    model: nn.Module, held: list[TensorShard], stored: Mapping[str, Stored], strict: bool
) -> tuple[dict[str, list[Stored]], list[str]]:
    """Stored tensors for each shard, and the unused names; UsageError for all that does not fit."""
    named, extra = named_as(model, stored)
    chosen = {one.name: [stored[named[name]] for name in one.names if name in named] for one in held}
    kind = type(model).__name__
    marked = [name for name in extra if name.lower().endswith(QUANTISED)]
    for shard in held:
        for found in chosen[shard.name]:
            if shard.tensor.is_floating_point() and found.dtype not in FLOATS:
                marked.append(f"{shard.name} ({found.dtype or 'of an unknown type'})")
    if marked:
        raise UsageError(
            f"{_where(stored)} is quantised: {_listed(marked)}; quantised weights are not trained here: give the "
            "model in float32, float16 or bfloat16"
        )
    adapters: set[str] = set(model.peft_config) if is_adapted(model) else set()  # type: ignore[arg-type]
    missing = [
        one.name
        for one in held
        if not chosen[one.name] and (one.tensor.is_meta or not adapters & set(one.name.split(".")))
    ]
    if missing:
        raise UsageError(
            f"{_where(stored)} lacks {len(missing)} tensors that {kind} needs: {_listed(missing)}; give the weights "
            "of this architecture, with every one of its files"
        )
    if extra and strict:
        raise UsageError(
            f"{_where(stored)} holds {len(extra)} tensors that {kind} has no place for: {_listed(extra)}; build the "
            "model that was saved, or ignore them with strict=False"
        )
    for shard in held:
        for found in chosen[shard.name]:
            _require_fit(shard, found, kind)
    return chosen, extra


def _require_fit(shard: TensorShard, found: Stored, kind: str) -> None:
    ours = shard.tensor.dtype
    if not ours.is_floating_point and found.dtype != ours:
        raise UsageError(
            f"tensor {shard.name!r} is of {found.dtype} in {found.where!r} and of {ours} in {kind}; save it as "
            "the type that the model has"
        )
    if found.shape != shard.shape:
        raise UsageError(
            f"tensor {shard.name!r} has shape {found.shape} in {found.where!r} and {shard.shape} in {kind}; "
            "build the model with the sizes of the one that was saved"
        )


def _require_equal_ties(chosen: Mapping[str, list[Stored]], pieces: Mapping[str, list[Index]]) -> None:
    """Raise UsageError for a tied parameter with differing stored tensors. pieces: indices to compare."""
    for name, found in chosen.items():
        for other in found[1:]:
            if not all(torch.equal(found[0].read(piece), other.read(piece)) for piece in pieces[name]):
                raise UsageError(
                    f"{found[0].where!r} holds {len(found)} tensors for {name!r}, which is tied in the model, and "
                    "they differ; build the model with tie_word_embeddings=False"
                )


def _refuse_quantised(source: str | Path | Mapping[str, Tensor]) -> None:
    settings = configuration(source).get("quantization_config")
    if settings:
        method = settings.get("quant_method", "an unnamed method") if isinstance(settings, dict) else settings
        raise UsageError(
            f"{str(source)!r} is quantised: its config.json has a quantization_config of {method}; quantised weights "
            "are not trained here: give the model in float32, float16 or bfloat16"
        )


def _places(model: nn.Module) -> dict[int, list[tuple[dict[str, nn.Parameter | Tensor | None], str]]]:
    """Every module dictionary that holds a parameter or buffer, by its id."""
    found: dict[int, list[tuple[dict[str, nn.Parameter | Tensor | None], str]]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((tensors, name))  # type: ignore[arg-type]
    return found


def _materialized(
    shard: TensorShard,
    places: Mapping[int, list[tuple[dict[str, nn.Parameter | Tensor | None], str]]],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Tensor:
    """The shard's tensor, real and of the requested type; a new one is put in all its places."""
    old = shard.tensor
    wanted = dtype if dtype is not None and old.is_floating_point() else old.dtype
    if not old.is_meta and old.dtype == wanted:
        return shard.part
    part = shard.part
    empty = torch.empty_like(part, dtype=wanted, device=device if old.is_meta else old.device)
    placed = with_local(old, empty) if is_tensor_parallel(old) else empty
    if not old.is_meta and isinstance(old, nn.Parameter):
        old.data = placed  # the parameter object stays the same
        return shard.part
    new = renewed(old, placed) if isinstance(old, nn.Parameter) else empty
    for tensors, name in places[id(old)]:
        tensors[name] = new
    return part_of_rank(new).detach()


@torch.no_grad()
def _fill(shard: TensorShard, stored: Stored, local: Tensor) -> None:
    for whole, own in shard.pieces():
        local[own].copy_(stored.read(whole))


@torch.no_grad()
def _receive(shard: TensorShard, stored: Stored, local: Tensor, group: ProcessGroup) -> None:
    """The first rank broadcasts blocks of rows; every rank keeps its shard."""
    assert stored.dtype is not None
    pieces = list(shard.pieces())
    for row in range(0, shard.rows, shard.block_rows):
        stop = min(shard.rows, row + shard.block_rows)
        shape = torch.Size((stop - row, *stored.shape[1:])) if stored.shape else torch.Size(())
        data = torch.empty(shape.numel() * stored.dtype.itemsize, dtype=torch.uint8, device=wire_device(local, group))
        if group_rank(group) == 0:
            block = stored.read((slice(row, stop),) if stored.shape else ())
            data.copy_(block.contiguous().reshape(-1).view(torch.uint8))
        dist.broadcast(data, group=group, group_src=0)
        block = data.view(stored.dtype).reshape(shape)
        for whole, own in pieces:
            if not whole:
                local.copy_(block)
                continue
            first, last = max(whole[0].start, row), min(whole[0].stop, stop)
            if first < last:
                begin = own[0].start + first - whole[0].start
                mine = (slice(begin, begin + last - first), *own[1:])
                local[mine].copy_(block[(slice(first - row, last - row), *whole[1:])])


def _unread(index: Index) -> Tensor:
    raise AssertionError("the first rank alone reads its state")


def _where(stored: Mapping[str, Stored]) -> str:
    files = list(dict.fromkeys(one.where for one in stored.values()))
    return " and ".join(map(repr, files)) if len(files) < 3 else f"{files[0]!r} with {len(files) - 1} more files"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(map(repr, found[:LISTED])) + more
