"""Report of `parallelize`: sharded parameters, how layers run, and reasons where something is replicated.

transformers' tp_plan lists names by hand; the traced graph decides. The report names entries where both differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from oases.autotp.runner import Runner
from oases.autotp.shapes import copies_of
from oases.autotp.signatures import LayerSignature


@dataclass
class LayersReport:
    """Report of one list of layers. runs: "across layers", "inside layers" or "replicated"; reason: why not across
    layers.

    experts: expert weights sharded over the ranks. copied: replicated weights of fewer heads (keys) than ranks, of
    which each rank computes some. runner: runs the layers where they run across layers; its stack's schedule can be
    changed.
    """

    name: str
    layers: int
    runs: str
    schedule: str = ""
    blocks_per_layer: int = 0
    reason: str = ""
    column: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    degrees: list[int] = field(default_factory=list)
    runner: Runner | None = field(default=None, repr=False, compare=False)

    def describe(self, signatures: Iterable[LayerSignature]) -> None:
        """Add the sharding of layers with these signatures."""
        signatures = list(signatures)
        for signature in signatures:
            copied = [name for name, segments in signature.columns.items() if copies_of(segments) > 1]
            cut = [name for name in signature.columns if name not in copied]
            whole = [name for name, _ in signature.twin.named_parameters() if name not in signature.cuts]
            for held, names in (
                (self.column, cut), (self.row, signature.rows), (self.experts, signature.experts),
                (self.replicated, whole), (self.copied, copied),
            ):  # fmt: skip
                held.extend(name for name in dict.fromkeys(names) if name not in held)
            self.refused |= signature.refused
        degrees = [set(signature.structure.degrees) for signature in signatures]
        self.degrees = sorted(set.intersection(*degrees)) if degrees else []


@dataclass
class PartitionReport:
    """Result of `parallelize`, as `model.oases_partition`. Prints as a table.

    plan_agrees, plan_differs: entries of transformers' own tp_plan for the model.
    """

    model: str
    tensor_parallel: int
    layers: list[LayersReport] = field(default_factory=list)
    vocabulary: list[str] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    plan_agrees: list[str] = field(default_factory=list)
    plan_differs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """Plain data."""
        # A runner is not plain data and must not be copied.
        found = asdict(replace(self, layers=[replace(each, runner=None) for each in self.layers]))
        for each in found["layers"]:
            del each["runner"]
        return found

    def __str__(self) -> str:
        lines = [f"{self.model}, tensor parallel over {self.tensor_parallel}"]
        for each in self.layers:
            how = "replicated" if each.runs == "replicated" else f"overlapped {each.runs}"
            if each.schedule:
                plural = "s" if each.blocks_per_layer != 1 else ""
                how += f", schedule {each.schedule}, {each.blocks_per_layer} all-reduce{plural} per layer"
            count = "1 layer" if each.layers == 1 else f"{each.layers} layers"
            lines.append(f"{each.name or self.model}: {count}, {how}")
            if each.reason:
                lines.append(f"  because: {each.reason}")
            lines.extend(_named("  column-parallel", each.column))
            lines.extend(_named("  row-parallel", each.row))
            lines.extend(_named("  expert-parallel", each.experts))
            lines.extend(_named("  replicated", each.replicated))
            lines.extend(_named("  each rank computes some heads of", each.copied))
            lines.extend(f"  {name} is replicated: {why}" for name, why in each.refused.items())
        lines.extend(_named("vocabulary-parallel", self.vocabulary))
        lines.extend(_named("replicated elsewhere", self.replicated))
        if self.plan_agrees or self.plan_differs:
            total = len(self.plan_agrees) + len(self.plan_differs)
            lines.append(f"as in transformers' own plan: {len(self.plan_agrees)} of {total} entries")
        lines.extend(f"  {name}: {what}" for name, what in self.plan_differs.items())
        lines.extend(self.notes)
        return "\n".join(lines)


def _named(what: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{what}: {', '.join(names)}"] if names else []


_WHOLE = "whole"


def compare_with_plan(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Entries of the model's tp_plan that agree with its sharding, and a description of each that differs.

    ([], {}) for a model without a plan. Styles without a single cut per weight (experts) are left out.
    """
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    agree: dict[str, None] = {}
    differ: dict[str, str] = {}
    for name, module in model.named_modules():
        entry = name if name in plan else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        wanted = _wanted(plan.get(entry, ""))
        if wanted is None or module._parameters.get("weight") is None:
            continue
        found = _found(module)
        if found == wanted:
            agree[entry] = None
        else:
            differ[entry] = f"transformers' plan says {plan[entry]}, the graph {found}"
    return [entry for entry in agree if entry not in differ], differ


def _wanted(style: str) -> str | None:
    """Cut of a weight under a tp_plan style."""
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
