"""Full tensors of a sharded model, gathered to the first rank in blocks of rows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.core.blocks.sharding import Cut
from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.group import ProcessGroup, group_rank, group_size
from oases.distributed.dtensors import is_tensor_parallel
from oases.distributed.mesh import run_of
from oases.distributed.shard_map import ModelTensor, TensorShard, tensors_of_model
from oases.errors import UsageError


def gather_state(
    model: nn.Module,
    *,
    to: torch.device | str = "cpu",
    process_group: ProcessGroup | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor | None]]:
    """Iterate over (name, full tensor) of the model's state, on device `to`. Collective: all ranks iterate.

    The first rank of process_group gets the tensors with the names, shapes and types of the original model; a tied
    tensor comes under each of its names. Other ranks get None. Tensors are not kept after they are yielded.
    process_group: all ranks of the model; None: those of its mesh, or the default group. wanted: whether to gather a
    tensor, by any of its names.
    """
    group = run_of(model, process_group)
    first, wire = group_rank(group) == 0, GatherBuffers()
    for tensor in tensors_of_model(model, group):
        if not any(map(wanted, tensor.names)):
            continue
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=to) if first else None
        for row, block in gather_blocks(tensor, group, wire):
            if whole is not None and block is not None:
                whole.reshape(tensor.shape or (1,))[row : row + len(block)] = block
        for name in tensor.names:
            yield name, whole
        del whole  # free it before the next one is allocated


def full_state_dict(
    model: nn.Module, *, to: torch.device | str = "cpu", process_group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Full state_dict on the first rank, in its memory; {} on the others. Collective: all ranks call it.

    process_group: all ranks of the model; None: those of its mesh, or the default group. For a model larger than one
    rank's memory use `save_pretrained`.
    """
    found = gather_state(model, to=to, process_group=process_group)
    state = {name: tensor for name, tensor in found if tensor is not None}
    order = dict.fromkeys([*model.state_dict(keep_vars=True), *state])
    return {name: state[name] for name in order if name in state}


@torch.no_grad()
def gather_blocks(
    tensor: ModelTensor, process_group: ProcessGroup | None, wire: GatherBuffers
) -> Iterator[tuple[int, Tensor | None]]:
    """Iterate over (first row, rows of the full tensor) until all rows have come, in any order. Collective.

    The first rank of process_group gets the rows, which are valid until the next block; other ranks get None. Its
    leader gathers a tensor that this rank does not have, and sends it the blocks. Ranks whose group does not include
    the leader hold copies of other ranks' shards and return at once.
    """
    rank, shard, leader = group_rank(process_group), tensor.shard, tensor.leader
    if leader is None:
        raise UsageError(f"{tensor.names[0]!r} is on meta on every rank and has no value; load weights first")
    if rank == 0 and leader != 0:
        assert process_group is not None
        yield from wire.receive(tensor, process_group)
    elif shard is not None:
        root = dist.get_global_rank(process_group, leader) if process_group is not None else 0
        for row, block in _gather_shards(shard, root, rank == leader, wire):
            if leader == 0:
                yield row, block
            elif block is not None:
                assert process_group is not None
                wire.send(row, block, process_group)
        if rank == leader != 0:
            assert process_group is not None
            wire.send(-1, None, process_group)


def _gather_shards(
    shard: TensorShard, root: int, leads: bool, wire: GatherBuffers
) -> Iterator[tuple[int, Tensor | None]]:
    """Blocks of a full tensor on global rank `root`, None on the other ranks of its group."""
    local, cut = shard.tensor.detach(), shard.cut
    if is_tensor_parallel(local) and local.device_mesh.ndim == 1:  # type: ignore[attr-defined]
        local = shard.part
    elif is_dtensor(local):  # FSDP shards it again: gathered on all replicas
        cut = None if is_tensor_parallel(local) else cut
        local = local.full_tensor()  # type: ignore[attr-defined]
    local = local.reshape(local.shape or (1,))
    if cut is None or shard.process_group is None:
        for row in range(0, shard.rows, shard.block_rows) if leads else ():
            yield row, local[row : row + shard.block_rows]
    elif root not in dist.get_process_group_ranks(shard.process_group):
        return
    elif cut.dim == 0:
        yield from _rows(local, shard, cut, shard.process_group, root, wire)
    else:
        yield from _columns(local, shard, cut, shard.process_group, root, wire)


def _rows(
    local: Tensor, shard: TensorShard, cut: Cut, group: ProcessGroup, root: int, wire: GatherBuffers
) -> Iterator[tuple[int, Tensor | None]]:
    """Gather a tensor sharded by rows: every rank sends its own rows, segment by segment."""
    ranks, mine = group_size(group), group_rank(group)
    at_once = max(1, shard.block_rows // ranks)
    begin = 0
    for spans in zip(*(cut.ranges(rank, ranks) for rank in range(ranks)), strict=True):
        lengths = [last - first for first, last in spans]
        for row in range(0, max(lengths), at_once):
            counts = [max(0, min(at_once, length - row)) for length in lengths]
            own = local[begin + row : begin + row + counts[mine]]
            shapes = [(count, *local.shape[1:]) for count in counts]
            parts = wire.gather(own, shapes, group, root)
            for rank, (first, _) in enumerate(spans):
                yield first + row, None if parts is None else parts[rank]
        begin += lengths[mine]


def _columns(
    local: Tensor, shard: TensorShard, cut: Cut, group: ProcessGroup, root: int, wire: GatherBuffers
) -> Iterator[tuple[int, Tensor | None]]:
    """Gather a tensor sharded along another dimension: every rank sends its part of the same rows."""
    ranks = group_size(group)
    widths = [sum(last - first for first, last in cut.ranges(rank, ranks)) for rank in range(ranks)]
    for row in range(0, shard.rows, shard.block_rows):
        own = local[row : row + shard.block_rows]
        shapes = [(*own.shape[: cut.dim], width, *own.shape[cut.dim + 1 :]) for width in widths]
        parts = wire.gather(own, shapes, group, root)
        yield row, None if parts is None else cut.join(parts)


class GatherBuffers:
    """Reused buffers for blocks on their way to the first rank.

    Allocating each block separately would fragment the heap.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}

    def gather(
        self, part: Tensor, shapes: list[tuple[int, ...]], group: ProcessGroup, root: int
    ) -> list[Tensor] | None:
        """Parts of all ranks, of these shapes, on global rank `root`; None elsewhere. Valid until the next call.

        Parts are sent as bytes, which every backend supports for all types.
        """
        sizes = [torch.Size(shape).numel() * part.element_size() for shape in shapes]
        receives = dist.get_rank() == root
        longest = max(16, -(-max(sizes) // 16) * 16)  # alignment for a view as any type
        sent, *received = self._slots(wire_device(part, group), longest, 1 + receives * len(sizes))
        own = sizes[group_rank(group)]
        sent[:own].view(part.dtype).reshape(part.shape).copy_(part)
        dist.gather(sent, received if receives else None, dst=root, group=group)
        if not receives:
            return None
        pairs = zip(received, sizes, shapes, strict=True)
        return [data[:size].view(part.dtype).reshape(shape) for data, size, shape in pairs]

    def send(self, row: int, block: Tensor | None, group: ProcessGroup) -> None:
        """Send rows from `row` on to the first rank of a group; None after the last."""
        device = _device_of(group)
        rows = 0 if block is None else len(block)
        dist.send(torch.tensor([row, rows], device=device), group=group, group_dst=0)
        if block is not None:
            dist.send(block.contiguous().reshape(-1).view(torch.uint8).to(device), group=group, group_dst=0)

    def receive(self, tensor: ModelTensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
        """Rows of a tensor that its leader sends. Valid until the next ones."""
        device, leader = _device_of(group), tensor.leader
        head = torch.zeros(2, dtype=torch.int64, device=device)
        while True:
            dist.recv(head, group=group, group_src=leader)
            row, rows = head.tolist()
            if row < 0:
                return
            size = rows * tensor.row_bytes
            (slot,) = self._slots(device, -(-size // 16) * 16, 1)
            dist.recv(slot[:size], group=group, group_src=leader)
            yield row, slot[:size].view(tensor.dtype).reshape(rows, *tensor.shape[1:])

    def _slots(self, device: torch.device, size: int, number: int) -> list[Tensor]:
        memory = self._memory.get(device)
        if memory is None or len(memory) < number * size:
            self._memory[device] = memory = torch.zeros(number * size, dtype=torch.uint8, device=device)
        return list(memory[: number * size].split(size))


def _device_of(group: ProcessGroup) -> torch.device:
    """Device that a group's point-to-point messages are sent from."""
    if any(name in dist.get_backend_config(group) for name in ("gloo", "staged")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a backend that sends no tensors of the CPU has an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def wire_device(tensor: Tensor, group: ProcessGroup) -> torch.device:
    """Device that a tensor's bytes are sent from: its own where the group has a backend that sends from there."""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    sends = backends.get(tensor.device.type, "gloo") not in ("gloo", "staged")
    return tensor.device if sends else torch.device("cpu")


INITIALISED = "_is_hf_initialized"
"""Attribute of tensors that transformers' initialisation skips."""


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a transformers model, which defines its own weight names and buffer initialisation.

    UsageError for transformers before 5, which did both differently.
    """
    if "transformers" not in sys.modules:  # not loaded, so there is no such model
        return False
    transformers: Any = importlib.import_module("transformers")
    if not isinstance(module, transformers.PreTrainedModel):
        return False
    if int(transformers.__version__.split(".")[0]) < 5:
        raise UsageError(f"transformers {transformers.__version__} is too old; install transformers 5 or newer")
    return True


def base_of(model: nn.Module) -> nn.Module:
    """The model of transformers in a PeftModel; any other model itself."""
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a PeftModel."""
    return any(each.__module__.startswith("peft.") and each.__name__ == "PeftModel" for each in type(model).__mro__)


@torch.no_grad()
def materialize_buffers(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Materialise non-persistent meta buffers on `device`: rotary frequencies, position ids and the like.

    In a transformers model its own initialisation computes them; parameters and other buffers keep their values.
    UsageError names a buffer without a known initialisation, and any other tensor that a module keeps on meta.
    """
    owners = {"": model}
    for path, module in model.named_modules():
        parent = owners[path.rpartition(".")[0]]
        owners[path] = module if is_pretrained(module) else parent
        _refuse_plain(path, module)
        lost = [
            name
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
        ]
        if lost:
            _compute(path, module, lost, owners[path], torch.device(device))


def _compute(path: str, module: nn.Module, lost: list[str], owner: nn.Module, device: torch.device) -> None:
    empty: dict[str, Tensor] = {}
    if is_pretrained(owner):
        for name in lost:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = empty[name] = torch.empty_like(buffer, device=device)
        initialise: Any = owner._init_weights
        with _filled(module, set(lost)), torch.device(device):
            initialise(module)
    for name in lost:
        if name not in empty or (module._buffers[name] is empty[name] and empty[name]._version == 0):
            for other in empty:  # leave no buffer uninitialised
                module._buffers[other] = empty[other].to("meta")
            raise UsageError(
                f"buffer {f'{path}.{name}'.lstrip('.')!r} is on meta, in no checkpoint, and {type(owner).__name__} "
                "does not initialise it; build the model with real buffers, only its parameters on meta"
            )


@contextmanager
def _filled(module: nn.Module, but: set[str]) -> Iterator[None]:
    """Mark a module's tensors as initialised, `but` these own buffers, so that its initialisation skips them."""
    marked = []
    for child in module.modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and not (child is module and name in but) and not hasattr(tensor, INITIALISED):
                setattr(tensor, INITIALISED, True)
                marked.append(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, INITIALISED)


def _refuse_plain(path: str, module: nn.Module) -> None:
    """Refuse meta tensors that are neither parameter nor buffer: no checkpoint has them and nothing computes them."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise UsageError(
                f"tensor {f'{path}.{name}'.lstrip('.')!r} is on meta and neither a parameter nor a buffer; make it a "
                "buffer, or build the model with this tensor real"
            )
