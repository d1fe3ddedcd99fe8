"""Train LoRA adapters of peft: torchrun --nproc-per-node 2 examples/lora.py [FOLDER].

Two ranks share the model (tp 2), four are two replicas of two. The last checkpoint in the folder is resumed.
"""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import oases

folder = sys.argv[1] if len(sys.argv) > 1 else "adapted"
checkpoint = get_last_checkpoint(folder) if os.path.isdir(folder) else None
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same weights on all ranks
tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(tiny), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
model = oases.parallelize(model, mesh=mesh)  # adapters first: they are sharded with the layers that they are in

tokens = torch.randint(128, (64, 16), generator=torch.Generator().manual_seed(1)).tolist()
samples = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    folder,
    use_cpu=device == "cpu",
    per_device_train_batch_size=8 // (ranks // tp),
    max_steps=8,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train(resume_from_checkpoint=checkpoint)
model.save_pretrained(folder)  # the adapter alone, which PeftModel.from_pretrained loads; all ranks call it
