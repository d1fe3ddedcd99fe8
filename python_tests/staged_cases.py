"""Random calls of collectives, which a test makes over two groups to compare the results.

Each is drawn from `case`, the same on all ranks, and its numbers from `own`, of this rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
MOVED = FLOATS + WHOLE

REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX")

Operation = Callable[[random.Random, torch.Generator, Any, int, int], list[torch.Tensor]]


def on_nodes(of_rank: Sequence[int], function: Any, *arguments: Any) -> Any:
    """Call a function as on nodes of a launcher. of_rank: each rank's node."""
    node = of_rank[dist.get_rank()]
    local = {"GROUP_RANK": str(node), "LOCAL_WORLD_SIZE": str(of_rank.count(node)), "WORLD_SIZE": str(len(of_rank))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in local.items():
            patch.setenv(name, value)
        return function(*arguments)


def numbers(own: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact in every type, and so the same in every order."""
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(low, 5, shape, generator=own).to(dtype)


def draw_shape(case: random.Random) -> tuple[int, ...]:
    """Empty, small, of one piece, and now and then of several."""
    rows = case.choice([0, 1, 2, 3, 64, 257])
    return (rows, case.choice([1, 5, 64, 1000, 5000 if case.random() < 0.2 else 7]))


def draw_reduction(case: random.Random) -> tuple[torch.dtype, dist.ReduceOp.RedOpType]:
    dtype = case.choice(FLOATS + WHOLE)
    names = REDUCTIONS + (("AVG",) if dtype in FLOATS else ("BAND", "BOR", "BXOR"))
    return dtype, getattr(dist.ReduceOp, case.choice(names))


def wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def all_reduce(case, own, group, rank, size):
    dtype, reduce = draw_reduction(case)
    tensor = numbers(own, draw_shape(case), dtype)
    if case.random() < 0.2:
        tensor = tensor.t()  # dense, but not contiguous
        if group.name() == "gloo":
            tensor = tensor.contiguous()
    wait(dist.all_reduce(tensor, reduce, group, async_op=case.random() < 0.5))
    return [tensor]


def reduce(case, own, group, rank, size):
    dtype, reduce = draw_reduction(case)
    tensor, root = numbers(own, draw_shape(case), dtype), case.randrange(size)
    wait(dist.reduce(tensor, group_dst=root, op=reduce, group=group, async_op=case.random() < 0.5))
    return [tensor] if rank == root else []


def broadcast(case, own, group, rank, size):
    tensor = numbers(own, draw_shape(case), case.choice(MOVED))
    wait(dist.broadcast(tensor, group_src=case.randrange(size), group=group, async_op=case.random() < 0.5))
    return [tensor]


def all_gather(case, own, group, rank, size):
    tensor = numbers(own, draw_shape(case), case.choice(MOVED))
    if case.random() < 0.5:
        whole = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        wait(dist.all_gather_into_tensor(whole, tensor, group, async_op=case.random() < 0.5))
        return [whole]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    wait(dist.all_gather(parts, tensor, group, async_op=case.random() < 0.5))
    return parts


def reduce_scatter(case, own, group, rank, size):
    dtype, reduce = draw_reduction(case)
    rows, columns = draw_shape(case)
    whole = numbers(own, (size * rows, columns), dtype)
    part = whole.new_empty((rows, columns))
    if case.random() < 0.5:
        wait(dist.reduce_scatter_tensor(part, whole, reduce, group, async_op=case.random() < 0.5))
    else:
        parts = list(whole.chunk(size)) if rows else [whole] * size
        wait(dist.reduce_scatter(part, parts, reduce, group, async_op=case.random() < 0.5))
    return [part]


def all_to_all(case, own, group, rank, size):
    dtype, columns = case.choice(MOVED), case.choice([1, 3, 100, 3000])
    rows = [[case.choice([0, 1, 2, 60]) for _ in range(size)] for _ in range(size)]
    if case.random() < 0.5:  # equal parts
        rows = [[rows[0][0]] * size] * size
    sent, received = rows[rank], [rows[other][rank] for other in range(size)]
    tensor = numbers(own, (sum(sent), columns), dtype)
    whole = tensor.new_empty((sum(received), columns))
    wait(dist.all_to_all_single(whole, tensor, received, sent, group, async_op=case.random() < 0.5))
    return [whole]


def gather(case, own, group, rank, size):
    tensor, root = numbers(own, draw_shape(case), case.choice(MOVED)), case.randrange(size)
    parts = [torch.empty_like(tensor) for _ in range(size)] if rank == root else None
    wait(dist.gather(tensor, parts, group=group, group_dst=root, async_op=case.random() < 0.5))
    return parts or []


def scatter(case, own, group, rank, size):
    shape, dtype, root = draw_shape(case), case.choice(MOVED), case.randrange(size)
    parts = [numbers(own, shape, dtype) for _ in range(size)] if rank == root else None
    part = torch.empty(shape, dtype=dtype)
    wait(dist.scatter(part, parts, group=group, group_src=root, async_op=case.random() < 0.5))
    return [part]


def messages(case, own, group, rank, size):
    """Sends and receives by several tags, each rank's in an order of its own."""
    shapes = [draw_shape(case) for _ in range(2)]
    dtype, shift = case.choice(MOVED), case.randrange(1, size)
    to, source = (rank + shift) % size, (rank - shift) % size
    sent = [numbers(own, shape, dtype) for shape in shapes]
    received = [torch.empty_like(tensor) for tensor in sent]
    starts = [lambda tag=tag: dist.isend(sent[tag], group_dst=to, group=group, tag=tag) for tag in range(2)]
    starts += [lambda tag=tag: dist.irecv(received[tag], group_src=source, group=group, tag=tag) for tag in range(2)]
    random.Random(rank).shuffle(starts)
    for work in [start() for start in starts]:
        wait(work)
    return received


def barrier(case, own, group, rank, size):
    wait(dist.barrier(group, async_op=case.random() < 0.5))
    return []


OPERATIONS: tuple[Operation, ...] = (
    all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, messages, barrier,
)  # fmt: skip


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes that must be equal. gloo adds truth values as bytes: 1 + 1 = 2."""
    flat = tensor.flatten().clone().view(torch.uint8)
    return flat != 0 if tensor.dtype == torch.bool else flat


def random_cases(first: int, count: int) -> int:
    """Number of cases whose results are those of gloo on this rank."""
    group, gloo = dist.new_group(backend="staged"), dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in range(first, first + count):
        operation = random.Random(seed).choice(OPERATIONS)
        results = []
        for over in (group, gloo):
            case, own = random.Random(seed + 1), torch.Generator().manual_seed(seed * size + rank)
            results.append(operation(case, own, over, rank, size))
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(raw(ours), raw(theirs)), f"case {seed}, {operation.__name__}: {ours} but {theirs}"
    return count
