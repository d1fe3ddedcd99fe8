"""`make gpu-day` without a GPU: its refusal, and its runner with steps that need none."""

import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from build_tools import gpu_day, objects
from build_tools.gpu_day import Step

COUNTING = (
    "import pathlib; path = pathlib.Path({path!r}); path.write_text(path.read_text() + 'x'); print('=== done ===')"
)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2():
    command = [sys.executable, "-m", "build_tools.gpu_day"]
    done = subprocess.run(command, cwd=objects.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "gpu-day: this torch sees no GPU; run it where there is one, with a CUDA build of torch\n"


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path, monkeypatch):
    ran = [tmp_path / name for name in ("first", "second")]
    for path in ran:
        path.write_text("")
    works = Step("first", (sys.executable, "-c", COUNTING.format(path=str(ran[0]))), 1)
    fails = Step("second", (sys.executable, "-c", COUNTING.format(path=str(ran[1])) + "; raise SystemExit(3)"), 1)
    missing = Step("third", ("no-such-program",), 1, needs="no-such-program")
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_day, "steps", lambda folder: [works, fails, missing])
    assert gpu_day.run_all(tmp_path / "logs", "some GPU") == 1
    repaired = Step("second", works.command, 1)
    monkeypatch.setattr(gpu_day, "steps", lambda folder: [works, repaired, missing])
    text = (tmp_path / "logs" / "report.md").read_text()
    assert "| first | passed: done |" in text
    assert "| second | exit 3: done |" in text
    assert "| third | not run: no-such-program is not installed | |" in text
    assert "## second failed" in text
    assert gpu_day.run_all(tmp_path / "logs", "some GPU") == 0
    assert [path.read_text() for path in ran] == ["xx", "x"], "first once, and as the repaired second; second once"


def test_a_step_that_hangs_is_stopped_and_the_next_gets_its_own_time(tmp_path, monkeypatch):
    hangs = Step("hangs", (sys.executable, "-c", "import time; time.sleep(600)"), 0.5 / 60)
    works = Step("works", (sys.executable, "-c", "print('done')"), 1)
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_day, "steps", lambda folder: [hangs, works])
    assert gpu_day.run_all(tmp_path / "logs", "some GPU") == 1
    report = tmp_path / "logs" / "report.md"
    assert "| hangs | stopped, its time was over: " in report.read_text()
    assert "| works | passed: done |" in report.read_text()


def test_the_steps_leave_five_of_25_minutes_for_the_build(tmp_path):
    assert sum(step.minutes for step in gpu_day.steps(tmp_path)) <= 20


@pytest.mark.long
def test_the_sanitizers_run_some_tests_of_every_file_of_kernels(tmp_path):
    (memcheck,) = (step for step in gpu_day.steps(tmp_path) if step.name == "memcheck")
    command = [*memcheck.command[memcheck.command.index(sys.executable) :], "--collect-only"]
    found = subprocess.run(command, cwd=objects.ROOT, capture_output=True, text=True, check=True)
    chosen = Counter(re.findall(r"^python_tests/kernels/test_(\w+)\.py::", found.stdout, re.MULTILINE))
    sources = {path.stem for path in (objects.ROOT / "csrc").glob("*.cu") if "__global__" in path.read_text()}
    assert set(chosen) == sources - {"device"}
    assert all(5 <= count <= 40 for count in chosen.values()), chosen
