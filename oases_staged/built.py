"""Whether an extension can be loaded beside the torch that is installed.

torch keeps no binary interface between minor versions. Beside another one an extension fails with an undefined
symbol, or loads and crashes. So the version is read from the extension's file first.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

BUILT_AGAINST = re.compile(rb"oases was built against torch ([^\0]+)\0")


def why_unfit(name: str, torch_version: str) -> str:
    """Why an extension, given by its module's name, cannot be loaded beside a torch; "" where it can."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"{name} is not compiled for this Python; run make build, or pip install oases' folder"
    return mismatch(Path(spec.origin), torch_version)


def mismatch(extension: Path, torch_version: str) -> str:
    """Say that an extension's file was built against another minor version of torch; "" where it was not."""
    found = BUILT_AGAINST.search(extension.read_bytes())
    if found is None:
        return f"{extension} does not say which torch it was built against; build oases again"
    built = found[1].decode()
    if _minor(built) == _minor(torch_version):
        return ""
    return (
        f"oases was built against torch {built}, but torch {torch_version} is installed; build oases again "
        f"(pip install --force-reinstall --no-deps, or make build) or install torch {_minor(built)}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
