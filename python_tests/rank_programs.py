"""Functions for the ranks of tests that start their own: ranks that answer, refuse, fail, die, hang or train."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.errors import UsageError


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def listening():
    """Local addresses, in hexadecimal, at which this rank and its launcher listen."""
    launcher = os.getppid()  # the fork server's parent
    launcher = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    sockets = set()
    for process in (os.getpid(), launcher):
        for link in Path(f"/proc/{process}/fd").iterdir():
            sockets |= {os.readlink(link)} if link.is_symlink() else set()
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def refuse():
    raise UsageError("steps 0 is too few")


def stumble():
    raise KeyError("a bug")


def dies_in_mid_step(victim):
    config = TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000)
    trainer = Trainer(config)
    if dist.get_rank() == victim:

        def kill(grad):
            if trainer.steps_done == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.model.stack.blocks[3].up.weight.register_hook(kill)
    trainer.train()


def runs_out_of_memory(victim):
    """Errors of a step in which one rank ran out of memory, and of the next step."""
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000))
    trainer.step()
    if dist.get_rank() == victim:
        trainer.model.stack.blocks[3].combine = raise_out_of_memory
    said = []
    for _ in range(2):
        try:
            trainer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def raise_out_of_memory(x, y):
    raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")


def waits_for_one_that_leaves(path):
    if dist.get_rank() == 1:
        Path(path).touch()
        raise KeyError("a bug")
    dist.distributed_c10d._get_default_store().wait(["a key that nobody sets"])


def dawdles(seconds):
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=1000))
    if dist.get_rank() == 1:

        def sleep(grad):
            if trainer.steps_done == 2:
                time.sleep(seconds)

        trainer.model.stack.blocks[3].up.weight.register_hook(sleep)
    trainer.train()


def tells_when_training(path):
    trainer = Trainer(TrainConfig(hidden=32, layers=2, heads=4, sequence=32, batch=4, steps=100_000))
    trainer.step()
    dist.barrier()
    Path(path).touch()
    trainer.train()


def loses_the_store():
    if dist.get_rank() == 1:
        raise dist.DistNetworkError("Broken pipe")
    dist.barrier()
