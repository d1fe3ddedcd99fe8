"""Last phase of `parallelize`: stacks behind the model's own loop over its layers, its steps, and tools."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from oases.autotp.checking import Setup
from oases.autotp.export import UnsplittableError
from oases.autotp.layers import LayerList
from oases.autotp.local_weights import FORWARDS, read_locally
from oases.autotp.model_hooks import ModelHooks
from oases.autotp.pipeline.building import PipelineOptions, Stages
from oases.autotp.pipeline.training import PipelineTraining
from oases.autotp.pipeline.units import install_units
from oases.autotp.program import Program
from oases.autotp.report import LayersReport, PartitionReport, compare_with_plan
from oases.autotp.runner import Layer, Runner, StandaloneForward
from oases.autotp.shards import Segments, Sharded
from oases.autotp.signatures import LayerSignature
from oases.autotp.tools.connection import ModelSaver, connect_tools, named_mesh, replace_functions, take_full_tensors
from oases.core.execution.group import ProcessGroup, group_size
from oases.distributed.dtensors import mesh_of_group, to_dtensors
from oases.distributed.guards import register_replaced, register_stage
from oases.distributed.precision import set_needs
from oases.distributed.replicas import average_replicas
from oases.errors import UsageError


def install(model: nn.Module, setup: Setup, sharded: Sharded) -> None:
    """Have a sharded model run its layers as stacks, train in its stages or replicas, and be known to tools."""
    tp, steps, group = setup.tp, setup.steps, setup.group
    report = PartitionReport(type(model).__name__, tp.ranks, vocabulary=sharded.vocabulary)
    report.notes += [*setup.notes, *sharded.notes]
    _install_layers(model, setup, sharded.segments, report)
    if tp.ranks > 1:
        report.plan_agrees, report.plan_differs = compare_with_plan(model)
    hooks = ModelHooks(model, group)
    mesh = setup.mesh if steps is not None else named_mesh(setup.mesh, model, group)
    if group is not None and (steps is None or not steps.shards):
        _show_dtensors(model, group, mesh, hooks, sharded.outside_reads)
    hooks.begin(model)
    if steps is None or not steps.shards:
        set_needs(model, zero=setup.zero, dtype=setup.dtype)
    if steps is not None and sharded.stages is not None:
        _train_in_stages(model, sharded.stages, steps, setup, report, hooks)
        take_full_tensors(model)
        replace_functions(model)
    else:
        average_replicas(model, setup.mesh, setup.gradient_wire)
        connect_tools(model, group)
    if callable(getattr(model, "save_pretrained", None)) and (tp.ranks > 1 or steps or setup.experts):
        _attach(model, save_pretrained=ModelSaver(model, group))
    mesh = mesh if steps is None else mesh or steps.mesh
    _attach(model, oases_mesh=mesh, oases_partition=report, oases_hooks=hooks)
    hooks.note_forwards(model)


def _show_dtensors(
    model: nn.Module, group: ProcessGroup, mesh: Any, hooks: ModelHooks, outside_reads: Collection[str]
) -> None:
    """Have a model of several tensor-parallel ranks show DTensors, and read local tensors.

    outside_reads: parameters that code of the model reads itself, as tensors of this rank: where they are a layer's,
    which run as a stack, they stay as they are.
    """
    layers = [each for each, part in model.named_modules() if isinstance(vars(part).get("forward"), FORWARDS)]
    plain = {each for each in outside_reads if any(each.startswith(f"{layer}.") for layer in layers)}
    some = next(model.parameters(), None)
    if some is not None and group_size(group) > 1:
        for replaced in to_dtensors(model, group, mesh_of_group(mesh, group, some.device), plain):
            register_replaced(replaced)
        hooks.weights = read_locally(model)


def _attach(model: nn.Module, **attributes: Any) -> None:
    """Set attributes without registering them: modules and parameters among them are not the model's."""
    for name, value in attributes.items():
        object.__setattr__(model, name, value)


def _train_in_stages(
    model: nn.Module, stages: Stages, steps: PipelineOptions, setup: Setup, report: PartitionReport, hooks: ModelHooks
) -> None:
    """Give the model its `train_step` and `eval_step`. A model of one stage can be called, too."""
    if steps.mesh.num_stages > 1:
        install_units(model, stages.units, stages.names)
    runners = [each.runner for each in report.layers if each.runner is not None]
    training = PipelineTraining(model, stages, steps, setup.spec.loss or (lambda result: result), runners, hooks)
    _attach(model, oases_pipeline=training, train_step=training.train_step, eval_step=training.eval_step)
    _attach(model, __deepcopy__=_refuse_copy)
    register_stage(model)
    of_rank = stages.division.layers_on(steps.mesh.stage)
    report.notes.append(
        f"stage {steps.mesh.stage} of {steps.mesh.num_stages}: layers "
        f"{', '.join(f'{layers[0]} to {layers[-1]}' for layers in of_rank)}"
    )


def _refuse_copy(*_: Any) -> None:
    """Replacement of `__deepcopy__` for models in stages or with sharded weights."""
    raise UsageError(
        "a copy of a model in stages, or with sharded weights (fsdp), whose process groups cannot be copied; average "
        "its parameters one by one, or parallelize() a second model and load the state of the first"
    )


def _install_layers(model: nn.Module, setup: Setup, segments: Segments, report: PartitionReport) -> None:
    """Replace the forward of the layers of all lists, and describe them in `report`."""
    experts, group = setup.experts, setup.group
    for each, signatures, chosen in segments:
        report.layers.append(_install(model, each, signatures, group, chosen))
        runner = report.layers[-1].runner
        if setup.compile is not None and runner is not None:
            runner.stack.compile_blocks(backend=setup.compile)
        if experts is not None and runner is not None and experts.groups.degree > group_size(group):
            runner.stack.tuned_over = experts.groups.expert  # the order of tokens' messages follows from the choice
    known = {id(p) for each, *_ in segments for path in each.paths for p in model.get_submodule(path).parameters()}
    known |= {id(p) for name in report.vocabulary for p in model.get_submodule(name).parameters()}
    report.replicated = [name for name, p in model.named_parameters() if id(p) not in known]


def _install(
    model: nn.Module,
    found: LayerList,
    signatures: list[LayerSignature | UnsplittableError],
    group: ProcessGroup | None,
    options: dict[str, Any],
) -> LayersReport:
    """Replace the forward of the layers of one list."""
    report = LayersReport(found.name, len(found.paths), "replicated")
    cut = [signature for signature in signatures if isinstance(signature, LayerSignature)]
    reasons = [str(signature) for signature in signatures if isinstance(signature, UnsplittableError)]
    report.reason = found.broken or (reasons[0] if reasons else "")
    programs: list[Program] = []
    if not report.reason and options["schedule"] != "layers":
        programs = [
            signature.sample(call, at)
            for signature, call, at in zip(cut, found.calls, found.activations, strict=True)
        ]
        report.reason = next((why for program in programs if (why := program.why_not_in_a_stack)), "")
    if programs and not report.reason:
        layers = [
            Layer(model.get_submodule(path), signature, at, path)
            for signature, at, path in zip(cut, found.activations, found.paths, strict=True)
        ]
        report.runner = runner = Runner(found.name, layers, programs, group, **options)
        runner.install()
        report.runs, report.schedule = "across layers", runner.schedule
        report.blocks_per_layer = len(runner.stack.blocks) // len(layers)
    else:
        for signature, path in zip(signatures, found.paths, strict=True):
            if isinstance(signature, LayerSignature):
                module = model.get_submodule(path)
                module.forward = StandaloneForward(module, signature, path)
                report.runs = "inside layers"
        if options["schedule"] == "layers":
            report.reason = report.reason or "schedule='layers' was requested"
    report.describe(dict.fromkeys(cut))
    return report
