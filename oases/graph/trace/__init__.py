"""Trace a model to a LayerGraph by torch.export, without computation or weights; models on `meta` work.

`trace` exports the whole model: the 80 layers of Llama-70B take 7 s and 0.5 GB. `trace_layers` exports layers of one
kind once, for their costs. Layers are traced as `oases.autotp` traces them: as they run, and within a bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from oases.errors import UsageError
from oases.graph.layer_graph import Input, LayerGraph, Node, Parameter
from oases.graph.layered import layered_model
from oases.graph.trace.as_run import layers_as_run
from oases.graph.trace.configuration import configured_model, read_configuration, sample_inputs
from oases.graph.trace.repeated import Progress, layers_once
from oases.plans.layered import Model

Inputs = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a model's forward; only shape and dtype of tensors matter."""

_SCOPES = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Ops that run a subgraph under a context and compute nothing themselves."""
_VALUES = ("data-dependent", "data dependent", "GuardOnDataDependent", "_local_scalar_dense")


def trace(
    model: nn.Module, *, inputs: Inputs | None = None, batch: int = 1, sequence: int | None = None
) -> LayerGraph:
    """Trace the forward pass of a model as it is, in training mode with dropouts.

    inputs: (args, kwargs) of a forward pass. Without them a transformers model gets `batch` samples of `sequence`
    tokens (default: 1024, or its number of positions). Sizes are concrete, not symbolic. bytes_out are those on the
    model's device; on `meta` the attention result is copied once more. Raises UsageError if forward branches on
    tensor values or takes other inputs, and for layers with too many calls.
    """
    if inputs is None:
        inputs = ((), sample_inputs(model, batch, sequence))
    if not (isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], Mapping)):
        raise UsageError(f"inputs must be (args, kwargs), such as ((x,), {{}}), got {type(inputs).__name__}")
    args, kwargs = tree_map(_like_the_model(model), (tuple(inputs[0]), dict(inputs[1])))
    name = type(model).__name__
    given_up: list[str] = []
    try:
        with layers_as_run(model) as given_up:
            exported = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:  # torch.export raises anything that forward raises, and many types of its own
        raise UsageError(f"model {name} cannot be traced: {(given_up or [_remedy(error)])[0]}") from error
    return _Reader(model, exported).graph()


def trace_layers(
    model: nn.Module, *, inputs: Inputs | None = None, sequence: int | None = None, on_layer: Progress | None = None
) -> Model:
    """Costs of a model's layers for the planner, of one sample; layers of one kind are traced once.

    inputs, sequence: as in `trace`, with a batch of one. on_layer(done, total): progress callback. Raises UsageError
    as `trace` and `layered_model` do.
    """
    with layers_once(model, on_layer) as alike:
        graph = trace(model, inputs=inputs, sequence=sequence)
    return layered_model(graph, alike)


def trace_configuration(
    given: Any, *, sequence: int | None = None, dtype: str = "float32", on_layer: Progress | None = None
) -> Model:
    """Costs of the layers of a model given by its configuration; no weights are read or made.

    given: path of a config.json of transformers or of a folder with one, or a transformers configuration. Raises
    UsageError for one that is not valid or that transformers does not know.
    """
    if hasattr(given, "to_dict"):
        data = given.to_dict()
    else:
        data = read_configuration(Path(given), "model", "a config.json of transformers")
    return trace_layers(configured_model(data, dtype), sequence=sequence, on_layer=on_layer)


def _like_the_model(model: nn.Module) -> Any:
    """Map tensors to the model's device without their values, which tracing does not need."""
    first = next((each for each in (*model.parameters(), *model.buffers())), None)

    def moved(value: Any) -> Any:
        if first is None or not isinstance(value, torch.Tensor) or value.device == first.device:
            return value
        return torch.empty_like(value, device=first.device)

    return moved


def _remedy(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
    if any(word in said + str(error) for word in _VALUES):
        return (
            f"its forward branches on the values of a tensor, which cannot be traced ({said}); express the branch "
            "with torch.where, or move it out of forward"
        )
    return f"{said}; give the arguments that its forward takes: trace(model, inputs=(args, kwargs))"


class _Reader:
    """Reader of an exported program: its nodes and those of nested scopes, in execution order."""

    def __init__(self, model: nn.Module, exported: Any) -> None:
        self._name = type(model).__name__
        self._exported = exported
        self._flops = FlopFormulas()
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._read: dict[Any, str] = {}  # fx node -> name of the node or model input it represents
        self._weights: dict[Any, str] = {}  # fx node -> name of the parameter or buffer it represents
        self._scopes: dict[Any, list[Any]] = {}  # fx node of a scope -> the fx nodes that it returns
        identities: dict[int, int] = {}
        self._parameters = {
            name: _parameter(name, tensor, identities.setdefault(id(tensor), len(identities)), buffer=buffer)
            for named, buffer in ((model.named_parameters, False), (model.named_buffers, True))
            for name, tensor in named(remove_duplicate=False)
        }
        self._identities = identities

    def graph(self) -> LayerGraph:
        """The finished graph."""
        signature, graph = self._exported.graph_signature, self._exported.graph_module.graph
        targets = {spec.arg.name: spec.target for spec in signature.input_specs if spec.target is not None}
        inputs = []
        for each in graph.nodes:
            if each.op == "placeholder" and each.name in targets:
                target = targets[each.name]
                if target not in self._parameters:  # a constant tensor created in forward
                    number = len(self._identities)
                    self._identities[number] = number
                    self._parameters[target] = _parameter(target, each.meta["val"], number, buffer=True)
                self._weights[each] = target
            elif each.op == "placeholder" and isinstance(each.meta.get("val"), torch.Tensor):
                value = each.meta["val"]
                inputs.append(Input(each.name, tuple(value.shape), _num_bytes(value)))
                self._read[each] = each.name
                self._names.add(each.name)
        self._walk(self._exported.graph_module)
        return LayerGraph(self._name, tuple(self._nodes), tuple(inputs), tuple(self._parameters.values()))

    def _walk(self, module: Any) -> list[Any]:
        """Read the nodes of a graph module. Returns its results."""
        for each in module.graph.nodes:
            if each.op == "output":
                return tree_leaves(each.args[0])
            if each.op != "call_function":
                continue
            if each.target.__name__ in _SCOPES:
                self._enter(module, each)
            elif each.target.__name__ == "getitem" and each.args[0] in self._scopes:
                self._alias(each, self._scopes[each.args[0]][each.args[1]])
            elif isinstance(each.target, torch._ops.HigherOrderOperator):
                raise UsageError(
                    f"model {self._name} cannot be traced: its forward branches or loops with {each.target.__name__};"
                    " write it with plain ops"
                )
            elif each.users or _tensors(each.meta.get("val")):  # else it is only a check
                self._add(each)
        return []

    def _enter(self, module: Any, each: Any) -> None:
        place = next(at for at, arg in enumerate(each.args) if getattr(arg, "op", "") == "get_attr")
        inner = getattr(module, each.args[place].target)
        outer = each.args[place + 1 :]
        for stand_in, given in zip((n for n in inner.graph.nodes if n.op == "placeholder"), outer, strict=True):
            self._alias(stand_in, given)
        self._scopes[each] = self._walk(inner)

    def _alias(self, each: Any, other: Any) -> None:
        for names in (self._read, self._weights):
            if other in names:
                names[each] = names[other]

    def _add(self, each: Any) -> None:
        reads = each.all_input_nodes
        outputs = _tensors(each.meta.get("val"))
        if not all(isinstance(size, int) for value in outputs for size in value.shape):
            raise UsageError(
                f"model {self._name} cannot be traced: the output size of {_op(each.target)} depends on the "
                "values of a tensor; write it with torch.where or a mask, which keep sizes"
            )
        name = each.name
        while name in self._names:
            name += "_"
        self._names.add(name)
        self._read[each] = name
        path = next(reversed((each.meta.get("nn_module_stack") or {"": ("", None)}).values()))[0].split("@")[0]
        self._nodes.append(
            Node(
                name=name, op=_op(each.target), module=path,
                inputs=tuple(dict.fromkeys(self._read[n] for n in reads if n in self._read)),
                parameters=tuple(dict.fromkeys(self._called(n, path) for n in reads if n in self._weights)),
                shapes=tuple(tuple(value.shape) for value in outputs), num_bytes=sum(map(_num_bytes, outputs)),
                floating=any(value.is_floating_point() for value in outputs),
                flops=self._flops.of(each), bytes_out=_written(each, outputs),
            )
        )  # fmt: skip

    def _called(self, each: Any, path: str) -> str:
        """Name of a tied parameter in the module that reads it; torch.export uses any of its names."""
        name = self._weights[each]
        own = f"{path}.{name.rpartition('.')[2]}"
        same = own in self._parameters and self._parameters[own].identity == self._parameters[name].identity
        return own if same else name


def _written(each: Any, outputs: list[torch.Tensor]) -> int:
    """Bytes of the outputs with memory of their own, or written over an input's."""
    schema = getattr(each.target, "_schema", None)
    if schema is None:  # getitem
        return 0
    held = {_memory(value) for node in each.all_input_nodes for value in _tensors(node.meta.get("val"))}
    own = (value for value in outputs if schema.is_mutable or _memory(value) not in held)
    return sum(map(_num_bytes, own))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _parameter(name: str, value: torch.Tensor, identity: int, *, buffer: bool) -> Parameter:
    return Parameter(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), identity, buffer)


def _num_bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _op(target: Any) -> str:
    """Op name: "aten.linear" of aten.linear.default, "getitem" of Python's own."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else target.__name__


class FlopFormulas:
    """FLOPs of traced ops' forward passes, cached by op and shapes."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, node: Any) -> int:
        """FLOPs of an fx node whose arguments carry shapes; 0 if torch has no formula."""
        if not _may_count(node):
            return 0
        args, kwargs = tree_map(
            _shape_of, (node.args, node.kwargs), is_leaf=lambda arg: isinstance(arg, torch.fx.Node)
        )
        key = repr((str(node.target), tree_map(_sizes, (args, kwargs))))
        if key not in self._known:
            self._known[key] = _counted(node.target, args, kwargs)
        return self._known[key]


def _may_count(node: Any) -> bool:
    """Whether the op has a formula, or decomposes into ops that may have one: then it reads two tensors."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.overloadpacket in flop_registry:
        return True
    reads = [arg for arg in tree_leaves((node.args, node.kwargs)) if isinstance(arg, torch.fx.Node)]
    return len(reads) >= 2 and target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


def _shape_of(arg: Any) -> Any:
    """A `meta` tensor for a node, on which an op runs at no cost."""
    if isinstance(arg, torch.fx.Node):
        return tree_map(
            lambda v: (
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
                if isinstance(v, torch.Tensor)
                else v
            ),
            arg.meta.get("val"),
        )
    return torch.device("meta") if isinstance(arg, torch.device) else arg


def _sizes(arg: Any) -> Any:
    return (tuple(arg.shape), str(arg.dtype)) if isinstance(arg, torch.Tensor) else arg


def _counted(target: Any, args: Any, kwargs: Any) -> int:
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            target(*args, **kwargs)
    except Exception as error:  # an op may raise anything
        shapes = [tuple(arg.shape) for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
        raise UsageError(f"the FLOPs of {target} on shapes {shapes} cannot be counted: {error}") from error
    return counter.get_total_flops()
