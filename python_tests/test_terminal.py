"""Progress without a terminal: lines on stderr while work goes on, none for short work; logs on stdout."""

import time

import pytest

from oases import terminal


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(terminal, "_FIRST_LINE_SECONDS", 0.05)
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.05)


def wait_for(capsys, text):
    """Return what was printed, once `text` is on stderr."""
    out, error, end = "", "", time.monotonic() + 30
    while text not in error:
        assert time.monotonic() < end, error
        time.sleep(0.01)
        more = capsys.readouterr()
        out, error = out + more.out, error + more.err
    return out, error


def test_long_work_prints_lines_to_stderr(capsys):
    with terminal.progress("measuring", 3) as advance:
        wait_for(capsys, "oases: measuring 0/3 (0:00:0")
        advance(2, "link")
        out, _ = wait_for(capsys, "oases: measuring 2/3 link (0:00:0")
    assert out == ""
    with terminal.working("searching plans, setting") as update:
        wait_for(capsys, "oases: searching plans, setting (")
        update(3, 7)
        wait_for(capsys, "oases: searching plans, setting 3/7 (")


def test_short_and_invisible_work_prints_nothing(capsys, monkeypatch):
    with terminal.progress("hidden", 1, visible=False), terminal.working("hidden", visible=False):
        time.sleep(0.2)
    monkeypatch.setattr(terminal, "_FIRST_LINE_SECONDS", 60.0)
    with terminal.progress("short", 1) as advance, terminal.working("short"):
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_a_log_goes_to_stdout_and_ends_the_lines(capsys):
    with terminal.progress("training", 20, log=True, every=2) as advance:
        wait_for(capsys, "oases: training 0/20 (")
        for step in range(1, 5):
            advance(step, f"loss {step}")
        time.sleep(0.2)
    out, error = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()] == ["training 2/20 loss 2", "training 4/20 loss 4"]
    assert error.count("oases: training") <= 1, "lines stop with the first step"


def test_an_error_ends_the_lines(capsys):
    with pytest.raises(ZeroDivisionError), terminal.progress("failing", 1):
        raise ZeroDivisionError
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
