"""Log of the UsageErrors that tests raise, in a file that $OASES_REFUSALS names, for the page of refusals.

A line is a file and line of the product, the test, and the message, as JSON.
"""

import functools
import json
import os
import sys
from pathlib import Path

from oases.errors import UsageError
from oases.testing import RankPool

ROOT = Path(__file__).resolve().parents[1]
VARIABLE, TEST = "OASES_REFUSALS", "PYTEST_CURRENT_TEST"


def start() -> None:
    """Log those of this process and, with the names of their tests, those of ranks of its pools."""
    _log_own()
    run = RankPool.run

    @functools.wraps(run)
    def named(self, function, *args, **options):
        return run(self, _as_test, os.environ[VARIABLE], os.environ.get(TEST, ""), function, *args, **options)

    RankPool.run = named


def _as_test(path, test, function, *args):
    os.environ[VARIABLE], os.environ[TEST] = path, test
    _log_own()
    return function(*args)


def _log_own() -> None:
    if "__init__" in vars(UsageError):
        return

    def logged(self, *args):
        ValueError.__init__(self, *args)
        frame = sys._getframe(1)
        while frame is not None and "python_tests" not in frame.f_code.co_filename:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT) and file.name != "errors.py":
                where = f"{file.relative_to(ROOT)}:{frame.f_lineno}"
                line = json.dumps([where, os.environ.get(TEST, "").partition(" ")[0], str(self)])
                log = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # some tests patch open()
                os.write(log, f"{line}\n".encode())
                os.close(log)
                return
            frame = frame.f_back

    UsageError.__init__ = logged
