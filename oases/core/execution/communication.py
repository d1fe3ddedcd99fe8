"""Collectives of a schedule's ops: layout and type of the tensors that are sent, also of quantised numbers.

Quantised numbers, "int8", have 8 bits each, and an fp32 scale per block of 128; all ranks decode the same sums.
Their collectives run on a group of their own (csrc/quantized_backend.h), made by `add_wire`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.dtypes import QUANTISED, WIRE_BYTES
from oases.core.execution.failure import monitor_of
from oases.core.execution.group import ProcessGroup, group_of, nccl_options, scheduler_of
from oases.errors import UsageError
from oases.extension import QuantizedBackend

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

WireType = torch.dtype | str


class Scheduler(Protocol):
    """Collectives that a Wire uses; implemented by `oases._C.OverlapScheduler`."""

    def all_reduce(self, tensor: Tensor, label: str = "", largest: bool = False, wire: str = "") -> Any:
        """Start to sum `tensor` over the ranks in place; return a ticket."""

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "", wire: str = "") -> Any:
        """Start to sum `input` [ranks, ...] over the ranks, this rank's part into `output`; return a ticket."""

    def all_gather(self, output: Tensor, input: Tensor, label: str = "", wire: str = "") -> Any:
        """Start to concatenate every rank's `input` in `output` [ranks, ...]; return a ticket."""

    def all_to_all(self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = "") -> Any:
        """Start to send each rank its rows of `input`; `output` gets theirs, in rank order; return a ticket."""

    def wait(self, ticket: Any) -> None:
        """Wait until the ticket's result may be used."""


class NullScheduler:
    """Scheduler without communication, for a group of one and for benchmarks of the compute alone.

    allocate_buffers: allocate the buffers of all collectives, also those of replicated gradients, to measure a step's
    memory. (With gloo, its threads hold tensors besides, sometimes longer than the step.)
    """

    def __init__(self, *, allocate_buffers: bool = False) -> None:
        self.allocate_buffers = allocate_buffers

    def all_reduce(self, tensor: Tensor, label: str = "", largest: bool = False, wire: str = "") -> None:
        """Leave `tensor` as it is."""

    def reduce_scatter(self, output: Tensor, input: Tensor, label: str = "", wire: str = "") -> None:
        """Copy one part in place of the sum."""
        output.copy_(input[0])

    def all_gather(self, output: Tensor, input: Tensor, label: str = "", wire: str = "") -> None:
        """Copy `input` in place of every rank's."""
        output.copy_(input.expand_as(output))

    def all_to_all(
        self, output: Tensor, input: Tensor, sent: list[int], received: list[int], label: str = ""
    ) -> None:
        """Copy rows of `input` in place of the other ranks', then zeros."""
        rows = min(len(output), len(input))
        output.zero_()[:rows].copy_(input[:rows])

    def wait(self, ticket: None) -> None:
        """Return at once."""


class PendingCollective(NamedTuple):
    """Started collective: its ticket, and the function that returns its result after the wait."""

    ticket: Any
    result: Callable[[], Tensor]


class Wire:
    """Collectives of one call of a stack. The sequence is dimension 1, in `size` parts.

    wire_dtype: type in which floating-point tensors are sent, see `wire_type`; None for their own.
    """

    def __init__(self, scheduler: Scheduler, size: int, wire_dtype: WireType | None) -> None:
        self.scheduler, self.dtype = scheduler, wire_dtype
        self._size = size
        self._dtype = None if isinstance(wire_dtype, str) else wire_dtype
        self._wire: dict[str, Any] = {"wire": wire_dtype} if isinstance(wire_dtype, str) else {}

    def wait(self, flight: PendingCollective) -> Tensor:
        """Wait for a collective; return its result in the original type."""
        self.scheduler.wait(flight.ticket)
        return flight.result()

    def all_reduce(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start to sum a tensor over the ranks, in place where possible."""
        whole = tensor.contiguous()
        if self._dtype is None or self._dtype == whole.dtype or whole.is_complex():
            sent = torch.view_as_real(whole) if whole.is_complex() else whole  # which every backend sums
            return PendingCollective(self.scheduler.all_reduce(sent, label, **self._wire), lambda: whole)
        sent = whole.to(self._dtype)
        return PendingCollective(self.scheduler.all_reduce(sent, label), lambda: whole.copy_(sent))

    def reduce_scatter(self, tensor: Tensor, label: str) -> PendingCollective:
        """Start to sum a tensor over the ranks; each gets its part of the sequence."""
        parts = tensor.unflatten(1, (self._size, -1)).movedim(1, 0)
        sent = parts.to(self._dtype or tensor.dtype).contiguous()
        mine = torch.empty_like(sent[0])
        ticket = self.scheduler.reduce_scatter(mine, sent, label, **self._wire)
        return PendingCollective(ticket, lambda: mine.to(tensor.dtype))

    def all_gather(self, part: Tensor, label: str) -> PendingCollective:
        """Start to concatenate the ranks' parts of a sequence."""
        sent = part.to(self._dtype or part.dtype).contiguous()
        parts = sent.new_empty((self._size, *sent.shape))
        ticket = self.scheduler.all_gather(parts, sent, label, **self._wire)
        return PendingCollective(ticket, lambda: parts.movedim(0, 1).flatten(1, 2).to(part.dtype))


def wire_type(given: WireType | None) -> WireType | None:
    """A wire_dtype as it is used: a floating-point torch.dtype, "int8", or None.

    Raises ValueError for anything else.
    """
    if isinstance(given, str) and given in _DTYPES:
        return _DTYPES[given]
    if given is None or (isinstance(given, torch.dtype) and given.is_floating_point):
        return given
    names = ", ".join(map(repr, _DTYPES))
    return quantised_type("wire_dtype", given, f"a floating-point type such as torch.bfloat16, {names}, ")


def quantised_type(option: str, given: object, also: str = "") -> str:
    """The dtype of quantised numbers. UsageError, with what an option takes besides, for anything else."""
    if given == QUANTISED:
        return QUANTISED
    raise UsageError(f"{option} must be {also}{QUANTISED!r} or None, got {given!r:.80}")


WIRE_DTYPES: dict[str, WireType | None] = {"none": None} | {name: wire_type(name) for name in WIRE_BYTES}
"""Communication dtypes by the names that options take."""


def add_wire(group: ProcessGroup) -> str:
    """Let the group's scheduler send quantised numbers; return the c10d name of the group that does it.

    Collective over the group the first time. Raises UsageError for a group of whose backends none can be made again.
    """
    scheduler = scheduler_of(group)
    monitor = monitor_of(group)
    if monitor is not None:
        monitor.calls_of(group)  # first: the scheduler of a new group is renewed, without its wires
    if scheduler.has_wire(QUANTISED) and _exists(scheduler.wire_group(QUANTISED)):
        return cast(str, scheduler.wire_group(QUANTISED))
    carriers = _carriers_of(group)
    if not carriers:
        raise UsageError(
            f"wire_dtype {QUANTISED!r} needs a group with a backend of which another can be made, such as gloo, "
            f"staged or nccl, got {dist.get_backend_config(group)}; leave it out, or make the group with one"
        )
    name = f"oases_{QUANTISED}_over_{'_'.join(backend for backend, _ in carriers.values())}"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, partial(_quantised, carriers), devices=list(carriers))
    with _named(group):
        made = dist.new_group(
            dist.get_process_group_ranks(group), _timeout_of(group), name, use_local_synchronization=True
        )
    scheduler.add_wire(QUANTISED, made.group_name)
    return cast(str, scheduler.wire_group(QUANTISED))


@contextmanager
def _named(group: ProcessGroup) -> Iterator[None]:
    """Context in which torch gives the group of a wire a name that none had.

    torch names it by its ranks and the number of groups there are, so that it has the name of an older group where
    another one was destroyed meanwhile. The store counts the wires of each name: all ranks add one for each.
    """
    key = f"oases wire {QUANTISED} over {group.group_name}"
    count = dist.distributed_c10d._get_default_store().add(key, 1)
    unique = hashlib.sha1(f"{key} {(count - 1) // group.size()}".encode(), usedforsecurity=False).hexdigest()
    names: Any = dist.distributed_c10d
    by_ranks, names._hash_ranks_to_str = names._hash_ranks_to_str, lambda ranks: unique
    try:
        yield
    finally:
        names._hash_ranks_to_str = by_ranks


def carries_codes(group: ProcessGroup) -> bool:
    """Whether `add_wire` can let this group send quantised numbers of CPU tensors."""
    return "cpu" in _carriers_of(group)


_Carriers = dict[str, tuple[str, Callable[..., Any]]]
"""By type of device: name of a backend, and what makes another one of its kind."""


def _carriers_of(group: ProcessGroup) -> _Carriers:
    """The group's backends of which another can be made, the CPU's first."""
    # A group has one for each type of device: "cpu:gloo,cuda:nccl". Its own name is "undefined" where none was given.
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    created = {device: (name, _created_by(name)) for device, name in backends.items()}
    found = {device: (name, create) for device, (name, create) in created.items() if create is not None}
    first = [device for device in ("cpu",) if device in found]
    # gloo says that it carries tensors of some accelerators, by copies.
    others = [
        device for device, (name, _) in found.items()
        if device != "cpu" and name != "gloo" and torch.get_device_module(device).is_available()
    ]  # fmt: skip
    return {device: found[device] for device in first + others[:1]}


def _quantised(carriers: _Carriers, store: dist.Store, *arguments: Any) -> Any:
    """Backend over one of each kind; arguments: rank, size and timeout."""
    made = {device: create(dist.PrefixStore(device, store), *arguments) for device, (_, create) in carriers.items()}
    return QuantizedBackend(made.pop("cpu", None), next(iter(made.values()), None))


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    """Timeout of the group's collectives, on the CPU if it has such; None for a backend that does not say it."""
    device = next(iter(_carriers_of(group)))
    backend: Any = group._get_backend(torch.device(device))
    try:
        options = getattr(backend, "options", None)
    except RuntimeError:  # of torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL, around a backend without options
        options = None
    return getattr(backend, "timeout", None) if options is None else options._timeout


def _created_by(backend: str) -> Callable[..., Any] | None:
    if backend == "gloo":
        return dist.ProcessGroupGloo
    if backend == "nccl":
        return _nccl
    plugin = dist.Backend._plugins.get(backend.upper())
    return None if plugin is None or plugin.extended_api else plugin.creator_fn


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = nccl_options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _exists(name: str) -> bool:
    """Whether a wire's group exists: the name of a destroyed group may be another one's now, with its scheduler."""
    try:
        group_of(name)
    except RuntimeError:
        return False
    return True
