"""Models partitioned by hand: parameters of this rank's shape, mostly on `meta`, and modules that say how."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from oases.core.blocks.sharding import Cut

SIZES = {"vocab_size": 37, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8, **SIZES}
LLAMA = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24, **SIZES}
BERT = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24, **SIZES}

KINDS: dict[str, Any] = {
    "gpt2": lambda **more: GPT2LMHeadModel(GPT2Config(**{**GPT2, **more})),
    "gpt2 base": lambda: GPT2Model(GPT2Config(**GPT2)),
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**{**LLAMA, **more})),
    "bert": lambda: BertModel(BertConfig(**BERT)),
    "mixed": lambda: Mixed(),
}

COLUMN, ROW = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "head"),
    ("o_proj", "down_proj", "out"),
)


class Mixed(nn.Module):
    """Every way to be cut, and tensors that are not: types, no dimensions, buffers, a table tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6)
        self.fused = nn.Linear(6, 16)
        self.conv = Conv1D(24, 6)
        self.out = nn.Linear(8, 6)
        self.experts = nn.Parameter(torch.randn(3, 8, 6, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.table.weight


def partition(model: nn.Module, group: dist.ProcessGroup | None, *, device: str = "meta") -> nn.Module:
    """Cut what the modules' names say, in place."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    for path, module in model.named_modules():
        dims, segments = _ways(path.rpartition(".")[2], module)
        dims = {name: dim for name, dim in dims.items() if getattr(module, name, None) is not None}
        if not dims:
            continue
        module.shard_dims, module.tensor_parallel = dims, ranks
        module._group_name = "" if group is None else group.group_name
        module.shard_segments = {name: segments or (getattr(module, name).shape[dim],) for name, dim in dims.items()}
    locals_: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            dim = getattr(module, "shard_dims", {}).get(name)
            if id(parameter) not in locals_:
                part = parameter.detach().to(device)
                if dim is not None:
                    part = Cut(dim, module.shard_segments[name]).take(part, rank, ranks).clone()
                locals_[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
            module._parameters[name] = locals_[id(parameter)]
    return model


def _ways(name: str, module: nn.Module) -> tuple[dict[str, int], tuple[int, ...] | None]:
    if isinstance(module, Mixed):
        return {"experts": 1}, None
    if isinstance(module, nn.Embedding) and name in ("wte", "embed_tokens", "table"):
        return {"weight": 0}, None
    if name in ("c_attn", "conv"):
        third = module.weight.shape[1] // 3
        return {"weight": 1, "bias": 0}, (third, third, third)
    if name == "c_fc":
        return {"weight": 1, "bias": 0}, None
    if name == "c_proj":
        return {"weight": 0}, None
    if name == "fused":
        return {"weight": 0, "bias": 0}, (8, 4, 4)
    if name in COLUMN:
        return {"weight": 0, "bias": 0}, None
    return ({"weight": 1}, None) if name in ROW else ({}, None)


def build(kind: str, device: str = "meta", **more: Any) -> nn.Module:
    """A model of a kind, partitioned over all ranks there are. Its non-persistent buffers are on `device`, too."""
    with torch.device(device):
        model = KINDS[kind](**more)
    return partition(model, dist.group.WORLD if dist.is_initialized() else None, device=device)


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that names, their order, types and values are the same."""
    assert list(state) == list(other)
    for name, tensor in state.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def message(function: Callable[..., Any], *args: Any) -> str:
    """Type and message of the exception that a function raises."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
