"""The backend `staged` over nodes on tensors of the virtual device, beside gloo on the CPU and sums in its order."""

import time
from datetime import timedelta

import device
import pytest
import test_virtual_staged as one_node
import torch
import torch.distributed as dist
from staged_cases import on_nodes
from test_virtual_staged import in_order
from test_virtual_staged_failure import error_of

from oases.testing import RankPool

pytestmark = pytest.mark.long

ALONE = [0, 1]
"""Node of each rank: two of one rank."""
PAIRS = [0, 1, 1, 0]
LONG = 3 * (8 << 20) // 4 + 5
"""Numbers of float32 that are copied, summed and brought back in several pieces."""


@pytest.fixture(scope="module")
def four_virtual(virtual_device):
    with RankPool(4) as pool:
        yield pool


def by_nodes(each, reduce=torch.add):
    """Reduction as the nodes of PAIRS make it: within each in the order of ranks, then in the order of nodes."""
    return in_order([in_order([each[0], each[3]], reduce), in_order([each[1], each[2]], reduce)], reduce)


def in_their_order(name, *arguments):
    """Call a function of one node's tests where sums are expected to be those of PAIRS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_node, "in_order", by_nodes)
        patch.delitem(one_node.CALLS, "average")  # of averages
        return getattr(one_node, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("compares_collectives", ()), ("exchanges_messages", (4,)), ("adds_again_and_again", (5,)), ("delayed", (10,))],
)
def test_two_nodes_of_a_rank(two_virtual, name, seeds):
    assert two_virtual.run(on_nodes, ALONE, getattr(one_node, name), *seeds) == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "seeds"), [("compares_collectives", ()), ("exchanges_messages", (4,)), ("delayed", (20,))]
)
def test_two_nodes_of_two_ranks(four_virtual, name, seeds):
    assert four_virtual.run(on_nodes, PAIRS, in_their_order, name, *seeds) == [[]] * 4


def test_a_stack_over_two_nodes(two_virtual):
    two_virtual.run(on_nodes, ALONE, one_node.compare_a_stack, {"schedule": "oases", "sequence_parallel": False}, 2)


def test_long_sums(two_virtual):
    assert two_virtual.run(on_nodes, ALONE, sums_at_length) == [True] * 2


def sums_at_length():
    """Whether a sum of several pieces, its future's value, and a sum of a tensor with gaps between rows are right."""
    module, place = device.take()
    module.set_delays(1e-3, 1)
    group, each = device.staged_group(), [one_node.numbers(rank, LONG, torch.float32) for rank in range(2)]
    x = each[dist.get_rank()].to(place)
    (found,) = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    apart = torch.ones(4, 6, device=place)[:, :3]
    dist.all_reduce(apart, group=group)
    module.set_delays(0.0)
    return torch.equal(found.cpu(), sum(each)) and found.shape == x.shape and apart.tolist() == [[2.0] * 3] * 4


def test_messages_with_other_tags_arrive_in_the_order_of_the_calls(two_virtual):
    assert two_virtual.run(on_nodes, ALONE, exchanges_tags) == [[1.0, 2.0]] * 2


def exchanges_tags():
    _, place = device.take()
    group, other = device.staged_group(), 1 - dist.get_rank()
    x = [torch.full((3,), float(number), device=place) for number in (1, 2)]
    y = [torch.zeros(3, device=place) for _ in range(2)]
    works = [dist.isend(each, group=group, group_dst=other, tag=tag) for each, tag in zip(x, (2, 1), strict=True)]
    works += [dist.irecv(each, group=group, group_src=other, tag=tag) for each, tag in zip(y, (1, 2), strict=True)]
    for work in works:
        work.wait()
    return [each[0].item() for each in y]


def test_a_group_with_a_message_that_never_comes_ends(two_virtual):
    assert two_virtual.run(on_nodes, ALONE, ends_a_message, timeout_seconds=60.0) == [True] * 2


def ends_a_message():
    """Whether a message that nobody sends fails at an abort."""
    _, place = device.take()
    group = device.staged_group()
    dist.all_reduce(torch.ones(2, device=place), group=group)
    work = dist.irecv(torch.zeros(3, device=place), group=group, group_src=1 - dist.get_rank())
    time.sleep(0.2)
    group._get_backend(place).abort()
    return "given up" in error_of(lambda: work)


@device.virtual_only
def test_the_host_does_not_wait_for_another_node(two_virtual):
    assert two_virtual.run(on_nodes, ALONE, runs_ahead) == [0, 0]


def runs_ahead():
    """Times that the host has waited for the device while it queued calls to which the other node has not come."""
    module, place = device.take()
    group, store = device.staged_group(), dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    x, y, z = (torch.ones(4, device=place) for _ in range(3))
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    if rank == 1:
        store.wait(["staged over nodes has run ahead"])
    before = module.counts()["host_waits"]
    for _ in range(5):
        dist.all_reduce(x, group=group)
        dist.all_to_all_single(z, y, group=group)
        dist.isend(y, group=group, group_dst=1 - rank)
        dist.irecv(z, group=group, group_src=1 - rank).wait()
    work = dist.all_reduce(x, group=group, async_op=True)
    waits = module.counts()["host_waits"] - before
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="ALLREDUCE: not done after 10 ms"):
            work.wait(timedelta(milliseconds=10))
        store.set("staged over nodes has run ahead", "1")
    work.wait(timedelta(seconds=60))
    assert x.tolist() == [2.0**7] * 4
    assert z.tolist() == [1.0] * 4
    return waits


@pytest.mark.parametrize("gone", ["another node", "this node"])
def test_streams_do_not_wait_for_a_rank_that_never_comes(four_virtual, gone):
    found = four_virtual.run(on_nodes, PAIRS, waits_in_vain, gone)
    absent = {0, 3} if gone == "another node" else {3}
    for rank, (said, finite) in enumerate(found):
        if rank not in absent:
            lost = ["rank 0", "rank 3"] if gone == "another node" else ["rank 3", f"rank {(rank + 3) % 4}"]
            assert any(name in said for name in lost), said
            assert not finite, "a sum that was never made"


def waits_in_vain(gone):
    """Error of a sum that some ranks do not call, and whether its numbers look like one; streams end."""
    _, place = device.take()
    group, rank = device.staged_group(), dist.get_rank()
    x = torch.ones(5, device=place)
    dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    group._get_backend(place).set_timeout(timedelta(seconds=1))
    said, finite = "", True
    if rank != 3 and (rank != 0 or gone == "this node"):
        began = time.monotonic()
        said = error_of(lambda: dist.all_reduce(x, group=group, async_op=True))
        torch.accelerator.synchronize()
        assert time.monotonic() - began < 20
        finite = x.isfinite().all().item()
    dist.barrier()
    return said, finite


def test_wrong_calls_are_errors(two_virtual):
    for anyone, operation, tag, other in two_virtual.run(on_nodes, ALONE, asks_for_more):
        assert "does not receive from any rank; name the rank" in anyone
        assert "all_reduce by BAND is not available for Float" in operation
        assert "tag 1073741824 is not from 0 to 1073741822" in tag
        assert "is not cut in 2 parts by splits" in other


def asks_for_more():
    """Errors of calls that are wrong on all ranks; the group is as good as before."""
    _, place = device.take()
    group, said = device.staged_group(), []
    x, other = torch.ones(4, device=place), 1 - dist.get_rank()
    for call in (
        lambda: dist.recv(x, group=group),
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        lambda: dist.send(x, group=group, group_dst=other, tag=1 << 30),
        lambda: dist.all_to_all_single(x, x, [2, 3], [2, 2], group),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        said.append(str(caught.value).splitlines()[0])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 4
    return said
