"""Dependencies of the package. A wheel runs beside the minor version of torch that it was built against and no other.

torch keeps no binary interface between minor versions, so a wheel requires its own; an sdist requires any that was
tried (docs/versions.md).
"""

from __future__ import annotations

import os

from build_tools.objects import report

OLDEST, NEWEST = (2, 11), (2, 15)
"""Minor versions of torch between which all were tried."""
TORCH = f"torch>=2.{OLDEST[1]},<2.{NEWEST[1] + 1}"
OTHERS = (
    "matplotlib>=3.8", "numpy>=1.26", "plotly>=6.0", "PyYAML>=6.0", "rich>=13.0", "safetensors>=0.4", "scipy>=1.11",
)  # fmt: skip
_MINOR = "OASES_BUILD_TORCH"


def built_against(torch_version: str) -> None:
    """Make the torch of this build, such as "2.13.0+cpu", the one that the wheel requires.

    Raises SystemExit where it is too old.
    """
    minor = tuple(int(part) for part in torch_version.split(".")[:2])
    if minor < OLDEST:
        raise SystemExit(f"oases: error: torch {torch_version} is too old for oases; pip install '{TORCH}'")
    if minor > NEWEST:
        report(f"oases: torch {torch_version} is newer than {'.'.join(map(str, NEWEST))}, the last that was tried")
    os.environ[_MINOR] = ".".join(map(str, minor))


def dependencies() -> list[str]:
    """Requirements of the package: after `built_against` that minor version of torch, else any that was tried."""
    minor = os.environ.get(_MINOR)
    return [TORCH if minor is None else f"torch=={minor}.*", *OTHERS]
