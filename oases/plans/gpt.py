"""GPTs as layered models: FLOPs, bytes and parameters of their blocks by formula, and known sizes by name."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from oases.errors import UsageError
from oases.plans.layered import Block, Kind, LayerKind, LayerList, Model, Outside, Share
from oases.plans.shape import ELEMENT_BYTES, KINDS, GPTSizes


def gpt(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int = 50304, **more: Any) -> Model:
    """Model of these sizes, see `GPTSizes`. Blocks of one plan may have different degrees."""
    return gpt_of(GPTSizes(hidden, layers, heads, sequence, vocabulary, **more))


def resized(model: Model, **sizes: Any) -> Model:
    """A GPT with other sizes."""
    assert model.sizes is not None
    return gpt_of(replace(model.sizes, **sizes))


def gpt_of(sizes: GPTSizes) -> Model:
    """Model of these sizes.

    Every rank has norms and row-parallel biases, and keeps input and output of the norm. Sharded are the matmuls and
    what is kept of them: queries, keys, values and the attention output, or the MLP before and after its GELU; a
    gated MLP keeps both outputs, the activation and their product. Each tensor is written once and read once by the
    next op; norms and residuals pass over whole units.
    """
    h, s, element, attended = sizes.hidden, sizes.sequence, ELEMENT_BYTES[sizes.dtype], sizes.attended
    unit, table, width = s * h * element, sizes.vocabulary * h, sizes.intermediate or 4 * h
    heads, inner = gcd(sizes.heads, sizes.kv_heads), (3 if sizes.gated else 2) * width

    def block(name: str, units: int, inner: int, row: int, core: int, kept: int, biases: int) -> Block:
        whole = Share(parameters=3 * h, moved=3 * unit, kept=2 * unit)
        cut = Share(
            units, parameters=h * inner + biases, column=2 * s * h * (inner - row), core=core, row=2 * s * h * row,
            moved=2 * s * kept * element, kept=s * kept * element,
        )  # fmt: skip
        return Block(name, (whole, cut), combined=4 * unit, ops=5)

    projected = 2 * attended + 2 * attended * (sizes.kv_heads or sizes.heads) // sizes.heads
    blocks = (
        block("attention", heads, projected, attended, 4 * s * s * attended, projected, 3 * h),
        block("mlp", gcd(h, sizes.intermediate), inner, width, 0, inner * 4 // 3 if sizes.gated else inner, 4 * h),
    )
    ends = (
        Outside(0, (Share(parameters=s * h, moved=3 * unit), Share(sizes.vocabulary, True, parameters=table))),
        Outside(
            sizes.layers,
            (Share(parameters=2 * h), Share(sizes.vocabulary, True, parameters=table, column=2 * s * table)),
            s * sizes.vocabulary, table * sizes.tied,
        ),
    )  # fmt: skip
    a_layer = sum(share.parameters for each in blocks for share in each.shares)
    return Model(
        name=sizes.name, dtype=sizes.dtype, sequence=s, hidden=h, unit=s * h, vocabulary=sizes.vocabulary,
        num_parameters=sizes.layers * a_layer + (1 if sizes.tied else 2) * table + (s + 2) * h,
        lists=(LayerList("layers", sizes.layers),), kinds=(LayerKind("layers.0", blocks),),
        order=(0,) * sizes.layers, outside=ends, messages=(unit,) * sizes.layers, token_wise=True, sizes=sizes,
    )  # fmt: skip


def kind_called(name: str) -> Kind:
    """Kind of a GPT's block by its name, attention or mlp."""
    return 0, KINDS.index(name)


MODELS = {
    name: gpt(hidden, layers, heads, sequence, name=name)
    for name, hidden, layers, heads, sequence in (
        ("gpt-125m", 768, 12, 12, 1024),
        ("gpt-350m", 1024, 24, 16, 1024),
        ("gpt-760m", 1536, 24, 16, 1024),
        ("gpt-1.3b", 2048, 24, 32, 1024),
        ("gpt-2.7b", 2560, 32, 32, 1024),
        ("gpt-6.7b", 4096, 32, 32, 2048),
        ("gpt-13b", 5120, 40, 40, 2048),
        ("gpt-20b", 6144, 44, 64, 2048),
        ("gpt-65b", 8192, 80, 64, 2048),
        ("gpt-175b", 12288, 96, 96, 2048),
        ("gpt-1t", 25600, 128, 160, 2048),
    )
}
"""Models by name: sizes of the GPT-3 and GPT-NeoX families, with a vocabulary padded for divisibility."""


def model_called(name: str) -> Model:
    """Model of this name. Raises UsageError, listing the known ones."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; known are {', '.join(MODELS)}, or give --hidden, --layers, ...")
    return MODELS[name]
