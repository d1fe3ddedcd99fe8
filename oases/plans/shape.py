"""Model shapes: sizes of a transformer, and the FLOPs, bytes and parameters of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from oases.core.schedule import from_text, is_text
from oases.errors import UsageError
from oases.limits import require_numbers, short

BlockKind = Literal["attention", "mlp"]
KINDS: tuple[BlockKind, BlockKind] = ("attention", "mlp")
AnyKind: TypeAlias = Any
"""Kind of a block of any model: a BlockKind, or the Kind of a LayeredModel."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, whatever the parameter's dtype: gradients accumulate in float32."""
REDUCED_UNITS = 2
"""Blocks whose whole gradients are being reduced at a time, with fsdp or zero; another one waits for the first."""

LARGEST = 2**31 - 1
"""Upper bound of any size or count; anything larger is a typing error."""


def state_bytes(element: int, parameters: int, replicas: int, *, zero: bool = False, fsdp: bool = False) -> int:
    """Bytes of parameters, gradients and Adam state on a rank. element: bytes of a parameter.

    Gradients are float32. 16-bit weights have float32 masters beside the two moments: 18 bytes per parameter in all,
    against 16 in float32. zero, fsdp: `replicas` share float32 weights, gradients and moments; with zero each has
    whole weights besides. Not in it: what is whole for a while, see `planner.memory.sharding_bytes`.
    """
    if replicas > 1 and (zero or fsdp):
        return parameters * (GRADIENT_BYTES + 12) // replicas + parameters * element * zero
    return parameters * (element + GRADIENT_BYTES + (8 if element == GRADIENT_BYTES else 12))


@dataclass(frozen=True)
class ModelShape:
    """Shape of a GPT: `layers` times attention and an MLP of four times the width. sequence: tokens per sample.

    Differences from a GPT, 0 or False if there are none: head_size: features per head. kv_heads: key/value heads
    (GQA). intermediate: MLP width. gated: gated MLP with a third matmul. tied: tied embeddings.
    Blocks of one plan may have different degrees: `mixed` is True.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 50304
    dtype: str = "float32"
    name: str = "gpt"
    head_size: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    gated: bool = False
    tied: bool = True

    mixed: ClassVar[bool] = True
    token_wise: ClassVar[bool] = True
    num_experts: ClassVar[int] = 0
    expert_parallel: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model: {name} must be a whole number of at least 1, got {short(value)}")
        for name in ("head_size", "kv_heads", "intermediate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"model: {name} must be a whole number of at least 0, got {short(value)}")
        require_numbers(vars(self), "model: ")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UsageError(f"model: {self.heads} heads do not divide by kv_heads {self.kv_heads}")
        if not self.head_size and self.hidden % self.heads:
            raise UsageError(f"model: hidden {self.hidden} does not divide by {self.heads} heads")
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"model: unknown dtype {self.dtype!r}; known are {', '.join(ELEMENT_BYTES)}")

    @property
    def num_blocks(self) -> int:
        """Number of blocks; attention and MLP count each."""
        return 2 * self.layers

    @property
    def element_bytes(self) -> int:
        """Bytes per element of an activation."""
        return ELEMENT_BYTES[self.dtype]

    def state_bytes(self, parameters: int, replicas: int, *, zero: bool = False, fsdp: bool = False) -> int:
        """Bytes of parameters, gradients and Adam state on a rank (see the function `state_bytes`)."""
        return state_bytes(self.element_bytes, parameters, replicas, zero=zero, fsdp=fsdp)

    def step_flops(self, samples: float) -> float:
        """FLOPs of a step without recomputation: matmuls of the forward and the backward pass.

        The backward pass of a matmul is two matmuls; embeddings are lookups, the head is a matmul.
        """
        blocks = self.layers * sum(sum(self.matmul_flops(kind, 1, samples)) for kind in KINDS)
        return 3 * (blocks + self.head_flops(samples))

    def head_flops(self, samples: float, tp: int = 1) -> float:
        """FLOPs of the head's matmul in a forward pass, on one of `tp` ranks."""
        return 2.0 * samples * self.sequence * self.hidden * self.vocabulary / tp

    def logits(self, samples: float, tp: int) -> float:
        """Elements of the logits on one of `tp` ranks."""
        return samples * self.sequence * self.vocabulary / tp

    def message_bytes(self, layer: int, samples: float) -> int:
        """Bytes of the activation that crosses the border before a layer."""
        return self.unit_bytes(samples)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, with embeddings."""
        blocks = self.layers * sum(self.block_parameters(kind, 1) for kind in KINDS)
        return blocks + self.embedding_parameters(1)

    @property
    def is_gpt(self) -> bool:
        """Whether its blocks are a GPT's, as those of measured profiles are."""
        same = self.intermediate in (0, 4 * self.hidden) and self.kv_heads in (0, self.heads)
        return same and self.attended == self.hidden and not self.gated

    @property
    def attended(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_size if self.head_size else self.hidden

    def inner_width(self, kind: AnyKind) -> int:
        """Sum of a block's matmul widths on the side that is not `hidden`: 4 and 8 times `hidden` in a GPT."""
        if kind == "mlp":
            return (3 if self.gated else 2) * (self.intermediate or 4 * self.hidden)
        return 2 * self.attended + 2 * self.attended * (self.kv_heads or self.heads) // self.heads

    @property
    def layer_kinds(self) -> tuple[tuple[BlockKind, ...], ...]:
        """Kinds of the blocks of each kind of layer: one kind, of two blocks."""
        return (KINDS,)

    @property
    def layer_order(self) -> tuple[int, ...]:
        """Index in `layer_kinds` of each layer."""
        return (0,) * self.layers

    def first_block(self, layer: int) -> int:
        """First block of a layer."""
        return 2 * layer

    def layer_at(self, block: int) -> int:
        """Layer that holds a block."""
        return block // 2

    def num_layers(self, first: int, count: int) -> int:
        """Number of layers of `count` blocks from block `first` on: pairs, an odd last block counted as one."""
        return (count + 1) // 2

    def layer_numbers(self, first: int, count: int) -> None:
        """Layer of each of these blocks, for a schedule's generator: None, which is pairs."""

    def alike(self, first: int, count: int) -> int:
        """First block from which `count` blocks of the same kinds begin: one name for equal segments."""
        return first % 2

    def with_layers(self, count: int) -> ModelShape:
        """The model with another number of layers."""
        return replace(self, layers=count)

    def in_dtype(self, dtype: str) -> ModelShape:
        """The model in another dtype."""
        return replace(self, dtype=dtype)

    def kind_of(self, block: int) -> AnyKind:
        """Kind of a block: attention or MLP."""
        return KINDS[block % 2]

    def fits_degree(self, tp: int) -> bool:
        """Whether heads, width and vocabulary divide over `tp` ranks."""
        sizes = (self.heads, self.kv_heads, self.hidden, self.intermediate, self.vocabulary)
        return not any(size % tp for size in sizes)

    def block_parameters(self, kind: AnyKind, tp: int) -> int:
        """Parameters of a block on one of `tp` ranks; norms and row-parallel biases are replicated."""
        h = self.hidden
        cut = h * self.inner_width(kind) + (3 if kind == "attention" else 4) * h
        return cut // tp + 3 * h

    def expert_parameters(self, kind: AnyKind) -> int:
        """0: a plan's experts replace its MLPs (`Experts`)."""
        return 0

    def embedding_parameters(self, tp: int) -> int:
        """Parameters of embedding, positions, last norm and untied head on one of `tp` ranks; sharded by
        vocabulary.
        """
        tables = 1 if self.tied else 2
        return (tables * (self.vocabulary // tp) + self.sequence + 2) * self.hidden

    def end_parameters(self, first: int, last: int, tp: int) -> int:
        """Parameters outside of the layers on one of `tp` ranks of a stage with layers [first, last).

        With tied embeddings both ends hold the table; else the first stage holds table and positions, the last one
        norm and head.
        """
        ends = (first == 0, last == self.layers)
        if self.tied or all(ends):
            return self.embedding_parameters(tp) if any(ends) else 0
        table = self.vocabulary // tp * self.hidden
        return (table + self.sequence * self.hidden) * ends[0] + (table + 2 * self.hidden) * ends[1]

    def unit_bytes(self, samples: float) -> int:
        """Bytes of the activation between two blocks: samples x sequence x hidden."""
        return round(samples * self.sequence * self.hidden * self.element_bytes)

    def kept_bytes(self, kind: AnyKind, tp: int, samples: float) -> int:
        """Bytes of activations that the backward pass of one block needs, with its input.

        Replicated: the input and the output of the norm. Sharded: the outputs of matmuls, i.e. queries, keys,
        values and the attention output, or the MLP before and after its GELU. A gated MLP keeps both outputs, the
        activation and their product.
        """
        unit = self.unit_bytes(samples)
        inner = self.inner_width(kind)
        if kind == "mlp" and self.gated:
            inner = inner * 4 // 3
        return 2 * unit + inner * unit // (self.hidden * tp)

    def matmul_flops(self, kind: AnyKind, tp: int, samples: float) -> tuple[float, float, float]:
        """FLOPs of a forward pass: column-parallel matmuls, attention itself, row-parallel matmul."""
        tokens, h, inner = samples * self.sequence, self.hidden, self.inner_width(kind)
        if kind == "mlp":
            row = self.intermediate or 4 * h
            return 2.0 * tokens * h * (inner - row) / tp, 0.0, 2.0 * tokens * h * row / tp
        attended = self.attended
        core = 4.0 * tokens * self.sequence * attended / tp
        return 2.0 * tokens * h * (inner - attended) / tp, core, 2.0 * tokens * h * attended / tp


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces every MLP: sizes, router, and replication of busy experts.

    experts: per layer, sharded across all ranks of its stage. top_k: experts per token. expert_hidden: width of an
    expert, 0 for 4 x hidden. shared_hidden: width of the shared expert, 0 for none. gate: of the router.
    balance_weight, z_weight: weights of its auxiliary losses. bias_update_rate: 0 = no bias. capacity_factor: 0 =
    drops no tokens. placement: method that replicates experts. expert_memory: bytes of one layer's replicas per
    rank, -1 = unlimited. expert_schedule: name of one in `oases.plans.expert_schedules`, or the text of one for a
    segment's layers.
    """

    experts: int
    top_k: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0
    gate: str = "softmax"
    balance_weight: float = 0.01
    z_weight: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float = 0.0
    placement: str = "prophet"
    expert_memory: int = -1
    expert_schedule: str = "block_wise"

    def __post_init__(self) -> None:
        require_numbers(vars(self))
        if self.experts < 1:
            raise UsageError(f"experts must be at least 1, or 0 for a dense model, got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top_k must be from 1 to the {self.experts} experts, got {self.top_k}")
        if self.placement != "none" and self.expert_schedule == "plain":
            raise UsageError(
                f"expert_schedule plain moves no experts, but placement is {self.placement}; give placement none, or "
                "another schedule"
            )

    @property
    def name(self) -> str:
        """Name of the expert schedule."""
        text = self.expert_schedule
        return from_text(text, "experts").name if is_text(text) else text

    def layer_parameters(self, hidden: int) -> int:
        """Parameters of a layer's experts on all ranks together."""
        return 2 * hidden * (self.experts * (self.expert_hidden or 4 * hidden) + self.shared_hidden)


def _gpt(name: str, hidden: int, layers: int, heads: int, sequence: int = 1024) -> ModelShape:
    return ModelShape(hidden, layers, heads, sequence, name=name)


MODELS = {
    shape.name: shape
    for shape in (
        _gpt("gpt-125m", 768, 12, 12),
        _gpt("gpt-350m", 1024, 24, 16),
        _gpt("gpt-760m", 1536, 24, 16),
        _gpt("gpt-1.3b", 2048, 24, 32),
        _gpt("gpt-2.7b", 2560, 32, 32),
        _gpt("gpt-6.7b", 4096, 32, 32, 2048),
        _gpt("gpt-13b", 5120, 40, 40, 2048),
        _gpt("gpt-20b", 6144, 44, 64, 2048),
        _gpt("gpt-65b", 8192, 80, 64, 2048),
        _gpt("gpt-175b", 12288, 96, 96, 2048),
        _gpt("gpt-1t", 25600, 128, 160, 2048),
    )
}
"""Shapes by name: sizes of the GPT-3 and GPT-NeoX families, with a vocabulary padded for divisibility."""


def model_called(name: str) -> ModelShape:
    """Shape of this name. Raises UsageError, listing the known ones."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; known are {', '.join(MODELS)}, or give --hidden, --layers, ...")
    return MODELS[name]
