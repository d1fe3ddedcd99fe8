"""Names of the compiled extension `oases._C`, loaded only beside the torch that it was built against.

oases_staged/built.py reads that version from the extension's file. Import the extension's names from here.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from oases.errors import ExtensionError
from oases_staged.built import why_unfit  # importing it registers the backend

if _unfit := why_unfit("oases._C", torch.__version__):
    raise ExtensionError(_unfit)

from oases._C import (
    QUANTIZED_BLOCK,
    DeferredGradients,
    ExpertCosts,
    Leaves,
    OverlapScheduler,
    Piece,
    QuantizedBackend,
    generator_mark,
    place_experts,
    quantized_bytes,
    search_experts,
    sim_backend,
    single_process_backend,
)
from oases._C import build_info as _build_info

__all__ = [
    "QUANTIZED_BLOCK",
    "DeferredGradients",
    "ExpertCosts",
    "Leaves",
    "OverlapScheduler",
    "Piece",
    "QuantizedBackend",
    "generator_mark",
    "place_experts",
    "quantized_bytes",
    "search_experts",
    "sim_backend",
    "single_process_backend",
]


class BuildInfo(TypedDict):
    """Build of the extension. nvcc: version, None without CUDA kernels. architectures: "sm_80", ..."""

    torch: str
    cuda: bool
    nvcc: str | None
    architectures: list[str]


def build_info() -> BuildInfo:
    """Torch version and CUDA architectures that `oases._C` was built with."""
    info: BuildInfo = _build_info()
    return info


def build_text() -> str:
    """Build of the extension in a line, e.g. "torch 2.13.0+cpu; CUDA kernels: sm_80 sm_90 by nvcc 13.0"."""
    info = build_info()
    kernels = f"{' '.join(info['architectures'])} by nvcc {info['nvcc']}" if info["cuda"] else "none"
    return f"torch {info['torch']}; CUDA kernels: {kernels}"
