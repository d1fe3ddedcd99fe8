"""Copies of the state in memory that outlives the ranks, from which restarted ranks go on without reading a disk.

Each rank copies its shards after every few steps to one of two files in memory (`oases.launch.memory`), in turn: a
rank that is killed while it copies leaves the other one whole. A restart takes the newest step that all shards have.
A rank whose own copy is gone with its node, or is older, gets it from a replica. A file holds a header, the tensors
and JSON; nothing in it is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.checkpoint.state import local_state, set_random_states
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_rank, group_size
from oases.distributed.optimizer import ShardedOptimizer, set_state, state_of, weight_of
from oases.launch.memory import open_pair

_HEADER = struct.Struct("qqq")
"""Step, 0 while the file is incomplete; place and size of the JSON."""
_STEP_BYTES = 8
_ALIGNED = 64


class StateMemory:
    """Two copies of this rank's shards of model and optimizer, of different steps. All ranks create it.

    shard: name that ranks with the same state share, and no others. group: all ranks. UsageError where no launcher
    keeps memory for the ranks.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shard: str, group: ProcessGroup | None
    ) -> None:
        self._model, self._optimizer, self._group = model, optimizer, group
        _begin(optimizer)
        self._files = [_File(descriptor) for descriptor in open_pair()]
        self._name = shard
        self._shard = self._shard_of(self._state())
        self._sources: dict[int, tuple[int, str]] = {}
        """By rank without the step that is restored: another with it, and the shard."""

    def newest(self, at_most: float = math.inf) -> int:
        """Newest step that all shards have; 0 without one. Collective: the least `at_most` of all ranks applies."""
        mine = [(file.step, file.shard) for file in self._files if file.step]
        everyone = all_gather_objects((self._shard, mine, at_most), self._group)
        limit = min(most for _, _, most in everyone)
        for step in sorted({step for _, held, _ in everyone for step, _ in held if step <= limit}, reverse=True):
            holders = {shard: rank for rank, (_, held, _) in enumerate(everyone) for at, shard in held if at == step}
            if all(wanted in holders for wanted, _, _ in everyone):
                self._sources = {
                    rank: (holders[wanted], wanted)
                    for rank, (wanted, held, _) in enumerate(everyone)
                    if (step, wanted) not in held
                }
                return step
        return 0

    def restore(self, step: int) -> dict[str, Any]:
        """Load the step that `newest` returned into model and optimizer, in place; return its record. Collective."""
        if self._sources:
            self._exchange(step)
        file = next(file for file in self._files if file.holds(step, self._shard))
        state = self._state()
        for name, part in file.tensors(state).items():
            state[name].copy_(part)
        record: dict[str, Any] = file.text()["record"]
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.copy_masters_to_model()
        set_random_states(self._model, state)
        return record

    def forget(self, but: int = 0) -> None:
        """Drop all steps but one: the run goes on from another, and may compute them again on other ranks."""
        for file in self._files:
            if not (but and file.holds(but, self._shard)):
                file.step = 0

    def save(self, step: int, record: dict[str, Any]) -> None:
        """Copy the state after a step. OSError where there is too little memory.

        record: plain values to keep with it, "updates" of the optimizer among them.
        """
        file = min(self._files, key=lambda file: file.step)
        file.step = 0
        state = self._state()
        for name, part in file.tensors(state).items():
            part.copy_(state[name])
        file.write_text({"shard": self._shard_of(state), "record": record})
        file.step = step

    def _state(self) -> dict[str, Tensor]:
        """Tensors in the order of their names: an optimizer that was loaded has its state in another."""
        return dict(sorted(local_state(self._model, self._optimizer, self._group).items()))

    def _shard_of(self, state: dict[str, Tensor]) -> str:
        """Name of a shard and of the layout of its file."""
        layout = [[name, str(held.dtype), list(held.shape)] for name, held in state.items()]
        return f"{self._name} {hashlib.sha256(json.dumps(layout).encode()).hexdigest()}"

    def _exchange(self, step: int) -> None:
        """Send files of the step to the ranks that lack it, by a group on the CPU."""
        ranks = None if self._group is None else dist.get_process_group_ranks(self._group)
        group, rank = dist.new_group(ranks, backend="gloo"), group_rank(self._group)
        for target, (source, shard) in self._sources.items():
            if rank == source:
                data = next(file for file in self._files if file.holds(step, shard)).whole()[_STEP_BYTES:]
                dist.send(torch.tensor([data.numel()]), group=group, group_dst=target)
                dist.send(data, group=group, group_dst=target)
            elif rank == target:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, group=group, group_src=source)
                file = next(file for file in self._files if file.step != step)  # that one, others may need
                file.step = 0
                data = file.whole(_STEP_BYTES + int(size))[_STEP_BYTES : _STEP_BYTES + int(size)]
                dist.recv(data, group=group, group_src=source)
                file.step = step
        dist.barrier(group=group)
        if group_size(group) == dist.get_world_size():  # one of fewer ranks stays: see CheckpointWriter
            dist.destroy_process_group(group)


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state of its first step, so that files of all steps have the same tensors."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = weight_of(optimizer, parameter)
            if weight is not None and not state_of(optimizer, parameter):
                moments = {name: torch.zeros_like(weight.detach()) for name in ("exp_avg", "exp_avg_sq")}
                set_state(optimizer, parameter, {"step": torch.zeros((), device=weight.device), **moments})


class _File:
    """File in memory: header, tensors, JSON."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._allocate(_HEADER.size)
        self._head = mmap.mmap(descriptor, _HEADER.size)
        self._layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._parts: dict[str, Tensor] = {}
        self._end = 0
        """First byte behind the tensors."""

    @property
    def step(self) -> int:
        """Step of the copy; 0 while there is none, or it is incomplete."""
        return int(_HEADER.unpack_from(self._head)[0])

    @step.setter
    def step(self, step: int) -> None:
        struct.pack_into("q", self._head, 0, step)  # one store: whole or not at all

    @property
    def shard(self) -> str:
        """Name of the shard of a complete copy."""
        return str(self.text()["shard"])

    def holds(self, step: int, shard: str) -> bool:
        """Whether it is a complete copy of a shard after a step, at least 1."""
        return self.step == step and self.shard == shard

    def tensors(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in the file, which is made large enough, with names, dtypes and shapes of `like`."""
        layout = {name: (each.dtype, tuple(each.shape)) for name, each in like.items()}
        if layout != self._layout:
            places, end = {}, _ALIGNED
            for name, each in like.items():
                size = each.numel() * each.element_size()
                places[name] = (end, size)
                end += -(-size // _ALIGNED) * _ALIGNED
            whole = self.whole(end)
            self._parts = {
                name: whole[first : first + size].view(like[name].dtype).view(like[name].shape)
                for name, (first, size) in places.items()
            }
            self._layout, self._end = layout, end
        return self._parts

    def whole(self, size: int = 0) -> Tensor:
        """The file as a tensor. size: to make it, at least; 0: as it is."""
        if size:
            self._allocate(size)
        size = size or os.fstat(self._descriptor).st_size
        return torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def text(self) -> Any:
        """The JSON."""
        _, place, size = _HEADER.unpack_from(self._head)
        return json.loads(os.pread(self._descriptor, size, place))

    def write_text(self, value: Any) -> None:
        """Write the JSON behind the tensors."""
        text = json.dumps(value).encode()
        os.pwrite(self._descriptor, text, self._end)
        struct.pack_into("qq", self._head, _STEP_BYTES, self._end, len(text))

    def _allocate(self, size: int) -> None:
        # Now, with an error, and not by a signal at the first write to a page.
        os.posix_fallocate(self._descriptor, 0, size)
