"""Fixture for pytest; in a conftest.py: pytest_plugins = ["oases_check.pytest_plugin"]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oases_check import CheckReport, check


@pytest.fixture
def trains_as_one_process() -> Callable[..., CheckReport]:
    """Function with the arguments of `oases.check`, which fails the test with its report where something differs."""

    def require(*args: Any, **options: Any) -> CheckReport:
        report = check(*args, **options)
        assert report.equal, f"\n{report}"
        return report

    return require
