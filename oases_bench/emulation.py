"""Emulated matmuls: on this process' CPU tensors they wait as long as a given device would compute, and return zeros.

For more ranks than cores, and for models as their authors wrote them: whoever calls a matmul, this project, torch,
Megatron-Core or autograd, gets the same wait for the same FLOPs. All other ops and all communication are real.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oases_bench.timed_block import sleep_until


class EmulatedDevice:
    """Kernels that wait. flops: FLOP/s of the device."""

    def __init__(self, flops: float) -> None:
        self.flops = flops
        self.seconds = 0.0
        """Seconds waited for so far."""

    def _wait(self, start: float, flops: float) -> None:
        self.seconds += flops / self.flops
        sleep_until(start + flops / self.flops)

    def _product(self, a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """[..., N, K] @ [..., K, M] -> [..., N, M]. out: where it goes; add: where it is added, so left alone."""
        start = time.perf_counter()
        if out is None:
            out = a.new_zeros(*a.shape[:-1], b.shape[-1])
        elif not add:
            out.zero_()
        self._wait(start, 2.0 * out.numel() * a.shape[-1])
        return out

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """`aten.mm` and `aten.bmm`."""
        return self._product(a, b)

    def mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """`aten.mm.out`."""
        return self._product(a, b, out)

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """`aten.addmm`."""
        return self._product(a, b)

    def addmm_out(
        self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        """`aten.addmm.out`."""
        return self._product(a, b, out)

    def addmm_(self, total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        """`aten.addmm_`."""
        return self._product(a, b, total, add=True)

    def grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`aten._grouped_mm`: products of [..., N, K] and [..., K, M]; `offs` cuts one dimension by experts."""
        start = time.perf_counter()
        groups, summed = offs.numel() if offs is not None else len(a), a.dim() == b.dim() == 2
        rows = a.shape[1:-1] if a.dim() > b.dim() else a.shape[:-1]
        out = a.new_zeros(*([groups] if summed else []), *rows, b.shape[-1], dtype=out_dtype)
        flops = 2.0 * a.numel() * b.shape[-1]
        self._wait(start, flops / groups if a.dim() > b.dim() else flops)
        return out

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Two matmuls of the scores' size; a causal mask skips half of each."""
        start = time.perf_counter()
        # The layout of the kernel: sequence before heads.
        out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums = q.new_zeros(q.shape[0], q.shape[2], q.shape[1]).transpose(1, 2)
        self._wait(start, self._attention_flops(q, k, is_causal))
        return out, sums

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, dropout_p: float,
        is_causal: bool, **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Five matmuls, of which one computes the scores again."""
        start = time.perf_counter()
        found = tuple(torch.zeros_like(each) for each in (q, k, v))
        self._wait(start, 2.5 * self._attention_flops(q, k, is_causal))
        return found[0], found[1], found[2]

    @staticmethod
    def _attention_flops(q: Tensor, k: Tensor, is_causal: bool) -> float:
        return 4.0 * q.numel() * k.shape[-2] / (2 if is_causal else 1)


@contextmanager
def emulated_device(flops: float) -> Iterator[EmulatedDevice]:
    """Emulate the matmuls and attentions of this process' CPU tensors on a device of so many FLOP/s."""
    library, device = torch.library.Library("aten", "IMPL"), EmulatedDevice(flops)
    kernels = {
        "mm": device.mm, "mm.out": device.mm_out, "bmm": device.mm, "addmm": device.addmm,
        "addmm.out": device.addmm_out, "addmm_": device.addmm_, "_grouped_mm": device.grouped_mm,
        "_scaled_dot_product_flash_attention_for_cpu": device.attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": device.attention_backward,
    }  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, kernel in kernels.items():
                library.impl(name, kernel, "CPU", allow_override=True)
        yield device
    finally:
        library._destroy()
