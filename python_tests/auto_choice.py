"""Measured choices of schedules, which other tests go without: the environment names a schedule in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oases.core.execution import autotune


@contextmanager
def measuring(path: Path) -> Iterator[None]:
    """Context in which stacks of this process that are asked for "auto" measure, and keep their choices at `path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OASES_SCHEDULE")
        patch.setattr(autotune, "cache_path", lambda: path)
        yield
