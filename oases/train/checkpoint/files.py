"""Sharded checkpoints by torch.distributed.checkpoint: each rank writes its shards; any degrees can load them.

Shards are wrapped as DTensors for saving and loading, so that a checkpoint can be loaded with other tensor-parallel
degrees. A checkpoint is written to a temporary folder, with a checksum of every file, and renamed once complete. Only
folders that are checkpoints are ever replaced. `export` writes the weights to one safetensors file.
torch.distributed.checkpoint takes half a second to import, so it is imported in the functions that use it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import oases.train.checkpoint.retention as retention
from oases.errors import UsageError
from oases.execution.group import HoldsGroup, ProcessGroup, group_name, group_rank, group_size
from oases.parallel.fsdp import laid_out, local, mesh_of, units_of
from oases.parallel.optimizer import ShardedOptimizer, state_of, weight_of
from oases.parallel.sharding import holders, sharded_parameters
from oases.safetensors_files import write_header
from oases.train.checkpoint.coordination import SaveError, run_on_all_ranks
from oases.train.checkpoint.integrity import INDEX, checksums, find_fault, write_checksums
from oases.train.checkpoint.metadata import RECORD, Metadata, is_checkpoint

# A single process is intended. Filtered once: warning filters are not thread-safe, and a thread writes checkpoints.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

State = dict[str, Any]
"""This rank's part of a checkpoint: tensors and DTensors by name."""

_WEIGHTS = "model."
"""Prefix of model weights in a checkpoint."""


def require_replaceable(path: str | Path) -> Path:
    """Raise UsageError unless `path` may be written: absent, an empty folder, or an earlier checkpoint."""
    given, path = path, Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"checkpoint {str(given)!r} is a file; give the path of a folder of its own")
    if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
        raise UsageError(
            f"checkpoint {str(given)!r} holds other files, which would be replaced; give a new or empty folder"
        )
    return path


def save(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Metadata, group: ProcessGroup | None
) -> None:
    """Write model, optimizer and metadata to the folder `path`, replacing an earlier checkpoint. All ranks call it.

    group: all ranks that train the model; replicated tensors are written once. Raises UsageError for a path
    that holds anything else, SaveError where writing failed.
    """
    write(path, state(model, optimizer, group), record, group)


def write(path: str | Path, state: State, record: Metadata, group: ProcessGroup | None) -> None:
    """Write a state of `state` or `cpu_state` with its metadata, as `save` does."""
    path = require_replaceable(path)
    aside, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    _barrier(group)  # no rank writes before all ranks have checked the path
    rank = group_rank(group)

    def prepare() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        record.write(aside)

    def store() -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=aside, process_group=group, no_dist=group is None)

    def seal() -> None:
        write_checksums(aside, {name: digest for part in parts for name, digest in part.items()})
        _sync(aside)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)

    what = f"checkpoint {str(path)!r}"
    try:
        _by_first(prepare, what, group)
        run_on_all_ranks(store, what, group)
        own = [RECORD, INDEX] if rank == 0 else []  # besides the shards, which carry the rank in their names
        parts = run_on_all_ranks(
            lambda: checksums([*(aside / name for name in own), *sorted(aside.glob(f"__{rank}_*"))]), what, group
        )
        _by_first(seal, what, group)
    except SaveError:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        _barrier(group)  # no rank checks the path again while it is being removed
        raise


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sizes: dict[str, Any],
    group: ProcessGroup | None,
    *,
    verify: bool = True,
) -> Metadata:
    """Read a checkpoint into model and optimizer (None: the model alone), in place; return its metadata.

    With an optimizer, random states are restored too; those of rank 0 on every rank if the number of ranks differs.
    verify: compare checksums first. Raises UsageError where the folder is not a checkpoint, is corrupt, has a newer
    format or holds a model of other sizes.
    """
    path = Path(path)
    record = Metadata.read(path)
    record.require_sizes(sizes, path)
    fault = find_fault(path, group) if verify else ""
    if fault:
        raise UsageError(f"checkpoint {str(path)!r} is corrupt: {fault}; use another")
    wanted = state(model, optimizer, group)
    # Where another rank has the master weight, load the model's own weight; both round alike.
    wanted = {**state(model, None, group), **wanted}
    generators = _generators(model)
    if optimizer is not None:
        rank = group_rank(group) if record.ranks == group_size(group) else 0
        generators = {name: one for name, one in generators.items() if name in record.random}
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith("random.")}
        wanted |= {_random(name, rank): one.get_state() for name, one in generators.items()}
    import torch.distributed.checkpoint as dcp

    from oases.train.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(path)
    reader.read_metadata()  # an error on all ranks alike
    dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    if optimizer is not None:
        random = {name: wanted[_random(name, rank)] for name in generators}
        finish_loading(model, optimizer, record.updates, random)
    return record


def finish_loading(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: int, random: Mapping[str, Tensor]
) -> None:
    """Set what follows from loaded tensors or is not among them. updates: number of the optimizer's.

    random: states of the generators, by name; those without one stay.
    """
    for parameter in model.parameters():
        moments = state_of(optimizer, parameter)
        if moments is not None:
            moments["step"].fill_(float(updates))
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.copy_masters_to_model()
    for name, generator in _generators(model).items():
        if name in random:
            generator.set_state(random[name])


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None, group: ProcessGroup | None) -> State:
    """Collect this rank's tensors, without copying; with an optimizer, random states too."""
    return _state(model, optimizer, group, lambda tensor: tensor, None)


def cpu_state(model: nn.Module, optimizer: torch.optim.Optimizer, group: ProcessGroup | None) -> State:
    """Copy `state` to CPU memory, so that later steps can proceed while it is written."""
    return _state(model, optimizer, group, lambda tensor: tensor.to("cpu", copy=True), "cpu")


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: ProcessGroup | None,
    copied: Callable[[Tensor], Tensor],
    device: str | None,
) -> State:
    """Collect tensors by name; shards become DTensors over the process group of their layer."""
    from torch.distributed.tensor import DTensor, Shard

    dims = {id(parameter): dim for _, parameter, dim in sharded_parameters(model)}
    cut_by, units = holders(model), units_of(model)
    meshes: dict[str, Any] = {}

    def whole(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        tensor = copied(local(tensor.detach()))
        cutting, dim = _cutting(cut_by.get(id(parameter)), group), dims.get(id(parameter), 0)
        if isinstance(parameter, DTensor):
            return laid_out(tensor, units[id(parameter)], parameter, cutting, dim)
        if cutting is None:
            return tensor
        name = group_name(cutting)
        if name not in meshes:
            meshes[name] = mesh_of([cutting], device or parameter.device.type)
        return DTensor.from_local(tensor, meshes[name], [Shard(dim)])

    found: State = {name: whole(tensor, parameter) for name, tensor, parameter in _tensors(model, optimizer)}
    for name, buffer in _buffers(model):  # the same on all ranks
        found[_WEIGHTS + name] = copied(buffer.detach())
    if optimizer is not None:
        for name, generator in _generators(model).items():
            found[_random(name, group_rank(group))] = generator.get_state()
    return found


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collect this rank's shards as plain tensors, without copying, and copies of its random states, by name.

    Weights are included whose masters other ranks have.
    """
    found = {}
    for name, tensor, _ in [*_tensors(model, None), *_tensors(model, optimizer)]:
        found[name] = local(tensor.detach())
    found |= {_WEIGHTS + name: buffer.detach() for name, buffer in _buffers(model)}
    return found | {name: generator.get_state() for name, generator in _generators(model).items()}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
    """Weights, or their masters, and moments that this rank has, by name and with their parameter."""
    for name, parameter in model.named_parameters():
        weight = weight_of(optimizer, parameter)
        if weight is not None:
            yield _WEIGHTS + name, weight, parameter
        # With ZeRO-1, the moments of a parameter may be on another rank, which writes them.
        for kind, moment in _moments_of(optimizer, parameter).items():
            yield f"optimizer.{name}.{kind}", moment, parameter


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers of a model, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _moments_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW moments of a parameter on this rank, initialized to zero before the first step."""
    moments = None if optimizer is None else state_of(optimizer, parameter)
    weight = weight_of(optimizer, parameter)
    if moments is None or weight is None:
        return {}
    if not moments:  # as AdamW initializes them
        moments["step"] = torch.tensor(0.0)
        moments["exp_avg"] = torch.zeros_like(weight)
        moments["exp_avg_sq"] = torch.zeros_like(weight)
    return {kind: moments[kind] for kind in ("exp_avg", "exp_avg_sq")}


def _cutting(holder: nn.Module | None, group: ProcessGroup | None) -> ProcessGroup | None:
    """Process group that a layer's parameters are sharded over; None where they are replicated."""
    cutting = holder.process_group if isinstance(holder, HoldsGroup) else group
    return None if holder is None or group_size(cutting) == 1 else cutting


def random_streams(model: nn.Module) -> list[str]:
    """Names of the per-rank random states in a checkpoint of this model."""
    return list(_generators(model))


def _generators(model: nn.Module) -> dict[str, torch.Generator]:
    """Default torch generators of the CPU and the model's GPU; Python's and numpy's are not used."""
    found = {"cpu": torch.default_generator}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    for device in devices:
        found["cuda"] = torch.cuda.default_generators[device.index or 0]
    return found


def _random(name: str, rank: int) -> str:
    return f"random.{rank}.{name}"


def _by_first(action: Callable[[], None], what: str, group: ProcessGroup | None) -> None:
    """Run on rank 0 only; an error is raised on all ranks."""
    run_on_all_ranks(action if group_rank(group) == 0 else lambda: None, what, group)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _barrier(group: ProcessGroup | None) -> None:
    if group_size(group) > 1:
        dist.barrier(group=group)


def export(checkpoint: str | Path, file: str | Path) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's weights to `file`, replacing it; return their shapes by name.

    checkpoint: of any parallel degrees, or a folder of checkpoints for the newest. Runs in one process, tensor by
    tensor, with memory for the largest one. The file appears by a rename, once complete. UsageError for an invalid or
    corrupt checkpoint, one of a newer format, and a file that cannot be written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from oases.train.checkpoint.reader import CheckpointReader

    path, file = Path(checkpoint), Path(file)
    if file.exists() and not file.is_file():  # a rename would replace a device
        raise UsageError(f"{str(file)!r} is not a file; give the path of a file to write")
    if not is_checkpoint(path):
        path = next(iter(retention.checkpoints(path)), path)
    Metadata.read(path)
    fault = find_fault(path, None)
    if fault:
        raise UsageError(f"checkpoint {str(path)!r} is corrupt: {fault}; use another")
    reader = CheckpointReader(path)
    stored = {
        name.removeprefix(_WEIGHTS): kept
        for name, kept in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(_WEIGHTS) and isinstance(kept, TensorStorageMetadata)
    }
    header = {name: (kept.properties.dtype, tuple(kept.size)) for name, kept in stored.items()}
    aside = file.with_name(f".{file.name}.part")
    try:
        with aside.open("wb") as out:
            begins = write_header(out, header)
            for name, (dtype, shape) in header.items():
                tensor = torch.empty(shape, dtype=dtype)
                dcp.load({_WEIGHTS + name: tensor}, storage_reader=reader, no_dist=True)
                out.seek(begins[name])
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror}; give another path") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    return {name: shape for name, (_, shape) in header.items()}
