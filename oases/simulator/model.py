"""The sizes of a transformer and what its blocks compute, send and keep: all that a plan needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oases.errors import UsageError

BlockKind = Literal["attention", "mlp"]
KINDS: tuple[BlockKind, BlockKind] = ("attention", "mlp")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LARGEST = 2**31 - 1
"""Of any size or count: what is beyond it was mistyped."""
MOST_LAYERS = 4096
"""Beyond it a search would not end in time."""


@dataclass(frozen=True)
class ModelShape:
    """A GPT: `layers` times attention and an MLP of four times the width. sequence: tokens per sample."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 50304
    dtype: str = "float32"
    name: str = "gpt"

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model: {name} must be a whole number of at least 1, got {value!r}")
            most = MOST_LAYERS if name == "layers" else LARGEST
            if value > most:
                raise UsageError(f"model: {name} must be at most {most}, got {value}")
        if self.hidden % self.heads:
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

    @property
    def num_parameters(self) -> int:
        """Of the whole model, embeddings included."""
        blocks = self.layers * sum(self.block_parameters(kind, 1) for kind in KINDS)
        return blocks + (self.vocabulary + self.sequence + 2) * self.hidden

    def kind_of(self, block: int) -> BlockKind:
        """What the block at this place is."""
        return KINDS[block % 2]

    def fits_degree(self, tp: int) -> bool:
        """Whether heads, width and vocabulary can be cut over `tp` ranks."""
        return not (self.heads % tp or self.hidden % tp or self.vocabulary % tp)

    def block_parameters(self, kind: BlockKind, tp: int) -> int:
        """Parameters of one block on one of `tp` ranks: matrices are cut, norms and row-parallel biases are not."""
        h = self.hidden
        cut = 4 * h * h + 3 * h if kind == "attention" else 8 * h * h + 4 * h
        return cut // tp + 3 * h

    def embedding_parameters(self, tp: int) -> int:
        """Of embedding, positions and last norm on one of `tp` ranks; the table is cut over the vocabulary."""
        return (self.vocabulary // tp + self.sequence + 2) * self.hidden

    def unit_bytes(self, samples: float) -> int:
        """Of the activations between two blocks: samples x sequence x hidden."""
        return round(samples * self.sequence * self.hidden * self.element_bytes)

    def kept_bytes(self, kind: BlockKind, tp: int, samples: float) -> int:
        """Activations that the backward pass of one block needs, its input included.

        Whole on every rank are the input and the norm's result; cut over the ranks are the products' results:
        queries, keys, values and what attention makes of them, or the MLP before and after its GELU.
        """
        unit = self.unit_bytes(samples)
        inner = 4 if kind == "attention" else 8
        return 2 * unit + inner * unit // tp

    def product_flops(self, kind: BlockKind, tp: int, samples: float) -> tuple[float, float, float]:
        """Floating-point operations of a forward pass: column-parallel, attention itself, row-parallel."""
        tokens, h = samples * self.sequence, self.hidden
        if kind == "mlp":
            return 8.0 * tokens * h * h / tp, 0.0, 8.0 * tokens * h * h / tp
        return 6.0 * tokens * h * h / tp, 4.0 * tokens * self.sequence * h / tp, 2.0 * tokens * h * h / tp


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
