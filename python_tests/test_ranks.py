"""Ranks as the command line starts them: results, a rank that dies in mid-step, a launcher of the wrong size."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch
from marked_processes import wait_until_gone, with_mark
from rank_programs import (
    dawdles,
    dies_in_mid_step,
    listening,
    loses_the_store,
    rank_and_size,
    refuse,
    runs_out_of_memory,
    stumble,
    waits_for_one_that_leaves,
)

from oases.errors import UsageError
from oases.launch import fork_server
from oases.launch.ranks import RankOptions, _join, run_ranks
from oases.testbed import Backend


@pytest.fixture
def failed(capfd):
    """Call `run_ranks` and return (exit code, what the ranks and the launcher wrote to stderr)."""

    def call(function, arguments=(), **options):
        with pytest.raises(SystemExit) as caught:
            run_ranks(function, arguments, RankOptions(**options))
        return caught.value.code, capfd.readouterr().err

    return call


def test_result_of_rank_zero(monkeypatch):
    monkeypatch.setenv("OASES_TEST", "set after the fork server was started")
    assert run_ranks(rank_and_size, (), RankOptions(2)) == (0, 2)
    assert run_ranks(os.getenv, ("OASES_TEST",), RankOptions(2)) == os.environ["OASES_TEST"]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_ranks_of_one_machine_are_reached_from_it_alone():
    found = run_ranks(listening, (), RankOptions(2))
    assert len(found) >= 2  # the launcher's store, and the rank's group
    assert set(found) == {"0100007F"}  # 127.0.0.1


def test_a_mistake_found_by_the_ranks_exits_with_2(failed):
    assert failed(refuse, size=2) == (2, "oases: error: steps 0 is too few\n")


def test_a_bug_shows_its_traceback(failed):
    code, error = failed(stumble, size=2)
    assert code == 1
    assert "KeyError: 'a bug'" in error
    assert "oases: rank 0 failed:" in error or "oases: rank 1 failed:" in error


@pytest.mark.long
def test_a_rank_without_its_store_says_so_in_a_line(failed):
    code, error = failed(loses_the_store, size=2)
    assert code == 1
    assert "oases: rank 1: the connection to the ranks' store is lost: Broken pipe" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_named_by_the_others(failed, size):
    code, error = failed(dies_in_mid_step, (1,), size=size)
    assert code == 1
    assert "oases: rank 1 ended with signal SIGKILL; the run is over" in error
    # The survivor next to it in the backward pass says what it waited for.
    assert "waited for all_reduce of " in error
    assert "Traceback" not in error


@pytest.mark.parametrize("pool", ["two_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def test_a_rank_that_runs_out_of_memory_is_named_by_all(request, pool):
    for rank, (said, later) in enumerate(request.getfixturevalue(pool).run(runs_out_of_memory, 1)):
        assert "rank 1 ran out of memory at C 3." in said
        assert ("has failed; start all ranks again" in later) if rank == 1 else later == said


@pytest.mark.long
def test_a_collective_that_does_not_end_is_named(failed):
    """The watchdog: after the set time the run ends, and a rank says what it waited for, and where."""
    code, error = failed(dawdles, (600,), size=2, timeout_seconds=8)
    assert code == 1
    assert "rank 0 waited for all_reduce of " in error
    assert "bytes" in error


@pytest.mark.long
def test_a_rank_that_waits_for_the_store_ends_with_the_others(failed, tmp_path):
    """Its main thread cannot handle a signal meanwhile; the launcher would kill it after 30 s."""
    left = tmp_path / "left"
    code, error = failed(waits_for_one_that_leaves, (str(left),), size=2)
    assert code == 1
    assert "oases: rank 1 ended with exit code 1; the run is over" in error
    assert time.time() - left.stat().st_mtime < 25


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a rank's parent is known to the kernel on Linux alone")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    """They are children of the fork server, which outlives the launcher as long as it has children."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:  # tmp_path would be too long for a socket
        run = training(tmp_path / "ready", OASES_TEST=mark, TMPDIR=folder)
        assert len(with_mark(mark)) >= 4  # the launcher, the server, the ranks
        run.kill()
        run.communicate(timeout=600)
        wait_until_gone(mark)
        assert left_in(folder) == [], "the server removes the folder of its socket"


def left_in(folder):
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]  # a cache, which stays


def test_more_ranks_than_the_launcher_gives(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"--tp 4 needs 4 ranks, but the launcher gives 2; .* --nproc-per-node 4"):
        run_ranks(rank_and_size, (), RankOptions(4))


def training(ready, **environment):
    """A process whose two ranks train, once they do."""
    code = (
        "import rank_programs as t; from oases.launch.ranks import RankOptions, _join, run_ranks\n"
        f"run_ranks(t.tells_when_training, ({str(ready)!r},), RankOptions(2))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=os.environ | environment, text=True,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    while not ready.exists():
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.05)
    return run


@pytest.mark.slow
def test_an_interrupt_ends_the_run_in_one_line_and_leaves_no_folder(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        run = training(tmp_path / "ready", TMPDIR=folder)
        os.killpg(run.pid, signal.SIGINT)
        _, error = run.communicate(timeout=600)
        assert left_in(folder) == []
    assert run.returncode == 130
    assert "oases: interrupted" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("rank", "address", "taken", "message"),
    [
        (0, "127.0.0.1", True, r"port \d+ is in use on this machine; give the ranks a free one, by MASTER_PORT"),
        (0, "127.0.0.1", False, r"1 of 2 ranks came to 127\.0\.0\.1:\d+ within 1 s; start the missing ones"),
        (1, "127.0.0.1", False, r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:\d+; check MASTER_ADDR and MASTER_PORT"),
        (1, "", False, "rank 1 cannot join .*MASTER_ADDR expected, but not set; check MASTER_ADDR"),
    ],
)
def test_ranks_that_do_not_come_together_say_why(monkeypatch, rank, address, taken, message):
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        if taken:
            other.listen()
        port = other.getsockname()[1]
        if not taken:
            other.close()
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        if not address:
            monkeypatch.delenv("MASTER_ADDR")
        with pytest.raises(UsageError, match=message):
            _join(RankOptions(2, timeout_seconds=1), 0)


@pytest.mark.parametrize(
    ("name", "cuda", "index"), [("staged", True, 1), ("staged", False, None), ("gloo", False, None)]
)
def test_ranks_of_staged_may_share_a_gpu(monkeypatch, name, cuda, index):
    taken, started = [], []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **_: started.append(backend))
    _join(RankOptions(4, Backend(name, cuda=cuda)), 3)
    assert taken == ([] if index is None else [index])
    assert started == [name]


@pytest.mark.parametrize(("shared", "index"), [("1", 1), ("0", 3)])
def test_ranks_of_nccl_share_a_gpu_where_it_was_told_so(monkeypatch, shared, index):
    taken = []
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("oases.core.execution.group.nccl_options", lambda: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda _, **given: taken.append(given["device_id"]))
    _join(RankOptions(4, Backend("nccl", cuda=True)), 3)
    assert taken == [index, torch.device("cuda", index)]


def test_a_rank_has_the_environment_of_its_launcher_and_what_an_agent_has_set():
    """Not that of the fork server, which may have been started under other values."""
    agent = {
        "RANK": "3", "LOCAL_RANK": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "oases",
    }  # fmt: skip
    stale = {"TORCHINDUCTOR_CACHE_DIR": "/before", "NAME": "before", "MASTER_KEY": "before", "PLAIN": "before"}
    launcher = {"TORCHINDUCTOR_CACHE_DIR": "/now", "NAME": "now", "RANK": "0"}
    with mock.patch.dict(os.environ, stale | agent, clear=True):
        fork_server.Launcher(launcher).take_over()
        assert dict(os.environ) == launcher | agent
