"""Errors that a user can mend. The command line prints them without a traceback and exits with 2."""


class UsageError(ValueError):
    """Something the user gave cannot work; the message names the value and the remedy."""


class OverlapError(RuntimeError):
    """Overlap was required and did not happen; the message says why."""
