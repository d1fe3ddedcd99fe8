"""PEP 517 backend: setuptools, built against the torch that the wheel will run with.

pip builds in an environment without the user's packages and installs the newest torch into it. An extension built
against that does not load beside the torch that the user has. This backend therefore takes the user's torch where
there is one, by adding the user's packages at the end of the path; otherwise it asks for the newest that was tried.
Either way the wheel requires the minor version that it was built against, so pip combines it with no other.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no torch)

from build_tools.dependencies import TORCH, built_against
from build_tools.objects import report

Settings = Mapping[str, Any] | None

ASK = """
import importlib.util, json, sys
found = importlib.util.find_spec("torch")
print(json.dumps([found and found.origin, sys.path]))
"""


def users_path() -> list[str] | None:
    """`sys.path` of the Python that pip runs under, if it has torch, else None.

    A fresh interpreter without pip's PYTHONPATH sees the user's packages. Front ends that build in a virtual
    environment of their own (uv, build) run that one's Python, and hide the user's packages from here too.
    """
    hidden = {"PYTHONPATH", "PYTHONNOUSERSITE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    answer = subprocess.run([sys.executable, "-c", ASK], env=environment, cwd="/", capture_output=True, text=True)
    answer.check_returncode()
    torch, path = json.loads(answer.stdout)
    return path if torch else None


def requirements() -> list[str]:
    """Requirements of a build beyond setuptools."""
    if users_path() is not None:
        return []
    report(f"oases: no torch in this environment; pip now installs one to build against, {TORCH}")
    return [TORCH]


def with_torch() -> None:
    """Make torch importable, the dependency on its minor version known to setup.py, and progress visible."""
    os.environ["OASES_BUILD_TTY"] = "1"
    sys.path += [entry for entry in users_path() or [] if entry and entry not in sys.path]
    built_against(version("torch"))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517."""
    return requirements()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660."""
    return requirements()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """PEP 517: an sdist holds no objects."""
    return []


def prepare_metadata_for_build_wheel(folder: str, config_settings: Settings = None) -> str:
    """PEP 517."""
    with_torch()
    return build_meta.prepare_metadata_for_build_wheel(folder, config_settings)


def prepare_metadata_for_build_editable(folder: str, config_settings: Settings = None) -> str:
    """PEP 660."""
    with_torch()
    return build_meta.prepare_metadata_for_build_editable(folder, config_settings)


def build_wheel(folder: str, config_settings: Settings = None, metadata: str | None = None) -> str:
    """PEP 517."""
    with_torch()
    return build_meta.build_wheel(folder, config_settings, metadata)


def build_editable(folder: str, config_settings: Settings = None, metadata: str | None = None) -> str:
    """PEP 660."""
    with_torch()
    return build_meta.build_editable(folder, config_settings, metadata)
