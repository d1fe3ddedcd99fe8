"""Point-to-point messages between pipeline stages: activations to the next stage, gradients to the previous one.

Every pair of neighbours has a lane for each of the two, a process group of its own, so no message queues behind one
of another kind or another neighbour. Receives are posted in advance, and a send is never waited for before the
receiver has confirmed it by a later message. What is sent is replicated over the tensor-parallel ranks of a stage, so
each sends its part to its peer, and the receiving stage gathers the parts where its own links are faster.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from oases.core.execution.communication import quantised_type
from oases.core.execution.failure import begin_call
from oases.core.execution.group import ProcessGroup, group_name, group_of, scheduler_of
from oases.core.schedule import Op, Schedule, validate
from oases.core.schedule.ops import crossing
from oases.distributed.clock import Clock
from oases.distributed.mesh import Mesh
from oases.distributed.message_layout import QUANTISABLE, Form, Layout, form_text
from oases.errors import UsageError
from oases.reporting import Row

AHEAD = 2
"""Receives posted per lane on the CPU: one in flight while the previous one is read. On an accelerator one, because a
posted receive occupies a part of the device until its message has come.
"""
_LANE_CTAS = 1
"""Multiprocessors of an NCCL lane, for the same reason."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 96
"""Numbers of the header of a lane's first message: number of tensors, and of each its type, dimensions and sizes."""

_in_use: WeakSet[StageMessages] = WeakSet()


def waiting_for() -> str:
    """The message that this process is waiting for, or ""; for error reports."""
    return next((text for messages in list(_in_use) if (text := messages.waiting_for)), "")


def refuse_backend(kind: str, config: str) -> None:
    """Raise UsageError where messages of an accelerator could not be sent, or could stop a run for ever.

    config: backend by type of device, such as "cpu:gloo,cuda:nccl".
    """
    if f"{kind}:gloo" in config:
        raise UsageError(
            f"gloo sends no tensors of {kind} between pipeline stages; initialise the group with nccl, or with "
            f"cpu:gloo,{kind}:staged"
        )
    if "cuda:nccl" in config and os.environ.get("CUDA_MODULE_LOADING", "") != "EAGER":
        raise UsageError(
            "pipeline stages over NCCL need CUDA_MODULE_LOADING=EAGER in the environment before CUDA starts: loading "
            "a kernel at its first use waits for the receives that are posted, which wait for what is queued after it"
        )


def sends_confirmed_by(pipeline: Schedule, stage: int) -> dict[Op, list[Op]]:
    """For each receive of a stage, the stage's sends that the other side must have read before."""
    found: dict[Op, list[Op]] = {}
    for other in range(pipeline.num_stages):
        read: list[Op] = []
        for op in pipeline.stages[other]:
            if op.kind not in ("send", "receive") or pipeline.stage_of(crossing(op).block) != stage:
                continue
            if op.kind == "receive":
                read.append(crossing(op))
            else:
                found[crossing(op)], read = read, []
    return found


@dataclass
class _Lane:
    """Messages of one kind from one stage to another, in the same order on both sides."""

    source: int
    target: int
    of: str
    degree: int
    name: str = ""
    layout: Layout | None = None
    upcoming: deque[Op] = field(default_factory=deque)
    posted: deque[tuple[Op, Tensor, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        what = "activations" if self.of == "F" else "gradients"
        self.row = Row(f"{what}, stage {self.source} to {self.target}")


class StageMessages:
    """Messages of one rank of a pipeline. Collective: all ranks of the run create it together.

    mesh: of the rank's stage. degrees: tensor-parallel degree at each border between two parts of the model, in
    order. device: of the tensors. split: whether each tensor-parallel rank sends its part alone; otherwise each sends
    the full tensor. None: where the parts are joined inside a node (`Mesh.on_one_node`). wire: "int8" for
    quantised activations and gradients; "" for their own type. All messages of a lane have
    the shape and type of its first, which is announced in a header, until `renew`.
    Raises ScheduleError for an invalid pipeline, ValueError for degrees that do not fit it, UsageError for an unknown
    wire and, on all ranks, for one that differs between them.
    """

    def __init__(
        self,
        pipeline: Schedule,
        mesh: Mesh,
        degrees: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        split: bool | None = None,
        wire: str = "",
    ) -> None:
        if wire:
            quantised_type("pipeline_wire", wire)
        if mesh.num_stages != pipeline.num_stages or len(degrees) != pipeline.num_stages * pipeline.chunks - 1:
            raise ValueError(
                f"a pipeline of {pipeline.num_stages} stages with {pipeline.chunks} parts each was given a mesh of "
                f"{mesh.num_stages} stages and {len(degrees)} degrees; give those of its plan"
            )
        validate(pipeline, "stage")
        self._mesh, self._wire = mesh, wire
        self._device = torch.device(device)
        if self._device.type != "cpu" and mesh.run is not None:
            refuse_backend(self._device.type, dist.get_backend_config(mesh.run))
        self._agree()
        self._split = {each: mesh.on_one_node(each) if split is None else split for each in set(degrees)}
        self._on_host = ""
        self._awaited: deque[tuple[Op, Any]] = deque()  # by the stream of an accelerator
        _in_use.add(self)
        self._clock = Clock(self._device)
        self._waits: list[tuple[Row, Any, Any]] = []  # rows and marks that are not in them yet
        self._stage_of = pipeline.stage_of
        self._known = sends_confirmed_by(pipeline, mesh.stage)
        self._sent: dict[Op, tuple[Any, Tensor]] = {}
        self._headers: list[tuple[Any, Tensor, Op]] = []
        self._lanes: dict[tuple[int, int, str], _Lane] = {}
        for border, degree in enumerate(degrees):
            here, there = self._stage_of(border), self._stage_of(border + 1)
            if here == there:
                continue
            for source, target, of in ((here, there, "F"), (there, here, "B")):
                known = self._lanes.setdefault((source, target, of), _Lane(source, target, of, degree))
                if known.degree != degree:
                    raise ValueError(
                        f"stages {source} and {target} meet with tp {known.degree} and with tp {degree}; give all "
                        "their borders the same"
                    )
        for lane in self._lanes.values():
            self._join(lane)
        mesh.meet()

    @property
    def waiting_for(self) -> str:
        """The message that this rank is waiting for, or "": its host's, or the first that its stream has not got."""
        pending = next((op for op, work in list(self._awaited) if not work.is_completed()), None)
        return self._on_host or ("" if pending is None else self._named(pending))

    @property
    def rows(self) -> list[Row]:
        """Statistics of this rank's messages, a row per lane. Arrival times are unknown, only waits."""
        self._settle()
        return [lane.row for lane in self._lanes.values() if lane.row.collectives]

    @property
    def waited_seconds(self) -> float:
        """Seconds this rank has waited for messages, including sends at the end of lists."""
        self._settle()
        return sum(lane.row.blocked_seconds for lane in self._lanes.values())

    def renew(self) -> None:
        """Announce shapes again, between lists of ops, for a batch of another shape. All stages call it alike."""
        for lane in self._lanes.values():
            lane.layout = None

    def begin(self, ops: Iterable[Op]) -> None:
        """Post the first receives of each lane, before a list of ops runs."""
        for lane in self._lanes.values():
            lane.upcoming.clear()
        for op in ops:
            if op.kind == "receive":
                self._lane(op).upcoming.append(op)
        for lane in self._lanes.values():
            self._post(lane)

    def send(self, op: Op, tensors: Sequence[Tensor]) -> None:
        """Start to send the result of `op`, which may then be freed. ValueError for other shapes than the lane's."""
        lane, tensors = self._lane(op), [tensor.detach() for tensor in tensors]
        form = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if lane.layout is None and lane.of == "F":
            self._require_types(op, form)
            lane.layout = self._layout(lane, form)
            self._announce(lane, op)
        layout = lane.layout
        if layout is None or layout.form != form:
            raise ValueError(
                f"{self._named(op)}: a message of {form_text(form)} on a lane of "
                f"{form_text(() if layout is None else layout.form)}; give all micro-batches one shape"
            )
        part = layout.pack(tensors)
        if layout.parts > 1:
            size, _ = layout.part
            part = part.narrow(0, self._mesh.rank % lane.degree * size, size)
            part = part.clone()  # so that the rest can be freed
        self._sent[op] = self._started(lane, op, part), part
        if lane.of == "F":
            back = self._lanes[lane.target, lane.source, "B"]
            if back.layout is None:
                back.layout = layout  # a gradient has the shape of its tensor
                self._post(back)  # after the send: the first receive may hold the host until its message is sent
        self._count(lane, layout)

    def receive(self, op: Op) -> list[Tensor]:
        """Wait for the message of `op`; return its full tensors in new memory."""
        lane = self._lane(op)
        start = self._clock.mark()
        if lane.layout is None:
            lane.layout = self._layout(lane, self._announced(lane, op))
            self._lanes[lane.target, lane.source, "B"].layout = lane.layout
        layout = lane.layout
        self._post(lane)
        posted, part, work = lane.posted.popleft()
        assert posted == op, f"{op} was asked for, {posted} comes first"
        self._wait(work, op)
        self._post(lane)
        for sent in self._known[op]:
            self._finish(sent)
        self._waits.append((lane.row, start, self._clock.mark()))
        self._count(lane, layout)
        whole = part
        if layout.parts > 1:
            group = self._mesh.tensor(lane.degree)
            assert group is not None, "a degree above one has a group"
            whole = part.new_empty(layout.parts * part.numel())
            scheduler = scheduler_of(group)
            scheduler.wait(scheduler.all_gather(whole, part, f"{lane.row.where}, joined"))
        return layout.unpack(whole)

    def end(self) -> None:
        """Wait until all sends have completed, after the list."""
        for op in list(self._sent):
            start = self._clock.mark()
            self._finish(op)
            self._waits.append((self._lane(op).row, start, self._clock.mark()))
        for work, _, op in self._headers:
            self._wait(work, op)
        self._headers.clear()

    def _settle(self) -> None:
        """Add waits to their rows. On an accelerator they are measured between marks in its stream."""
        for row, start, end in self._waits:
            row.blocked_seconds += self._clock.seconds(start, end)
        self._waits.clear()

    def close(self) -> None:
        """Close the lanes; a neighbour that waits on one gets an error."""
        self._sent.clear()
        self._headers.clear()
        for lane in self._lanes.values():
            lane.posted.clear()
            lane.upcoming.clear()
            name, lane.name = lane.name, ""
            group = group_of(name)
            if group is not None:
                dist.destroy_process_group(group)

    def _lane(self, op: Op) -> _Lane:
        source, target = (op, crossing(op)) if op.kind == "send" else (crossing(op), op)
        assert op.of is not None
        return self._lanes[self._stage_of(source.block), self._stage_of(target.block), op.of]

    def _join(self, lane: _Lane) -> None:
        ranks = sorted(self._mesh.members_of(lane.source) + self._mesh.members_of(lane.target))
        group = dist.new_group(ranks, **self._mesh.group_options(_LANE_CTAS))
        if self._mesh.stage not in (lane.source, lane.target):
            return
        lane.name = group_name(group)
        # NCCL connects two ranks at their first message, which holds the host of each until the other comes: here,
        # where all ranks come in one order.
        first = torch.zeros(1, device=self._device)
        if self._mesh.stage == lane.source:
            dist.send(first, self._mesh.peer(lane.target), group)
        else:
            dist.recv(first, self._mesh.peer(lane.source), group)
        self._clock.synchronize()

    def _group(self, lane: _Lane) -> ProcessGroup:
        if not lane.name:
            raise RuntimeError(
                f"the pipeline's {lane.row.where} was closed after a failure; create new messages on all ranks"
            )
        group = group_of(lane.name)
        assert group is not None
        return group

    def _agree(self) -> None:
        """Compare the wire with that of all ranks of the run."""
        begin_call(self._mesh.run, "messages between pipeline stages", ("pipeline_wire", self._wire or None))

    def _layout(self, lane: _Lane, form: Form) -> Layout:
        return Layout(form, lane.degree if self._split[lane.degree] else 1, quantised=bool(self._wire))

    @staticmethod
    def _count(lane: _Lane, layout: Layout) -> None:
        """Add a message to the lane's row."""
        lane.row.collectives += 1
        lane.row.bytes += layout.part_bytes
        lane.row.saved_bytes += layout.saved_bytes

    def _post(self, lane: _Lane) -> None:
        """Post the next receives of a lane whose shape is known."""
        if lane.layout is None or lane.target != self._mesh.stage:
            return
        size, dtype = lane.layout.part
        while lane.upcoming and len(lane.posted) < (AHEAD if self._device.type == "cpu" else 1):
            op = lane.upcoming.popleft()
            part = torch.empty(size, dtype=dtype, device=self._device)
            lane.posted.append((op, part, dist.irecv(part, self._mesh.peer(lane.source), self._group(lane))))

    def _require_types(self, op: Op, form: Form) -> None:
        """Raise ValueError for a tensor that no message can carry, or that the wire cannot round."""
        for shape, dtype in form:
            if dtype not in _DTYPES:
                raise ValueError(f"{self._named(op)}: cannot send {tuple(shape)} {dtype}; use a floating-point type")
            if self._wire and dtype not in QUANTISABLE:
                raise ValueError(
                    f"{self._named(op)}: cannot send {tuple(shape)} {dtype} in {self._wire}, which takes float32, "
                    "bfloat16 and float16; convert the tensor, or leave out pipeline_wire"
                )

    def _announce(self, lane: _Lane, op: Op) -> None:
        assert lane.layout is not None
        form = lane.layout.form
        numbers = [len(form)]
        for shape, dtype in form:
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > _HEADER:
            raise ValueError(
                f"{self._named(op)}: cannot send {len(form)} tensors, whose shapes take {len(numbers)} numbers "
                f"of a header of {_HEADER}; divide the model where fewer values pass"
            )
        header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)))
        if self._device.type != "cpu":  # a copy from pageable memory would wait for the stream
            header = header.pin_memory().to(self._device, non_blocking=True)
        self._headers.append((self._started(lane, op, header), header, op))

    def _announced(self, lane: _Lane, op: Op) -> Form:
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
        self._wait(dist.irecv(header, self._mesh.peer(lane.source), self._group(lane)), op)
        numbers = iter(header.tolist())
        form = []
        for _ in range(next(numbers)):
            dtype = _DTYPES[next(numbers)]
            form.append((torch.Size([next(numbers) for _ in range(next(numbers))]), dtype))
        return tuple(form)

    def _started(self, lane: _Lane, op: Op, tensor: Tensor) -> Any:
        try:
            return dist.isend(tensor, self._mesh.peer(lane.target), self._group(lane))
        except RuntimeError as error:
            raise self._lost(op, error) from error

    def _finish(self, op: Op) -> None:
        if op in self._sent:
            self._wait(self._sent[op][0], op)
            del self._sent[op]

    def _wait(self, work: Any, op: Op) -> None:
        self._on_host = self._named(op)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(op, error) from error
        finally:
            self._on_host = ""
        if self._device.type != "cpu":
            self._awaited.append((op, work))
            while self._awaited and self._awaited[0][1].is_completed():
                self._awaited.popleft()

    def _lost(self, op: Op, error: RuntimeError) -> dist.DistBackendError:
        first = (str(error).strip().splitlines() or [""])[0]
        return dist.DistBackendError(f"{self._named(op)}: {first}")

    def _named(self, op: Op) -> str:
        where = "to" if op.kind == "send" else "from"
        other = self._stage_of(crossing(op).block)
        rank = self._mesh.peer(other)
        return f"{op} on stage {self._mesh.stage}, {where} stage {other} (rank {rank})"
