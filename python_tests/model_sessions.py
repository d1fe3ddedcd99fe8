"""Sessions of training small transformers models over a mesh, and runs of them that may be killed at any moment."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from autotp.staged import sizes
from autotp.zoo import batch, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases

STEPS = 2


class Session:
    """A model over a mesh of these degrees, with AdamW of two groups and a learning rate schedule."""

    def __init__(
        self,
        name,
        degrees,
        seed=0,
        dtype=torch.float32,
        dropout=0.0,
        fsdp=False,
        share=False,
        computed_in=None,
        layers=None,
        pipeline="one_f_one_b",
        **options,
    ):
        self.degrees, self.name, self.group, self.replica = degrees, name, None, 0
        self.staged = False
        model = build(name, seed, **(sizes(name, layers) if layers else {})).to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        if degrees == (1, 1, 1):  # each rank alone
            self.group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            self.model = oases.parallelize(model, mesh=self.group)
        else:
            mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp", "tp"))
            self.replica = mesh.get_local_rank("dp")
            self.staged = degrees[0] > 1 or fsdp or share
            staged = {"mesh": mesh, "micro_batches": 2, "fsdp": fsdp, "zero": share, "dtype": computed_in}
            staged |= {"pipeline": pipeline}
            self.model = oases.parallelize(model, **(staged if self.staged else {"mesh": mesh["dp", "tp"]}))
        parameters = list(self.model.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1]},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = oases.make_optimizer(
            self.model, torch.optim.AdamW, params=groups, lr=1e-2, weight_decay=0.1, **options
        )
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def steps(self, first, number=STEPS):
        losses = []
        for step in range(first, first + number):
            data = batch(self.name, samples=8, seed=step)
            data["labels"] = data["input_ids"]
            data = {key: value.chunk(self.degrees[1])[self.replica] for key, value in data.items()}
            self.optimizer.zero_grad()
            if self.staged:
                loss = self.model.train_step(**data)
            else:
                loss = self.model(**data).loss
                loss.backward()
            oases.clip_grad_norm(self.model, 1.0, process_group=self.group)
            self.optimizer.step()
            self.rates.step()
            losses.append(float(loss.detach()))
        return losses

    def save(self, folder, step, **options):
        rates = {"rates": self.rates.state_dict()}
        return oases.save_checkpoint(
            folder, self.model, self.optimizer, step=step, extra=rates, process_group=self.group, **options
        )

    def load(self, folder):
        step = oases.load_checkpoint(folder, self.model, self.optimizer, process_group=self.group)
        self.rates.load_state_dict(step.extra["rates"])
        return step

    def close(self):
        if self.staged:
            self.model.oases_pipeline.close()


def run(folder, degrees, steps, save_every=2):
    """Train up to `steps` and log them, from the newest checkpoint in `folder` if there is one, as a user would."""
    folder, rank = Path(folder), dist.get_rank()
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    session = Session("llama", degrees)
    done = 0
    if any((folder / "run").glob("step-*")):
        done = session.load(folder / "run")
    log = folder / "log.jsonl"
    if rank == 0:
        log.touch()
        os.truncate(log, sum(map(len, log.read_bytes().splitlines(keepends=True)[:done])))
        (folder / "resumed").write_text(str(int(done)))
    saved = None
    for step in range(done, steps):
        loss = torch.tensor(session.steps(step, 1), dtype=torch.float64)
        dist.all_reduce(loss)  # over replicas; equal on the ranks of one
        if rank == 0:
            with log.open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": float(loss) / dist.get_world_size()}) + "\n")
        if (step + 1) % save_every == 0:
            saved = session.save(folder / "run", step + 1, keep=2, asynchronous=True)
    if saved is not None:
        saved.finish()
    session.close()
    return [float(parameter.detach().double().sum()) for parameter in session.model.parameters()]
