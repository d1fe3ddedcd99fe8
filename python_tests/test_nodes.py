"""Nodes of a testbed: what goes between them pays, what stays inside does not, and nothing outlives a run."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marked_processes import wait_until_gone, with_mark
from rank_programs import refuse

from oases import testbed
from oases.errors import UsageError
from oases.launch.ranks import RankOptions, run_ranks
from oases.testbed import Nodes

HERE = Path(__file__).parent
LINK = "200mbit"
why_not = testbed.why_impossible(LINK, 3)
needs_namespaces = pytest.mark.skipif(why_not is not None, reason=f"{why_not}")


def start(call, nodes=2, ranks=2, **environment):
    """A process behind a link that calls a function, given as text with its arguments, on ranks spread over nodes."""
    code = (
        "import rank_programs, test_nodes as t\n"
        f"print(t.run_ranks({call}, t.RankOptions({ranks}, nodes=t.Nodes({nodes}, {LINK!r}), timeout_seconds=540)))"
    )
    return subprocess.Popen(
        testbed.command_behind(LINK, [sys.executable, "-c", code], nodes), cwd=HERE, text=True,
        env=testbed.environment_behind(LINK, nodes) | environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def bytes_sent():
    """Return the bytes that this node has sent to others."""
    lines = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return sum(int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo")


def price_of_all_reduces():
    """Time all-reduces of 8 MB between two ranks of a node, of different nodes, and between two such pairs at once.

    For each the seconds of the fastest of four, and the bytes that rank 0's node sent in all.
    """

    def fastest(*pairs):
        before = bytes_sent()
        groups = [dist.new_group(list(pair)) for pair in pairs]
        mine = next((group for pair, group in zip(pairs, groups, strict=True) if dist.get_rank() in pair), None)
        times, x = [], torch.zeros(2_000_000)
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            if mine is not None:
                dist.all_reduce(x, group=mine)
            ends = [0.0] * dist.get_world_size()
            dist.all_gather_object(ends, time.perf_counter())
            times.append(max(ends) - begin)  # one clock on one machine
        return min(times), bytes_sent() - before

    return {"inside": fastest((0, 1)), "across": fastest((0, 2)), "both": fastest((0, 2), (1, 3))}


def bytes_by_backend():
    """Bytes that rank 0's node sends in an all-reduce of 4 MB over all ranks, and the sum."""
    found = {}
    for backend in ("gloo", "staged"):
        group, x = dist.new_group(backend=backend), torch.ones(1_000_000)
        dist.all_reduce(x, group=group)  # ranks connect
        dist.barrier()
        before = bytes_sent()
        dist.all_reduce(x, group=group)
        dist.barrier()
        found[backend] = bytes_sent() - before, x.unique().tolist()
    return found


def places_and_bytes():
    return places(), bytes_by_backend()


def told_by(call):
    """Result of a function on four ranks of two nodes."""
    run = start(f"t.{call}, ()", ranks=4)
    output, error = run.communicate(timeout=600)
    assert run.returncode == 0, error
    return eval(output)


@pytest.fixture(scope="module")
def told():
    return told_by("places_and_bytes")


@pytest.mark.slow
@needs_namespaces
def test_ranks_of_a_node_are_near_and_nodes_are_far():
    told = told_by("price_of_all_reduces")
    seconds, sent = zip(*(told[name] for name in ("inside", "across", "both")), strict=True)
    assert sent[0] < 1e6  # of groups and clocks alone
    assert sent[1] > 4 * 8e6
    assert sent[2] > 8 * 8e6
    # Bounds that load cannot break: what a token bucket of 256 KiB lets through at this rate. Two pairs share it.
    rate = testbed.link_bytes_per_second(LINK)
    assert seconds[1] >= (8e6 - 2**18) / rate
    assert seconds[2] >= (16e6 - 2**18) / rate


def places():
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OASES_TESTBED_LINK")
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [os.environ[name] for name in names])
    return everyone


@pytest.mark.long
@needs_namespaces
def test_ranks_can_tell_where_they_are(told):
    where = f"{LINK} between 2 nodes"
    assert told[0] == [[str(r), str(r % 2), "2", str(r // 2), "2", where] for r in range(4)]


@pytest.mark.long
@needs_namespaces
def test_staged_sends_a_nodes_sum_once(told):
    by = told[1]
    assert by["gloo"][1] == by["staged"][1] == [16.0]
    assert 4e6 < by["staged"][0] < 1.1 * 4e6  # each rank a half of the node's sum
    assert by["gloo"][0] > 1.3 * by["staged"][0]


def stumble_on_the_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("a bug")
    dist.barrier()


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("rank_programs.refuse, ()", 2, ["oases: error: steps 0 is too few\n"]),
        (
            "t.stumble_on_the_last, ()",
            1,
            ["KeyError: 'a bug'", "oases: rank 1 failed:", "oases: rank 1 ended with exit code 1; the run is over"],
        ),
        (
            "rank_programs.dies_in_mid_step, (1,)",
            1,
            ["waited for all_reduce of ", "rank 1 ended with signal SIGKILL; the run is over"],
        ),
        (
            "rank_programs.dies_in_mid_step, (0,)",
            1,
            ["waited for all_reduce of ", "rank 0 ended with signal SIGKILL; the run is over"],
        ),
    ],
    ids=["mistake", "bug", "kill on node 1", "kill on node 0"],
)
def test_a_rank_that_fails_ends_the_run(call, code, says):
    mark = uuid.uuid4().hex
    run = start(call, MARK=mark)
    _, error = run.communicate(timeout=600)
    assert run.returncode == code, error
    for text in says:
        assert text in error, error
    assert error.count("Traceback") == ("KeyError" in error), error
    wait_until_gone(mark)


def agents_start(mark):
    """Whether the fork server has a child."""
    return sum("forkserver" in command for command in with_mark(mark)) > 1


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("training", "SIGINT to the group"),
        ("training", "SIGTERM"),
        ("training", "SIGKILL"),
        ("starting", "SIGINT to the group"),
        ("starting", "SIGKILL"),
    ],
)
def test_nothing_is_left(when, how, tmp_path):
    ready, mark, links = tmp_path / "ready", uuid.uuid4().hex, sorted(os.listdir("/sys/class/net"))
    run = start(f"rank_programs.tells_when_training, ({str(ready)!r},)", MARK=mark)
    while not (ready.exists() or (when == "starting" and agents_start(mark))):
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    number = signal.Signals[how.split()[0]]
    os.killpg(run.pid, number) if "group" in how else os.kill(run.pid, number)
    _, error = run.communicate(timeout=600)
    wait_until_gone(mark)
    assert sorted(os.listdir("/sys/class/net")) == links
    if number == signal.SIGKILL:
        assert run.returncode == -number
    else:
        assert run.returncode == 130
        assert "oases: interrupted" in error
        assert "Traceback" not in error


def test_mistakes(monkeypatch):
    with pytest.raises(UsageError, match=r"4 ranks .* --nodes 3; valid node counts: 1, 2, 4"):
        Nodes(3, LINK).ranks_per_node(4)
    with pytest.raises(UsageError, match=r"--nodes must be between 1 and 250, got 251"):
        Nodes(251, LINK).ranks_per_node(251)
    monkeypatch.delenv(testbed.INSIDE, raising=False)
    with pytest.raises(UsageError, match=rf"this process is in none; .* --link {LINK} --nodes 2"):
        run_ranks(refuse, (), RankOptions(4, nodes=Nodes(2, LINK)))
