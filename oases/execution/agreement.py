"""Agreement of a group's ranks on what they are about to run, before the collectives of a call start.

Collectives of unequal sizes or numbers end in an abort of the process, a wrong sum or the group's timeout. So before
a call whose form (shapes, types, modes, schedule) differs from the caller's previous one, a rank writes the form to
the group's store and waits for those of the others. A rank whose form did not change waits for nobody: if it is in a
collective already, its failure monitor, which polls the store, answers with the form that it runs. Calls of an
unchanged form cost a comparison.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Form = tuple[Any, ...]
"""Hashable description of a call: alternating names and values, for messages."""
Samples = list[tuple[bool, list[float]]]
"""Sample of each tensor, with whether its numbers are exact (integers)."""

_SAMPLED = 64
"""Numbers per tensor."""
_PATIENT_SECONDS = 0.02
"""Pause between looks at the store, at most."""
_TOLERANCE = 0.05
"""Largest difference of a sampled number, relative to the largest one, that ranks may have from rounding."""


def samples_of(tensors: Iterable[Tensor]) -> Samples:
    """Numbers of each tensor, evenly over it, that ranks can compare."""
    found: Samples = []
    for tensor in tensors:
        flat = torch.empty(0) if tensor.is_meta else tensor.detach().reshape(-1)
        flat = flat[:: max(1, -(-len(flat) // _SAMPLED))]
        exact = not (flat.is_floating_point() or flat.is_complex())
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        found.append((exact, torch.nan_to_num(flat.double(), 0.0, 0.0, 0.0).tolist()))
    return found


def is_sampled(call: int) -> bool:
    """Whether the ranks compare samples of their inputs at this call, counted from 1: at the powers of two."""
    return call & (call - 1) == 0


class Disagreement(NamedTuple):
    """First difference between the ranks' calls. stuck: whether a rank is in a collective of its call already."""

    text: str
    stuck: bool


class _Call(NamedTuple):
    """Call that the main thread runs. asks: whether it writes its form to the store itself."""

    round: int
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
        self._known: dict[str, Form] = {}
        self._call = _Call(0, 0, (), False)
        self._answered = (0, 0)
        self._lock = threading.Lock()

    def begin(
        self, caller: str, form: Form, failures: int, samples: Samples | None, check: Callable[[], None]
    ) -> Disagreement | None:
        """Begin a call; return how the ranks differ.

        caller: its name, equal in each of its calls. failures: of the group so far, after each of which ranks may be
        a call apart. samples: of the input, where the ranks compare them. check: raises, while this rank waits for
        others, a failure of one of them. DistBackendError for a rank that does not come within the store's timeout.
        """
        if not self._others:
            return None
        number = self._call.number + 1
        if failures != self._call.round:
            number = 1
            self._known.clear()
        asks = samples is not None or self._known.get(caller) != form
        with self._lock:
            self._call = _Call(failures, number, form, asks)
        if not asks:
            return None
        self._known[caller] = form
        mine = self._text(self._call, samples)
        self._store.set(self._key(failures, number, self._rank), mine)
        self._store.set(f"{self._prefix}/asked", f"{failures} {number}")
        said = {self._rank: json.loads(mine)}
        found = _difference(said | self._wait_for_others(failures, number, check))
        if found is not None:
            del self._known[caller]
        return found

    def answer(self) -> None:
        """Tell ranks that ask about the current call its form. Called by the monitor's thread, now and then."""
        key = f"{self._prefix}/asked"
        if not self._others or not self._store.check([key]):
            return
        failures, number = map(int, self._store.get(key).split())
        with self._lock:
            call = self._call
            asked = call.round == failures and call.number >= number and not call.asks
            if asked and self._answered != (failures, number):
                self._answered = (failures, number)
                self._store.set(self._key(failures, number, self._rank), self._text(call, None))

    def _key(self, failures: int, number: int, rank: int) -> str:
        """Key of what a rank says of a call. Two in turns, because after a disagreement, which has no collectives, a
        rank may be in its next call before another has read this one's.
        """
        return f"{self._prefix}/{failures}/{rank}/{number % 2}"

    @staticmethod
    def _text(call: _Call, samples: Samples | None) -> str:
        form = [str(part) for part in call.form]
        return json.dumps({"number": call.number, "form": form, "stuck": not call.asks, "samples": samples})

    def _wait_for_others(self, failures: int, number: int, check: Callable[[], None]) -> dict[int, dict[str, Any]]:
        """Collect the answers of the others, by rank; {} for one that has gone on from it, and so agreed."""
        found: dict[int, dict[str, Any]] = {}
        store: Any = self._store
        end = time.monotonic() + store.timeout.total_seconds()
        pause = 1e-4
        while True:
            for rank in self._others:
                key = self._key(failures, number, rank)
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
        names, values = mine["form"][::2], mine["form"][1::2]
        for name, value, other in zip(names, values, theirs["form"][1::2], strict=False):
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
    for (exact, mine), (_, theirs) in zip(one, other, strict=False):
        largest = max(map(abs, (*mine, *theirs)), default=0.0)
        allowed = 0.0 if exact else _TOLERANCE * largest
        if len(mine) != len(theirs) or any(abs(a - b) > allowed for a, b in zip(mine, theirs, strict=True)):
            return False
    return True
