"""The long run: what it measures, over a few steps."""

import json
import os

import pytest

from benchmarks import long_run


def test_usage_of_this_process_grows_with_what_it_takes(tmp_path):
    memory, threads, files = long_run.usage(os.getpid())
    with (tmp_path / "file").open("w"):
        assert long_run.usage(os.getpid())[2] == files + 1
    assert memory > 10
    assert threads >= 1


@pytest.mark.long
def test_rows_of_a_run(monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["long_run.py", "--steps", "4", "--tp", "2", "--every", "2", "--json", str(file)])
    long_run.main()
    rows = json.loads(file.read_text())
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert list(row) == list(long_run.COLUMNS)
        assert all(value > 0 for value in row.values())
    assert "launcher MiB" in capsys.readouterr().out
