"""Build information of the extension: torch's version, and the CUDA architectures of its kernels."""

from __future__ import annotations

from typing import TypedDict


class BuildInfo(TypedDict):
    """cuda: whether there are CUDA kernels. nvcc: the version that compiled them. architectures: "sm_80", ..."""

    torch: str
    cuda: bool
    nvcc: str | None
    architectures: list[str]


def build_info() -> BuildInfo:
    """Build information of `oases._C`."""
    import torch  # noqa: F401  (the extension needs torch's libraries loaded)

    import oases._C as _C

    info: BuildInfo = _C.build_info()
    return info


def described() -> str:
    """Build in one line: "torch 2.13.0+cpu; CUDA kernels: sm_80 sm_90 by nvcc 13.0", or "...: none"."""
    info = build_info()
    kernels = f"{' '.join(info['architectures'])} by nvcc {info['nvcc']}" if info["cuda"] else "none"
    return f"torch {info['torch']}; CUDA kernels: {kernels}"
