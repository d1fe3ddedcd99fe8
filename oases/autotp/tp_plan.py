"""What transformers' own plan says of a model (`model._tp_plan`), against what was found from its graph.

The plan is a list of names that somebody wrote by hand; the graph decides. Where both differ, one of them has found
less, or sums elsewhere, and the report says so.
"""

from __future__ import annotations

import re

from torch import nn

_WHOLE = "whole"


def compared(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """The entries of the plan that agree with how the model is cut now, and what is different of the others.

    A model without a plan gives nothing. Entries in styles for which no weight is cut one way (experts) are left out.
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    agree: dict[str, None] = {}
    differ: dict[str, str] = {}
    for name, module in model.named_modules():
        entry = name if name in plan else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        wanted = _wanted(plan.get(entry, ""))
        if wanted is None or getattr(module, "weight", None) is None:
            continue
        found = _found(module)
        if found == wanted:
            agree[entry] = None
        else:
            differ[entry] = f"transformers' plan says {plan[entry]}, the graph {found}"
    return [entry for entry in agree if entry not in differ], differ


def _wanted(style: str) -> str | None:
    """How a style of transformers cuts a weight."""
    for start, way in (("colwise", "colwise"), ("rowwise", "rowwise"), ("embedding_rowwise", "embedding_rowwise")):
        if style.startswith(start):
            return way
    return _WHOLE if style.startswith(("replicated", "sequence_parallel")) else None


def _found(module: nn.Module) -> str:
    dim = getattr(module, "shard_dims", {}).get("weight")
    if dim is None:
        return _WHOLE
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise" if dim == 0 else "embedding_colwise"
    transposed = type(module).__name__ == "Conv1D"  # GPT-2's, whose weight is [in, out]
    return "colwise" if (dim == 0) != transposed else "rowwise"
