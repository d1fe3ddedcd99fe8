"""Names of the compiled extension `oases._C`, loaded only beside the torch that it was built against.

torch keeps no binary interface between minor versions. Beside another one the extension fails with an undefined
symbol, or loads and crashes. So the version is read from the extension's file first. Import the extension's names
from here.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TypedDict

import torch

import oases
from oases.errors import ExtensionError

BUILT_AGAINST = re.compile(rb"oases was built against torch ([^\0]+)\0")


def check_torch(extension: Path, torch_version: str) -> None:
    """Compare minor versions of torch. ExtensionError where they differ."""
    found = BUILT_AGAINST.search(extension.read_bytes())
    if found is None:
        raise ExtensionError(f"{extension} does not say which torch it was built against; build oases again")
    built = found[1].decode()
    if _minor(built) != _minor(torch_version):
        raise ExtensionError(
            f"oases was built against torch {built}, but torch {torch_version} is installed; build oases again "
            f"(pip install --force-reinstall --no-deps, or make build) or install torch {_minor(built)}"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _extension() -> Path:
    spec = importlib.util.find_spec("oases._C")
    if spec is None or spec.origin is None:
        raise ExtensionError("oases is not compiled for this Python; run make build, or pip install oases' folder")
    return Path(spec.origin)


check_torch(_extension(), torch.__version__)
oases._register_backends()

from oases._C import (  # noqa: E402  (once the torch is known to be the right one)
    QUANTIZED_BLOCK,
    DeferredGradients,
    ExpertCosts,
    Leaves,
    OverlapScheduler,
    Piece,
    QuantizedBackend,
    generator_mark,
    nodes_backend,
    place_experts,
    quantized_bytes,
    register_stream_words,
    search_experts,
    sim_backend,
    single_process_backend,
    staged_backend,
)
from oases._C import build_info as _build_info  # noqa: E402

__all__ = [
    "QUANTIZED_BLOCK",
    "DeferredGradients",
    "ExpertCosts",
    "Leaves",
    "OverlapScheduler",
    "Piece",
    "QuantizedBackend",
    "generator_mark",
    "nodes_backend",
    "place_experts",
    "quantized_bytes",
    "register_stream_words",
    "search_experts",
    "sim_backend",
    "single_process_backend",
    "staged_backend",
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
