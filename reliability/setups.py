"""Set-ups of parallelized models over a backend, beside one process: on GPUs, which ranks may share, or CPUs.

    torchrun --nproc-per-node 2 -m reliability.setups [--backend gloo | nccl | staged] [--only PATTERN] [--json FILE]

A set-up is a small model over a mesh of all ranks, trained for three steps. Its losses are compared with those of one
process on the same device, up to the rounding of its type. With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30) ranks share
a GPU. Exit code 1 where losses differ, or one raises; a set-up that hangs ends with the stacks of all ranks.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import oases

BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "staged": "cpu:gloo,cuda:staged"}
STEPS, BATCH, SEQUENCE, WORDS = 3, 8, 32, 256
SECONDS = 120.0
"""Time limit of a set-up."""
MESH = ("pp", "dp", "tp")
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
EXACT, BFLOAT16, INT8 = 1e-5, 5e-3, 5e-3
"""Largest differences of losses: in float32, under autocast, with quantised sums."""


@dataclass(frozen=True)
class Setup:
    """A model over a mesh. degrees: of (pp, dp, tp). experts: a Mixtral. options: of parallelize()."""

    name: str
    degrees: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    autocast: bool = False
    bound: float = EXACT


def setups(ranks: int) -> Iterator[Setup]:
    """Set-ups of two or four ranks, by what they share out."""
    tp, dp, pp = (1, 1, ranks), (1, ranks, 1), (ranks, 1, 1)
    for schedule in ("auto", "sync", "oases", "fine_grained"):
        yield Setup(f"tp {schedule}", tp, {"schedule": schedule})
    yield Setup("tp oases 4", tp, {"schedule": "oases", "sub_batches": 4})
    yield Setup("tp cross_pass, recomputed", tp, {"schedule": "cross_pass", "recompute": "full"})
    yield Setup("tp sequence", tp, {"sequence_parallel": True})
    yield Setup("tp int8", tp, {"wire_dtype": "int8"}, bound=INT8)
    yield Setup("tp autocast", tp, autocast=True, bound=BFLOAT16)
    yield Setup("tp inductor", tp, {"compile": "inductor"})
    yield Setup("experts", tp, experts=True)
    yield Setup("experts balanced", tp, {"experts": "balanced"}, experts=True)
    yield Setup("zero", dp, {"zero": True})
    yield Setup("fsdp", dp, {"fsdp": True})
    for pipeline in ("one_f_one_b", "zb_h1", "zb_v", "interleaved", "shifted_critical_path"):
        yield Setup(f"pp {pipeline}", pp, {"pipeline": pipeline, "micro_batches": 4})
    if ranks == 4:
        for pipeline in ("one_f_one_b", "zb_h1", "zb_v"):
            for schedule in ("auto", "oases"):
                options = {"pipeline": pipeline, "micro_batches": 4, "schedule": schedule}
                yield Setup(f"pp tp {pipeline} {schedule}", (2, 1, 2), options)
        yield Setup("dp tp", (1, 2, 2))
        yield Setup("dp tp fsdp", (1, 2, 2), {"fsdp": True})
        yield Setup("pp dp zero", (2, 2, 1), {"zero": True, "micro_batches": 2})
        yield Setup("dp tp experts balanced", (1, 2, 2), {"experts": "balanced"}, experts=True)


def made(setup: Setup, device: torch.device) -> nn.Module:
    """The unsharded model."""
    import transformers

    torch.manual_seed(0)
    if setup.experts:
        config = transformers.MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
        return nn.Module.to(transformers.MixtralForCausalLM(config), device)
    layers = 2 * dist.get_world_size()  # as many as stages of two parts each
    sizes = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    return nn.Module.to(transformers.LlamaForCausalLM(sizes), device)


def losses(model: nn.Module, optimizer: Any, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
    """Losses of a few steps. loss_of: runs the forward and backward pass on a batch of all samples."""
    found, numbers = [], torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        found.append(float(loss_of(model, torch.randint(WORDS, (BATCH, SEQUENCE), generator=numbers))))
        optimizer.step()
        optimizer.zero_grad()
    return found


def in_one_process(setup: Setup, device: torch.device) -> list[float]:
    """Losses of the unsharded model, by the same autocast."""

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=setup.autocast):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    model = made(setup, device)
    return losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)


def over_ranks(setup: Setup, device: torch.device) -> list[float]:
    """Losses of the parallelized model, averaged over replicas."""
    mesh = init_device_mesh(device.type, setup.degrees, mesh_dim_names=MESH)
    model = oases.parallelize(made(setup, device), mesh=mesh, **setup.options)
    replicas = mesh["dp"]

    def loss_of(model: Any, tokens: Tensor) -> Tensor:
        mine = tokens.to(device).chunk(replicas.size())[replicas.get_local_rank()]
        if setup.degrees[0] > 1:
            total: Tensor = model.train_step(input_ids=mine, labels=mine)
            return total.detach()
        with torch.autocast(device.type, torch.bfloat16, enabled=setup.autocast):
            loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        mean: Tensor = loss.detach().clone()
        dist.all_reduce(mean, group=replicas.get_group())
        return mean / replicas.size()

    return losses(model, oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3), loss_of)


def run(setup: Setup, device: torch.device) -> dict[str, Any]:
    """Compare a set-up with one process."""
    began, said = time.monotonic(), dict[str, Any]()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        pairs = zip(in_one_process(setup, device), over_ranks(setup, device), strict=True)
        apart = max(abs(one - other) for one, other in pairs)
        said = {"apart": apart, "equal": apart <= setup.bound}
    except (RuntimeError, ValueError, AssertionError) as error:
        said = {"equal": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return said | {"setup": setup.name, "seconds": round(time.monotonic() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on this rank; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default="gloo")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    device = torch.device("cpu")
    if given.backend != "gloo":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[given.backend], timeout=datetime.timedelta(seconds=SECONDS))
    found = []
    for setup in setups(dist.get_world_size()):
        if fnmatch(setup.name, given.only):
            found.append(run(setup, device))
            if dist.get_rank() == 0 or "error" in found[-1]:
                print(f"rank {dist.get_rank()}: {found[-1]}", flush=True)
    if given.json is not None and dist.get_rank() == 0:
        given.json.write_text(json.dumps(found, indent=1))
    wrong = [each["setup"] for each in found if not each["equal"]]
    if dist.get_rank() == 0:
        print(f"{len(found) - len(wrong)} of {len(found)} set-ups are equal to one process; others: {wrong}")
    dist.destroy_process_group()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
