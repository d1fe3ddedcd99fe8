"""Exchange of one gradient in one step: encoding, collectives and decoding, as a generator that can be paused."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oases.kernels.sparse import bitmap_unpack
from oases_sparse.costs import Costs, Task
from oases_sparse.gradient import Form, Rows
from oases_sparse.sketch import Sketch
from oases_sparse.wire import Reduction, Wire, or_of

MODES = ("auto", "dense", "packed", "gather", "sketch")
GATHERED_RANKS = 8
"""Maximum ranks for which auto gathers all bitmaps, not their union alone, to know the cost of a gather."""
LEAST_CELLS = 0.25
"""Default cells per non-zero."""
NOT_SPARSE = "more than half of the rows are not zero"
NO_MATRIX = "not a matrix"
ALIGNED = 16
"""Alignment in bytes of rows after a bitmap."""

Steps = Generator[None, None, Tensor]
"""Pauses twice: after the send of the bitmap, and of the values. Returns the mean."""


@dataclass(frozen=True)
class ReducerSettings:
    """Arguments of a reducer; see `S2Reducer`."""

    mode: str
    rows: int
    cells_per_nonzero: float | None
    error_feedback: bool
    seed: int


@dataclass
class TensorState:
    """State of one tensor between steps.

    union, largest: rows of any rank in the last step, and the maximum of one rank where all are known. residual: part
    not sent yet, float32 [rows, width]. check_again, pause: steps until the tensor is scanned for zero rows again,
    and the previous such interval. form, device: of the gradients, once the ranks have agreed on the form.
    """

    name: str
    number: int
    steps: int = 0
    union: int | None = None
    largest: int = 0
    residual: Tensor | None = None
    check_again: int = 0
    pause: int = 0
    form: Form | None = None
    device: torch.device | str = "cpu"

    def seed(self, base: int) -> int:
        """Seed for this step and tensor, equal on all ranks."""
        return (base * 1_000_003 + self.number * 7_368_787 + self.steps * 2_654_435_761) & (2**62 - 1)

    def rest(self) -> None:
        """Double the interval until the next scan."""
        self.pause = min(64, max(1, 2 * self.pause))
        self.check_again = self.pause


class Exchange:
    """Exchange of one gradient. if_sparse: send it dense where more than half of the rows are used."""

    def __init__(
        self, wire: Wire, settings: ReducerSettings, costs: Costs | None, rows: Rows, memory: TensorState, *,
        if_sparse: bool = False,
    ) -> None:  # fmt: skip
        self.wire, self.settings, self.rows, self.memory = wire, settings, rows, memory
        self._costs, self._if_sparse = costs, if_sparse
        self._item = torch.empty(0, dtype=rows.dtype).element_size()
        dense = wire.reduced_bytes(rows.rows * rows.width * self._item)
        self.found = Reduction(memory.name, settings.mode, rows.rows, dense_bytes=dense)
        self._start = time.perf_counter()
        self._supports: list[Tensor] = []  # rows of each rank, where known
        self._early: Tensor | None = None  # the first rows of each rank, where they came with the bitmaps
        memory.steps += 1
        self._seed = memory.seed(settings.seed)

    @property
    def _early_rows(self) -> int:
        return 0 if self._early is None else self._early.shape[1]

    def _predicted(self, mode: str, task: Task, sketch_cells: int = 0) -> float:
        if self._costs is None:
            raise AssertionError("auto measures its costs before it chooses")
        return self._costs.seconds(mode, task, self.wire, sketch_cells)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.found.encode_seconds += time.perf_counter() - start

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.found.decode_seconds += time.perf_counter() - start

    def steps(self) -> Steps:
        """The generator; every rank must advance it at the same points among its collectives."""
        mean = yield from self._by_mode()
        self.found.seconds = time.perf_counter() - self._start
        return mean

    def _by_mode(self) -> Steps:
        settings, memory, found = self.settings, self.memory, self.found
        if self.wire.world == 1:
            found.mode = "dense"
            yield
            yield
            return self.rows.put_dense(self.rows.dense())
        if settings.mode == "dense" or len(self.rows.shape) < 2:
            found.fallback = "" if settings.mode in ("dense", "auto") else NO_MATRIX
            yield
            return (yield from self._dense())
        if self.rows.rows * self.rows.width == 0:
            yield
            yield
            return self.rows.put_dense(self.rows.dense())
        with self._encoding():
            every = settings.mode == "gather" or (settings.mode == "auto" and self.wire.world <= GATHERED_RANKS)
            early = self._ahead()
            if early:
                uniting = self.wire.gather(self._beside_bits(memory.largest), found)
            else:
                uniting = (self.wire.gather if every else self.wire.unite)(self.rows.bits(), found)
        yield
        bits = uniting.wait()
        with self._encoding():
            if early:
                bits, self._early = self._apart(bits)
            if every:
                self._supports = [bitmap_unpack(one, self.rows.rows) for one in bits]
                bits = or_of(bits)
                memory.largest = max(len(support) for support in self._supports)
            union = bitmap_unpack(bits, self.rows.rows)
        count = found.union = memory.union = union.shape[0]
        found.phases = 1
        if count == 0:
            found.mode = "packed" if settings.mode == "auto" else settings.mode
            yield
            return self.rows.put(union, torch.empty(0, self.rows.width, dtype=self.rows.dtype, device=union.device))
        return (yield from self._after_union(union))

    def _after_union(self, union: Tensor) -> Steps:
        """Second phase of every mode."""
        found, count = self.found, union.shape[0]
        mode, found.fallback = self._choose(count)
        found.mode, found.phases = mode, 2
        if mode == "dense":
            return (yield from self._dense())
        if mode == "sketch":
            return (yield from self._sketch(union))
        if mode == "gather":
            return (yield from self._gather(union))
        return (yield from self._packed(union))

    def _sized(self, count: int) -> Sketch:
        cells = self.settings.cells_per_nonzero
        return Sketch.sized(count, self.settings.rows, LEAST_CELLS if cells is None else cells, self._seed)

    def _choose(self, count: int) -> tuple[str, str]:
        """Mode for so many rows, and the reason if it is not the requested one."""
        settings, rows = self.settings, self.rows.rows
        if self._if_sparse and 2 * count > rows:
            self.memory.rest()
            return "dense", "" if settings.mode == "auto" else NOT_SPARSE
        self.memory.pause = 0
        if settings.mode == "auto":
            left = max(0, self.memory.largest - self._early_rows)
            lossless = ("dense", "packed", "gather") if self._supports else ("dense", "packed")
            return self._cheapest(lossless, left), ""
        if settings.mode == "sketch":
            cells = self._sized(count).cells
            if cells >= rows:
                return "dense", "the table would be no smaller than the dense gradient"
            asked = settings.cells_per_nonzero
            if cells >= count and (asked is None or asked < 1):
                return "packed", "the table would be no smaller than the packed rows"
        return settings.mode, ""

    def _cheapest(self, lossless: tuple[str, ...], largest: int, early: int = 0) -> str:
        """Cheapest of these modes, and of sketch if its loss is allowed, for the last union: equal on all ranks."""
        rows, count = self.rows, self.memory.union or 0
        task = Task(rows.rows, rows.width, rows.width * self._item, count, largest, early)
        options = {mode: self._predicted(mode, task) for mode in lossless}
        sketch = self._sized(count)
        if self.settings.cells_per_nonzero is not None and sketch.cells < count:
            options["sketch"] = self._predicted("sketch", task, sketch.cells)
        return min(options, key=lambda mode: options[mode])

    def _ahead(self) -> bool:
        """Whether to send a gather's rows with the bitmap, as many as the fullest rank had in the last step."""
        memory, mode = self.memory, self.settings.mode
        if mode not in ("gather", "auto") or not memory.union or not memory.largest:
            return False
        if self._if_sparse and 2 * memory.union > self.rows.rows:
            return False
        return mode == "gather" or (
            self._cheapest(("dense", "packed", "gather"), memory.largest, memory.largest) == "gather"
        )

    def _beside_bits(self, early: int) -> Tensor:
        """Bitmap and first rows of this rank, zero-padded, as bytes."""
        bits, (_, values) = self.rows.bits(), self.rows.own()
        head = -(-bits.shape[0] // ALIGNED) * ALIGNED
        message = bits.new_zeros(head + early * self.rows.width * self._item)
        message[: bits.shape[0]] = bits
        first = values[:early]
        self._before(message[head:].view(self.rows.dtype).view(early, self.rows.width)[: len(first)].copy_(first))
        return message

    def _apart(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Bitmaps of the ranks, uint8 [world, bytes], and their first rows, [world, early, width]."""
        size = (self.rows.rows + 7) // 8
        values = messages[:, -(-size // ALIGNED) * ALIGNED :].view(self.rows.dtype)
        return messages[:, :size], values.unflatten(1, (-1, self.rows.width))

    def _dense(self) -> Steps:
        self.found.mode = "dense"
        self.found.phases += self.found.phases == 0
        with self._encoding():
            whole = self._before(self.rows.dense())
        sending = self.wire.sum(whole, self.found)
        yield
        sending.wait()
        with self._decoding():
            return self.rows.put_dense(self._after(whole))

    def _packed(self, union: Tensor) -> Steps:
        residual = self.memory.residual
        with self._encoding():
            values = self.rows.gather(union)
            if residual is not None:  # from steps that sent a sketch
                values += residual.index_select(0, union).to(values.dtype)
                residual.index_fill_(0, union, 0)
            sending = self.wire.sum(self._before(values), self.found)
        yield
        sending.wait()
        with self._decoding():
            return self.rows.put(union, self._after(values))

    def _gather(self, union: Tensor) -> Steps:
        """Gather every rank's rows; the bitmaps give their numbers; summed in rank order.

        Rows that came with the bitmaps are not sent again: often none is left, and no second phase.
        """
        early = self._early_rows
        rest, sending = self.memory.largest - early, None
        with self._encoding():
            _, values = self.rows.own()
            if rest > 0:
                padded = values.new_zeros(rest, self.rows.width)
                left = values[early:]
                padded[: len(left)] = left
                sending = self.wire.gather(self._before(padded), self.found)
        self.found.phases = 1 + (rest > 0)
        yield
        late = None if sending is None else sending.wait()
        with self._decoding():
            total = values.new_zeros(len(union), self.rows.width)
            for rank, support in enumerate(self._supports):
                places = torch.searchsorted(union, support)
                if self._early is not None:
                    total.index_add_(0, places[:early], self._early[rank, : len(support)])
                if late is not None and len(support) > early:
                    total.index_add_(0, places[early:], late[rank, : len(support) - early])
            return self.rows.put(union, self._after(total))

    def _sketch(self, union: Tensor) -> Steps:
        sketch, memory = self._sized(union.shape[0]), self.memory
        with self._encoding():
            values = self.rows.gather(union).float()
            if self.settings.error_feedback and memory.residual is None:
                memory.residual = torch.zeros(self.rows.rows, self.rows.width, device=values.device)
            if memory.residual is not None:
                values += memory.residual.index_select(0, union)
            table = sketch.encode(union, values)
            own = table.clone() if memory.residual is not None and sketch.rows == 1 else table
        sending = self.wire.sum(table, self.found)
        yield
        sending.wait()
        if not bool(table.isfinite().all()):
            return self._packed_instead(union, "NaN or infinity")
        with self._decoding():
            if memory.residual is None:
                mean = sketch.decode(table, union) / self.wire.world
            else:
                estimate = sketch.contract(table, own, union)
                mean = estimate.values / self.wire.world
                memory.residual.index_copy_(0, union, values - (mean if estimate.own is None else estimate.own))
            return self.rows.put(union, mean.to(self.rows.dtype))

    def _packed_instead(self, union: Tensor, reason: str) -> Tensor:
        """Fall back to packed; all ranks have read the same sums, so all do."""
        self.found.mode, self.found.fallback = "packed", reason
        self.found.phases += 1
        values = self._before(self.rows.gather(union))
        self.wire.sum(values, self.found).wait()
        with self._decoding():
            return self.rows.put(union, self._after(values))

    # 16-bit floats may overflow in a sum and are divided before it, as in DDP; others after it.
    def _before(self, values: Tensor) -> Tensor:
        return values.div_(self.wire.world) if self._item < 4 else values

    def _after(self, values: Tensor) -> Tensor:
        return values if self._item < 4 else values.div_(self.wire.world)
