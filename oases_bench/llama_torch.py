"""torchtitan's way with a Llama: torch.distributed.pipelining, DTensor's tensor parallelism, and FSDP2.

The plan for the layers is that of torchtitan's Llama, under the names of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from oases_bench.llama import IGNORED, LlamaShape, LlamaSteps, Stage, names_in_model, stages_of, targets

INTERLEAVED_CHUNKS = 2


class TorchLlama(LlamaSteps):
    """A schedule of torch.distributed.pipelining over stages with DTensor's tensor parallelism and FSDP2.

    mesh: of "pp", "dp" and "tp". interleaved: two parts of the model on a stage. sequence: whether activations
    between layers are sharded along the sequence, torchtitan's default: all-gathers and reduce-scatters in place of
    all-reduces.
    """

    def __init__(
        self, shape: LlamaShape, mesh: DeviceMesh, *, interleaved: bool = False, sequence: bool = False
    ) -> None:
        stages, stage, tensor = mesh.size(0), mesh.get_local_rank("pp"), mesh["tp"]
        self.stages = stages_of(shape, stage, stages, INTERLEAVED_CHUNKS if interleaved else 1)
        parts = stages * len(self.stages)
        made: list[Any] = []
        for number, module in self.stages.items():
            if tensor.size() > 1:
                _apply_tp(module, tensor, sequence)
            if mesh["dp"].size() > 1:
                _apply_fsdp(module, mesh["dp"])
            made.append(PipelineStage(module, number, parts, torch.device("cpu"), group=mesh.get_group("pp")))
        self._parallel_loss = tensor.size() > 1
        many = shape.micro_batches
        self._schedule: Any
        if interleaved:
            self._schedule = ScheduleInterleaved1F1B(made, many, loss_fn=_loss)
        else:
            self._schedule = Schedule1F1B(made[0], many, loss_fn=_loss)
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        self._tokens = shape.tokens(mesh.get_local_rank("dp"))
        self._targets = targets(self._tokens)
        super().__init__([each for module in self.stages.values() for each in module.parameters()])

    def backward(self) -> Tensor | None:
        """See `LlamaSteps`; known on the last stage, of this replica."""
        losses: list[Tensor] = []
        with loss_parallel() if self._parallel_loss else nullcontext():
            given = (self._tokens,) if self._is_first else ()
            last: dict[str, Any] = {"target": self._targets, "losses": losses} if self._is_last else {}
            self._schedule.step(*given, **last, return_outputs=False)
        return torch.stack([_whole(loss.detach()) for loss in losses]).mean() if losses else None

    def gradients(self) -> Mapping[str, Tensor]:
        """See `LlamaSteps`."""
        return {
            name: _whole(parameter.grad)
            for module in self.stages.values()
            for name, parameter in names_in_model(module)
            if parameter.grad is not None
        }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def _apply_tp(stage: Stage, mesh: DeviceMesh, sequence: bool) -> None:
    between = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel()} if sequence else {}
    outside: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(stage, mesh, {k: v for k, v in (outside | norm).items() if getattr(stage, k) is not None})
    plan: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
    }
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sequence:
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, plan)


def _apply_fsdp(stage: Stage, mesh: DeviceMesh) -> None:
    """Shard layers as torchtitan does with a pipeline: weights stay gathered between micro-batches."""
    shard: Callable[[Any], Any] = lambda module: fully_shard(module, mesh=mesh, reshard_after_forward=False)  # noqa: E731
    for layer in stage.layers.values():
        shard(layer)
    shard(stage)
