"""Arguments of `oases plan`, and commands that must be refused."""

import pytest

from oases import cli

MODEL = ["--hidden", "256", "--heads", "4", "--layers", "2", "--sequence", "128", "--vocabulary", "512"]
GIVEN = [*MODEL, "--cluster", "4x3090", "--global-batch", "16"]


def fails(capture, *arguments):
    """Run `oases`, which must exit with 2 and one line on stderr; return that. capture: capsys or capfd."""
    capture.readouterr()  # of commands before, whose progress may be on stderr
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    error = capture.readouterr().err
    assert caught.value.code == 2, error
    assert error.startswith("oases: error: ")
    assert error.count("\n") == 1, "one line, no traceback"
    return error
