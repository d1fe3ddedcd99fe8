"""The memory that loading and saving take on each rank, every rank a fresh process: python weights_memory.py [RANKS]

What counts is the process's resident set above what it was before, at its highest (VmHWM, which /proc/self/clear_refs
sets back): pages of mapped files among it, and the model itself.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from autotp.partitioned import KINDS, build

from oases.autotp.pretrained import save_pretrained
from oases.autotp.weights import load_weights

LARGE = {"n_embd": 1024, "n_layer": 4, "n_head": 8, "vocab_size": 16384}
"""The sizes of a GPT-2 of 269 MB in float32, fused queries, keys and values [1024, 3072] cut along the columns."""


def peaks(ranks: int, folder: Path) -> tuple[int, list[tuple[int, int]]]:
    """(the model's bytes, (bytes at the highest while loading, and while saving) of each rank)."""
    model = KINDS["gpt2"](**LARGE)
    model.save_pretrained(folder / "large", max_shard_size="100MB")
    KINDS["gpt2"]().save_pretrained(folder / "small")
    size = sum(parameter.nbytes for parameter in model.parameters())
    context = multiprocessing.get_context("spawn")
    with context.Pool(ranks, maxtasksperchild=1) as pool:
        tasks = [(rank, ranks, folder) for rank in range(ranks)]
        return size, pool.starmap_async(_peak, tasks, chunksize=1).get(timeout=300)


def _peak(rank: int, ranks: int, folder: Path) -> tuple[int, int]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    model = build("gpt2")  # once at a small size, for all the code and the buffers of gloo
    load_weights(model, folder / "small")
    save_pretrained(model, folder / "again")
    model = build("gpt2", **LARGE)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    load_weights(model, folder / "large")
    loading = _resident("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    save_pretrained(model, folder / "large again")
    saving = _resident("VmHWM") - before
    dist.destroy_process_group()
    return loading, saving


def _resident(what: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as directory:
        size, found = peaks(ranks, Path(directory))
    print(f"model {size / 1e6:.0f} MB, a part {size / ranks / 1e6:.0f} MB")
    for rank, (loading, saving) in enumerate(found):
        shares = f"{loading / size * ranks:.2f} and {saving / size * ranks:.2f} of a part"
        print(f"rank {rank}: loading {loading / 1e6:.0f} MB, saving {saving / 1e6:.0f} MB, {shares}")
