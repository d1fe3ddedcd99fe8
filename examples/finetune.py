"""Fine-tune a model of transformers: torchrun --nproc-per-node 2 examples/finetune.py [MODEL_FOLDER [TEXT_FILE]]."""

import os
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
import oases

_, folder, text, *_ = [*sys.argv, None, None]  # without a folder: a small random model, bytes for tokens, this text
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = torch.distributed.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
log = print if mesh.get_rank() == 0 else lambda *_: None
torch.manual_seed(0)  # tensor parallelism: all ranks begin with the same model and see the same batches
tiny = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
with torch.device("meta" if folder else device):  # on meta it takes no memory: ranks read their own parts
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder) if folder else tiny)
oases.parallelize(model, mesh=mesh, weights=folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
encode = AutoTokenizer.from_pretrained(folder).encode if folder else str.encode
windows = torch.tensor([*encode(Path(text or __file__).read_text())], device=device).unfold(0, 128, 16)
for step, batch in enumerate(windows[torch.randint(len(windows), (20, 8))]):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log(f"step {step:2} loss {loss.item():.3f}")
oases.save_pretrained(model, "tuned")
log(oases.report())
torch.distributed.destroy_process_group()
