"""Model FLOPs utilisation: what share of the ranks' peak a step's necessary products come to.

A step of T tokens has 6 N T FLOPs in products with weights, N being the weights of all matrices with the head's and
without embeddings, which are looked up; and 12 L S H T in attention itself, for L layers of width H over sequences
of S: forward 2 N + 4 L S H a token, backward twice that. The causal half counts whole, and nothing that is computed
again counts (Narayanan et al. 2021, Chowdhery et al. 2022).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from oases.execution.clock import synchronize
from oases.execution.group import ProcessGroup, group_size
from oases.parallel.collectives import all_reduce
from oases.simulator.peaks import peak_flops

_PRODUCT = {"cpu": 512, "cuda": 8192}
_SECONDS = 0.03
"""For which products are repeated."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s of all ranks together at their best, and where the number is from."""

    flops_per_second: float
    source: str

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype, process_group: ProcessGroup | None, given: float = 0.0) -> Peak:
        """The peak of the ranks' devices; all ranks call it.

        given: of one rank, in FLOP/s; 0: of a known GPU its data sheet's, of anything else what a product reaches
        here while all ranks compute one, in some 30 ms. dtype: what the model's products are of.
        """
        ranks, name = group_size(process_group), str(dtype).removeprefix("torch.")
        if given:
            return Peak(ranks * given, f"{ranks} x {given:.4g} FLOP/s, as given")
        known = peak_flops(torch.cuda.get_device_name(device), name) if device.type == "cuda" else None
        if known:
            return Peak(ranks * known, f"{ranks} x {known:.4g} FLOP/s in {name}, as its data sheet says")
        mine = torch.tensor([_reached(device, dtype)], dtype=torch.float64, device=device)
        everyone = float(all_reduce(mine, process_group, "peak of a product"))
        size = _PRODUCT[device.type]
        return Peak(everyone, f"products of {size} x {size} in {name}, measured on {ranks} at once")


def _reached(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of some products."""
    size = _PRODUCT[device.type]
    a = torch.ones(size, size, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + _SECONDS
    a @ a
    while best == float("inf") or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
