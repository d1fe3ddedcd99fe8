"""Train with Lightning: torchrun --nproc-per-node 2 examples/lightning_module.py [FOLDER].

Two ranks share the model (tp 2), four are two replicas of two. The checkpoint in the folder is resumed.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import oases

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "lightning")
ranks = int(os.environ.get("WORLD_SIZE", 1))
tp = min(2, ranks)
accelerator = "cuda" if torch.cuda.is_available() else "cpu"
tiny = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


class Llama(lightning.LightningModule):
    """Llama, parallelized once Lightning's ranks are there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks
        self.model = LlamaForCausalLM(tiny)
        self.losses = []

    def configure_model(self):
        """Shard the model."""
        if not hasattr(self.model, "oases_mesh"):  # Lightning may call this more than once
            mesh = init_device_mesh(accelerator, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
            self.model = oases.parallelize(self.model, mesh=mesh)

    def configure_optimizers(self):
        """Create the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch, number):
        """Return the loss of a micro-batch."""
        loss = self.model(**batch).loss
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        """Clip by the norm of the whole model, and print a step."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.print(f"step {self.global_step} loss {sum(self.losses) / len(self.losses):.6f} norm {norm:.6f}")
        self.losses = []


tokens = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(1))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4 // (ranks // tp))
trainer = lightning.Trainer(
    accelerator=accelerator,
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    strategy=ModelParallelStrategy(data_parallel_size=ranks // tp, tensor_parallel_size=tp),
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[ModelCheckpoint(folder, "epoch{epoch}", auto_insert_metric_name=False, save_top_k=-1)],
    logger=False,
)
saved = folder / "epoch0.ckpt"
trainer.fit(Llama(), loader, ckpt_path=saved if saved.exists() else None)
