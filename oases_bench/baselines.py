"""Other people's tensor parallelism, as contestants: torch's DTensor plan, Megatron-Core's linears, DeepSpeed Domino.

A peer is a module [batch, sequence, hidden] -> the same that computes what the blocks of `oases.models.gpt` compute,
with the same shards of the same weights, and communicates in its own way. Peers are imported when they are made.
Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oases.core.execution.group import ProcessGroup
from oases.errors import UsageError
from oases.models.gpt import GPTConfig
from oases_bench.harness import parse_peers

BASELINES = ("torch", "megatron", "domino")

_PACKAGES = {"torch": "torch", "megatron": "megatron-core", "domino": "deepspeed"}

MakeLinear = Callable[[int, int], nn.Module]
"""(input features, output features), both of the whole weight -> a linear layer."""


def parse_baselines(text: str, batch: int = 2, recompute: str = "none") -> tuple[str, ...]:
    """Peers as in `parse_peers`; all are those that can run such a batch and recomputation."""
    names = parse_peers(text, BASELINES)
    return tuple(name for name in names if text != "all" or unsupported_reason(name, batch, recompute) is None)


def require_installed(name: str) -> None:
    """Raise UsageError unless the peer is installed here."""
    try:
        distribution(_PACKAGES[name])
    except PackageNotFoundError:
        raise UsageError(
            f"the peer {name!r} needs {_PACKAGES[name]}, which is not installed; "
            "pip install --group peers, or leave it out of --peers"
        ) from None


def require_baseline(name: str, batch: int, recompute: str = "none") -> None:
    """Raise UsageError unless the peer is installed here and can run such a batch with such recomputation."""
    require_installed(name)
    reason = unsupported_reason(name, batch, recompute)
    if reason is not None:
        raise UsageError(f"the peer {name!r} {reason}, or leave it out of --peers")


def unsupported_reason(name: str, batch: int, recompute: str) -> str | None:
    """Why a peer cannot run such a batch with such recomputation, and the remedy; None if it can."""
    if name == "domino" and recompute != "none":
        return (
            f"cannot recompute ({recompute!r}): its layers share one loop over both halves of the batch; use "
            "--recompute none"
        )
    if name == "domino" and batch < 2:
        return f"cuts the batch in two, and {batch} sample cannot be; raise --batch"
    return None


def make_baseline(
    name: str,
    config: GPTConfig,
    blocks: Sequence[nn.Module],
    group: ProcessGroup,
    recompute: str = "none",
) -> nn.Module:
    """The peer `name` on this rank of `group`, with copies of the shards that `blocks` hold.

    blocks: what `transformer_blocks(config, group)` returns. recompute: "none", or "full" to compute each layer
    again in the backward pass, its forward all-reduces included. UsageError as `require_baseline`, which knows the
    batch.
    """
    require_baseline(name, batch=2, recompute=recompute)
    make = {"torch": _torch, "megatron": _megatron, "domino": _domino}[name]
    like = next(blocks[0].parameters())
    with torch.device(like.device):
        peer, parts = make(config, group, recompute == "full")
    peer.to(like.dtype)
    _copy_shards(parts, chain.from_iterable(block.children() for block in blocks))
    return peer


_Made = tuple[nn.Module, Iterable[nn.Module]]
"""A peer and its norms and linears, in the order in which `blocks` hold theirs."""


@torch.no_grad()
def _copy_shards(parts: Iterable[nn.Module], ours: Iterable[nn.Module]) -> None:
    for part, our in zip(parts, ours, strict=True):
        for name, source in our.named_parameters():
            target = part.get_parameter(name)
            target = getattr(target, "to_local", lambda target=target: target)()
            # copy_ would broadcast, and a peer with less to compute would win.
            assert target.shape == source.shape, f"{name} is {tuple(target.shape)}, ours {tuple(source.shape)}"
            target.copy_(source)


class _Layer(nn.Module):
    """Pre-norm attention and MLP around linears that hold shards and do their own communication."""

    def __init__(self, config: GPTConfig, column: MakeLinear, row: MakeLinear) -> None:
        super().__init__()
        h = config.hidden
        self.head_width = h // config.heads
        self.norm = nn.LayerNorm(h)
        self.qkv = column(h, 3 * h)
        self.projection = row(h, h)
        self.mlp_norm = nn.LayerNorm(h)
        self.up = column(h, 4 * h)
        self.down = row(4 * h, h)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        qkv = self.qkv(self.norm(x_BSH)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BSH = x_BSH + self.projection(attended)
        return cast(Tensor, x_BSH + self.down(F.gelu(self.up(self.mlp_norm(x_BSH)), approximate="tanh")))


class _Stack(nn.Module):
    def __init__(self, layers: Iterable[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute

    def forward(self, x_BSH: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSH = checkpoint(layer, x_BSH, use_reentrant=False) if self.recompute else layer(x_BSH)
        return x_BSH

    def parts(self) -> Iterable[nn.Module]:
        return chain.from_iterable(layer.children() for layer in self.layers)


def _torch(config: GPTConfig, group: ProcessGroup, recompute: bool) -> _Made:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(group, torch.get_default_device().type)
    plan = {
        "qkv": ColwiseParallel(),
        "projection": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    stack = _Stack((_Layer(config, nn.Linear, nn.Linear) for _ in range(config.layers)), recompute)
    for layer in stack.layers:
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    return stack, stack.parts()


def _megatron(config: GPTConfig, group: ProcessGroup, recompute: bool) -> _Made:
    with warnings.catch_warnings():
        # It warns of each CUDA extension that it can do without.
        warnings.simplefilter("ignore")
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    # Its advice on the order of CUDA kernels, given on the CPU too.
    warnings.filterwarnings("ignore", message="When using async grad allreduce")
    given: dict[str, Any] = {
        # "CPU initialization" leaves the device to torch's default one, which make_baseline has set.
        "config": ModelParallelConfig(
            tensor_model_parallel_size=group.size(), use_cpu_initialization=True, perform_initialization=False
        ),
        "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False, "tp_group": group,
    }  # fmt: skip

    def column(inputs: int, outputs: int) -> nn.Module:
        linear = ColumnParallelLinear(inputs, outputs, gather_output=False, **given)
        assert linear.allreduce_dgrad, "Megatron-Core hides the all-reduce of the input gradient only then"
        return _without_bias(linear)

    def row(inputs: int, outputs: int) -> nn.Module:
        return _without_bias(RowParallelLinear(inputs, outputs, input_is_parallel=True, **given))

    stack = _Stack((_Layer(config, column, row) for _ in range(config.layers)), recompute)
    return stack, stack.parts()


def _without_bias(linear: nn.Module) -> nn.Module:
    """Megatron-Core's linears return (output, bias that the caller shall add), here None."""
    linear.register_forward_hook(lambda module, inputs, outputs: outputs[0])
    return linear


class _SequenceFirst(nn.Module):
    """Domino under our layout: one copy of the input and one of the output."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_SBH = x_BSH.transpose(0, 1).contiguous()
        return cast(Tensor, self.transformer(x_SBH, None).transpose(0, 1).contiguous())


def _domino(config: GPTConfig, group: ProcessGroup, recompute: bool) -> _Made:
    device = torch.get_default_device().type
    os.environ.setdefault("DS_ACCELERATOR", device)  # read on import
    from deepspeed import ops
    from deepspeed.runtime.domino import async_linear
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    # On the CPU it would first compile an all-reduce for inference, which Domino never calls.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It sums in place behind autograd's back, which torch warns of; the tests check that the gradients are right.
    warnings.filterwarnings("ignore", message="c10d::allreduce_")
    # The group of its backward all-reduces is a global that only the first layer ever made would set.
    async_linear.TP_group = group
    sizes = SimpleNamespace(
        num_layers=config.layers, hidden_size=config.hidden, ffn_hidden_size=4 * config.hidden,
        num_attention_heads=config.heads, kv_channels=config.hidden // config.heads, params_dtype=torch.float32,
        layernorm_epsilon=1e-5, attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=True,
        gated_linear_unit=False, apply_residual_connection_post_layernorm=False, perform_initialization=False,
        init_method=None, output_layer_init_method=None,
        domino_intra_layer_overlap=False,  # across layers: the stronger of its two schedules
    )  # fmt: skip
    mpu = SimpleNamespace(
        get_tensor_model_parallel_world_size=group.size, get_tensor_model_parallel_group=lambda: group
    )
    transformer = DominoTransformer(sizes, mpu, None, ModelType.encoder_or_decoder, post_layer_norm=False)
    parts: list[nn.Module] = []
    for layer in transformer.layers:
        layer.mlp_activation_func = partial(F.gelu, approximate="tanh")  # the exact one costs more
        attention = layer.self_attention
        parts += [layer.input_layernorm, attention.query_key_value, attention.dense]
        parts += [layer.post_attention_layernorm, layer.linear_fc1, layer.linear_fc2]
    return _SequenceFirst(transformer), parts
