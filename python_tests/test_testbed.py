import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from oases import testbed
from oases.core.execution.group import scheduler_of
from oases.errors import UsageError
from oases.launch.ranks import RankOptions, run_ranks
from oases.testbed import Backend, link, link_bytes_per_second


def test_rates():
    assert link_bytes_per_second("500mbit") == 62.5e6
    assert link_bytes_per_second("1gbit") == 125e6
    assert link_bytes_per_second("2.5Gbit") == 312.5e6
    for rate in ("fast", "1gb", "-1gbit", "0mbit", "1 gbit", ""):
        with pytest.raises(UsageError, match=f"unknown link rate {rate!r}"):
            link_bytes_per_second(rate)


def test_backends():
    assert Backend.parse("gloo") == Backend("gloo")
    assert Backend.parse("staged") == Backend("staged")
    assert Backend.parse("sim:alpha=20us,bandwidth=12GB/s") == Backend("sim", 20e-6, 12e9)
    for name in ("single_process", "alone"):  # 0.1.0 says alone
        one = Backend.parse(f"sim:alpha=1us,bandwidth=1gbit,{name}")
        assert one == Backend("sim", 1e-6, 125e6, single_process=True)
    assert Backend.parse("sim:bandwidth=1gbit,alpha=1ms") == Backend("sim", 1e-3, 125e6)
    for text, message in [
        ("mpi", "unknown backend 'mpi'"),
        ("gloo:x=1", "unknown backend"),
        ("gloo:alone", "unknown backend"),
        ("staged:x=1", "unknown backend"),
        ("sim:alone", "sim needs alpha and bandwidth, got none"),
        ("sim", "sim needs alpha and bandwidth, got none"),
        ("sim:alpha=1us", "got 'alpha'"),
        (f"sim:{'a' * 9999}=1", r"^.{0,250}$"),
        ("sim:alpha=1,bandwidth=1gbit", "alpha '1' is not a time"),
        ("sim:alpha=1us,bandwidth=0gbit", "bandwidth '0gbit' is not a rate"),
    ]:
        with pytest.raises(UsageError, match=message):
            Backend.parse(text)


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "_environment", lambda: {"PATH": str(tmp_path)})
    assert testbed.why_impossible("1gbit") == "'unshare' is missing; install the package util-linux"


@pytest.mark.skipif(testbed.why_impossible("1gbit") is not None, reason=f"{testbed.why_impossible('1gbit')}")
def test_the_link_has_its_price():
    """Half a megabyte beyond the burst at 20 mbit cannot arrive in less than 0.2 s."""
    script = (
        "import socket, threading, time\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname()); peer, _ = server.accept()\n"
        "size = 262144 + 524288\n"
        "start = time.monotonic(); threading.Thread(target=client.sendall, args=(bytes(size),)).start()\n"
        "left = size\n"
        "while left: left -= len(peer.recv(65536))\n"
        "print(time.monotonic() - start)\n"
    )
    done = subprocess.run(
        testbed.command_behind("20mbit", [sys.executable, "-c", script]),
        env=testbed.environment_behind("20mbit"), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert float(done.stdout) >= 0.2


@pytest.mark.skipif(testbed.why_impossible("1gbit") is not None, reason=f"{testbed.why_impossible('1gbit')}")
def test_the_rate_can_be_changed():
    script = (
        "import subprocess; from oases import testbed; print(testbed.set_rate(20.5e6))\n"
        "print(subprocess.run(['tc', 'qdisc', 'show', 'dev', 'lo'], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run(
        testbed.command_behind("1gbit", [sys.executable, "-c", script]),
        env=testbed.environment_behind("1gbit"), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.startswith("20.5mbit\nqdisc tbf")
    assert " rate 20500Kbit " in done.stdout


def test_rates_that_no_link_has():
    with pytest.raises(UsageError, match="link rate '1e-06mbit'"):
        testbed.set_rate(1)


ALPHA, BANDWIDTH = 0.03, 1e6


def overlap_over_sim():
    """Two all-reduces of 20 ms on the wire each, the second issued before the first is waited for."""
    assert dist.group.WORLD is not None
    scheduler = scheduler_of(dist.group.WORLD)
    tensor = torch.full((5000,), dist.get_rank() + 1.0)
    dist.barrier()
    start = time.perf_counter()
    ticket = scheduler.all_reduce(tensor, "sim")
    time.sleep(2.0)  # compute
    scheduler.wait(ticket)
    record = ticket.record
    return tensor[0].item(), record.finished - record.issued, record.finished - start, record.blocked_for


@pytest.mark.slow
def test_sim_backend_under_the_launcher():
    code = (
        "import test_testbed as t; from oases.launch.ranks import run_ranks\n"
        f"print(*run_ranks(t.overlap_over_sim, (), t.RankOptions(2, t.Backend('sim', {ALPHA}, {BANDWIDTH}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    value, in_flight, finished, blocked = map(float, done.stdout.split())
    assert value == 3.0
    assert in_flight >= ALPHA + 20000 / BANDWIDTH
    assert finished < 2.0  # it ended under the compute
    assert blocked < 1.0


def alone() -> dict[str, object]:
    group = dist.group.WORLD
    assert group is not None
    scheduler = scheduler_of(group)
    x = torch.arange(4.0)
    scheduler.wait(scheduler.all_reduce(x, "sum"))
    gathered, part = torch.empty(8, 4), torch.empty(1)
    scheduler.wait(scheduler.all_gather(gathered, torch.arange(4.0), "gather"))
    scheduler.wait(scheduler.reduce_scatter(part, torch.arange(8.0), "scatter"))
    objects: list[object] = [None] * 8
    dist.all_gather_object(objects, "mine")
    dist.barrier()
    seconds = sum(total.link_seconds for total in scheduler.totals().values())
    return {"size": scheduler.size, "x": x, "gathered": gathered, "part": part, "objects": objects, "s": seconds}


def test_one_process_stands_for_all_ranks():
    for alpha in ("10ms", "30ms"):  # one link after another in one process
        backend = Backend.parse(f"sim:alpha={alpha},bandwidth=1gbit,single_process")
        result = run_ranks(alone, (), RankOptions(8, backend))
        assert result["size"] == 8
        assert torch.equal(result["x"], torch.arange(4.0))
        assert torch.equal(result["gathered"], torch.arange(4.0).expand(8, 4))
        assert torch.equal(result["part"], torch.zeros(1))
        assert result["objects"] == ["mine"] * 8
        assert result["s"] >= 3 * {"10ms": 0.01, "30ms": 0.03}[alpha]
