"""Compile the kernels of csrc/ with plain nvcc, without torch: for setup.py, and for `make cuda-check`.

build_tools/toolkit.py has the variables that choose nvcc and architectures. $OASES_CUDA: 0 leaves CUDA out, 1 makes
its absence an error, as a torch with CUDA does. Objects lie in build/cuda/<architectures>, each beside the log of its
compilation.
"""

from __future__ import annotations

import os

from build_tools import objects
from build_tools.objects import Unit, report
from build_tools.toolkit import LINK_ONLY, NoCudaError, Toolkit, find_toolkit, gpus_present


def kernel_units(toolkit: Toolkit) -> list[Unit]:
    """Every *.cu of csrc/ as a unit to compile."""
    return [toolkit.unit(source) for source in sorted((objects.ROOT / "csrc").rglob("*.cu"))]


def wanted_toolkit(torch_cuda: str | None) -> Toolkit | None:
    """The toolkit to compile kernels with; None where they are left out, with one line why unless that was asked for.

    torch_cuda: the CUDA release of torch, None for a torch without. Raises SystemExit as `leave_out` does.
    """
    wanted = os.environ.get("OASES_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"oases: error: OASES_CUDA must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    try:
        return find_toolkit("present" if torch_cuda else LINK_ONLY, torch_cuda)
    except NoCudaError as error:
        leave_out(error, torch_cuda)
        return None


def leave_out(error: Exception, torch_cuda: str | None) -> None:
    """Say why the kernels are left out. Raises SystemExit where they are needed.

    That is where $OASES_CUDA is 1, or torch has CUDA and there is a GPU. The torch that pip installs has CUDA on any
    machine, so it alone does not tell that somebody wants kernels.
    """
    if os.environ.get("OASES_CUDA") == "1":
        raise SystemExit(f"oases: error: OASES_CUDA=1, but {error}")
    if torch_cuda is not None and gpus_present():
        raise SystemExit(
            f"oases: error: torch is built for CUDA {torch_cuda}, but {error} (OASES_CUDA=0 builds oases without its "
            "CUDA kernels)"
        )
    report(f"oases: building without CUDA kernels: {error} (OASES_CUDA=0 asks for that)")
