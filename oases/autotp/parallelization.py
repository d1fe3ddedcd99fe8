"""`parallelize`: a model as its author wrote it becomes one that trains under overlapped tensor parallelism."""

from __future__ import annotations

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
from oases.autotp.layers import LayerList, example_inputs, observe, single_layer
from oases.autotp.lowering import GroupRank
from oases.autotp.model_hooks import ModelHooks
from oases.autotp.module_snapshot import ModuleSnapshot, training_modes
from oases.autotp.preconditions import require_alike, require_cuttable, require_layers, tensor_parallel_group
from oases.autotp.pretrained import FullModelSaver
from oases.autotp.program import CallSignature, LayerSignature, Program, layer_signatures
from oases.autotp.report import LayersReport, PartitionReport, compare_with_plan
from oases.autotp.runner import Layer, Runner
from oases.autotp.spec import ParallelSpec
from oases.autotp.vocabulary import Vocabulary, shard_vocabulary
from oases.autotp.weights import load_weights
from oases.errors import UsageError
from oases.execution.group import ProcessGroup, group_name, group_rank, group_size
from oases.parallel.mesh import Mesh
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
    **stack_options: Any,
) -> nn.Module:
    """Cut a model over the ranks of a mesh, in place, and return it.

    model: of transformers, or any nn.Module, unedited, on every rank the same; on `meta` where `weights` are given.
    mesh: a DeviceMesh (of several dimensions the one named "tp"), a process group, or None for the default group.
    plan: of `oases.plan`; its schedule and recomputation are taken. schedule: as in OverlappedStack; "layers" hides
    communication inside each layer alone, and keeps the results of layers for who reads them.
    spec: what cannot be inferred of the model. weights: a folder or file of safetensors, or a mapping of whole
    tensors, of which this rank reads its parts (see `load_weights`) to `device`; None: that of the mesh, or the CPU.
    stack_options: others of OverlappedStack, such as sub_batches.

    What is column-parallel, row-parallel and vocabulary-parallel is found from the model's graph, its layers are cut
    at their all-reduces and run as an OverlappedStack behind the author's own loop over them; what cannot be cut
    stays as it is. `model.oases_partition` says all of it. Parameters keep their names; those that are cut hold this
    rank's part. Gradients, loss and logits are those of the whole model.
    Raises UsageError where sizes do not divide (with the degrees that do), where the model cannot be run on inputs
    without data, where weights are quantised, or of a plan for another model. Source: arXiv 2206.04959, section 4.
    """
    spec = spec or ParallelSpec()
    group, options = tensor_parallel_group(mesh, plan, schedule, stack_options)
    require_cuttable(model)
    spec.require_names(model)
    require_alike(model, group, values=weights is None)
    place = GroupRank.of(group)
    report = PartitionReport(type(model).__name__, place.ranks)
    vocabulary, twin = spec.vocabulary_of(model), twin_of(model)
    substitute_experts(twin, place.ranks)
    inputs = spec.inputs or example_inputs(model)
    names = [*vocabulary.tables, *vocabulary.heads] if vocabulary is not None else []
    observed = observe(twin, inputs, [twin.get_submodule(name) for name in names])
    lists = observed.lists
    if not lists and not spec.layers:
        lists = [single_layer(twin, inputs)]
    if spec.layers is not None:
        missing = set(spec.layers) - {each.name for each in lists}
        if missing:
            raise UsageError(f"spec.layers names {sorted(missing)}; lists found: {[each.name for each in lists]}")
        lists = [each for each in lists if each.name in spec.layers]
    if plan is not None:
        require_layers(plan, [len(each.calls) for each in lists])
    found = [(each, layer_signatures(each, model, spec, place)) for each in lists]
    _require_divisible(
        [(each.name, kind) for each, kinds in found for kind in kinds if isinstance(kind, LayerSignature)], place
    )
    hooks = ModelHooks(model, group)
    cut_parameters(
        (
            (model.get_submodule(path), kind.cuts)
            for each, kinds in found
            for path, kind in zip(each.paths, kinds, strict=True)
            if isinstance(kind, LayerSignature)
        ),
        group,
    )
    for each, kinds in found:
        report.layers.append(_install(model, each, kinds, group, options))
    _cut_vocabulary(model, vocabulary, observed.outside_reads, group, report)
    if place.ranks > 1:
        report.plan_agrees, report.plan_differs = compare_with_plan(model)
    if weights is not None:
        kind = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
        load_weights(model, weights, device=device or kind, process_group=group)
    known = {id(p) for each in lists for path in each.paths for p in model.get_submodule(path).parameters()}
    known |= {id(p) for name in report.vocabulary for p in model.get_submodule(name).parameters()}
    report.replicated = [name for name, p in model.named_parameters() if id(p) not in known]
    hooks.begin(model)
    if callable(getattr(model, "save_pretrained", None)) and place.ranks > 1:
        object.__setattr__(model, "save_pretrained", FullModelSaver(model, group))
    object.__setattr__(model, "oases_partition", report)
    return model


def _install(
    model: nn.Module,
    found: LayerList,
    kinds: list[LayerSignature | UnsplittableError],
    group: ProcessGroup | None,
    options: dict[str, Any],
) -> LayersReport:
    """Cut the layers of one list and put what runs them in the place of their forward."""
    modules = [model.get_submodule(path) for path in found.paths]
    report = LayersReport(found.name, len(modules), "replicated")
    cut = [kind for kind in kinds if isinstance(kind, LayerSignature)]
    reasons = [str(kind) for kind in kinds if isinstance(kind, UnsplittableError)]
    report.reason = found.broken or (reasons[0] if reasons else "")
    programs: list[Program] = []
    if len(cut) == len(kinds) and not found.broken and options["schedule"] != "layers":
        programs = [
            _sample(kind, call, at) for kind, call, at in zip(cut, found.calls, found.activations, strict=True)
        ]
        report.reason = next((why for program in programs if (why := program.why_not_in_a_stack)), "")
    if programs and not report.reason:
        layers = [
            Layer(module, kind, at, path)
            for module, kind, at, path in zip(modules, cut, found.activations, found.paths, strict=True)
        ]
        runner = Runner(found.name, layers, programs, group, **options)
        runner.install()
        report.runner = runner
        report.runs, report.schedule = "across layers", str(runner.stack.schedule.name)
        report.blocks_per_layer = len(runner.stack.blocks) // len(layers)
    else:
        for module, kind, path in zip(modules, kinds, found.paths, strict=True):
            if isinstance(kind, LayerSignature):
                module.forward = StandaloneForward(module, kind, path)
                report.runs = "inside layers"
        if options["schedule"] == "layers":
            report.reason = report.reason or "schedule='layers' was asked for"
    report.describe(dict.fromkeys(cut))
    return report


def _cut_vocabulary(
    model: nn.Module,
    vocabulary: Vocabulary | None,
    outside_reads: set[str],
    group: ProcessGroup | None,
    report: PartitionReport,
) -> None:
    """outside_reads: names of parameters that the model reads by itself, which needs all rows of them."""
    if vocabulary is None or group is None or isinstance(model.forward, StandaloneForward):
        return
    read = sorted(outside_reads & {f"{name}.weight" for name in (*vocabulary.tables, *vocabulary.heads)})
    if read:
        report.notes.append(f"the vocabulary stays whole: {', '.join(read)} is read outside of its module")
        return
    try:
        shard_vocabulary(model, vocabulary, group)
    except ValueError as error:
        report.notes.append(f"the vocabulary stays whole: {error}")
    else:
        report.vocabulary = [*vocabulary.tables, *vocabulary.heads]


def _sample(kind: LayerSignature, call: Any, at: int) -> Program:
    flat, tree = leaves(call.args, call.kwargs)
    return kind.program(CallSignature.of(flat, tree, training_modes(call.module)), flat, tree, at, flat[at].device)


def _require_divisible(kinds: list[tuple[str, LayerSignature]], place: GroupRank) -> None:
    """Raise UsageError, with the degrees that fit, unless all lengths that are cut divide by the degree."""
    wrong = dict.fromkeys(
        f"{length} ({name}.*.{of})"
        for name, kind in kinds
        for length, of in kind.structure.limits.items()
        if length % place.ranks
    )
    if wrong:
        fits = sorted(set.intersection(*(set(kind.structure.degrees) for _, kind in kinds)))
        raise UsageError(
            f"the tensor-parallel degree {place.ranks} does not divide these numbers of heads or features: "
            f"{', '.join(wrong)}; degrees that fit this model: {', '.join(map(str, fits))}"
        )


class StandaloneForward:
    """The forward of one layer, by its kind's programs."""

    def __init__(self, module: nn.Module, kind: LayerSignature, path: str) -> None:
        self.module = module
        self.kind = kind
        self._snapshot = ModuleSnapshot(module, path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's author has it."""
        found, tree = leaves(args, kwargs)
        device = next(each.device for each in [*found, *self.module.parameters()] if isinstance(each, Tensor))
        form = CallSignature.of(found, tree, self._snapshot.modes())
        program = self.kind.program(form, found, tree, None, device)
        run, names = program.module()
        exported = program.exported
        inputs = dict(zip(exported.inputs, found, strict=True))
        result = run(*(value_of(name, program, self.module, inputs, device) for name in names))
        return pytree.tree_unflatten(result, exported.result)


def cut_parameters(roots: Iterable[tuple[nn.Module, Mapping[str, Cut]]], group: ProcessGroup | None) -> None:
    """Replace parameters by this rank's parts of them, in every module of all roots that holds them.

    roots: modules, each with its cuts by the parameter's name in it. What several modules share they go on sharing.
    Each owner says so by the instance's `shard_dims`, `shard_segments`, `tensor_parallel` and the group's name.
    Parameters on meta stay there. UsageError, with nothing changed, where one is needed in two ways.
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
                    f"{cut}, None is whole); give spec=ParallelSpec(replicate=('*.{name}', '*.{elsewhere}'))"
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
    """A parameter of this rank's part, in memory of its own."""
    whole: Tensor = parameter.detach()
    part = cut.take(whole, group_rank(group), group_size(group)).clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # what others wrote on it: optimizers' groups are told by attributes
    return made


def declare(module: nn.Module, name: str, cut: Cut, group: ProcessGroup | None) -> None:
    """Have a module say that its parameter `name` is cut over a group."""
    for attribute, value in (("shard_dims", cut.dim), ("shard_segments", cut.segments)):
        if attribute not in vars(module):
            setattr(module, attribute, dict(getattr(module, attribute, {})))
        getattr(module, attribute)[name] = value
    setattr(module, "_group_name", group_name(group))  # noqa: B010
    setattr(module, "tensor_parallel", group_size(group))  # noqa: B010
