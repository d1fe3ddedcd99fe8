"""The backend `staged` over nodes: collectives beside gloo, calls that are wrong on one node, and aborts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged_cases import FLOATS, on_nodes, random_cases

from oases_staged.extension import nodes_backend, staged_backend

pytestmark = pytest.mark.long

HOUR = timedelta(hours=1)
PAIRS = [0, 0, 1, 1]
"""Node of each rank: two of two."""


@pytest.mark.long
@pytest.mark.parametrize("of_rank", [[0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 2, 3]], ids=str)
def test_random_collectives_over_nodes_are_those_of_gloo(of_rank, four_ranks):
    assert four_ranks.run(on_nodes, of_rank, random_cases, 0, 150) == [150] * 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_four_thousand_random_collectives_over_nodes_are_those_of_gloo(first, four_ranks):
    assert four_ranks.run(on_nodes, [0, 1, 1, 0], random_cases, first, 1000) == [1000] * 4


def sums_over_nodes() -> list[bool]:
    """Whether sums of random numbers are those of each node in the order of ranks, then of nodes, to the bit."""
    group, equal = dist.new_group(backend="staged"), []
    for dtype, count in itertools.product(FLOATS, (3, 999, 2_000_003)):
        each = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        nodes = [(each[rank].to(wide) + each[rank + 1].to(wide)).to(dtype) for rank in (0, 2)]
        own = each[dist.get_rank()]
        dist.all_reduce(own, group=group)
        equal.append(torch.equal(own, (nodes[0].to(wide) + nodes[1].to(wide)).to(dtype)))
    return equal


@pytest.mark.long
def test_sums_over_nodes_have_one_order(four_ranks):
    for equal in four_ranks.run(on_nodes, PAIRS, sums_over_nodes):
        assert all(equal)


def sums_of_four_nodes() -> list[bool]:
    """Whether sums over four nodes of one rank, whose parts are summed in parts, are in the order of nodes."""
    store, rank, limit = dist.PrefixStore("four", dist.distributed_c10d._get_default_store()), dist.get_rank(), HOUR
    whole = dist.ProcessGroupGloo(dist.PrefixStore("whole", store), rank, 4, limit)
    local = staged_backend(dist.PrefixStore(f"node {rank}", store), 0, 1, limit)
    backend, equal = nodes_backend(whole, local, [[0], [1], [2], [3]]), []
    for count in (1, 999, 5_000_003):  # of several pieces
        each = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        backend.allreduce([each[rank]]).wait()
        wanted = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        equal.append(torch.equal(each[rank], sum(wanted)))
    return equal


@pytest.mark.long
def test_sums_of_more_than_two_nodes_are_made_in_parts(four_ranks):
    for equal in four_ranks.run(sums_of_four_nodes):
        assert all(equal)


def sums_without_autograd() -> list[list[float]]:
    """Sums of tensors that autograd or inference mode guards, in sizes and layouts that are copied first."""
    group, found = dist.new_group(backend="staged"), []
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf, group=group)
        found.append(leaf.tolist())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            apart = torch.ones(2, 4).t()
            dist.all_reduce(apart, group=group)
            odd = torch.ones(5)
            dist.all_reduce(odd, group=group)
            whole = torch.empty(4)
            dist.all_gather_into_tensor(whole, odd[:1], group)
            found += [apart.flatten().tolist(), odd.tolist(), whole.tolist()]
    return found


def test_sums_of_leaves_and_of_inference_tensors(four_ranks):
    each = [[4.0] * 8, [4.0] * 5, [4.0] * 4]
    assert four_ranks.run(on_nodes, PAIRS, sums_without_autograd) == [[[4.0] * 3, *each, *each]] * 4


def scattered() -> list[list[list[float]]]:
    """Results of a scatter into a transposed tensor, by nodes and by gloo."""
    found = []
    for group in (dist.new_group(backend="staged"), dist.new_group(backend="gloo")):
        whole = torch.empty(3, 2).t() if group.name() == "staged" else torch.empty(2, 3)
        rows = [10.0 * rank + torch.arange(6.0).view(2, 3) for rank in range(4)]
        dist.scatter(whole, rows if dist.get_rank() == 1 else None, group_src=1, group=group)
        found.append(whole.tolist())
    return found


def test_a_scatter_into_a_tensor_of_another_layout(four_ranks):
    for ours, theirs in four_ranks.run(on_nodes, PAIRS, scattered):
        assert ours == theirs


def refusals_over_nodes() -> list[str]:
    """Errors of groups and calls that nodes cannot have; the group goes on after those that all ranks make."""
    said = []
    if dist.get_rank() < 3:
        with pytest.raises(ValueError, match="as many ranks of each node") as caught:
            dist.new_group([0, 1, 2], backend="staged", use_local_synchronization=True)
        said.append(str(caught.value))
    group = dist.new_group(backend="staged")
    backend = group._get_backend(torch.device("cpu"))
    elsewhere, other = [torch.zeros(4, device="meta")], (dist.get_rank() + 2) % 4
    for call in (
        lambda: dist.all_reduce(torch.zeros(3).to_sparse(), group=group),
        lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND, group=group),
        lambda: dist.recv(torch.zeros(3), group=group),
        lambda: backend.send(elsewhere, other, 0),
        lambda: backend.recv(elsewhere, other, 0),
        lambda: backend.broadcast(elsewhere, dist.distributed_c10d.BroadcastOptions()),
        lambda: backend.allgather([elsewhere * 4], elsewhere, dist.distributed_c10d.AllgatherOptions()),
        lambda: backend.alltoall_base(elsewhere[0], elsewhere[0], [], []),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            call()
        said.append(str(refused.value).splitlines()[0])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    assert tensor.tolist() == [4.0] * 3, "the group is as good as before"
    return said


def test_groups_and_calls_that_nodes_cannot_have_are_refused(four_ranks):
    (uneven, layout, operation, anyone, *devices), *_ = four_ranks.run(on_nodes, PAIRS, refusals_over_nodes)
    assert uneven == "staged joins as many ranks of each node, and this group has 2, 1 of them; use gloo for it"
    assert "takes dense tensors" in layout
    assert "all_reduce by BAND is not available for Float" in operation
    assert "name the rank" in anyone
    assert len(devices) == 5
    for said in devices:
        assert said.startswith("staged: streams of meta cannot wait for words of host memory in this build")


WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "refused": (
        lambda group: dist.all_reduce(torch.ones(4).to_sparse(), group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
    ),
    "another size": (
        lambda group: dist.all_reduce(torch.ones(8), group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
    ),
    "no numbers": (
        lambda group: dist.all_reduce(torch.ones(0), group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
    ),
    "another gather": (
        lambda group: dist.all_gather_into_tensor(torch.ones(32), torch.ones(8), group),
        lambda group: dist.all_gather_into_tensor(torch.ones(16), torch.ones(4), group),
    ),
    "a gather of another type": (
        lambda group: dist.all_gather_into_tensor(
            torch.ones(16, dtype=torch.int), torch.ones(4, dtype=torch.int), group
        ),
        lambda group: dist.all_gather_into_tensor(torch.ones(16), torch.ones(4), group),
    ),
}
"""Calls of one rank and of the others."""


def calls_again(wrong: str) -> list[str]:
    """Errors, or "", of a call that is wrong on rank 1, and of the next one, which is right on all."""
    group, said = dist.new_group(backend="staged"), []
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=2))
    of_one, of_others = WRONG[wrong]
    for call in (of_one if dist.get_rank() == 1 else of_others, of_others):
        try:
            call(group)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return said


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_is_wrong_on_one_node_is_never_taken_for_the_next(wrong, four_ranks):
    found = four_ranks.run(on_nodes, PAIRS, calls_again, wrong)
    for first, second in found:
        assert first, "the other node waits for its timeout"
        assert second, "a result of two different calls"
    why = "rank 1 was refused its call" if wrong == "refused" else "ranks do not call the same collective"
    for first, _ in found[:2]:
        assert first.startswith(f"ValueError: {why}")


def aborts() -> list[str]:
    """Errors of a sum that waits for another node when this rank aborts it, and of the next one."""
    group, said = dist.new_group(backend="staged"), []
    if dist.get_rank() < 2:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        time.sleep(0.3)  # both ranks wait for the other node
        group._get_backend(torch.device("cpu")).abort()
        for call in (work.wait, lambda: dist.all_reduce(torch.ones(4), group=group)):
            with pytest.raises(dist.DistBackendError) as caught:
                call()
            said.append(str(caught.value).splitlines()[0])
    dist.barrier()
    return said


def test_an_abort_ends_waits_for_other_nodes(four_ranks):
    for said in four_ranks.run(on_nodes, PAIRS, aborts, timeout_seconds=60.0)[:2]:
        assert len(said) == 2
        assert all("aborted the group" in each for each in said)


def barrier_among_broadcasts() -> list[float]:
    """Numbers of a broadcast that some ranks call before their thread has come to a barrier, and some after."""
    group, rank = dist.new_group(backend="staged"), dist.get_rank()
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=20))
    x = torch.full((3,), float(rank))
    works = [dist.all_reduce(torch.ones(4_000_000), group=group, async_op=True), dist.barrier(group, async_op=True)]
    if rank % 2:
        time.sleep(1.0)
    works.append(dist.broadcast(x, group_src=2, group=group, async_op=True))
    for work in works:
        work.wait()
    return x.tolist()


def test_a_barrier_runs_among_broadcasts(four_ranks):
    assert four_ranks.run(on_nodes, PAIRS, barrier_among_broadcasts) == [[2.0] * 3] * 4
