"""`parallelize`: overlapped tensor parallelism for an unedited model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from oases.autotp.block import value_of
from oases.autotp.experts import substitute_experts
from oases.autotp.export import UnsplittableError, leaves, twin_of
from oases.autotp.layers import LayerList, example_inputs, observe, single_layer, turn_off_inner_caches
from oases.autotp.lowering import GroupRank
from oases.autotp.model_hooks import ModelHooks
from oases.autotp.module_snapshot import ModuleSnapshot, training_modes
from oases.autotp.pipeline.building import (
    PipelineOptions,
    Stages,
    divide_model,
    pipeline_options,
    segments_of,
)
from oases.autotp.pipeline.training import PipelineTraining
from oases.autotp.pipeline.units import install_units
from oases.autotp.preconditions import require_alike, require_cuttable, tensor_parallel_group
from oases.autotp.program import CallSignature, LayerSignature, Program, layer_signatures
from oases.autotp.report import LayersReport, PartitionReport, compare_with_plan
from oases.autotp.runner import Layer, Runner
from oases.autotp.spec import ParallelSpec
from oases.autotp.tools.connection import ModelSaver, connect_tools
from oases.autotp.tools.recomputation import recomputing_options
from oases.autotp.vocabulary import Vocabulary, shard_vocabulary
from oases.autotp.weights import load_weights
from oases.errors import OverlapError, UsageError
from oases.execution.group import ProcessGroup, group_name, group_rank, group_size
from oases.parallel.guards import register_shards, register_stage
from oases.parallel.mesh import Mesh
from oases.parallel.replicas import average_replicas, data_parallel_group
from oases.parallel.sharding import Cut
from oases.plans.plan import Plan
from oases.schedule import Schedule


def parallelize(
    model: nn.Module,
    *,
    mesh: DeviceMesh | Mesh | ProcessGroup | None = None,
    plan: Plan | None = None,
    schedule: str | Schedule = "oases",
    spec: ParallelSpec | None = None,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
    pipeline: str = "one_f_one_b",
    micro_batches: int | None = None,
    fsdp: bool = False,
    compile: str | None = None,
    **stack_options: Any,
) -> nn.Module:
    """Shard a model over the ranks of a mesh, in place, and return it.

    model: a transformers model or any nn.Module, the same on every rank; on `meta` where `weights` are given. mesh: a
    DeviceMesh (of several dimensions the one named "tp"; over "dp" the model averages its gradients in each backward
    pass but those in `model.no_sync()`), a process group, or None for the default group. plan: from `oases.plan`;
    sets schedule and recomputation. schedule: as in OverlappedStack; "layers" overlaps communication inside each
    layer alone, and keeps the results of single layers readable. spec: what cannot be inferred from the model.
    weights: folder or file of safetensors, or mapping of full tensors, of which this rank reads its shards (see
    `load_weights`) to `device`; None: the mesh's device, or the CPU. pipeline, micro_batches: of a mesh with "pp":
    the schedule of its stages, and the number of parts that a step's samples are cut into, None for twice the stages.
    fsdp: shard weights, gradients and optimizer state over its "dp". compile: backend of torch.compile for the blocks
    of layers, such as inductor; None for eager. stack_options: further options of OverlappedStack, such as
    sub_batches.

    With "pp" every rank keeps one stage of the model and trains it by `model.train_step(**batch) -> loss` and
    `model.eval_step`, see `PipelineTraining`. Other stages' weights leave `model.named_parameters()`.

    Column-, row- and vocabulary-parallel modules are found from the model's graph. Layers are cut at their
    all-reduces and run as an OverlappedStack behind the model's own loop over them; what cannot be cut stays
    replicated. `model.oases_partition` reports all of it. Parameters keep their names; sharded ones hold this rank's
    shard. Gradients, loss and logits are those of the unsharded model.

    Raises UsageError where sizes do not divide (with the degrees that do), where the model does not run on fake
    tensors, for quantised weights, and for a plan of another model; OverlapError with require_overlap=True for layers
    that all stay replicated, of which a warning tells otherwise. Source: arXiv 2206.04959, section 4.
    """
    spec = spec or ParallelSpec()
    require_cuttable(model)
    stack_options = recomputing_options(model, stack_options)
    spec.require_names(model)
    steps = pipeline_options(mesh, plan, pipeline, micro_batches, stack_options.get("recompute", "none"), fsdp=fsdp)
    group, options = tensor_parallel_group(mesh if steps is None else steps.mesh, plan, schedule, stack_options)
    require_alike(model, group if steps is None else steps.mesh.run, values=weights is None)
    require_alike(model, data_parallel_group(mesh), values=weights is None)
    tp = GroupRank.of(group)
    report = PartitionReport(type(model).__name__, tp.ranks)
    report.notes += [f"{name}.config.use_cache is False now" for name in turn_off_inner_caches(model)]
    vocabulary, twin = spec.vocabulary_of(model), twin_of(model)
    substitute_experts(twin, tp.ranks)
    inputs = spec.inputs or example_inputs(model)
    names = [*vocabulary.tables, *vocabulary.heads] if vocabulary is not None else []
    observed = observe(twin, inputs, [twin.get_submodule(name) for name in names])
    lists = _chosen_lists(twin, observed.lists, inputs, spec, plan)
    found = [(each, layer_signatures(each, model, spec, tp)) for each in lists]
    _require_divisible(found, tp)
    required = options.get("require_overlap") or os.environ.get("OASES_REQUIRE_OVERLAP") == "1"
    _tell_of_whole_layers(model, found, tp, required)
    hooks = ModelHooks(model, group)
    stages = None
    if steps is not None:
        stages = divide_model(model, twin, lists, inputs, steps)
        vocabulary = None if vocabulary is None else vocabulary.held_by(model)
    division, stage = (None, 0) if stages is None or steps is None else (stages.division, steps.mesh.stage)
    segments = segments_of(found, plan, options, division, stage)
    cut_parameters(_cuts_of(model, segments), group)
    for each, signatures, chosen in segments:
        report.layers.append(_install(model, each, signatures, group, chosen))
        runner = report.layers[-1].runner
        if compile is not None and runner is not None:
            runner.stack.compile_blocks(backend=compile)
    _cut_vocabulary(model, vocabulary, observed.outside_reads, group, report)
    if plan is not None and plan.zero:
        report.notes.append("the plan shards the optimizer's state: oases.make_optimizer(model, ..., zero=True)")
    if tp.ranks > 1:
        report.plan_agrees, report.plan_differs = compare_with_plan(model)
    if weights is not None:
        device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
        run = group if steps is None else steps.mesh.run
        load_weights(model, weights, device=device or device_type, process_group=run)
    known = {id(p) for each, *_ in segments for path in each.paths for p in model.get_submodule(path).parameters()}
    known |= {id(p) for name in report.vocabulary for p in model.get_submodule(name).parameters()}
    report.replicated = [name for name, p in model.named_parameters() if id(p) not in known]
    hooks.begin(model)
    if steps is not None and stages is not None:
        _train_in_stages(model, stages, steps, spec, report, hooks)
    else:
        average_replicas(model, mesh)
        connect_tools(model, group)
    if callable(getattr(model, "save_pretrained", None)) and (tp.ranks > 1 or steps is not None):
        object.__setattr__(model, "save_pretrained", ModelSaver(model, group))
    object.__setattr__(model, "oases_partition", report)
    object.__setattr__(model, "oases_hooks", hooks)
    return model


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


def _train_in_stages(
    model: nn.Module,
    stages: Stages,
    steps: PipelineOptions,
    spec: ParallelSpec,
    report: PartitionReport,
    hooks: ModelHooks,
) -> None:
    """Give the model its `train_step` and `eval_step`. A model of one stage can be called, too."""
    if steps.mesh.num_stages > 1:
        install_units(model, stages.units, stages.names)
    runners = [each.runner for each in report.layers if each.runner is not None]
    training = PipelineTraining(model, stages, steps, spec.loss or (lambda result: result), runners, hooks)
    for name, value in (
        ("oases_pipeline", training), ("oases_mesh", steps.mesh),
        ("train_step", training.train_step), ("eval_step", training.eval_step),
    ):  # fmt: skip
        object.__setattr__(model, name, value)
    register_stage(model)
    of_rank = stages.division.layers[steps.mesh.stage :: steps.mesh.num_stages]
    report.notes.append(
        f"stage {steps.mesh.stage} of {steps.mesh.num_stages}: layers "
        f"{', '.join(f'{layers[0]} to {layers[-1]}' for layers in of_rank)}"
    )


def _tell_of_whole_layers(
    model: nn.Module,
    found: list[tuple[LayerList, list[LayerSignature | UnsplittableError]]],
    tp: GroupRank,
    required: bool,
) -> None:
    """Warn of lists of layers that stay whole. OverlapError where overlap is required."""
    whole = [
        f"{each.name or type(model).__name__} ({len(signatures)} layers): {signatures[0]}"
        for each, signatures in found
        if all(isinstance(signature, UnsplittableError) for signature in signatures)
    ]
    if not whole or tp.ranks == 1:
        return
    text = f"every rank computes these layers whole, with no less time and memory: {'; '.join(whole)}"
    if required:
        raise OverlapError(f"require_overlap: {text}")
    if tp.rank == 0:
        warnings.warn(text, stacklevel=3)


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
    layers = sum(len(each.calls) for each in found)
    if plan is not None and layers != plan.model.layers:
        raise UsageError(
            f"plan: it is for {plan.model.layers} layers, the model has {layers} in lists; plan for it with "
            "oases.plan(model, cluster, ...)"
        )
    return found


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
            _sample(signature, call, at)
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
        report.runs, report.schedule = "across layers", str(runner.stack.schedule.name)
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


def _cut_vocabulary(
    model: nn.Module,
    vocabulary: Vocabulary | None,
    outside_reads: set[str],
    group: ProcessGroup | None,
    report: PartitionReport,
) -> None:
    """Shard embedding tables and heads; outside_reads: parameters that the model reads itself and needs in full."""
    if vocabulary is None or group is None or isinstance(model.forward, StandaloneForward):
        return
    read = sorted(outside_reads & {f"{name}.weight" for name in (*vocabulary.tables, *vocabulary.heads)})
    if read:
        report.notes.append(f"the vocabulary is replicated: {', '.join(read)} is read outside of its module")
        return
    try:
        shard_vocabulary(model, vocabulary, group)
    except ValueError as error:
        report.notes.append(f"the vocabulary is replicated: {error}")
    else:
        report.vocabulary = [*vocabulary.tables, *vocabulary.heads]


def _sample(signature: LayerSignature, call: Any, at: int) -> Program:
    flat, tree = leaves(call.args, call.kwargs)
    return signature.program(
        CallSignature.of(flat, tree, training_modes(call.module)), flat, tree, at, flat[at].device, call.module
    )


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


class StandaloneForward:
    """Forward of one layer outside of a stack, by its traced programs."""

    def __init__(self, module: nn.Module, signature: LayerSignature, path: str) -> None:
        self.module = module
        self.signature = signature
        self._snapshot = ModuleSnapshot(module, path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's program; arguments and result are those of the layer."""
        found, tree = leaves(args, kwargs)
        device = next(each.device for each in [*found, *self.module.parameters()] if isinstance(each, Tensor))
        call_signature = CallSignature.of(found, tree, self._snapshot.modes())
        program = self.signature.program(call_signature, found, tree, None, device, self.module)
        run, names = program.module()
        exported = program.exported
        inputs = dict(zip(exported.inputs, found, strict=True))
        result = run(*(value_of(name, program, self.module, inputs, device) for name in names))
        return pytree.tree_unflatten(result, exported.result)


def cut_parameters(roots: Iterable[tuple[nn.Module, Mapping[str, Cut]]], group: ProcessGroup | None) -> None:
    """Replace parameters by this rank's shards, in every module of all roots that holds them.

    roots: modules, each with its cuts by parameter name. Shared parameters stay shared. Each owner gets the
    attributes `shard_dims`, `shard_segments`, `tensor_parallel` and the group's name. Meta parameters stay on meta.
    UsageError, with nothing changed, where a parameter would be cut in two ways.
    """
    roots = list(roots)
    wanted: dict[int, tuple[nn.Parameter, Cut | None, str]] = {}
    for root, cuts in roots:
        mine = {id(root.get_parameter(name)): cut for name, cut in cuts.items()}
        for name, parameter in root.named_parameters():
            cut = mine.get(id(parameter))
            _, other, elsewhere = wanted.setdefault(id(parameter), (parameter, cut, name))
            if other != cut:
                raise UsageError(
                    f"{name} is shared by layers that need it cut in different ways ({elsewhere}: {other}, {name}: "
                    f"{cut}, None is replicated); give spec=ParallelSpec(replicate=('*.{name}', '*.{elsewhere}'))"
                )
    made = {key: part_of(whole, cut, group) for key, (whole, cut, _) in wanted.items() if cut is not None}
    for root, _ in roots:
        for module in root.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in made:
                    _, cut, _ = wanted[id(parameter)]
                    assert cut is not None
                    setattr(module, name, made[id(parameter)])
                    declare(module, name, cut, group)


def part_of(parameter: nn.Parameter, cut: Cut, group: ProcessGroup | None) -> nn.Parameter:
    """This rank's shard of a parameter, in memory of its own."""
    whole: Tensor = parameter.detach()
    part = cut.take(whole, group_rank(group), group_size(group)).clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes set by others, such as marks for optimizer groups
    return made


def declare(module: nn.Module, name: str, cut: Cut, group: ProcessGroup | None) -> None:
    """Record on a module that its parameter `name` is sharded over a group."""
    for attribute, value in (("shard_dims", cut.dim), ("shard_segments", cut.segments)):
        if attribute not in vars(module):
            setattr(module, attribute, dict(getattr(module, attribute, {})))
        getattr(module, attribute)[name] = value
    setattr(module, "_group_name", group_name(group))  # noqa: B010
    setattr(module, "tensor_parallel", group_size(group))  # noqa: B010
    register_shards(module)
