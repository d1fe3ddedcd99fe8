"""User errors. The command line prints them without a traceback and exits with code 2."""

SAVED_EXIT_CODE = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that saved its state; start it again to resume."""


class UsageError(ValueError):
    """Error for invalid input; the message names the value and the remedy."""


class OverlapError(RuntimeError):
    """Error for required overlap that did not happen; the message gives the reason."""


class SavedExit(SystemExit):
    """Exit of a run that was asked to stop and saved its state, with SAVED_EXIT_CODE on every rank."""

    def __init__(self, message: str) -> None:
        super().__init__(SAVED_EXIT_CODE)
        self.message = message
