"""Train with accelerate: torchrun --nproc-per-node 2 examples/accelerated.py [FOLDER].

Two ranks share the model (tp 2), four are two replicas of two. The state in the folder is resumed.
"""

import os
import sys

import torch
from accelerate import Accelerator, ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import oases

folder = sys.argv[1] if len(sys.argv) > 1 else "accelerated"
resumed = 4 if os.path.isdir(folder) else 0
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same weights on all ranks
tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = oases.parallelize(LlamaForCausalLM(tiny), mesh=mesh)

tokens = torch.randint(128, (64, 16), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": row, "labels": row} for row in tokens]
loader = DataLoader(samples, batch_size=4 // (ranks // tp))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

config = ParallelismConfig(tp_size=tp, dp_shard_size=ranks // tp)  # so that it does not wrap the model in DDP
accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2, parallelism_config=config)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if resumed:
    accelerator.load_state(folder)
for step, batch in enumerate(accelerator.skip_first_batches(loader, 2 * resumed), 2 * resumed):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            mean = accelerator.gather(loss.detach()).mean()
            accelerator.print(f"step {step // 2} loss {mean:.6f} norm {norm:.6f}")
        optimizer.step()
        optimizer.zero_grad()
    if step == 7:
        accelerator.save_state(folder)
