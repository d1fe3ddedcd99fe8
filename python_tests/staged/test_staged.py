"""The backend `staged`: every collective beside gloo, within a machine."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged_cases import FLOATS, random_cases

from oases.layers import OverlappedStack
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.testing import RankPool

pytestmark = pytest.mark.long

OTHERS = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64)
"""Types that gloo does not have, and that can be moved all the same."""


@pytest.fixture(scope="module")
def pool(two_ranks, four_ranks):
    """Function that finds ranks by their number."""
    with RankPool(3) as three:
        yield {2: two_ranks, 3: three, 4: four_ranks}.__getitem__


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_collectives_are_those_of_gloo(size, pool):
    assert pool(size).run(random_cases, 0, 150) == [150] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_ten_thousand_random_collectives_are_those_of_gloo(size, first, pool):
    assert pool(size).run(random_cases, first, 1000) == [1000] * size


def moved_types() -> list[list[float]]:
    """Numbers of each other type after a broadcast and an all-gather."""
    group, rank, found = dist.new_group(backend="staged"), dist.get_rank(), []
    for dtype in OTHERS:
        tensor = torch.tensor([2.0 + rank, 1.0]).to(dtype)
        whole = torch.empty(4, dtype=dtype)
        dist.all_gather_into_tensor(whole, tensor, group)
        dist.broadcast(tensor, group_src=1, group=group)
        found.append(torch.cat([whole, tensor]).to(torch.complex64).real.tolist())
    return found


def test_types_that_gloo_lacks_are_moved(two_ranks):
    assert two_ranks.run(moved_types) == [[[2.0, 1.0, 3.0, 1.0, 3.0, 1.0]] * len(OTHERS)] * 2


def inference_parts() -> list[list[float]]:
    """Parts that a thread of the backend gathers into inference tensors whose numbers lie apart."""
    group, rank = dist.new_group(backend="staged"), dist.get_rank()
    with torch.inference_mode():
        parts = [torch.empty(3, 2).t() for _ in range(2)]
        dist.all_gather(parts, torch.full((2, 3), 1.0 + rank), group, async_op=True).wait()
    return [part.flatten().tolist() for part in parts]


def test_inference_tensors_are_filled(two_ranks):
    assert two_ranks.run(inference_parts) == [[[1.0] * 6, [2.0] * 6]] * 2


def sums() -> list[bool]:
    """Whether sums of random numbers are those in the order of ranks, to the bit."""
    group, equal = dist.new_group(backend="staged"), []
    size = dist.get_world_size()
    for dtype, count in itertools.product(FLOATS, (4, 999, 16_384, 2_000_003)):
        each = [torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
        wanted = each[0].float() if dtype.itemsize == 2 else each[0].clone()
        for tensor in each[1:]:
            wanted += tensor
        own = each[dist.get_rank()]
        part = torch.empty(count // size, dtype=dtype)
        dist.reduce_scatter_tensor(part, own[: part.numel() * size], group=group)
        equal.append(torch.equal(part, wanted.to(dtype)[: part.numel() * size].chunk(size)[dist.get_rank()]))
        dist.all_reduce(own, group=group)
        equal.append(torch.equal(own, wanted.to(dtype)))
    return equal


@pytest.mark.parametrize("size", [3, 4])
def test_sums_are_in_the_order_of_ranks_to_the_bit(size, pool):
    for equal in pool(size).run(sums):
        assert all(equal)


def refusals() -> list[str]:
    """First lines of the errors of calls that are wrong on one rank or on all."""
    group, rank, said = dist.new_group(backend="staged"), dist.get_rank(), []
    for call in (
        lambda: dist.all_reduce(torch.zeros(3 + rank), group=group),
        lambda: dist.broadcast(torch.zeros(3), group_src=rank, group=group),
        lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND, group=group),
        lambda: dist.all_reduce(torch.zeros(8)[::2], group=group),
        lambda: dist.all_reduce(torch.zeros(3).to_sparse(), group=group),
        # On one rank alone, before it meets the other.
        lambda: dist.all_reduce(torch.zeros(8)[::2] if rank else torch.zeros(4), group=group),
        lambda: dist.all_gather_into_tensor(torch.zeros(6 + rank), torch.zeros(3), group),
        lambda: dist.all_reduce(torch.zeros(8)[:: 1 + rank], group=group, async_op=True).wait(),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [2, 2 + rank], [2, 2], group),
        lambda: dist.all_reduce_coalesced([torch.zeros(3)] * (1 + rank), group=group),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        said.append(str(caught.value).splitlines()[0])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), 2.0)), "the group is as good as before"
    return said


def test_wrong_calls_are_errors_on_all_ranks(two_ranks):
    one, other = two_ranks.run(refusals)
    assert one == other
    sizes, roots, operation, gaps, layout, on_one, parts, later, splits, several = one
    assert "rank 0 calls all_reduce with Float of 12 bytes by SUM, rank 1 calls all_reduce with Float of 16" in sizes
    assert "root 0, rank 1 calls broadcast with Float of 12 bytes and root 1" in roots
    assert "all_reduce by BAND is not available for Float" in operation
    assert "has gaps; call .contiguous() first" in gaps
    assert "takes dense tensors, got one on cpu of layout Sparse" in layout
    for refused, why in (
        (on_one, "has gaps"),
        (parts, "is not 2 times"),
        (later, "has gaps"),
        (splits, "by splits 2 3"),
    ):
        assert refused.startswith("rank 1 was refused its call: all_"), refused
        assert why in refused
    assert "of 12 bytes by SUM, and 1 more" in several


def wrong_messages() -> list[Any]:
    """Error of a receiver that asks for another type or size, and what it gets then."""
    group, rank, found = dist.new_group(backend="staged"), dist.get_rank(), []
    if rank == 0:
        for tag in (0, 0, 1, 0):
            dist.send(torch.full((4,), 1.5), group=group, group_dst=1, tag=tag)
        return []
    kept = torch.zeros(4, dtype=torch.int32)  # of the third, while the first two wait to be received
    for tag, into in ((1, kept), (0, torch.zeros(4, dtype=torch.int32)), (0, torch.zeros(3))):
        with pytest.raises(
            ValueError, match=f"rank 0 sent 16 bytes of Float, rank 1 receives {into.nbytes} of"
        ) as caught:
            dist.recv(into, group=group, group_src=0, tag=tag)
        found.append(str(caught.value).splitlines()[0].split(" of ")[-1])
    assert kept.tolist() == [0] * 4, "numbers of another type are not written"
    into = torch.zeros(4)
    dist.recv(into, group=group, group_src=0)
    return [*found, into.tolist()]


def test_messages_of_another_type_or_size_are_errors(two_ranks):
    same = "; give both the same size and type"
    assert two_ranks.run(wrong_messages)[1] == [f"Int{same}", f"Int{same}", f"Float{same}", [1.5] * 4]


def objects_and_gradients() -> tuple[list[Any], list[float]]:
    """Objects, and DDP's gradients, over a group whose only backend is `staged`."""
    group, rank = dist.new_group(backend="cpu:staged"), dist.get_rank()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(torch.full((1, 3), float(rank))).sum().backward()
    future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    return everyone, [*model.weight.grad.flatten().tolist(), *future.wait()[0].tolist()]


def test_what_torch_builds_on_groups(two_ranks):
    assert two_ranks.run(objects_and_gradients) == [([{"rank": 0}, {"rank": 1}], [0.5] * 3 + [2.0] * 2)] * 2


def stack_gradients(backend: str) -> list[torch.Tensor]:
    """Output and gradients of a stack of tensor-parallel blocks whose collectives go over `backend`."""
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    sizes = GPTConfig(hidden=16, layers=2, heads=2, sequence=8)
    stack = OverlappedStack(transformer_blocks(sizes, group), process_group=group, schedule="oases", sub_batches=2)
    x = torch.randn(4, 8, 16, requires_grad=True)
    output = stack(x)
    output.square().sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]


def test_stacks_overlap_over_it(two_ranks):
    """Two numbers have one sum, in either order: the results are equal to the bit."""
    for ours, theirs in zip(
        two_ranks.run(stack_gradients, "staged"), two_ranks.run(stack_gradients, "gloo"), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def permissions() -> tuple[list[str], list[bool]]:
    """Access to the memory, by files under /proc, and whether a forked child has it."""
    group = dist.new_group(backend="staged")
    dist.barrier(group)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "oases-staged" in line]
    opened = [link for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()]
    files = [target for link in opened if "oases-staged" in (target := os.readlink(link))]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"1" if "oases-staged" in Path("/proc/self/maps").read_text() else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    seen = os.read(read, 1)
    os.close(read), os.close(write)
    assert lines
    return files, [seen == b"1", "/dev/shm" in "".join(lines)]


def test_nothing_but_the_ranks_has_the_memory(two_ranks):
    """No file is open, none has a name, and children do not keep it."""
    assert two_ranks.run(permissions) == [([], [False, False])] * 2
