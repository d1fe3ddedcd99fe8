"""FailureNotifier: whom it tells of a failure, in which order, on groups that are stand-ins."""

import pytest
import torch

from oases_train import failure_notifier
from oases_train.failure_notifier import FailureNotifier


class Monitor:
    """A FailureMonitor and its scheduler, which log what is asked of them."""

    rank, failures = 1, 0

    def __init__(self, name, log):
        self.scheduler, self._name, self._log = self, name, log

    def report_failure(self, failure):
        self._log.append(f"{self._name}: {failure}")

    def acknowledge(self):
        self.failures += 1
        self._log.append(f"{self._name} acknowledges")


@pytest.fixture
def notifier(monkeypatch):
    log = []
    monkeypatch.setattr(failure_notifier, "group_size", lambda group: 2)
    monkeypatch.setattr(failure_notifier, "scheduler_of", lambda group: None)
    monkeypatch.setattr(failure_notifier, "monitor_of", lambda group, scheduler, device: Monitor(group, log))
    made = FailureNotifier(["all", None, "data"], torch.device("cpu"))
    made.log, made.activity = log, "step 3"
    return made


def fail(notifier, told_by=()):
    """Raise an error inside, after the failure of another rank was told on some of the groups."""

    def work():
        for number in told_by:
            notifier._monitors[number].failures += 1
        raise ValueError("bad batch\nand more")

    with pytest.raises(ValueError, match="bad batch"), notifier:
        work()


def test_every_group_is_told_before_any_is_waited_for(notifier):
    fail(notifier)
    text = "rank 1 failed at step 3: ValueError: bad batch"
    assert notifier.log == [f"all: {text}", f"data: {text}", "all acknowledges", "data acknowledges"]
    assert notifier.failed


def test_a_group_that_told_this_rank_is_not_told(notifier):
    fail(notifier, told_by=[0])
    assert [line.split()[0] for line in notifier.log] == ["data:", "data"]


def test_a_rank_that_died_is_waited_for_once(notifier, monkeypatch):
    """And not again by each context around: a run in which a rank is killed restarts the earlier."""
    waits = []
    monkeypatch.setattr(FailureNotifier, "_receives_failure", lambda self, monitor: bool(waits.append(monitor)))
    for times in (1, 2):
        with pytest.raises(RuntimeError, match="closed"), notifier, notifier, notifier:
            raise RuntimeError("gloo: connection closed by peer")
        assert len(waits) == times
    assert notifier.log == []


def test_without_a_failure_nobody_is_told(notifier):
    with notifier:
        pass
    assert notifier.log == []
    assert not notifier.failed
