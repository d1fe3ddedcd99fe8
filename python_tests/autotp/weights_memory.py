"""Memory that loading and saving take on each rank: python -m autotp.weights_memory [RANKS]

What counts is the process's resident set above what it was before, at its highest (VmHWM, which /proc/self/clear_refs
sets back): pages of mapped files among it, and the model itself.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from autotp.partitioned import KINDS, build
from resident_memory import peak, reset_peak, resident

from oases.autotp.pretrained import save_pretrained
from oases.autotp.weights import load_weights
from oases.testing import RankPool

LARGE = {"n_embd": 1024, "n_layer": 4, "n_head": 8, "vocab_size": 16384}
"""The sizes of a GPT-2 of 269 MB in float32, fused queries, keys and values [1024, 3072] cut along the columns."""


def peaks(ranks: int, folder: Path) -> tuple[int, list[tuple[int, int]]]:
    """(the model's bytes, (bytes at the highest while loading, and while saving) of each rank)."""
    model = KINDS["gpt2"](**LARGE)
    model.save_pretrained(folder / "large", max_shard_size="100MB")
    KINDS["gpt2"]().save_pretrained(folder / "small")
    size = sum(parameter.nbytes for parameter in model.parameters())
    with RankPool(ranks) as pool:
        return size, pool.run(_peak, folder)


def _peak(folder: Path) -> tuple[int, int]:
    model = build("gpt2")  # once at a small size, for all the code and the buffers of gloo
    load_weights(model, folder / "small")
    save_pretrained(model, folder / "again")
    model = build("gpt2", **LARGE)
    before = resident()
    reset_peak()
    load_weights(model, folder / "large")
    loading = peak() - before
    reset_peak()
    save_pretrained(model, folder / "large again")
    return loading, peak() - before


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as directory:
        size, found = peaks(ranks, Path(directory))
    print(f"model {size / 1e6:.0f} MB, a part {size / ranks / 1e6:.0f} MB")
    for rank, (loading, saving) in enumerate(found):
        shares = f"{loading / size * ranks:.2f} and {saving / size * ranks:.2f} of a part"
        print(f"rank {rank}: loading {loading / 1e6:.0f} MB, saving {saving / 1e6:.0f} MB, {shares}")
