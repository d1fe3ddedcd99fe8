"""Tensors of a checkpoint by torch.distributed.checkpoint: safetensors of each rank, without a pickle.

A header says where in the full tensors its parts belong, so any degrees can load them. Imported where it is used:
torch.distributed.checkpoint takes half a second to import.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata as Tensors
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem

import oases.checkpoint.retention as retention
from oases.checkpoint.integrity import TENSORS, checksums, write_checksums
from oases.checkpoint.metadata import RECORD, Metadata
from oases.checkpoint.state import State, Stored
from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.safetensors_files import CODES

# A single process is intended. Filtered once: warning filters are not thread-safe, and a thread writes checkpoints.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

FILE_BYTES = 1 << 30
"""Largest file of several tensors: each is made in memory before it is written."""

Step = Callable[[], None]


def _nothing() -> None: ...


class Planner(DefaultSavePlanner):
    """Planner that copies each tensor when it is written: safetensors take no views, and none that share memory."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The part of a tensor as a contiguous copy in CPU memory."""
        found: Any = super().resolve_data(write_item)
        copied: Tensor = found.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copied


class Writer(HuggingFaceStorageWriter):
    """Writer of one checkpoint to the folder `path`, which gets its name once it is complete.

    copied: take a copy of the state before `async_save` returns. before, after: run by the first rank, before
    anything is written and when the checkpoint is complete.
    """

    def __init__(
        self, path: Path, record: Metadata, *, copied: bool = False, before: Step = _nothing, after: Step = _nothing
    ) -> None:
        super().__init__(str(retention.part_of(path)), save_distributed=True)
        self.final, self._record, self._copied, self._before, self._after = path, record, copied, before, after
        self._began = time.perf_counter()
        self.seconds = 0.0
        """Time until this rank was done."""

    def stage(self, state_dict: State) -> State:
        """The state to write, in CPU memory if copied."""
        if not self._copied:
            return state_dict
        return {name: each.to("cpu", copy=True) for name, each in state_dict.items()}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check on every rank that the folder may be replaced, and what it is to hold."""
        retention.require_replaceable(self.final)
        for item in plan.items:
            if (dtype := _data_of(item).properties.dtype) not in CODES:
                raise UsageError(f"{item.index.fqn!r} is {dtype}, which safetensors do not have; convert it")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on the first rank."""
        self._before()
        retention.begin(self.final)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files; returns a future of their checksums."""
        files = divided(plan.items, lambda item: (item.index.fqn, _bytes_of(item)))
        for number, items in enumerate(files, start=1):
            index = dict.fromkeys((item.index.fqn for item in items), number) | {"": len(files)}
            where = plan.storage_data | {"fqn_to_index_mapping": index}
            super().write_data(dataclasses.replace(plan, items=items, storage_data=where), planner).wait()
        mine = sorted(Path(self.path).glob(f"shard-{plan.storage_data['shard_index']:05}-*{TENSORS}"))
        for file in mine:
            retention.sync(file)  # torch flushes Python's buffer after its own fsync
        found: Any = torch.futures.Future()
        found.set_result([checksums(mine)])
        self.seconds = time.perf_counter() - self._began
        return found

    def finish(self, metadata: Tensors, results: Any) -> None:
        """Write record and checksums, and give the folder its name; on the first rank."""
        part = Path(self.path)
        self._record.write(part)
        files = {name: digest for each in results for found in each for name, digest in found.items()}
        write_checksums(part, files | checksums([part / RECORD]))
        retention.complete(part, self.final)
        self._after()
        self.seconds = time.perf_counter() - self._began


def save(state: State, writer: Writer, group: ProcessGroup | None) -> Future[Any]:
    """Start to write a state, in a thread of its own with collectives over `group`, which needs a CPU backend."""
    found: Any = dcp.async_save(
        state, storage_writer=writer, planner=Planner(), process_group=group, no_dist=group is None
    )
    return found  # type: ignore[no-any-return]


def save_now(state: State, writer: Writer, group: ProcessGroup | None) -> None:
    """Write a state, with collectives over `group`."""
    dcp.save(state, storage_writer=writer, planner=Planner(), process_group=group, no_dist=group is None)


class Reader(HuggingFaceStorageReader):
    """Reader of a checkpoint whose checksums were verified."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._folder = path
        self._found: Tensors | None = None

    def read_metadata(self) -> Tensors:
        """Read the headers, once. UsageError where they cannot be read, or parts do not cover their tensor."""
        if self._found is None:
            try:
                found = super().read_metadata()
                for name, each in _tensors(found).items():
                    if sum(math.prod(chunk.sizes) for chunk in each.chunks) != math.prod(each.size):
                        raise ValueError(f"the parts of {name} do not cover it once")
            except Exception as error:  # headers and the JSON in them fail in any way
                raise _unreadable(self._folder, error) from error
            self._found = found
        return self._found

    def stored(self) -> dict[str, Stored]:
        """Full shape and dtype of each tensor, by name."""
        return {
            name: (tuple(each.size), each.properties.dtype) for name, each in _tensors(self.read_metadata()).items()
        }

    def load(self, state: State, group: ProcessGroup | None) -> None:
        """Fill tensors by name, in place. Collective; UsageError on all ranks where they cannot be read."""
        try:
            dcp.load(state, storage_reader=self, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception; on all ranks alike
            raise _unreadable(self._folder, error) from error


def _tensors(found: Tensors) -> dict[str, TensorStorageMetadata]:
    tensors: Any = found.state_dict_metadata  # of safetensors, which hold nothing else
    return dict(tensors)


def divided(items: list[Any], of: Callable[[Any], tuple[str, int]]) -> list[list[Any]]:
    """Divide parts of tensors into files, in which a name is once. of: name and bytes of a part."""
    files: list[list[Any]] = []
    names: list[set[str]] = []
    sizes: list[int] = []
    for item in items:
        name, size = of(item)
        fitting = (at for at in range(len(files)) if name not in names[at] and sizes[at] + size <= FILE_BYTES)
        at = next(fitting, len(files))
        if at == len(files):
            files.append([])
            names.append(set())
            sizes.append(0)
        files[at].append(item)
        names[at].add(name)
        sizes[at] += size
    return files


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "a checkpoint holds tensors"
    return item.tensor_data


def _bytes_of(item: WriteItem) -> int:
    return math.prod(_data_of(item).chunk.sizes) * _data_of(item).properties.dtype.itemsize


def _unreadable(path: Path, error: BaseException) -> UsageError:
    return UsageError(
        f"checkpoint {str(path)!r} is corrupt: its tensors cannot be read ({error!s:.300}); use another"
    )
