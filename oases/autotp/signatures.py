"""Second phase of `parallelize`: layers, traced; those that differ in their weights alone share a signature.

The fake copy that a signature has of the unsharded layer is traced once per call signature: again for other flags,
other inputs, or shapes outside of earlier traces. The sharding is decided once; every trace must agree with it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.balanced import require_balanced
from oases.autotp.cache import NO_CACHE, is_layer_cache
from oases.autotp.checking import ParallelSpec, Setup
from oases.autotp.cutting import cut, other_results
from oases.autotp.experts import ExpertMlp, collections, replicate_experts, substitute_experts
from oases.autotp.export import (
    CallSignature,
    Exported,
    TooLongError,
    UnsplittableError,
    export,
    leaves,
    take_dtypes,
    twin_of,
    varying_lengths,
    varying_shapes,
    without_data,
)
from oases.autotp.layers import LayerList, TracedCall, first_leaf, observe, single_layer
from oases.autotp.lowering import GroupRank, block_dropout, block_linear
from oases.autotp.program import Program, shapes_of
from oases.autotp.rules import is_linear, weight_of
from oases.autotp.shapes import Segments, Split
from oases.autotp.splitter import Splitter
from oases.autotp.structure import Structure, find
from oases.autotp.trace_guard import Reads, TraceGuard, indices_in, inner_hooks, look_of, set_values, values_of
from oases.autotp.vocabulary import Vocabulary
from oases.core.blocks.sharding import Cut
from oases.errors import OverlapError, UsageError
from oases.plans.plan import Plan

_VARYING = (varying_shapes, varying_lengths, None)
"""Dynamic lengths to try in turn: all, all but the batch, none."""


class LayerSignature:
    """Layers that differ in their weights alone: one fake copy, one sharding, a program per call signature.

    Raises UnsplittableError where the layer cannot be traced or sharded.
    """

    def __init__(
        self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Any, tp: GroupRank
    ) -> None:
        self.twin = twin
        self.tp = tp
        flat, tree = leaves(args, kwargs)
        values = values_of(twin)
        sample = CallSignature.of(flat, tree, tuple(part.training for part in twin.modules()))
        self._sample = sample, shapes_of(flat), _places_of(twin)
        self._traces: dict[int, Exported | UnsplittableError] = {}
        """Graphs of the sample, or why there is none, by index in _VARYING, until it is run."""
        for level in (0, len(_VARYING) - 1):
            found = self._traces[level] = self._exported(args, kwargs, sample, values, level)
            try:
                if isinstance(found, UnsplittableError):
                    raise found
                self._decide(found, keep)
                if not (self.sums or self.refused):
                    break
            except UnsplittableError as error:  # a layer may be sharded where its lengths are known
                if level or isinstance(error, TooLongError):
                    raise
        self.programs: dict[tuple[CallSignature, int], list[Program]] = {}
        self._levels: dict[tuple[CallSignature, int], int] = {}
        self.kept: tuple[Split | None, ...] | None = None
        """Sharding of the keys and values that a key-value cache keeps; None before it is known."""

    def _decide(self, exported: Exported, keep: Callable[[str], bool]) -> None:
        """Decide the sharding by a graph. Raises UnsplittableError."""
        self.structure: Structure = find(exported, keep, self.tp.ranks)
        self.sums = not self.structure.columns and not any(collections(self.twin))
        if self.sums:  # norms over what would be sharded: rather more all-reduces than a layer on every rank
            self.structure = find(exported, keep, self.tp.ranks, sums=True)
        self.columns: dict[str, Segments] = {
            weight_of(exported, node): segments for node, segments in self.structure.columns.items()
        }
        self.rows = tuple(weight_of(exported, node) for node in self.structure.rows)
        walk = _walk(exported, self.columns, GroupRank(), self.sums)
        self.cuts: Mapping[str, Cut] = walk.cuts
        self.balanced: Mapping[str, tuple[ExpertMlp, int]] = walk.balanced
        self.experts, self.refused = tuple(walk.experts), {**self.structure.refused, **walk.refused}
        if not self.cuts:
            raise UnsplittableError(
                "; ".join(f"{k}: {v}" for k, v in self.structure.refused.items()) or "no pair of linears"
            )

    def program(
        self,
        call_signature: CallSignature,
        found: list[Any],
        tree: pytree.TreeSpec,
        activation: int,
        device: Any,
        guard: TraceGuard,
    ) -> Program:
        """Program for a call of a guard's layer with this signature and leaves; traced if there is none."""
        programs = self.programs.setdefault((call_signature, activation), [])
        for program in programs:
            if program.accepts(found) and guard.holds(program.exported.reads):
                return program
        args, kwargs = pytree.tree_map(self._whole_cache, pytree.tree_unflatten(found, tree), is_leaf=is_layer_cache)
        if next(self.twin.parameters()).device != device:
            self.twin = twin_of(self.twin, device)
        take_dtypes(self.twin, guard.layer)
        try:
            exported, walk = self._traced(args, kwargs, (call_signature, activation), guard)
        except UnsplittableError as error:
            if any(map(is_layer_cache, pytree.tree_leaves((args, kwargs), is_leaf=is_layer_cache))):
                raise UsageError(f"{error}, with a key-value cache; {NO_CACHE}") from error
            if changed := guard.changed():
                raise UsageError(
                    f"{error}, with another {changed} than at "
                    "parallelize(); set it back (peft: unmerge_adapter(), set_adapter()), or before parallelize()"
                ) from error
            raise UsageError(
                f"{error}, in a call with other arguments or modes than at parallelize(), which sharded this "
                "layer; call model.train() or model.eval() before it, as in most calls, and give such arguments "
                "as spec=ParallelSpec(inputs=...): layers that cannot be sharded with them then stay whole"
            ) from error
        guard.note(exported.reads)
        blocks, others, reason = [], list[Any](), "it has no activation"
        try:
            if activation >= 0 and exported.inputs[activation] is not None:
                x = walk.given(exported.inputs[activation])
                blocks, others, reason = cut(walk, x), other_results(walk, x), ""
        except UnsplittableError as error:
            reason = str(error)
        accepted = {shapes_of(found): True}  # valid for its own shapes even where a guard cannot be decided
        programs.append(Program(walk, activation, self.tp, blocks, others, reason, _accepted=accepted))
        return programs[-1]

    def _traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[CallSignature, int], guard: TraceGuard
    ) -> tuple[Exported, Splitter]:
        """Graph of a call and its sharding, with as many dynamic lengths as it allows.

        Later calls of the same key begin with those that the first one allowed. Raises UnsplittableError.
        """
        flat, _ = leaves(args, kwargs)
        traces, self._traces = self._traces, {}
        if self._sample != (key[0], shapes_of(flat), _places_of(self.twin)):
            traces = {}
        values = values_of(guard.layer)
        for level in range(self._levels.get(key, 0), len(_VARYING)):
            found = traces.get(level)
            if found is None or (isinstance(found, Exported) and not guard.holds(found.reads)):
                found = self._exported(args, kwargs, key[0], values, level)
            try:
                if isinstance(found, UnsplittableError):
                    raise found
                return found, self._walked(found)
            except TooLongError:
                raise
            except UnsplittableError:  # trace more of these shapes alone
                self._levels[key] = level + 1
                if _VARYING[level] is None:
                    raise
        raise AssertionError("the last level returns or raises")

    def _exported(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallSignature, values: Reads, level: int
    ) -> Exported | UnsplittableError:
        """Graph of a call with the dynamic lengths of a level, or why there is none."""
        set_values(self.twin, values)  # each time: a forward that cannot be traced may have changed some
        for part, training in zip(self.twin.modules(), call.modes, strict=True):
            part.training = training
        try:
            with torch.set_grad_enabled(call.gradients):  # not as in the pass that needs it, which may recompute
                return export(self.twin, args, kwargs, _VARYING[level])
        except UnsplittableError as error:
            return error

    def sample(self, call: TracedCall, activation: int) -> Program:
        """Program of a traced call."""
        flat, tree = leaves(call.args, call.kwargs)
        guard = TraceGuard(call.module, "")
        signature = CallSignature.of(flat, tree, guard.modes())
        return self.program(signature, flat, tree, activation, flat[activation].device, guard)

    def _whole_cache(self, held: Any) -> Any:
        """A LayerCache of the unsharded layer, without data; anything else itself."""
        if not is_layer_cache(held) or held.keys is None:
            return held
        whole = []
        for tensor, split in zip((held.keys, held.values), self.kept or (None, None), strict=True):
            shape = list(tensor.shape)
            if split is not None:
                shape[split.dim] = sum(split.segments) // split.copies
            if self.kept is None or (split and sum(split.segments) != self.tp.ranks * tensor.shape[split.dim]):
                raise UsageError(
                    f"{type(self.twin).__name__} was given a key-value cache of another model, with the shape "
                    f"{list(tensor.shape)}; give an empty one, or that of a call of this model"
                )
            whole.append(without_data(tensor.new_empty(1).expand(shape)))
        return held._replace(keys=whole[0], values=whole[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSignature:
        """Return self: it has no weights, and a copied layer has the same signature."""
        return self

    def _walked(self, exported: Exported) -> Splitter:
        walk = _walk(exported, self.columns, self.tp, self.sums)
        read = exported.parameters_read
        wrong = [name for name in sorted(read) if walk.cuts.get(name) != self.cuts.get(name)]
        if wrong:
            raise UnsplittableError(f"with these arguments other parameters would be sharded: {', '.join(wrong)}")
        if exported.keeps:
            self.kept = self.kept or tuple(walk.kept)
            given = [walk.cached.get(name) for name in exported.cached]
            if list(self.kept) != walk.kept or (given and given != walk.kept):
                raise UnsplittableError("its key-value cache would be sharded in two ways")
        return walk


def _walk(exported: Exported, columns: Mapping[str, Segments], tp: GroupRank, sums: bool) -> Splitter:
    nodes = {node: columns[weight_of(exported, node)] for node in exported.graph.nodes
             if is_linear(node) and weight_of(exported, node) in columns}  # fmt: skip
    return Splitter(exported, nodes, block_linear, block_dropout, tp.rank, tp.ranks, sums).run()


def _places_of(twin: nn.Module) -> list[tuple[torch.device, torch.dtype]]:
    """Devices and types of a module's parameters."""
    return [(parameter.device, parameter.dtype) for parameter in twin.parameters()]


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


Found = list[tuple[LayerList, list[LayerSignature | UnsplittableError]]]
"""A model's lists of layers, with the signature of each layer."""


def trace_layers(
    model: nn.Module, twin: nn.Module, setup: Setup, vocabulary: Vocabulary | None
) -> tuple[Found, set[str]]:
    """Second phase of `parallelize`: lists of layers to cut, and names of parameters read outside of their modules.

    twin: fake copy of the whole model; its experts are replaced. vocabulary: its tables and heads. Errors are those
    of `parallelize`.
    """
    experts, spec, tp = setup.experts, setup.spec, setup.tp
    substitute_experts(twin, tp.ranks if experts is None else experts.groups.degree, balanced=experts is not None)
    known = dict(collections(twin))
    if experts is not None:
        require_balanced(twin, known)
    names = [] if vocabulary is None else [*vocabulary.tables, *vocabulary.heads]
    observed = observe(twin, setup.inputs, [twin.get_submodule(name) for name in names])
    lists = observed.lists
    if not lists and not spec.layers:
        lists = [single_layer(twin, setup.inputs)]
    if spec.layers is not None:
        missing = set(spec.layers) - {each.name for each in lists}
        if missing:
            raise UsageError(f"spec.layers names {sorted(missing)}; lists found: {[each.name for each in lists]}")
        lists = [each for each in lists if each.name in spec.layers]
    if setup.plan is not None:
        _require_planned(twin, lists, setup.plan)
    found = [(each, layer_signatures(each, model, spec, tp)) for each in lists]
    _require_divisible(found, tp)
    if experts is not None:
        _require_experts_in_layers(model, known, found)
    required = setup.stack.get("require_overlap") or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
    _tell_of_whole_layers(model, found, tp, bool(required))
    return found, observed.outside_reads


def _require_planned(model: nn.Module, lists: Sequence[LayerList], plan: Plan) -> None:
    """Raise UsageError, with both sizes, for a plan of a model whose layers are others than those in `lists`.

    Compares their number, the features between them and, of a traced model, the parameters of each; those of
    adapters, which are added to a planned model, do not count.
    """
    calls = [call for each in lists for call in each.calls]
    planned, remedy = plan.model, f"plan for {type(model).__name__} by oases.plan(model, cluster, ...)"
    if len(calls) != planned.layers:
        raise UsageError(f"plan: it is for {planned.layers} layers, the model has {len(calls)} in lists; {remedy}")
    paths = [path for each in lists for path in each.paths]
    if paths == [""]:  # the whole model, as one layer
        return
    x = first_leaf(calls[0].result)
    if isinstance(x, Tensor) and x.dim() == 3 and x.shape[-1] != planned.hidden:
        width = x.shape[-1]
        raise UsageError(f"plan: it is for layers of width {planned.hidden}, the model's have {width}; {remedy}")
    if planned.sizes is not None or getattr(model, "peft_config", None) is not None:
        return
    for layer, (path, call) in enumerate(zip(paths, calls, strict=True)):
        kinds = planned.layer_kinds[planned.layer_order[layer]]
        wanted = sum(share.parameters for kind in kinds for share in planned.block(kind).shares)
        found = sum(parameter.numel() for parameter in call.module.parameters())
        if wanted != found:
            raise UsageError(
                f"plan: layer {layer} of {planned.name} has {wanted} parameters there, {path} has {found}; {remedy}"
            )


def _require_divisible(found: Found, tp: GroupRank) -> None:
    """Raise UsageError, with the degrees that fit, unless the degree divides all sharded lengths."""
    signatures = [
        (each.name, one) for each, of_layers in found for one in of_layers if isinstance(one, LayerSignature)
    ]
    wrong = dict.fromkeys(
        f"{length} ({name}.*.{of})"
        for name, signature in signatures
        for length, of in signature.structure.limits.items()
        if length % tp.ranks
    )
    if wrong:
        fits = sorted(set.intersection(*(set(signature.structure.degrees) for _, signature in signatures)))
        raise UsageError(
            f"the tensor-parallel degree {tp.ranks} does not divide these numbers of heads or features: "
            f"{', '.join(wrong)}; degrees that fit this model: {', '.join(map(str, fits))}"
        )


def _require_experts_in_layers(model: nn.Module, experts: dict[str, Any], found: Found) -> None:
    """Raise UsageError for balanced experts outside of the layers that are sharded."""
    inside: set[str] = set()
    for each, signatures in found:
        for path, signature in zip(each.paths, signatures, strict=True):
            if isinstance(signature, LayerSignature):
                inside.update(f"{path}.{name}" for name in signature.balanced)
            elif any(name.startswith(f"{path}.") for name in experts):
                raise UsageError(
                    f"experts='balanced': {path} of {type(model).__name__} cannot be sharded ({signature}); leave "
                    "experts out"
                )
    outside = sorted(set(experts) - inside)
    if outside:
        raise UsageError(
            f"experts='balanced': {outside[0]} of {type(model).__name__} is not called once in a layer that is "
            "sharded; leave experts out"
        )


def _tell_of_whole_layers(model: nn.Module, found: Found, tp: GroupRank, required: bool) -> None:
    """Warn of layers, and parts of layers, that stay whole, with their share of the parameters.

    OverlapError where overlap is required.
    """
    if tp.ranks == 1:
        return
    whole = []
    total = sum(parameter.numel() for parameter in model.parameters())
    for each, signatures in found:
        parts: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, one in zip(each.paths, signatures, strict=True):
            for part, why in whole_parts(one).items():
                parts.setdefault(part, []).append((model.get_submodule(path).get_submodule(part), why))
        for part, at in parts.items():
            many = f"{len(at)}" if len(at) == len(signatures) else f"{len(at)} of {len(signatures)}"
            held = {p: p.numel() for module, _ in at for p in module.parameters()}
            whole.append(
                f"{f'{part} of ' * bool(part)}{each.name or type(model).__name__} ({many} layers, "
                f"{sum(held.values()) / total:.0%} of the parameters): {at[0][1]}"
            )
    if not whole:
        return
    text = f"these layers are replicated (no speed-up, no memory saved): {'; '.join(whole)}"
    if required:
        raise OverlapError(f"require_overlap: {text}")
    if tp.rank == 0:
        warnings.warn(text, stacklevel=4)
