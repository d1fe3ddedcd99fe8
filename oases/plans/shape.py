"""The sizes of a transformer and what its blocks compute, send and keep: all that a plan needs to know of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from oases.errors import UsageError
from oases.schedule import from_text, is_text

BlockKind = Literal["attention", "mlp"]
KINDS: tuple[BlockKind, BlockKind] = ("attention", "mlp")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Of a parameter's gradient, whatever the parameter's type: gradients add up in float32."""

LARGEST = 2**31 - 1
"""Of any size or count: what is beyond it was mistyped."""
MOST_LAYERS = 4096
"""Beyond it a search would not end in time."""


@dataclass(frozen=True)
class ModelShape:
    """A GPT: `layers` times attention and an MLP of four times the width. sequence: tokens per sample.

    What differs from a GPT has fields of its own, 0 where it does not. head_size: features of a head. kv_heads: heads
    of keys and values. intermediate: features inside of the MLP. gated: the MLP has a third product, whose result is
    multiplied with the first's. tied: the head is the embedding's table.
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

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model: {name} must be a whole number of at least 1, got {value!r}")
            most = MOST_LAYERS if name == "layers" else LARGEST
            if value > most:
                raise UsageError(f"model: {name} must be at most {most}, got {value}")
        for name in ("head_size", "kv_heads", "intermediate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
                raise UsageError(f"model: {name} must be a whole number from 0 to {LARGEST}, got {value!r}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UsageError(f"model: {self.heads} heads do not divide by kv_heads {self.kv_heads}")
        if not self.head_size and self.hidden % self.heads:
            raise UsageError(f"model: hidden {self.hidden} does not divide by {self.heads} heads")
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"model: unknown dtype {self.dtype!r}; known are {', '.join(ELEMENT_BYTES)}")

    @property
    def num_blocks(self) -> int:
        """Attention and MLP count each."""
        return 2 * self.layers

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return ELEMENT_BYTES[self.dtype]

    def state_bytes(self, parameters: int, replicas: int, *, zero: bool = False, fsdp: bool = False) -> int:
        """Bytes on a rank of parameters, their gradients and Adam's state.

        Gradients are of float32. In a type of half its width, weights have masters in it beside the two moments: 18
        bytes a parameter in all, against 16. zero: masters and moments are cut over the `replicas`. fsdp: so are the
        parameters; gradients are counted whole, as they add up before the last micro-batch's backward pass.
        """
        optimizer = 8 if self.element_bytes == GRADIENT_BYTES else 12
        weights = parameters // (replicas if fsdp else 1) * self.element_bytes
        return weights + parameters * GRADIENT_BYTES + parameters * optimizer // (replicas if zero or fsdp else 1)

    def step_flops(self, samples: float) -> float:
        """Floating-point operations of a step: products of forward and backward pass, nothing computed again.

        The backward pass of a product is two products; embeddings are looked up, the head is a product.
        """
        blocks = self.layers * sum(sum(self.product_flops(kind, 1, samples)) for kind in KINDS)
        head = 2.0 * samples * self.sequence * self.hidden * self.vocabulary
        return 3 * (blocks + head)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, embeddings included."""
        blocks = self.layers * sum(self.block_parameters(kind, 1) for kind in KINDS)
        return blocks + self.embedding_parameters(1)

    @property
    def is_gpt(self) -> bool:
        """Whether its blocks are a GPT's, as those of measured profiles are."""
        same = self.intermediate in (0, 4 * self.hidden) and self.kv_heads in (0, self.heads)
        return same and self.attended == self.hidden and not self.gated

    @property
    def attended(self) -> int:
        """Features of the queries, all heads together."""
        return self.heads * self.head_size if self.head_size else self.hidden

    def inner_width(self, kind: BlockKind) -> int:
        """Features of a block's products on the side that is not `hidden`, summed: 4 and 8 times it in a GPT."""
        if kind == "mlp":
            return (3 if self.gated else 2) * (self.intermediate or 4 * self.hidden)
        return 2 * self.attended + 2 * self.attended * (self.kv_heads or self.heads) // self.heads

    def kind_of(self, block: int) -> BlockKind:
        """What the block at this place is."""
        return KINDS[block % 2]

    def fits_degree(self, tp: int) -> bool:
        """Whether heads, width and vocabulary can be cut over `tp` ranks."""
        sizes = (self.heads, self.kv_heads, self.hidden, self.intermediate, self.vocabulary)
        return not any(size % tp for size in sizes)

    def block_parameters(self, kind: BlockKind, tp: int) -> int:
        """Parameters of one block on one of `tp` ranks: matrices are cut, norms and row-parallel biases are not."""
        h = self.hidden
        cut = h * self.inner_width(kind) + (3 if kind == "attention" else 4) * h
        return cut // tp + 3 * h

    def embedding_parameters(self, tp: int) -> int:
        """Of embedding, positions, last norm and a head of its own on one of `tp` ranks; tables are cut by tokens."""
        tables = 1 if self.tied else 2
        return (tables * (self.vocabulary // tp) + self.sequence + 2) * self.hidden

    def unit_bytes(self, samples: float) -> int:
        """Of the activations between two blocks: samples x sequence x hidden."""
        return round(samples * self.sequence * self.hidden * self.element_bytes)

    def kept_bytes(self, kind: BlockKind, tp: int, samples: float) -> int:
        """Activations that the backward pass of one block needs, its input included.

        Whole on every rank are the input and the norm's result; cut over the ranks are the products' results:
        queries, keys, values and what attention makes of them, or the MLP before and after its GELU. A gated MLP
        keeps both results, the activation and the product of them.
        """
        unit = self.unit_bytes(samples)
        inner = self.inner_width(kind)
        if kind == "mlp" and self.gated:
            inner = inner * 4 // 3
        return 2 * unit + inner * unit // (self.hidden * tp)

    def product_flops(self, kind: BlockKind, tp: int, samples: float) -> tuple[float, float, float]:
        """Floating-point operations of a forward pass: column-parallel, attention itself, row-parallel."""
        tokens, h, inner = samples * self.sequence, self.hidden, self.inner_width(kind)
        if kind == "mlp":
            row = self.intermediate or 4 * h
            return 2.0 * tokens * h * (inner - row) / tp, 0.0, 2.0 * tokens * h * row / tp
        attended = self.attended
        core = 4.0 * tokens * self.sequence * attended / tp
        return 2.0 * tokens * h * (inner - attended) / tp, core, 2.0 * tokens * h * attended / tp


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of every MLP: sizes, router, and how busy experts are copied.

    experts: of a layer, spread over all ranks of its stage. top_k: experts of a token. expert_hidden: features inside
    of an expert, 0 for 4 x hidden. shared_hidden: of an expert for every token, 0 for none. gate: of the router.
    balance_weight, z_weight: of its losses. bias_update_rate: 0 = no bias. capacity_factor: 0 = drops nothing.
    placement: the method that copies experts. expert_memory: bytes of one layer's copies on a rank, -1 = any number.
    expert_schedule: the name of a list of `oases.schedule.experts`, or the text of one for a segment's layers.
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
        if self.experts < 1:
            raise UsageError(f"experts must be at least 1, or 0 for a dense model, got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top_k must be from 1 to the {self.experts} experts, got {self.top_k}")
        for name in ("expert_hidden", "shared_hidden", "balance_weight", "z_weight", "bias_update_rate",
                     "capacity_factor"):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.expert_memory < -1:
            raise UsageError(f"expert_memory must be at least 0 bytes, or -1 for any, got {self.expert_memory}")
        if self.placement != "none" and self.expert_schedule == "plain":
            raise UsageError(
                f"expert_schedule plain moves no experts, and placement is {self.placement}; give placement none, or "
                "another schedule"
            )

    @property
    def name(self) -> str:
        """The schedule's name."""
        text = self.expert_schedule
        return from_text(text, "experts").name if is_text(text) else text

    def layer_parameters(self, model: ModelShape) -> int:
        """Parameters of the experts of a layer, all ranks together."""
        return 2 * model.hidden * (self.experts * (self.expert_hidden or 4 * model.hidden) + self.shared_hidden)


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
"""Shapes by name; sizes of the GPT-3 and GPT-NeoX families, with a vocabulary that divides well."""


def model_called(name: str) -> ModelShape:
    """The shape of this name; UsageError lists the known ones."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; known are {', '.join(MODELS)}, or give --hidden, --layers, ...")
    return MODELS[name]
