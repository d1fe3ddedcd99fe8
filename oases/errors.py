"""Errors that a user can mend. The command line prints them without a traceback and exits with 2."""

SAVED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: start the same run again, and it goes on."""


class UsageError(ValueError):
    """Something the user gave cannot work; the message names the value and the remedy."""


class OverlapError(RuntimeError):
    """Overlap was required and did not happen; the message says why."""


class SavedExit(SystemExit):
    """A run that was told to end has saved its state and ends, with SAVED_EXIT_CODE, on every rank."""

    def __init__(self, message: str) -> None:
        super().__init__(SAVED_EXIT_CODE)
        self.message = message
