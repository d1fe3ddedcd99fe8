"""Megatron-Core's way with a Llama: its tensor-parallel layers, its 1F1B pipeline and its DistributedDataParallel.

The layers are those of transformers with Megatron-Core's linears: query, key and value in one, gate and up in one, as
its own models have them, so that each input gradient is all-reduced once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.core.execution.group import ProcessGroup
from oases_bench.llama import IGNORED, LlamaShape, LlamaSteps, Stage, names_in_model, stages_of, targets


class MegatronLlama(LlamaSteps):
    """Megatron-Core's `forward_backward_pipelining_without_interleaving` over a stage in its DistributedDataParallel.

    mesh: of "pp", "dp" and "tp". Its pipeline and its gradient buffers name CUDA where they allocate; they are given
    the CPU there, and nothing else of it is changed.
    """

    def __init__(self, shape: LlamaShape, mesh: DeviceMesh) -> None:
        core = _core()
        tensor, self._many, self._shape = mesh.get_group("tp"), shape.micro_batches, shape
        self._config = core.TransformerConfig(
            num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
            tensor_model_parallel_size=tensor.size(), pipeline_model_parallel_size=mesh.size(0),
            pipeline_dtype=torch.float32, use_cpu_initialization=True, perform_initialization=False,
            deallocate_pipeline_outputs=True,
        )  # fmt: skip
        # The only group that its vocabulary-parallel loss takes.
        core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tensor
        (stage,) = stages_of(shape, mesh.get_local_rank("pp"), mesh.size(0)).values()
        self._stage = _MegatronStage(stage, self._config, tensor)
        single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        data, pipeline = mesh.get_group("dp"), mesh.get_group("pp")
        self._groups = core.ProcessGroupCollection()
        for name, group in {
            "tp": tensor, "pp": pipeline, "cp": single, "dp": data, "dp_cp": data, "ep": single, "expt_dp": data,
            "intra_dp_cp": data, "intra_expt_dp": data, "embd": None, "pos_embd": None,
        }.items():  # fmt: skip
            setattr(self._groups, name, group)
        self._ddp = core.DistributedDataParallel(
            self._config, core.DistributedDataParallelConfig(overlap_grad_reduce=True), self._stage,
            pg_collection=self._groups,
        )  # fmt: skip
        self._config.no_sync_func = self._ddp.no_sync
        self._config.finalize_model_grads_func = lambda *_, **__: self._ddp.finish_grad_sync()
        self._p2p = core.P2PCommunicator(pipeline, self._config)
        self._run = core.forward_backward_pipelining_without_interleaving
        self._tokens = shape.tokens(mesh.get_local_rank("dp"))
        self._loss = core.vocab_parallel_cross_entropy
        super().__init__(list(self._stage.parameters()))

    def backward(self) -> Tensor | None:
        """See `LlamaSteps`; known on the last stage, of this replica."""
        losses = self._run(
            forward_step_func=self._forward,
            data_iterator=zip(self._tokens.chunk(self._many), targets(self._tokens).chunk(self._many), strict=True),
            model=self._ddp,
            num_microbatches=self._many,
            # Its activations have the sequence first, ours the samples; it only wants the shape of a message.
            seq_length=self._shape.samples,
            micro_batch_size=self._shape.sequence,
            p2p_communicator=self._p2p,
            pg_collection=self._groups,
        )
        return torch.stack(losses).mean() if losses else None

    def _forward(self, data: Iterator[tuple[Tensor, Tensor]], model: Callable[[Tensor], Tensor]) -> Any:
        tokens, target = next(data)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
            each = self._loss(logits, target)
            mean = each[target != IGNORED].mean()
            return mean, mean.detach().clone()  # it divides the first in place

        return model(tokens), loss

    def update(self) -> None:
        """See `LlamaSteps`: its gradients are in buffers of its own."""
        for parameter in self._stage.parameters():
            parameter.grad = cast(Any, parameter).main_grad
        super().update()
        self._ddp.zero_grad_buffer()

    def gradients(self) -> Mapping[str, Tensor]:
        """See `LlamaSteps`."""
        found = {}
        for name, parameter in names_in_model(self._stage.stage):
            parts = self._stage.fused.get(id(parameter), {"": parameter.shape[0]})
            gradient = cast(Any, parameter).main_grad.split(list(parts.values()))
            for part, share in zip(parts, gradient, strict=True):
                found[name.replace("fused", part)] = share.clone()
        return found


class _MegatronStage(nn.Module):
    """A stage whose linears and embedding are Megatron-Core's. fused: rows of each of a fused linear's parts."""

    def __init__(self, stage: Stage, config: Any, group: ProcessGroup) -> None:
        super().__init__()
        self.stage, self.config, self.input = stage, config, None
        self.fused: dict[int, dict[str, int]] = {}
        core, given = _core(), {"config": config, "init_method": nn.init.zeros_, "tp_group": group}
        rank, ranks = group.rank(), group.size()
        self.model_type = core.ModelType.encoder_or_decoder

        def column(**parts: nn.Linear) -> nn.Module:
            wholes = [part.weight for part in parts.values()]
            made = core.ColumnParallelLinear(
                wholes[0].shape[1], sum(map(len, wholes)), bias=False, gather_output=False, **given
            )
            shares = [whole.detach().chunk(ranks)[rank] for whole in wholes]
            made.weight.data.copy_(torch.cat(shares))
            if len(parts) > 1:
                self.fused[id(made.weight)] = {name: len(s) for name, s in zip(parts, shares, strict=True)}
            return _without_bias(made)

        def row(whole: nn.Linear) -> nn.Module:
            made = core.RowParallelLinear(
                whole.in_features,
                whole.out_features,
                bias=False,
                input_is_parallel=True,
                skip_bias_add=False,
                **given,
            )
            made.weight.data.copy_(whole.weight.detach().chunk(ranks, 1)[rank])
            return _without_bias(made)

        for layer in stage.layers.values():
            block = cast(Any, layer)
            attention, mlp = block.self_attn, block.mlp
            qkv = column(q_proj=attention.q_proj, k_proj=attention.k_proj, v_proj=attention.v_proj)
            block.self_attn = _Attention(qkv, row(attention.o_proj), attention.head_dim, self.fused[id(qkv.weight)])
            block.mlp = _GatedMLP(column(gate_proj=mlp.gate_proj, up_proj=mlp.up_proj), row(mlp.down_proj))
        if stage.tok_embeddings is not None:
            table = stage.tok_embeddings.weight
            made = core.VocabParallelEmbedding(*table.shape, **given)
            made.weight.data.copy_(table.detach().chunk(ranks)[rank])
            stage.tok_embeddings = made
        if stage.output is not None:
            stage.output = column(output=cast(nn.Linear, stage.output))

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Take the previous stage's activation. Megatron-Core's pipeline calls this ahead of a pass."""
        self.input = tensors[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """The next stage's input, or logits of this rank's part of the vocabulary."""
        found: Tensor = self.stage(tokens if self.input is None else self.input)
        return found


class _Attention(nn.Module):
    """LlamaAttention with one column-parallel linear."""

    def __init__(self, qkv: nn.Module, o_proj: nn.Module, width: int, rows: Mapping[str, int]) -> None:
        super().__init__()
        self.fused, self.o_proj, self.width, self.rows = qkv, o_proj, width, list(rows.values())

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        parts = self.fused(hidden_states).split(self.rows, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(-2)), None


class _GatedMLP(nn.Module):
    """LlamaMLP with one column-parallel linear."""

    def __init__(self, gate_and_up: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.fused, self.down_proj = gate_and_up, down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fused(x).chunk(2, -1)
        found: Tensor = self.down_proj(F.silu(gate) * up)
        return found


def _without_bias(linear: nn.Module) -> Any:
    """Megatron-Core's linears return (output, bias that the caller shall add), here None."""
    linear.register_forward_hook(lambda module, inputs, outputs: outputs[0])
    return linear


def _core() -> SimpleNamespace:
    """Import what is used of Megatron-Core, its pipeline and gradient buffers on the CPU."""
    with warnings.catch_warnings():
        # It warns of each CUDA extension that it can do without.
        warnings.simplefilter("ignore")
        from megatron.core import enums, parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            param_and_grad_buffer,
        )
        from megatron.core.pipeline_parallel import p2p_communication, schedules
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer import TransformerConfig
    # Its advice on the order of CUDA kernels, given on the CPU too.
    warnings.filterwarnings("ignore", message="When using async grad allreduce")
    for module in (p2p_communication, schedules, param_and_grad_buffer):
        module.torch = _OnCpu()
    parts = (DistributedDataParallel, DistributedDataParallelConfig, ProcessGroupCollection, TransformerConfig)
    return SimpleNamespace(
        **{part.__name__: part for part in parts},
        **{
            name: getattr(tensor_parallel, name)
            for name in (
                "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "vocab_parallel_cross_entropy"
            )
        },
        parallel_state=parallel_state,
        ModelType=enums.ModelType,
        P2PCommunicator=p2p_communication.P2PCommunicator,
        forward_backward_pipelining_without_interleaving=schedules.forward_backward_pipelining_without_interleaving,
    )  # fmt: skip


class _OnCpu:
    """The module torch, but allocations on CUDA are on the CPU, which has no queue to synchronize."""

    cuda = SimpleNamespace(current_device=lambda: "cpu", synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*sizes: Any, device: Any = None, **options: Any) -> Tensor:
        """`torch.zeros` on the CPU."""
        return torch.zeros(*sizes, **options)
