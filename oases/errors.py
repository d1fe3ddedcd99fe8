"""User errors: the command line reports them without a traceback and exits with code 2."""

from __future__ import annotations

from pathlib import Path

SAVED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the same command resumes the run."""


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
