"""Groups that carry quantised sums: any CPU backend, the group's timeout, and ranks that die or stall in a sum."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from oases.core.blocks.chooser import lossy_wires
from oases.core.execution.communication import add_wire, carries_codes
from oases.core.execution.group import scheduler_of
from oases.errors import UsageError
from oases.extension import QuantizedBackend, single_process_backend
from oases.launch import fork_server
from oases.launch.agents import loopback_store
from oases.testing import RankPool

OP = "F 3.1 (stack 0, layer 1, MLP)"


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks for wires of groups that end: torch names wires by the number of groups, and other tests' would clash."""
    with RankPool(2) as pool:
        yield pool


def check_sum(group):
    scheduler = scheduler_of(group)
    add_wire(group)
    x = torch.full((300,), 1.0 + dist.get_rank())
    scheduler.wait(scheduler.all_reduce(x, "carried", wire="int8"))
    assert torch.equal(x, torch.full((300,), 3.0))


def check_backend(name):
    group = dist.new_group(backend=name)
    assert carries_codes(group)
    assert lossy_wires(group, torch.ones(3)) == ["bfloat16", "int8"]
    check_sum(group)


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo", "staged", "cpu:staged"])
def test_cpu_backends_carry_codes(own_ranks, name):
    own_ranks.run(check_backend, name)


def check_debugged(name):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        check_sum(dist.new_group(backend=name))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@pytest.mark.parametrize("name", ["gloo", "staged"])
def test_groups_whose_collectives_torch_compares(own_ranks, name):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL asks backends how many collectives they have started."""
    own_ranks.run(check_debugged, name)


def check_inference(mode):
    """Sums of both types and an all-to-all of tensors that autograd, or inference mode, guards on other threads."""
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    scheduler = scheduler_of(group)
    add_wire(group)
    with mode():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.full((300,), 1.0 + rank, dtype=dtype, requires_grad=mode is torch.no_grad)
            scheduler.wait(scheduler.all_reduce(x, "carried", wire="int8"))
            assert x.tolist() == [3.0] * 300
            part = torch.full((4,), 1.0 + rank, dtype=dtype)
            whole = torch.empty(2, 4, dtype=dtype, requires_grad=mode is torch.no_grad)
            scheduler.wait(scheduler.all_gather(whole, part, "carried", "int8"))
            assert whole.tolist() == [[1.0] * 4, [2.0] * 4]
            received = torch.empty(4, dtype=dtype, requires_grad=mode is torch.no_grad)
            scheduler.wait(scheduler.all_to_all(received, part, [2, 2], [2, 2], "carried", "int8"))
            assert received.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_leaves_and_inference_tensors(own_ranks, mode):
    own_ranks.run(check_inference, mode)


@pytest.mark.parametrize("splits", [[], [1, 1], [1, 2, 0]])
def test_parts_that_do_not_cut_the_tensor_are_refused(splits):
    """Otherwise the rest of the output would keep what its memory held."""
    backend = QuantizedBackend(single_process_backend(0, 2))
    whole, equal = torch.zeros(3), torch.zeros(4)
    for output, of_output, given, of_input in ((whole, splits, equal, []), (equal, [], whole, splits)):
        with pytest.raises(RuntimeError, match=r"does not divide equally|Split sizes|Number of tensor splits"):
            backend.alltoall_base(output, given, of_output, of_input)


def test_a_group_without_a_named_backend(script_ranks, tmp_path):
    script = tmp_path / "unnamed.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from test_wire_groups import check_sum\n"
        "dist.init_process_group()\n"
        "check_sum(dist.group.WORLD)\n"
        "print('summed')\n"
        "dist.destroy_process_group()\n"
    )
    assert "summed" in script_ranks.run(script, folder=tmp_path)


def check_fake():
    group = dist.new_group(backend="fake")
    assert not carries_codes(group)
    assert lossy_wires(group, torch.ones(3)) == ["bfloat16"]
    with pytest.raises(UsageError, match=r"'int8' needs a group with a backend .* gloo, staged or nccl, got .*fake"):
        add_wire(group)


def test_a_group_that_cannot_carry_bytes(two_ranks):
    two_ranks.run(check_fake)


def serve(rank, port, how, backend, connection):
    """A sum of all ranks, then one in which the last rank dies or never comes; send the error of the others."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    timeout = timedelta(seconds=3 if how == "stalls" else 120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=120))
    group = dist.new_group(backend=backend, timeout=timeout)
    scheduler = scheduler_of(group)
    add_wire(group)
    scheduler.wait(scheduler.all_reduce(torch.ones(1000), "F 1.0 (stack 0, layer 0, MLP)", wire="int8"))
    try:
        if rank < 2 or how == "dies":
            ticket = scheduler.all_reduce(torch.ones(5_000_000), OP, wire="int8")
        if rank == 2 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            connection.recv()  # which nobody sends
        scheduler.wait(ticket)
        connection.send("no error")
    except RuntimeError as error:
        connection.send(str(error))
    os._exit(0)


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("how", "backend"), [("dies", "gloo"), ("dies", "staged"), ("stalls", "gloo"), ("stalls", "staged")]
)
def test_a_rank_lost_in_a_sum_is_an_error_on_the_others(how, backend):
    context, store, ranks = fork_server.context(), loopback_store(), []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=fork_server.as_started_by,
            args=(fork_server.Launcher(), serve, rank, store.port, how, backend, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        for _, connection in ranks[:2]:
            assert connection.poll(60), "a rank waits longer than its group's timeout"
            assert OP in connection.recv()
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
