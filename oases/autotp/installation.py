"""Layers of a model for `parallelize`: found and traced, sharded, and run as a stack behind the model's own loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from oases.autotp.balanced import ExpertOptions, attach_states, require_balanced
from oases.autotp.experts import collections, substitute_experts
from oases.autotp.export import UnsplittableError
from oases.autotp.layers import Inputs, LayerList, observe, single_layer
from oases.autotp.lowering import GroupRank
from oases.autotp.parameters import cut_parameters
from oases.autotp.preconditions import require_planned
from oases.autotp.program import Program
from oases.autotp.report import LayersReport, PartitionReport
from oases.autotp.runner import Layer, Runner
from oases.autotp.signatures import LayerSignature, layer_signatures, whole_parts
from oases.autotp.spec import ParallelSpec
from oases.autotp.standalone import StandaloneForward
from oases.core.blocks.sharding import Cut
from oases.core.execution.group import ProcessGroup, group_name, group_size
from oases.errors import OverlapError, UsageError
from oases.plans.plan import Plan

Found = list[tuple[LayerList, list[LayerSignature | UnsplittableError]]]
"""A model's lists of layers, with the signature of each layer."""


def signatures_of(
    model: nn.Module,
    twin: nn.Module,
    inputs: Inputs,
    vocabulary: Iterable[str],
    spec: ParallelSpec,
    plan: Plan | None,
    tp: GroupRank,
    options: dict[str, Any],
    experts: ExpertOptions | None = None,
) -> tuple[Found, set[str]]:
    """Lists of layers to cut, and the names of parameters that are read outside of their modules.

    twin: fake copy of the whole model; its experts are replaced. plan: None not to compare with one. experts: None to
    sum their results. Errors are those of `parallelize`.
    """
    substitute_experts(twin, tp.ranks if experts is None else experts.groups.degree, balanced=experts is not None)
    if experts is not None:
        require_balanced(twin, dict(collections(twin)))
    observed = observe(twin, inputs, [twin.get_submodule(name) for name in vocabulary])
    lists = _chosen_lists(twin, observed.lists, inputs, spec, plan)
    found = [(each, layer_signatures(each, model, spec, tp)) for each in lists]
    _require_divisible(found, tp)
    if experts is not None:
        _require_experts_in_layers(model, dict(collections(twin)), found)
    required = options.get("require_overlap") or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
    _tell_of_whole_layers(model, found, tp, required)
    return found, observed.outside_reads


def _chosen_lists(
    twin: nn.Module,
    found: list[LayerList],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    spec: ParallelSpec,
    plan: Plan | None,
) -> list[LayerList]:
    """Lists of layers to cut: those found that `spec` names, or the model as one layer where there are none."""
    if not found and not spec.layers:
        found = [single_layer(twin, inputs)]
    if spec.layers is not None:
        missing = set(spec.layers) - {each.name for each in found}
        if missing:
            raise UsageError(f"spec.layers names {sorted(missing)}; lists found: {[each.name for each in found]}")
        found = [each for each in found if each.name in spec.layers]
    if plan is not None:
        require_planned(twin, found, plan)
    return found


def _require_divisible(
    found: list[tuple[LayerList, list[LayerSignature | UnsplittableError]]], tp: GroupRank
) -> None:
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


def _tell_of_whole_layers(
    model: nn.Module,
    found: list[tuple[LayerList, list[LayerSignature | UnsplittableError]]],
    tp: GroupRank,
    required: bool,
) -> None:
    """Warn of layers, and parts of layers, that stay whole, with their share of the parameters.

    OverlapError where overlap is required.
    """
    if tp.ranks == 1:
        return
    whole = []
    total = sum(parameter.numel() for parameter in model.parameters())
    for each, signatures in found:
        reasons: dict[str, str] = {}
        places: dict[str, list[int]] = {}
        for place, one in enumerate(signatures):
            for part, why in whole_parts(one).items():
                reasons.setdefault(part, why)
                places.setdefault(part, []).append(place)
        for part, at in places.items():
            many = f"{len(at)}" if len(at) == len(signatures) else f"{len(at)} of {len(signatures)}"
            modules = [model.get_submodule(each.paths[place]).get_submodule(part) for place in at]
            held = {p: p.numel() for module in modules for p in module.parameters()}
            whole.append(
                f"{f'{part} of ' * bool(part)}{each.name or type(model).__name__} ({many} layers, "
                f"{sum(held.values()) / total:.0%} of the parameters): {reasons[part]}"
            )
    if not whole:
        return
    text = f"these layers are replicated (no speed-up, no memory saved): {'; '.join(whole)}"
    if required:
        raise OverlapError(f"require_overlap: {text}")
    if tp.rank == 0:
        warnings.warn(text, stacklevel=3)


def install_layers(
    model: nn.Module,
    segments: list[tuple[LayerList, list[Any], dict[str, Any]]],
    group: ProcessGroup | None,
    compile: str | None,
    report: PartitionReport,
    experts: ExpertOptions | None = None,
) -> None:
    """Shard the layers of all lists, replace their forward, and describe them in `report`."""
    found = {
        f"{path}.{name}": known
        for each, signatures, _ in segments
        for path, signature in zip(each.paths, signatures, strict=True)
        if isinstance(signature, LayerSignature)
        for name, known in signature.balanced.items()
    }
    modules = [model.get_submodule(name) for name in found]
    cut_parameters(_cuts_of(model, segments), group, modules, None if experts is None else experts.groups)
    if experts is not None:
        attach_states(model, found, experts, group_name(group))
    for each, signatures, chosen in segments:
        report.layers.append(_install(model, each, signatures, group, chosen))
        runner = report.layers[-1].runner
        if compile is not None and runner is not None:
            runner.stack.compile_blocks(backend=compile)
        if experts is not None and runner is not None and experts.groups.degree > group_size(group):
            runner.stack.tuned_over = experts.groups.expert  # the order of tokens' messages follows from the choice


def outside_of_layers(
    model: nn.Module, segments: list[tuple[LayerList, list[Any], dict[str, Any]]], report: PartitionReport
) -> list[str]:
    """Names of parameters that neither lists of layers nor the sharded vocabulary have."""
    known = {id(p) for each, *_ in segments for path in each.paths for p in model.get_submodule(path).parameters()}
    known |= {id(p) for name in report.vocabulary for p in model.get_submodule(name).parameters()}
    return [name for name, p in model.named_parameters() if id(p) not in known]


def _cuts_of(
    model: nn.Module, found: list[tuple[LayerList, list[LayerSignature | UnsplittableError], dict[str, Any]]]
) -> list[tuple[nn.Module, Mapping[str, Cut]]]:
    """Each layer that is sharded, with its cuts by parameter name."""
    return [
        (model.get_submodule(path), signature.cuts)
        for each, signatures, _ in found
        for path, signature in zip(each.paths, signatures, strict=True)
        if isinstance(signature, LayerSignature)
    ]


def _install(
    model: nn.Module,
    found: LayerList,
    signatures: list[LayerSignature | UnsplittableError],
    group: ProcessGroup | None,
    options: dict[str, Any],
) -> LayersReport:
    """Shard the layers of one list and replace their forward."""
    modules = [model.get_submodule(path) for path in found.paths]
    report = LayersReport(found.name, len(modules), "replicated")
    cut = [signature for signature in signatures if isinstance(signature, LayerSignature)]
    reasons = [str(signature) for signature in signatures if isinstance(signature, UnsplittableError)]
    report.reason = found.broken or (reasons[0] if reasons else "")
    programs: list[Program] = []
    if len(cut) == len(signatures) and not found.broken and options["schedule"] != "layers":
        programs = [
            signature.sample(call, at)
            for signature, call, at in zip(cut, found.calls, found.activations, strict=True)
        ]
        report.reason = next((why for program in programs if (why := program.why_not_in_a_stack)), "")
    if programs and not report.reason:
        layers = [
            Layer(module, signature, at, path)
            for module, signature, at, path in zip(modules, cut, found.activations, found.paths, strict=True)
        ]
        runner = Runner(found.name, layers, programs, group, **options)
        runner.install()
        report.runner = runner
        report.runs, report.schedule = "across layers", runner.schedule
        report.blocks_per_layer = len(runner.stack.blocks) // len(layers)
    else:
        for module, signature, path in zip(modules, signatures, found.paths, strict=True):
            if isinstance(signature, LayerSignature):
                module.forward = StandaloneForward(module, signature, path)
                report.runs = "inside layers"
        if options["schedule"] == "layers":
            report.reason = report.reason or "schedule='layers' was requested"
    report.describe(dict.fromkeys(cut))
    return report
