"""Fine-tune a model of transformers by Ray Train: python examples/cluster/ray_train.py [--workers N] [--gpus]."""

import argparse
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM

import oases


def train(options: dict[str, Any]) -> None:
    """One worker; Ray has made the default process group, over which the model is sharded."""
    device = ray.train.torch.get_device()
    torch.manual_seed(0)  # tensor parallelism: the same model and the same batches on every worker
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(device)
    oases.parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = torch.arange(4096, device=device).remainder(256).unfold(0, 64, 16)
    for _ in range(options["steps"]):
        batch = windows[torch.randint(len(windows), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        oases.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    first = ray.train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:  # all workers take part; the first one writes the whole model
        oases.save_pretrained(model, folder)
        checkpoint = Checkpoint.from_directory(folder) if first else None
        ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)
    if first:
        print(oases.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--gpus", action="store_true", help="one GPU per worker")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps (default: 10)")
    parser.add_argument("--storage", metavar="DIR", help="folder that all nodes see (default: ~/ray_results)")
    given = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"steps": given.steps},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(storage_path=given.storage),
    ).fit()
    print(f"loss {result.metrics['loss']:.3f}; the model is in {result.checkpoint.path}")
