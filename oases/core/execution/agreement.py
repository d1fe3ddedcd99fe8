"""Agreement of a group's ranks on what they are about to run, before the collectives of a call start.

Collectives of unequal sizes or numbers end in an abort of the process, a wrong sum or the group's timeout. So before
a call whose form (shapes, types, modes, schedule) differs from the caller's previous one, a rank writes the form to
the group's store and waits for those of the others. A rank whose form did not change waits for nobody: if it is in a
collective already, its failure monitor, which polls the store, answers with the form that it runs. Calls of an
unchanged form cost a comparison.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Form = tuple[Any, ...]
"""Hashable description of a call: alternating names and values, for messages."""
Samples = list[str | list[list[float]]]
"""Hash of the integers of each tensor, or sums over segments and how much each may differ."""

_SEGMENTS = 64
"""Segments of a tensor, both of neighbouring numbers and of every 64th."""
_ABSENT = "not given"
_PATIENT_SECONDS = 0.02
"""Pause between looks at the store, at most."""
_TOLERANCE = 0.05
"""Largest difference of a sum, relative to the spread of its segment, that ranks may have from rounding."""
_LARGE = 1e12
_ROUNDING = 2.0**-10
"""The same, relative to the segment's size: numbers of 32 bits may come from matmuls of fewer."""


def samples_of(tensors: Iterable[Tensor]) -> Samples:
    """Digest of each tensor, for ranks to compare: a hash of integers, weighted sums of other numbers.

    Another number changes two sums: that of its neighbours, and that of every 64th number, in most tensors of one
    channel. A large channel or outlier therefore hides its own segments alone.
    """
    return [_sample(tensor.detach()) for tensor in tensors if not tensor.is_meta]


@torch.no_grad()
def _sample(tensor: Tensor) -> str | list[list[float]]:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    if not flat.is_floating_point():
        return hashlib.blake2b(
            flat.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
        ).hexdigest()
    rounding = max(_ROUNDING, torch.finfo(flat.dtype).eps)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    flat = torch.nan_to_num(flat, 0.0, _LARGE, -_LARGE).clamp(-_LARGE, _LARGE)  # of masks, whose squares overflow
    segments = min(_SEGMENTS, len(flat) // 4)
    length = len(flat) // segments if segments else 0
    head, tail = flat[: segments * length], flat[segments * length :]
    views = [head.view(segments, length), head.view(length, segments).t(), tail.view(1, -1)]
    found = [_sums(rows, rounding) for rows in views if rows.numel()]
    return torch.cat(found, 1).double().tolist() if found else [[], []]


def _sums(rows: Tensor, rounding: float) -> Tensor:
    """[segments, numbers] -> [2, segments]: a weighted sum of each segment, and how much it may differ."""
    # Other weights for each number, so that exchanged numbers change the sum.
    count = rows.shape[1]
    weights = torch.arange(1, count + 1, device=rows.device, dtype=torch.float32).square().sin().to(rows.dtype)
    norm = torch.linalg.vector_norm(rows, dim=1)
    spread = (norm.square() - count * rows.mean(1).square()).clamp_min(0).sqrt()
    return torch.stack((rows @ weights, _TOLERANCE * spread + rounding * norm))


def is_sampled(call: int) -> bool:
    """Whether the ranks compare samples of their inputs at this call, counted from 1: at the powers of two."""
    return call & (call - 1) == 0


class Disagreement(NamedTuple):
    """First difference between the ranks' calls. stuck: whether a rank is in a collective of its call already."""

    text: str
    stuck: bool


class _Call(NamedTuple):
    """Call that the main thread runs. asks: whether it writes its form to the store itself."""

    number: int
    form: Form
    asks: bool


class CallAgreement:
    """Calls of one group on this rank, counted, and their forms. Collective, except for calls of unchanged forms.

    store: of the group, which other threads may use. ranks: of the group that exist.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._others = [each for each in ranks if each != rank]
        self._known: dict[Hashable, Form] = {}
        self._call = _Call(0, (), False)
        self._answered = 0
        self._lock = threading.Lock()

    def begin(
        self, caller: Hashable, form: Form, samples: Samples | None, check: Callable[[], None]
    ) -> Disagreement | None:
        """Begin a call; return how the ranks differ.

        caller: its key, equal in each of its calls whose forms are to be equal. samples: of the input, where the
        ranks compare them. check: raises, while this rank waits for others, a failure of one of them.
        DistBackendError for a rank that does not come within the store's timeout.
        """
        if not self._others:
            return None
        number = self._call.number + 1
        asks = samples is not None or self._known.get(caller) != form
        with self._lock:
            self._call = _Call(number, form, asks)
        if not asks:
            return None
        self._known[caller] = form
        mine = self._text(self._call, samples)
        self._store.set(self._key(number, self._rank), mine)
        self._store.set(f"{self._prefix}/asked", str(number))
        said = {self._rank: json.loads(mine)}
        found = _difference(said | self._wait_for_others(number, check))
        if found is not None:
            del self._known[caller]
        return found

    def answer(self) -> None:
        """Tell ranks that ask about the current call its form. Called by the monitor's thread, now and then."""
        key = f"{self._prefix}/asked"
        if not self._others or not self._store.check([key]):
            return
        number = int(self._store.get(key))
        with self._lock:
            call = self._call
            if call.number >= number and not call.asks and self._answered != number:
                self._answered = number
                self._store.set(self._key(number, self._rank), self._text(call, None))

    def _key(self, number: int, rank: int) -> str:
        """Key of what a rank says of a call. Two in turns, because after a disagreement, which has no collectives, a
        rank may be in its next call before another has read this one's.
        """
        return f"{self._prefix}/{rank}/{number % 2}"

    @staticmethod
    def _text(call: _Call, samples: Samples | None) -> str:
        form = [str(part) for part in call.form]
        return json.dumps({"number": call.number, "form": form, "stuck": not call.asks, "samples": samples})

    def _wait_for_others(self, number: int, check: Callable[[], None]) -> dict[int, dict[str, Any]]:
        """Collect the answers of the others, by rank; {} for one that has gone on from it, and so agreed."""
        found: dict[int, dict[str, Any]] = {}
        store: Any = self._store
        end = time.monotonic() + store.timeout.total_seconds()
        pause = 1e-4
        while True:
            for rank in self._others:
                key = self._key(number, rank)
                if rank not in found and self._store.check([key]):
                    said = json.loads(self._store.get(key))
                    if said["number"] >= number:
                        found[rank] = said if said["number"] == number or said["stuck"] else {}
            if len(found) == len(self._others):
                return found
            check()
            if time.monotonic() > end:
                gone = ", ".join(str(rank) for rank in self._others if rank not in found)
                raise dist.DistBackendError(
                    f"rank {self._rank} waited for rank {gone} to make the same call; see why it does not "
                    "come to it, or give init_process_group a longer timeout"
                )
            time.sleep(pause)
            pause = min(_PATIENT_SECONDS, 2 * pause)


def _difference(said: Mapping[int, dict[str, Any]]) -> Disagreement | None:
    """First difference from the lowest rank; equal on all ranks that said something."""
    stuck = any(each.get("stuck") for each in said.values())
    first, *others = sorted(rank for rank in said if said[rank])
    mine = said[first]
    for rank in others:
        theirs = said[rank]
        ours, its = (dict(zip(each["form"][::2], each["form"][1::2], strict=True)) for each in (mine, theirs))
        for name in ours | its:
            value, other = ours.get(name, _ABSENT), its.get(name, _ABSENT)
            if other != value:
                return Disagreement(
                    f"the {name} differs between ranks of one group: {value} on rank {first}, "
                    f"{other} on rank {rank}; make the same calls on all of them",
                    stuck,
                )
        if mine["samples"] and theirs["samples"] and not alike(mine["samples"], theirs["samples"]):
            return Disagreement(
                f"ranks {first} and {rank} were given different inputs, of which each computes a part of one result; "
                "give all ranks of a tensor-parallel group the same batch, and vary batches over data-parallel "
                "replicas alone",
                stuck,
            )
    return None


def alike(one: Samples, other: Samples) -> bool:
    """Whether samples of the same tensors are equal up to rounding."""
    if len(one) != len(other):
        return False
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, str) or isinstance(theirs, str) or len(mine[0]) != len(theirs[0]):
            if mine != theirs:
                return False
            continue
        pairs = zip(*mine, *theirs, strict=True)
        if any(abs(a - b) > max(allowed, its) for a, allowed, b, its in pairs):
            return False
    return True
