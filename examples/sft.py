"""Train on conversations with TRL's SFTTrainer: torchrun --nproc-per-node 2 examples/sft.py [FOLDER].

Two ranks share the model (tp 2), four are two replicas of two. The last checkpoint in the folder is resumed.
"""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import oases

folder = sys.argv[1] if len(sys.argv) > 1 else "instructed"
checkpoint = get_last_checkpoint(folder) if os.path.isdir(folder) else None
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)  # the same weights on all ranks
tiny = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = oases.parallelize(LlamaForCausalLM(tiny), mesh=mesh)

alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:255]]  # a token per byte
tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
samples = [{"prompt": f"{n} + {n} = ", "completion": str(2 * n)} for n in range(100, 164)]

arguments = SFTConfig(
    folder,
    use_cpu=device == "cpu",
    bf16=False,
    per_device_train_batch_size=8 // (ranks // tp),
    max_steps=8,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
)
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(samples), processing_class=tokenizer)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model()
