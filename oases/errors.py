"""User errors: the command line reports them without a traceback and exits with code 2."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from pathlib import Path

SAVED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command resumes the run."""
_FRAME = r'File "([^"]+)", line (\d+), in (\w+)'


class UsageError(ValueError):
    """Invalid user input; the message names the value and the remedy."""


class ExtensionError(ImportError):
    """The compiled extension is missing, or was built against another torch; the message says what to do."""


class OverlapError(RuntimeError):
    """Required overlap did not happen; the message says why."""


class SavedExit(SystemExit):
    """Exit of a run that saved its state on SIGTERM, with SAVED_EXIT_CODE, on every rank."""

    def __init__(self, message: str) -> None:
        super().__init__(SAVED_EXIT_CODE)
        self.message = message


def make_folder(folder: str | Path, option: str) -> Path:
    """Create an output folder and its parents. UsageError, naming `option`, where it cannot be created."""
    path = Path(folder)
    if not str(folder):
        raise UsageError(f"{option} '' is empty; give the path of a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{option} {str(folder)!r}: a file is in the way; give the path of a folder") from error
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"{option} {str(folder)!r} cannot be created: {reason}; give another path") from error
    return path


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an op ran out of memory."""
    # On the CPU torch raises a RuntimeError, recognisable by its text alone.
    full = any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__)
    return full or isinstance(error, MemoryError) or "DefaultCPUAllocator: " in str(error)


def author_line(error: BaseException) -> str:
    """File, line and function of the innermost code outside of torch and oases that raised an error, "" for none.

    A traced layer's line is that which its graph's node is of.
    """
    ours = tuple(f"{os.path.dirname(sys.modules[name].__file__ or '')}{os.sep}" for name in ("torch", "oases"))
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        file, found = frame.f_code.co_filename, []
        if file.startswith("<eval_with_key>"):
            name = linecache.getline(file, line).strip().partition(" = ")[0]
            graph = getattr(frame.f_locals.get("self"), "graph", None)
            for node in () if graph is None else graph.nodes:
                meta = getattr(node.meta.get("like"), "meta", node.meta)
                found += re.findall(_FRAME, meta.get("stack_trace") or "") if node.name == name else []
        elif not file.startswith("<"):
            found = [(file, str(line), frame.f_code.co_name)]
        for path, number, function in reversed(found):
            if not path.startswith(ours):
                return f"{path}:{number}, in {function}"
    return ""
