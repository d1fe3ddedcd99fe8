"""Failures of ranks whose tensors the backend `staged` moves on the virtual device: no stream waits for ever."""

import gc
import itertools
import os
import signal
import time
from datetime import timedelta

import device
import pytest
import torch
import torch.distributed as dist

from oases.core.execution.failure import FailedRankError, Failure, has_failed, monitor_of
from oases.core.execution.group import scheduler_of
from oases.launch import fork_server
from oases.launch.agents import loopback_store
from oases.testing import RankPool

pytestmark = pytest.mark.long


@pytest.mark.parametrize("first", [0, 1])
def test_calls_that_differ_are_errors_on_all_ranks(two_virtual, first):
    differ = "ranks do not call the same collective: rank 0 calls"
    for number, wanted in enumerate(
        (
            f"all_reduce: {differ} all_reduce with Float of 12 bytes by SUM, rank 1 calls all_reduce with Float of",
            f"broadcast: {differ} broadcast with Float of 12 bytes and root 0, rank 1 calls broadcast with Float",
            "all_reduce: rank 1 was refused its call: all_reduce: the tensor of shape",
        )
    ):
        for rank, (said, passed_off) in enumerate(two_virtual.run(calls_another, number, first)):
            assert said.startswith(wanted) or (rank == 1 and number == 2 and "has gaps" in said)
            assert not passed_off, "finite numbers, for a sum that was never made"


def calls_another(number, first):
    """Error of the group, and whether a sum that this rank waited for looks like one."""
    _, place = device.take()
    group, store, rank = device.staged_group(), dist.distributed_c10d._get_default_store(), dist.get_rank()
    x = torch.ones(3 + (rank if number == 0 else 0), device=place)
    key = f"calls another {number} {first}"
    if rank != first:
        store.wait([key])
    said, passed_off = "", False
    try:
        if number == 1:
            work = dist.broadcast(x, group=group, group_src=rank, async_op=True)
        else:
            with_gaps = torch.ones(8, device=place)[::2]
            work = dist.all_reduce(with_gaps if number == 2 and rank == 1 else x, group=group, async_op=True)
    except (ValueError, dist.DistBackendError) as error:
        said = str(error)
    store.set(key, "1")
    if not said:
        end = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        torch.accelerator.synchronize()  # no stream waits any more
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        said = str(caught.value)
        passed_off = number != 1 and x.isfinite().all().item()  # the root of a broadcast keeps its numbers
    return said.splitlines()[0], passed_off


def test_parts_that_differ_are_an_error_on_all_ranks(two_virtual):
    for said in two_virtual.run(sends_other_parts):
        assert said == ("all_to_all: rank 0 sends 8 bytes to rank 1, which receives 12; give both the same splits")


def sends_other_parts():
    _, place = device.take()
    group, rank = device.staged_group(), dist.get_rank()
    x, whole = torch.ones(4, device=place), torch.empty(4 + rank, device=place)
    return error_of(lambda: dist.all_to_all_single(whole, x, [2 + rank, 2], [2, 2], group, async_op=True))


def test_an_all_to_all_ends_where_a_rank_fails_instead_of_calling_it(two_virtual):
    for said, passed_off in two_virtual.run(fails_instead):
        assert "rank 1 failed at rows: ValueError: no rows" in said
        assert not passed_off, "finite numbers, of an exchange that was never made"


def fails_instead():
    """Error of a rank that has called an all-to-all, which rank 1 fails to call; whether it has numbers."""
    _, place = device.take()
    group, store, rank = device.staged_group(), dist.distributed_c10d._get_default_store(), dist.get_rank()
    scheduler, monitor = scheduler_of(group), monitor_of(group)
    x, rows = torch.ones(4, device=place), torch.zeros(6, device=place)
    scheduler.wait(scheduler.all_reduce(x))
    if rank == 1:
        store.wait(["staged has called an all-to-all"])
        monitor.tell(Failure(1, "rows", "ValueError: no rows"))
    else:
        scheduler.wait(scheduler.all_to_all(rows, x, [1, 3], [1, 5]))
        store.set("staged has called an all-to-all", "1")
        torch.accelerator.synchronize()  # no stream waits for ever
    while not has_failed():
        time.sleep(0.01)
    with pytest.raises(FailedRankError) as caught:
        monitor.check()
    return str(caught.value), rank == 0 and rows.isfinite().all().item()


def test_messages_of_other_sizes_are_errors_at_both_ends(two_virtual):
    for said in two_virtual.run(sends_another_size):
        assert "rank 1 has a message of 12 bytes of Float, rank 0 has a message of 16 bytes of Float" in said


def sends_another_size():
    _, place = device.take()
    group, rank = device.staged_group(), dist.get_rank()
    x, said = torch.ones(4 - rank, device=place), ""
    try:
        work = dist.isend(x, group=group, group_dst=0) if rank else dist.irecv(x, group=group, group_src=1)
    except dist.DistBackendError as error:
        said = str(error)
    if not said:
        end = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        said = str(caught.value)
    return said.splitlines()[0]


@device.virtual_only
def test_a_rank_that_changes_its_device_is_named_on_all(two_virtual):
    for said in two_virtual.run(changes_its_device):
        assert "rank 1 gave this group a tensor on" in said
        assert "keep to one device, or make a group for each" in said


def changes_its_device():
    _, place = device.take()
    group = device.staged_group()
    x = torch.ones(3, device=place)
    dist.all_reduce(x, group=group)
    elsewhere = torch.ones(3, device=torch.device(place.type, 3 - place.index))
    return error_of(lambda: dist.all_reduce(elsewhere if dist.get_rank() else x, group=group, async_op=True))


def error_of(start):
    """First line of the error of a collective, at its start or at the first wait that follows its end."""
    try:
        work = start()
        end = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        work.wait()
    except (ValueError, dist.DistBackendError) as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.long
@pytest.mark.parametrize("message", [False, True])
@device.virtual_only
def test_a_rank_whose_streams_cannot_be_made_is_named_on_all(virtual_device, message):
    with RankPool(2) as pool:
        for said in pool.run(lacks_words, message):
            assert "staged: streams of virtual cannot wait for words of host memory in this build" in said


def lacks_words(message):
    """Error of a sum, or of a message, of which one rank's device cannot wait for words."""
    module, place = device.take()
    rank = dist.get_rank()
    if rank:
        module.words = None  # looks as if they were known to the backend
    group, x = device.staged_group(), torch.ones(3, device=place)
    if not message:
        return error_of(lambda: dist.all_reduce(x, group=group, async_op=True))
    if rank:
        return error_of(lambda: dist.isend(x, group=group, group_dst=0))
    return error_of(lambda: dist.irecv(x, group=group, group_src=1))


@pytest.mark.long
@device.virtual_only
def test_a_group_of_a_broken_device_ends(two_virtual):
    assert two_virtual.run(ends_broken) == ["ended"] * 2


def ends_broken():
    module, place = device.take()
    group = device.staged_group()
    dist.all_reduce(torch.ones(3, device=place), group=group)
    torch.accelerator.synchronize()
    module.set_broken(True)
    try:
        dist.destroy_process_group(group)
        del group
        gc.collect()
    finally:
        module.set_broken(False)
    return "ended"


def test_a_rank_that_never_comes_is_named_at_the_timeout(two_virtual):
    said, finite = two_virtual.run(waits_in_vain)[0]
    assert said.startswith("all_reduce: rank 0 timed out after 300 ms waiting for rank 1")
    assert not finite


def waits_in_vain():
    _, place = device.take()
    group, store = device.staged_group(), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["staged has waited in vain"])
        return "", True
    x, options = torch.ones(3, device=place), dist.distributed_c10d.AllreduceOptions()
    options.timeout = timedelta(seconds=0.3)
    group._get_backend(place).allreduce([x], options).wait()
    finite = x.isfinite().all().item()  # the host waits for the device
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(x, group=group)
    store.set("staged has waited in vain", "1")
    return str(caught.value).splitlines()[0], finite


def moves_for_ever(rank, size, collective, port, connection):
    """Collectives of a device until one fails. Send a first message, then the error and whether a result is wrong."""
    fork_server.release_signals()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=device.TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=device.TIMEOUT)
    _, place = device.take()
    group = device.staged_group()
    x = torch.ones(size << 20, device=place)  # of several pieces
    sent = torch.empty_like(x)
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    connection.send(os.getpid())
    for number in itertools.count(1):
        result = number * (size if collective == "all_reduce" else 1)
        x.fill_(number), sent.fill_(number)
        try:
            if collective == "all_reduce":
                work = dist.all_reduce(x, group=group, async_op=True)
            else:
                work = dist.all_to_all_single(x.fill_(0), sent, group=group, async_op=True)
        except dist.DistBackendError as error:  # another rank has told before
            said, passed_off = error, False
            break
        torch.accelerator.synchronize()
        if not work.is_success():
            with pytest.raises(dist.DistBackendError) as caught:
                work.wait()
            said, passed_off = caught.value, (x.isfinite() & (x != result)).any().item()
            break
    connection.send((str(said).splitlines()[0], passed_off))
    connection.recv()


@pytest.mark.long
@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_a_killed_rank_ends_the_waits_of_the_others(virtual_device, collective):
    context, store, size, victim = fork_server.context(), loopback_store(), 3, 1
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        arguments = (fork_server.Launcher(), moves_for_ever, rank, size, collective, store.port, theirs)
        processes.append(context.Process(target=fork_server.as_started_by, args=arguments, daemon=True))
        processes[-1].start()
        ends.append(ours)
    try:
        for end in ends:
            assert end.poll(60)
            end.recv()
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank in (0, 2):
            assert ends[rank].poll(60), f"rank {rank} hangs"
            said, passed_off = ends[rank].recv()
            assert said == f"{collective}: rank {victim} (process {processes[victim].pid}) has ended"
            assert not passed_off, "finite numbers that are no result"
    finally:
        for process in processes:
            process.kill()
            process.join(10)
