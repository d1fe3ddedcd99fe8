"""Signatures of the layers of a list: layers that differ in their weights alone share one."""

from __future__ import annotations

from typing import Any

from torch import nn

from oases.autotp.experts import replicate_experts
from oases.autotp.export import UnsplittableError
from oases.autotp.layers import LayerList, TracedCall
from oases.autotp.lowering import GroupRank
from oases.autotp.module_snapshot import indices_in, inner_hooks, look_of
from oases.autotp.program import LayerSignature
from oases.autotp.spec import ParallelSpec


def layer_signatures(
    found: LayerList, model: nn.Module, spec: ParallelSpec, tp: GroupRank
) -> list[LayerSignature | UnsplittableError]:
    """Signature of each layer, one object for equal layers; the UnsplittableError for those that cannot be sharded.

    model: the original, whose layers are checked for hooks, which the fake copies do not have.
    """
    groups: dict[Any, list[int]] = {}
    indices = indices_in([call.module for call in found.calls])
    for at, (call, path) in enumerate(zip(found.calls, found.paths, strict=True)):
        kept = frozenset(
            name
            for name, _ in call.module.named_parameters()
            if name in found.outside_reads or spec.keeps_whole(f"{path}.{name}" if path else name)
        )
        refused = inner_hooks(model.get_submodule(path))
        if path in found.assigned:
            refused = f"{type(call.module).__name__} sets {', '.join(found.assigned[path])} in its forward"
        groups.setdefault((look_of(call.module, indices), _argument_types(call), call.ops, kept, refused), []).append(
            at
        )
    signatures: dict[int, LayerSignature | UnsplittableError] = {}
    for (*_, kept, refused), members in groups.items():
        signatures.update(dict.fromkeys(members, _layer_signature(found.calls[members[0]], kept, refused, tp)))
    return [signatures[at] for at in range(len(found.calls))]


def _layer_signature(
    call: TracedCall, kept: frozenset[str], refused: str, tp: GroupRank
) -> LayerSignature | UnsplittableError:
    if refused:
        return UnsplittableError(refused)
    replicate_experts(call.module, kept)
    try:
        return LayerSignature(call.module, call.args, call.kwargs, kept.__contains__, tp)
    except UnsplittableError as error:
        return error


def _argument_types(call: TracedCall) -> str:
    """Names and types of a call's arguments."""
    return repr(
        [type(each).__name__ for each in call.args] + sorted((k, type(v).__name__) for k, v in call.kwargs.items())
    )


def whole_parts(signature: LayerSignature | UnsplittableError) -> dict[str, str]:
    """Modules of a layer in which nothing is sharded though matrices are multiplied, each with the reason.

    The layer itself ("") where it cannot be sharded. A router beside sharded experts is no such module.
    """
    if isinstance(signature, UnsplittableError):
        return {"": str(signature)}
    shared = (*signature.cuts, *(f"{name}." for name in signature.balanced))
    found: dict[str, str] = {}
    for part, module in _parts(signature.twin):
        matrices = [name for name, p in module.named_parameters(prefix=part) if p.dim() > 1]
        refused = [why for name, why in signature.refused.items() if _is_of(name, part)]
        if (refused or len(matrices) > 1) and not any(_is_of(name, part) for name in shared):
            found[part] = refused[0] if refused else "no pair of linears"
    return found


def _parts(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that a layer consists of, those of a list one by one, with their names."""
    found = []
    for name, module in layer.named_children():
        inner = _parts(module) if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else [("", module)]
        found += [(f"{name}.{each}".rstrip("."), part) for each, part in inner]
    return found


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
