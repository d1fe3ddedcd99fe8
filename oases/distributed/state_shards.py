"""Shards in the state dicts of torch.distributed.checkpoint.

Its `get_state_dict` would return this rank's shards as plain tensors, and `save` takes tensors of equal name and
shape on several ranks for replicas of which one is written. Here they are returned as `StateShard`, which says where
in the full tensor a shard belongs, so that a checkpoint can be loaded with any degrees; `set_state_dict` takes them
back. Shards that reach `save` or `load` as plain tensors are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oases.after_import import after_import
from oases.core.blocks.sharding import Cut, cuts, holders
from oases.core.execution.group import group_of, group_rank, group_size
from oases.errors import UsageError

_REWRAPPED = ("aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like", "aten::lift_fresh")
"""Ops after which a shard is still the same part of a full tensor."""


class Piece(NamedTuple):
    """Box of a full tensor: its offsets there, its first indices in this rank's part, and its sizes."""

    offsets: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]


def pieces_of(
    shape: Sequence[int], cut: Cut | None, rank: int, ranks: int, rows: tuple[int, int] | None = None
) -> tuple[Piece, ...]:
    """Boxes of a full tensor of `shape` that are in this rank's part.

    cut: over `ranks`, of which this is `rank`; None: not cut. rows: [first, last) of the rows of that part which this
    rank has, where FSDP shards it again; None: all.
    """
    none = (0,) * len(shape)
    if cut is None:
        found = [Piece(none, none, tuple(shape))]
    else:
        found, begin = [], 0
        for first, last in cut.ranges(rank, ranks):
            at = (_put(none, cut.dim, first), _put(none, cut.dim, begin), _put(shape, cut.dim, last - first))
            found.append(Piece(*at))
            begin += last - first
    if rows is None:
        return tuple(found)
    parts = []
    for offsets, begins, sizes in found:
        first, last = max(rows[0], begins[0]), min(rows[1], begins[0] + sizes[0])
        if first < last:
            where = _put(offsets, 0, offsets[0] + first - begins[0])
            parts.append(Piece(where, _put(begins, 0, first - rows[0]), _put(sizes, 0, last - first)))
    return tuple(parts)


def _put(numbers: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


class StateShard(Tensor):
    """This rank's part, `local`, of a tensor of the full `shape`. Read and written by checkpoints alone.

    pieces: what the part consists of (see `pieces_of`). Any op but copies raises UsageError.
    """

    local: Tensor
    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls: type[StateShard], local: Tensor, shape: Sequence[int], pieces: tuple[Piece, ...]) -> StateShard:
        """Wrap a tensor."""
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # type: ignore[attr-defined]
        made.local, made.pieces = local.detach(), pieces
        found: StateShard = made
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        """Local and full shape."""
        return f"StateShard({tuple(self.local.shape)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy a shard; UsageError for other ops."""
        if function._schema.name == "aten::new_empty" and tuple(args[1]) == args[0].shape:  # of async_save
            (this, _) = args
            return StateShard(this.local.new_empty(this.local.shape, **(kwargs or {})), this.shape, this.pieces)
        if function._schema.name in _REWRAPPED:
            (this, *rest) = args
            return StateShard(function(this.local, *rest, **(kwargs or {})), this.shape, this.pieces)
        raise UsageError(
            f"{function} on the shard of a parallelized model in a distributed state dict; give the dict to "
            "torch.distributed.checkpoint.save or load, or get full tensors by oases.full_state_dict(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise UsageError: a pickle of one rank would lack the others' parts."""
        raise UsageError(
            "the distributed state dict of a parallelized model cannot be pickled; give it to "
            "torch.distributed.checkpoint.save, or torch.save model.state_dict() on every rank"
        )

    # --- interface of torch.distributed.checkpoint ---

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        """One write item per piece."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for piece, chunk in zip(self.pieces, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Place and size of each piece."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in self.pieces]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The piece at an index, sharing memory with `local`."""
        piece = next(piece for piece in self.pieces if piece.offsets == tuple(index.offset))
        found = self.local
        for dim, (begin, size) in enumerate(zip(piece.begins, piece.sizes, strict=True)):
            found = found.narrow(dim, begin, size)
        return found


def shards_of(model: nn.Module, names: Callable[[nn.Module, str], set[str]]) -> dict[str, Callable[[Tensor], Tensor]]:
    """For each sharded parameter, by its name in a distributed state dict, the function that makes a StateShard.

    names: (model, name) -> names in the dict. The function takes tensors of the shard's shape, others stay.
    """
    cut_by, held_by = cuts(model), holders(model)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        cut, holder = cut_by.get(id(parameter)), held_by.get(id(parameter))
        group = group_of(getattr(holder, "_group_name", ""))
        if cut is None or group_size(group) == 1:
            continue
        if hasattr(parameter, "to_local"):
            raise UsageError(
                f"{name} is sharded over tensor-parallel ranks and by FSDP, which a distributed state dict cannot "
                "describe; use oases.save_checkpoint, or torch.save model.state_dict() on every rank"
            )
        held, whole = parameter.shape, _put(parameter.shape, cut.dim, cut.size)
        pieces = pieces_of(whole, cut, group_rank(group), group_size(group))

        def made(
            tensor: Tensor,
            held: torch.Size = held,
            whole: tuple[int, ...] = whole,
            pieces: tuple[Piece, ...] = pieces,
        ) -> Tensor:
            return StateShard(tensor, whole, pieces) if tensor.shape == held else tensor

        found.update(dict.fromkeys(names(model, name), made))
    return found


def unwrapped(state: Any) -> Any:
    """The same nested dicts and lists with shards as plain tensors."""
    if isinstance(state, StateShard):
        return state.local
    if isinstance(state, Mapping):
        return {name: unwrapped(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(unwrapped(value) for value in state)
    return state


Registered = Callable[[], Mapping[int, tuple[nn.Parameter, str]]]
"""Function that returns all sharded parameters of this process, with a name, by id."""


def install(registered: Registered) -> None:
    """Have torch.distributed.checkpoint handle sharded parameters, as soon as it is imported; once per process."""
    global _installed
    if not _installed:
        _installed = True
        base = "torch.distributed.checkpoint."
        after_import(base + "state_dict", _replace_state_dicts)
        # async_save copies before it saves: what it is given is seen where objects become their state dicts.
        for module, function in (
            ("saver", "_save_state_dict"), ("saver", "_stateful_to_state_dict"), ("loader", "_load_state_dict"),
        ):  # fmt: skip
            after_import(f"{base}state_dict_{module}", partial(_check, registered=registered, name=function))


_installed = False


def _replace_state_dicts(module: Any) -> None:
    """Have the functions behind get_state_dict and set_state_dict give and take StateShards."""
    get_model, get_optimizer = module._get_model_state_dict, module._get_optim_state_dict
    set_model, set_optimizer = module._load_model_state_dict, module._load_optim_state_dict

    def makers(model: nn.Module, info: Any) -> dict[str, Callable[[Tensor], Tensor]]:
        found = shards_of(model, module._get_fqns)
        asked = [name for name in ("full_state_dict", "broadcast_from_rank0") if getattr(info, name, False)]
        if found and asked:
            raise UsageError(
                f"{asked[0]}=True is not available for a parallelized model; use oases.full_state_dict(model) and "
                "oases.load_weights(model, state), or leave the option out"
            )
        return found

    @wraps(get_model)
    def get_model_shards(model: nn.Module, info: Any) -> Any:
        found = makers(model, info)
        state = get_model(model, info)
        return {name: found[name](value) if name in found else value for name, value in state.items()}

    @wraps(get_optimizer)
    def get_optimizer_shards(model: nn.Module, optimizers: Any, info: Any) -> Any:
        found = makers(model, info)
        state = get_optimizer(model, optimizers, info)
        if "state" not in state:  # flattened: "state.NAME.KEY"
            for key, value in state.items():
                name = key.removeprefix("state.").rpartition(".")[0]
                if key.startswith("state.") and name in found and isinstance(value, Tensor):
                    state[key] = found[name](value)
            return state
        moments = {
            name: {
                key: found[name](value) if name in found and isinstance(value, Tensor) else value
                for key, value in each.items()
            }
            for name, each in state["state"].items()
        }
        return {**state, "state": moments}

    @wraps(set_model)
    def set_model_shards(model: nn.Module, state: Any, info: Any) -> Any:
        makers(model, info)
        return set_model(model, unwrapped(state), info)

    @wraps(set_optimizer)
    def set_optimizer_shards(model: nn.Module, optimizers: Any, state: Any, info: Any) -> Any:
        makers(model, info)
        return set_optimizer(model, optimizers, unwrapped(state), info)

    module._get_model_state_dict, module._get_optim_state_dict = get_model_shards, get_optimizer_shards
    module._load_model_state_dict, module._load_optim_state_dict = set_model_shards, set_optimizer_shards


def _check(module: Any, *, registered: Registered, name: str) -> None:
    """Check that a state dict that a function of torch takes or makes has no shards as plain tensors."""
    function = getattr(module, name)

    @wraps(function)
    def checked(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        storages = {
            parameter.untyped_storage().data_ptr(): name
            for parameter, name in registered().values()
            if not hasattr(parameter, "to_local") and parameter.numel()
        }
        _require_no_shards(state_dict, storages, "")
        result = function(state_dict, *args, **kwargs)
        _require_no_shards(result, storages, "")
        return result

    setattr(module, name, checked)


def _require_no_shards(state: Any, storages: Mapping[int, str], path: str) -> None:
    if isinstance(state, Mapping):
        for name, value in state.items():
            _require_no_shards(value, storages, f"{path}.{name}".lstrip("."))
    elif type(state) in (Tensor, nn.Parameter) and not state.is_meta:
        name = storages.get(state.untyped_storage().data_ptr())
        if name is not None:
            raise UsageError(
                f"{path} is this rank's shard of a tensor ({name}), and torch.distributed.checkpoint would take the "
                "ranks' shards for replicas; give it what "
                "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns"
            )
