"""The backend `staged` on tensors of the virtual device, beside gloo on the CPU and sums in the order of ranks."""

import gc
import time
from datetime import timedelta

import device
import pytest
import torch
import torch.distributed as dist
from virtual_stacks import given, make_stack, on, step

from oases.core.execution.group import scheduler_of
from oases.testing import RankPool

pytestmark = pytest.mark.long

PIECE = 2 << 20
"""Bytes of a piece in a group of few ranks."""
SIZES = (0, 1, 5, 1000, 2 * PIECE // 8 + 3)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


@pytest.fixture(scope="module")
def pool(virtual_device, two_virtual, three_virtual):
    """Pools of 2, 3 and 4 ranks, by size."""
    with RankPool(4) as four:
        yield {2: two_virtual, 3: three_virtual, 4: four}


def numbers(rank, count, dtype, seed=0):
    """Random numbers of a rank, which every rank can make."""
    return (10 * torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank))).to(dtype)


def in_order(each, reduce=torch.add):
    """Reduction in the order of ranks; of 16 bits in float32, rounded once."""
    total = each[0].float() if each[0].dtype.itemsize == 2 else each[0].clone()
    for other in each[1:]:
        total = reduce(total, other)
    return total.to(each[0].dtype)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_are_those_of_the_cpu_to_the_bit(pool, size):
    for wrong in pool[size].run(compares_collectives):
        assert wrong == []


def compares_collectives():
    """Collectives whose result on the device is another than on the CPU."""
    _, place = device.take()
    group, rank, size = device.staged_group(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in TYPES:
        for count in SIZES:
            each = [numbers(other, count, dtype) for other in range(size)]
            for name, call in CALLS.items():
                found, wanted = call(each, rank, place, group)
                wrong += [f"{name} of {count} {dtype}"] * (not torch.equal(found.cpu(), wanted))
    return wrong


def all_reduce(each, rank, place, group):
    x = each[rank].to(place)
    dist.all_reduce(x, group=group)
    return x, in_order(each)


def other_reductions(each, rank, place, group):
    """Those that are exact in any order, beside gloo's."""
    names = ("MAX", "MIN") if each[0].is_floating_point() else ("MAX", "PRODUCT", "BAND", "BOR", "BXOR")
    found, expected = [], []
    for name in names:
        x, y = each[rank].to(place), each[rank].clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, name), group=group)
        dist.all_reduce(y, getattr(dist.ReduceOp, name))
        found.append(x), expected.append(y)
    return torch.cat(found), torch.cat(expected)


def average(each, rank, place, group):
    x = each[rank].to(place)
    if x.is_floating_point():
        dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
        total = in_order([y.float() if y.dtype.itemsize == 2 else y for y in each])
        return x, (total / len(each)).to(x.dtype)
    return x, each[rank]


def reduce_to_one(each, rank, place, group):
    x = each[rank].to(place)
    dist.reduce(x, group=group, group_dst=1)
    return x, in_order(each) if rank == 1 else each[rank]


def broadcast(each, rank, place, group):
    x = each[rank].to(place)
    dist.broadcast(x, group=group, group_src=len(each) - 1)
    return x, each[-1]


def all_gather(each, rank, place, group):
    whole = torch.empty(len(each) * each[0].numel(), dtype=each[0].dtype, device=place)
    dist.all_gather_into_tensor(whole, each[rank].to(place), group)
    expected = torch.empty(whole.shape, dtype=whole.dtype)
    dist.all_gather_into_tensor(expected, each[rank])
    return whole, expected


def all_gather_a_list(each, rank, place, group):
    parts = [torch.empty_like(x, device=place) for x in each]
    dist.all_gather(parts, each[rank].to(place), group)
    return torch.cat(parts), torch.cat(each)


def reduce_scatter(each, rank, place, group):
    size, rows = len(each), each[0].numel() // len(each)
    part = torch.empty(rows, dtype=each[0].dtype, device=place)
    dist.reduce_scatter_tensor(part, each[rank][: rows * size].to(place), group=group)
    return part, in_order(each)[rows * rank : rows * (rank + 1)]


def scatter(each, rank, place, group):
    part = torch.empty_like(each[0], device=place)
    dist.scatter(part, [x.to(place) for x in each] if rank == 0 else None, group=group, group_src=0)
    return part, each[rank]


def all_to_all(each, rank, place, group):
    """Equal parts, parts that grow with the ranks, and parts that some pairs alone have, of many pieces."""
    size, found, wanted = len(each), [], []
    least, most = each[0].numel() // size**2, each[0].numel()
    equal, growing = [[least] * size] * size, [[least * (to + at) // 2 for to in range(size)] for at in range(size)]
    forth = [[most * (to == (at + 1) % size) for to in range(size)] for at in range(size)]
    for parts in (equal, growing, forth):
        sent, received = parts[rank], [other[rank] for other in parts]
        whole = torch.empty(sum(received), dtype=each[0].dtype, device=place)
        dist.all_to_all_single(whole, each[rank][: sum(sent)].to(place), received, sent, group)
        found.append(whole)
        wanted += [each[at][: sum(parts[at])].split(parts[at])[rank] for at in range(size)]
    return torch.cat(found), torch.cat(wanted)


CALLS = {
    each.__name__: each
    for each in (
        all_reduce, other_reductions, average, reduce_to_one, broadcast, all_gather, all_gather_a_list,
        reduce_scatter, scatter, all_to_all,
    )
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_under_fifty_random_delays(pool, size):
    assert pool[size].run(delayed, 50) == [[]] * size


def delayed(seeds):
    """Seeds under which collectives that are under way together, and whose tensors are let go at once, are wrong.

    Sizes of several pieces and of less than one take turns.
    """
    module, place = device.take()
    group, rank, size = device.staged_group(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in range(1, seeds + 1):
        module.set_delays(1e-3, seed)
        each = [
            numbers(other, 3 * PIECE // 4 + 7 if seed % 10 == 0 else 999, torch.float32, seed)
            for other in range(size)
        ]
        x = each[rank].to(place).mul_(2)
        works = [dist.all_reduce(x, group=group, async_op=True)]
        whole = torch.empty(size * x.numel(), device=place)
        works.append(dist.all_gather_into_tensor(whole, each[rank].to(place), group, async_op=True))
        parts = torch.empty_like(whole)
        works.append(dist.all_to_all_single(parts, torch.cat(each).to(place), group=group, async_op=True))
        part = torch.empty_like(x)
        works.append(dist.reduce_scatter_tensor(part, torch.cat(each).to(place).mul(2), group=group, async_op=True))
        torch.full_like(x, 7.0)  # takes memory that was let go
        for work in works:
            work.wait()
        same = [
            torch.equal(x.cpu(), in_order([2 * y for y in each])),
            torch.equal(whole.cpu(), torch.cat(each)),
            torch.equal(parts.cpu(), torch.cat([each[rank]] * size)),
            torch.equal(part.cpu(), in_order([2 * each[rank]] * size)),
        ]
        wrong += [] if all(same) else [seed]
    return wrong


@pytest.mark.parametrize(
    ("schedule", "sequence_parallel"),
    [
        pytest.param("sync", False, marks=pytest.mark.long),
        ("oases", False),
        pytest.param("cross_pass", False, marks=pytest.mark.long),
        ("oases", True),
    ],
)
def test_gradients_of_a_stack_are_those_of_the_cpu(two_virtual, schedule, sequence_parallel):
    two_virtual.run(compare_a_stack, {"schedule": schedule, "sequence_parallel": sequence_parallel}, 3)


def compare_a_stack(options, seeds):
    module, place = device.take()
    group = device.staged_group()
    expected = step(make_stack("cpu", **options), *given())
    stack, (x, grad) = make_stack(place, group, **options), on(place, given())
    for seed in range(seeds):
        module.set_delays(1e-3, 1 + seed)
        found = step(stack, x, grad)
        for a, b in zip(on("cpu", found), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert scheduler_of(group).totals()


@device.virtual_only
def test_the_host_does_not_wait(two_virtual):
    assert two_virtual.run(runs_ahead) == [0, 0]


def runs_ahead():
    """Times that the host has waited for the device while it queued collectives that a rank has not come to."""
    module, place = device.take()
    group, store = device.staged_group(), dist.distributed_c10d._get_default_store()
    x, y, z = torch.ones(5, device=place), torch.ones(4, device=place), torch.zeros(4, device=place)
    dist.all_reduce(x, group=group)  # makes the streams
    torch.accelerator.synchronize()
    if dist.get_rank() == 1:
        store.wait(["staged has run ahead"])
    before = module.counts()["host_waits"]
    for _ in range(20):
        dist.all_reduce(x, group=group)
        dist.all_to_all_single(z, y, group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    waits = module.counts()["host_waits"] - before
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="all_reduce: not done after 10 ms"):
            work.wait(timedelta(milliseconds=10))
        store.set("staged has run ahead", "1")
    work.wait(timedelta(seconds=60))  # the host's time was asked for
    assert work.is_success()
    (found,) = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    assert found.tolist() == [2.0**23] * 5
    assert z.tolist() == [1.0] * 4
    return waits


@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_in_their_order(pool, size):
    assert pool[size].run(exchanges_messages, 12) == [[]] * size


def exchanges_messages(seeds):
    """Messages that are not those sent: around a ring, both ways at once, among collectives, under random delays."""
    module, place = device.take()
    group, rank, size = device.staged_group(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in range(1, seeds + 1):
        module.set_delays(1e-3, seed)
        works, received, sums = [], [], []
        for number, count in enumerate((5, 0, 3 * PIECE // 8 + 1 if seed % 4 == 0 else 700, 1)):
            for to in ((rank + 1) % size, (rank - 1) % size):
                y = numbers(rank, count, torch.float32, 10 * seed + number).to(place)
                works.append(dist.isend(y, group=group, group_dst=to))
            for source in ((rank - 1) % size, (rank + 1) % size):
                z = torch.empty(count, device=place)
                works.append(dist.irecv(z, group=group, group_src=source))
                received.append((z, numbers(source, count, torch.float32, 10 * seed + number)))
            sums.append(torch.ones(1000, device=place))
            works.append(dist.all_reduce(sums[-1], group=group, async_op=True))
        for work in works:
            work.wait()
        wrong += [seed for z, sent in received if not torch.equal(z.cpu(), sent)]
        wrong += [seed for x in sums if x.tolist() != [float(size)] * 1000]
    module.set_delays(0.0, 1)
    return wrong


def test_collectives_of_one_tensor_follow_one_another(two_virtual):
    assert two_virtual.run(adds_again_and_again, 10) == [[]] * 2


def adds_again_and_again(seeds):
    """Seeds under which sums of sums, which nobody waits for in between, are wrong."""
    module, place = device.take()
    group, wrong = device.staged_group(), []
    for seed in range(1, seeds + 1):
        module.set_delays(1e-3, seed)
        x = torch.ones(1000 if seed % 5 else 3 * PIECE // 8, device=place)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(4)]
        works[-1].wait()
        wrong += [seed] * (not torch.equal(x.cpu(), torch.full(x.shape, 16.0)))
    module.set_delays(0.0, 1)
    return wrong


@pytest.mark.long
@device.virtual_only
def test_nothing_grows(two_virtual):
    for before, after in two_virtual.run(counts_of_calls):
        assert after["events"] <= before["events"], "of 300 collectives"
        assert after | {"events": 0} == before | {"events": 0}
    assert two_virtual.run(pinned_memories) == [0, 0], "the group has been destroyed"


def counts_of_calls():
    module, place = device.take()
    group = device.staged_group()
    x, whole = torch.ones(1000, device=place), torch.empty(2000, device=place)

    def calls(count):
        for _ in range(count):
            dist.all_reduce(x, group=group)
            dist.all_gather_into_tensor(whole, x, group)
            dist.reduce_scatter_tensor(x, whole, group=group)
        torch.accelerator.synchronize()
        return module.counts() | {"host_waits": 0}

    before = calls(2)
    after = calls(100)
    end = time.monotonic() + 20  # the host sees a little later what has been done
    while after["events"] > before["events"] and time.monotonic() < end:
        time.sleep(0.05)
        after = calls(0)
    dist.destroy_process_group(group)
    return before, after


def pinned_memories():
    gc.collect()
    return device.loaded().counts()["pinned"]


@device.virtual_only
def test_what_it_has_not_names_a_remedy(two_virtual):
    for said in two_virtual.run(asks_for_more):
        anyone, operation, other = said
        assert "does not receive a tensor of a device from any rank; name it" in anyone
        assert "all_reduce by BAND is not available for Float" in operation
        assert "keep to one device, or make a group for each" in other


def asks_for_more():
    _, place = device.take()
    group, said = device.staged_group(), []
    x = torch.ones(4, device=place)
    dist.all_reduce(x, group=group)
    elsewhere = torch.ones(4, device=torch.device(place.type, 3 - place.index))
    for call in (
        lambda: dist.recv(x, group=group),
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        lambda: dist.all_reduce(elsewhere, group=group),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        said.append(str(caught.value).splitlines()[0])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4.0] * 4, "refused on all ranks: the group is as good as before"
    return said
