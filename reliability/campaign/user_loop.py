"""A user's own loop: parallelize a plain model, save every few steps, go on from the newest save.

    torchrun --nproc-per-node 2 user_loop.py FOLDER STEPS SAVE_EVERY {shards,files,oases}

shards: by torch.distributed.checkpoint. files: torch.save, a file for each rank. oases: oases.save_checkpoint, in the
background. Only a folder that is complete gets its name; the log is cut to the steps of the save.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import oases

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 64, 16


class Layer(nn.Module):
    """Transformer layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP to an activation [batch, length, WIDTH]."""
        h = self.norm(x)
        q, k, v = (
            cut(h).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
            for cut in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Language model of a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Logits [batch, length, WORDS] of words [batch, length]."""
        x: Tensor = self.table(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def batch_of(step: int) -> Tensor:
    """Words of a step, [batch, length + 1]."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (8, 1), generator=generator)
    return (first + torch.arange(LENGTH + 1) * 3) % WORDS


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> Any:
    """Save in one of the ways; returns a save that is still being written, or None."""
    if way == "oases":
        return oases.save_checkpoint(folder, model, optimizer, step=step, keep=2, asynchronous=True)
    part, rank = folder / f".step-{step:06d}.part", dist.get_rank()
    if rank == 0:
        part.mkdir(parents=True)
    dist.barrier()
    if way == "shards":
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=part)
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, part / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        part.rename(folder / f"step-{step:06d}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.old")))
    return None


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> int:
    """Load the newest save; return its step, 0 without one."""
    if way == "oases":
        return oases.load_checkpoint(folder, model, optimizer) if any(folder.glob("step-*")) else 0
    rank = dist.get_rank()
    if rank == 0:
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
    dist.barrier()
    saved = sorted(folder.glob("step-*"))
    if not saved:
        return 0
    if way == "shards":
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        state = torch.load(saved[-1] / f"rank-{rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return int(saved[-1].name.removeprefix("step-"))


def main(place: Path, steps: int, save_every: int, way: str) -> None:
    """Train, from the newest save, to the last step."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Model()
    oases.parallelize(model, spec=oases.ParallelSpec(inputs=((batch_of(0)[:, :-1],), {})))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = dist.get_rank() == 0
    done = load(place / "run", model, optimizer, way)
    log, saved = place / "steps.jsonl", None
    if first:
        log.touch()
        os.truncate(log, sum(map(len, log.read_bytes().splitlines(keepends=True)[:done])))
    for step in range(done + 1, steps + 1):
        words = batch_of(step)
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if step % save_every == 0:
            saved = save(place / "run", step, model, optimizer, way)
    if saved is not None:
        saved.finish()
    weights = oases.full_state_dict(model)
    if first:
        save_file({name: value.contiguous() for name, value in weights.items()}, place / "weights.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
