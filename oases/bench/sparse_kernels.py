"""How fast one core encodes and decodes sparse gradients, in numbers of the rows that are used."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from oases.kernels.bitmap import bitmap_unpack
from oases.sparse.gradient import DenseRows
from oases.sparse.peel import decode as peel_decode
from oases.sparse.peel import encode as peel_encode
from oases.sparse.peel import table_cells
from oases.sparse.sketch import Sketch

ROWS, WIDTH = 32768, 128


def nonzeros_per_second(share: float = 0.25, cells: float = 0.25) -> dict[str, float]:
    """By mode, encoding and decoding together, the best of several runs on one thread.

    share: of the rows that are used, in a gradient of 32768 rows of 128 numbers. cells: of sketches, per non-zero.
    "scan": the bitmap of a dense-stored gradient alone, which reads every number; an embedding with sparse=True needs
    none.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gradient = torch.zeros(ROWS, WIDTH)
    union = torch.randperm(ROWS)[: round(share * ROWS)].sort().values
    gradient[union] = torch.randn(len(union), WIDTH)
    held = DenseRows(gradient, in_place=True)
    bits = held.bits()
    values = held.gather(union)

    def sketched(rows: int) -> Callable[[], object]:
        sketch = Sketch.sized(len(union), rows, cells, 0)
        return lambda: held.put(union, sketch.decode(sketch.encode(union, values), union))

    table = table_cells(len(union))
    works: dict[str, Callable[[], object]] = {
        "packed": lambda: held.put(union, held.gather(bitmap_unpack(bits, ROWS)).div_(2)),
        "scan": lambda: DenseRows(gradient, in_place=True).bits(),
        "sketch, 1 row": sketched(1),
        "sketch, 3 rows": sketched(3),
        "sketch, 5 rows": sketched(5),
        "peel": lambda: held.put(union, _known(peel_decode(peel_encode(union, values, table, 0), union, 0))),
    }
    found = {name: len(union) * WIDTH / min(_seconds(work) for _ in range(7)) for name, work in works.items()}
    torch.set_num_threads(threads)
    return found


def _known(values: torch.Tensor | None) -> torch.Tensor:
    if values is None:
        raise AssertionError("a table of seed 0 peels")
    return values


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
