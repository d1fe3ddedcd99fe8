"""Shard the replicas' weights, too, by torch's FSDP2: torchrun --nproc-per-node 4 examples/fsdp2.py [FOLDER].

Two ranks share the model (tp 2), four are two groups of two, over which fully_shard shards weights, gradients and the
optimizer's state. What the ranks left in the folder is resumed.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import oases

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "sharded")
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same weights on all ranks
tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = oases.parallelize(LlamaForCausalLM(tiny), mesh=mesh["tp"])  # tp alone: FSDP averages over dp
fully_shard(model, mesh=mesh["dp"])  # the model, not its layers, which run as one
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

file, done = folder / f"rank{dist.get_rank()}.pt", 0
if file.exists():
    state = torch.load(file, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
for step in range(done, 8):
    tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(ranks // tp)[mesh.get_local_rank("dp")]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean / ranks:.6f} norm {float(norm):.6f}")
    if step == 3:
        folder.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, file)
dist.destroy_process_group()
