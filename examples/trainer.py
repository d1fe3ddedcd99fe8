"""Train with the Trainer of transformers: torchrun --nproc-per-node 2 examples/trainer.py [FOLDER].

Two ranks share the model (tp 2), four are two replicas of two. The last checkpoint in the folder is resumed.
"""

import os
import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import oases

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
checkpoint = get_last_checkpoint(folder) if os.path.isdir(folder) else None
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same weights on all ranks
tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = oases.parallelize(LlamaForCausalLM(tiny), mesh=mesh)  # all that differs from a script for one process

tokens = torch.randint(128, (76, 16), generator=torch.Generator().manual_seed(1)).tolist()
samples = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    folder,
    use_cpu=device == "cpu",
    per_device_train_batch_size=4 // (ranks // tp),  # 4 samples in all, and twice as many in a step
    per_device_eval_batch_size=4 // (ranks // tp),
    gradient_accumulation_steps=2,
    max_steps=8,
    learning_rate=1e-2,
    lr_scheduler_type="linear",
    max_grad_norm=0.5,
    logging_steps=1,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=samples[:66], eval_dataset=samples[66:])
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
