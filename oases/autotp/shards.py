"""Third phase of `parallelize`: a model in stages, its parameters cut, and its weights read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.balanced import attach_states
from oases.autotp.checking import Setup
from oases.autotp.export import UnsplittableError
from oases.autotp.layers import LayerList
from oases.autotp.parameters import cut_parameters
from oases.autotp.pipeline.building import Stages, divide_model, segments_of
from oases.autotp.signatures import Found, LayerSignature
from oases.autotp.vocabulary import Vocabulary, shard_vocabulary
from oases.autotp.weights import load_weights
from oases.core.execution.group import ProcessGroup, group_name
from oases.errors import UsageError

Segments = list[tuple[LayerList, list[LayerSignature | UnsplittableError], dict[str, Any]]]
"""Lists of layers that run together, each with its signatures and the options of its stack."""


@dataclass
class Sharded:
    """Result of `shard`. stages: None for a model that is called. vocabulary: names of sharded tables and heads.

    outside_reads: names of parameters that are read outside of their modules, see `trace_layers`.
    """

    segments: Segments
    stages: Stages | None = None
    vocabulary: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outside_reads: Collection[str] = ()


def shard(
    model: nn.Module, twin: nn.Module, setup: Setup, found: Found, outside_reads: Collection[str],
    vocabulary: Vocabulary | None, weights: Any, device: Any,
) -> Sharded:  # fmt: skip
    """Keep this rank's part of a model, in place.

    twin, found, outside_reads: see `trace_layers`. weights: to read it from, to `device`; None to move what there is.
    """
    stages, division, stage = None, None, 0
    if setup.steps is not None:
        stages = divide_model(model, twin, [each for each, _ in found], setup.inputs, setup.steps)
        division, stage = stages.division, setup.steps.mesh.stage
        vocabulary = None if vocabulary is None else vocabulary.held_by(model)
    sharded = Sharded(
        segments_of(found, setup.plan, setup.stack, division, stage), stages, outside_reads=outside_reads
    )
    _require_token_wise(sharded.segments, setup.tp.ranks)
    cut_layers(model, setup, sharded.segments)
    whole = [path for path, _ in signatures_by_path(sharded.segments)] == [""]  # the model itself is the layer
    if vocabulary is not None and setup.group is not None and not whole:
        _cut_vocabulary(model, vocabulary, outside_reads, setup.group, sharded)
    if weights is not None:
        device = device or (setup.mesh.device_type if isinstance(setup.mesh, DeviceMesh) else "cpu")
        load_weights(model, weights, device=device, process_group=setup.run)
    elif device is not None:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return sharded


def signatures_by_path(segments: Segments) -> Iterator[tuple[str, LayerSignature]]:
    """Each layer that is sharded, by its name, with its signature."""
    for each, signatures, _ in segments:
        for path, signature in zip(each.paths, signatures, strict=True):
            if isinstance(signature, LayerSignature):
                yield path, signature


def cut_layers(model: nn.Module, setup: Setup, segments: Segments) -> None:
    """Cut the parameters of layers, and give balanced experts their state."""
    experts, group = setup.experts, setup.group
    layers = [(model.get_submodule(path), signature.cuts) for path, signature in signatures_by_path(segments)]
    found = {
        f"{path}.{name}": known
        for path, signature in signatures_by_path(segments)
        for name, known in signature.balanced.items()
    }
    modules = [model.get_submodule(name) for name in found]
    cut_parameters(layers, group, modules, None if experts is None else experts.groups)
    if experts is not None:
        attach_states(model, found, experts, group_name(group))


def _require_token_wise(segments: Segments, ranks: int) -> None:
    """Raise UsageError, naming list and op, for layers that are to run on parts of a sequence and cannot."""
    for found, signatures, options in segments:
        if not options.get("sequence_parallel") or ranks == 1:
            continue
        if why := _why_whole(found, signatures, options):
            raise UsageError(
                f"sequence_parallel: {found.name or 'the model'} does not run across its layers ({why}); leave "
                "sequence_parallel out, or name the lists to shard in spec=ParallelSpec(layers=...)"
            )


def _why_whole(found: LayerList, signatures: Sequence[Any], options: dict[str, Any]) -> str:
    """Reason why layers cannot run across one another, or "". UsageError for an op that relates tokens."""
    if options["schedule"] == "layers":
        return "schedule='layers' runs each layer alone"
    refused = found.broken or next((str(each) for each in signatures if isinstance(each, UnsplittableError)), "")
    for signature, call, at in zip(signatures, found.calls, found.activations, strict=True) if not refused else ():
        program = signature.sample(call, at)
        if program.why_not_in_a_stack:
            return str(program.why_not_in_a_stack)
        _ = program.tokens
    return refused


def _cut_vocabulary(
    model: nn.Module, vocabulary: Vocabulary, outside_reads: Collection[str], group: ProcessGroup, sharded: Sharded
) -> None:
    """Shard embedding tables and heads; outside_reads: parameters that the model reads itself and needs in full."""
    names = [*vocabulary.tables, *vocabulary.heads]
    if read := sorted({f"{name}.weight" for name in names} & set(outside_reads)):
        sharded.notes.append(f"the vocabulary is replicated: {', '.join(read)} is read outside of its module")
        return
    try:
        shard_vocabulary(model, vocabulary, group)
    except ValueError as error:
        sharded.notes.append(f"the vocabulary is replicated: {error}")
    else:
        sharded.vocabulary = names
