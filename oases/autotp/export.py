"""Trace a layer by torch.export on fake tensors.

The graph is plain aten, one node per call, with the layer's parameter names. Where export fails (data-dependent
control flow, buffers changed in forward) UnsplittableError gives the reason.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oases.autotp.as_run import CallCounter, traced_as_run
from oases.autotp.cache import call_layer, is_layer_cache, numbers_given
from oases.autotp.rewrites import (
    differentiable_copies,
    drop_asserts,
    inline_grad_modes,
    normalise_linears,
    without_in_place,
)
from oases.autotp.trace_guard import (
    Read,
    assigned_attributes,
    changed_arguments,
    code_of_backward,
    noted_reads,
    read_values,
    unrecorded,
)
from oases.core.execution.failure import Failure
from oases.distributed.fsdp import COMPUTED_IN
from oases.errors import UsageError


class UnsplittableError(Exception):
    """A layer, or a pair of linears in it, cannot be sharded; the message gives the reason."""


class TooLongError(UnsplittableError):
    """A layer has more calls than its trace may have (MOST_CALLS), whatever lengths vary."""


@dataclass(frozen=True)
class Exported:
    """Graph of one layer for inputs of one shape.

    parameters, buffers: names in the layer, by placeholder. constants: tensors that the layer creates. inputs: the
    placeholder of each leaf of (args, kwargs) that is a tensor, in the order of `leaves`; None for other leaves.
    outputs: a node or constant for each leaf of the result. ranges: bounds of the dynamic lengths; guards: further
    conditions on them. layer: the traced module. cached: placeholders of a key-value cache; keeps: whether the last
    two outputs are keys and values to put into one. reads: values that it is valid for.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str | None, ...]
    outputs: tuple[fx.Node | Any, ...]
    result: pytree.TreeSpec
    ranges: dict[Any, Any]
    guards: tuple[Any, ...]
    layer: nn.Module
    cached: tuple[str, ...]
    keeps: bool
    reads: dict[Read, Any]

    @cached_property
    def parameters_read(self) -> frozenset[str]:
        """Names in the layer of the parameters that its graph reads."""
        return frozenset(self.parameters[node.name] for node in self.graph.nodes
                         if node.op == "placeholder" and node.name in self.parameters and node.users)  # fmt: skip

    @property
    def own_results(self) -> int:
        """Number of outputs that are the layer's own results."""
        return len(self.outputs) - 2 * self.keeps


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and tree of a call's arguments; kwargs in alphabetical order."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


@dataclass(frozen=True)
class CallSignature:
    """Properties of a call, besides shapes, that determine its graph: tree, constants, types, modes of the layer.

    gradients: whether they are on. autocast: type that it computes in on the first tensor's device; None where off.
    """

    tree: str
    constants: tuple[str, ...]
    types: tuple[str, ...]
    modes: tuple[bool, ...]
    gradients: bool
    autocast: torch.dtype | None

    @classmethod
    def of(cls, found: list[Any], tree: pytree.TreeSpec, modes: tuple[bool, ...]) -> CallSignature:
        """Signature of a call from its leaves. UnsplittableError for a leaf that is neither a tensor nor a plain
        value.
        """
        for leaf in found:
            if not isinstance(leaf, (Tensor, int, float, str, bool, torch.dtype, torch.device, type(None))):
                raise UnsplittableError(f"an argument of type {type(leaf).__name__} was passed")
        return cls(
            str(tree),
            tuple("tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in found),
            tuple(f"{leaf.dtype} {leaf.dim()}" for leaf in found if isinstance(leaf, Tensor)),
            modes,
            torch.is_grad_enabled(),
            _autocast(next((leaf.device.type for leaf in found if isinstance(leaf, Tensor)), "cpu")),
        )


def _autocast(device: str) -> torch.dtype | None:
    """Type that autocast computes in; None where it is off. A trace has types that a model read of its values."""
    enabled = device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast to ask for
    return torch.get_autocast_dtype(device) if enabled else None


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of a graph node; a dynamic dimension has its traced length."""
    return tuple(map(length_of, value.meta["val"].shape))


def length_of(length: Any) -> int:
    """A dimension's traced length, dynamic or not."""
    return length if isinstance(length, int) else int(length.node.hint)


_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""The one mode of all fake tensors, because tensors of different modes cannot be mixed."""


def without_data(value: Any, device: torch.device | None = None) -> Any:
    """Fake tensor with the shape and type of `value`, on its device or another; other values unchanged.

    A meta tensor becomes a fake CPU tensor, because constants made in a forward have data on the CPU.
    """
    if not isinstance(value, Tensor) or (isinstance(value, FakeTensor) and device in (None, value.device)):
        return value
    device = device or (torch.device("cpu") if value.is_meta else value.device)
    with _FAKE:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def twin_of(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Copy of a module with fake parameters and buffers and without hooks.

    UsageError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = without_data(tensor.detach(), device)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:  # an attribute of the model may raise anything
        raise UsageError(
            f"{type(module).__name__} cannot be copied without its data ({type(error).__name__}: {error}); it may "
            "hold modules, parameters, buffers and plain values only; use the weight norms of "
            "torch.nn.utils.parametrizations"
        ) from error
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return twin


def take_dtypes(twin: nn.Module, module: nn.Module) -> None:
    """Give the parameters of a `twin_of` copy the dtypes that those of the module have now.

    Those that the module does not have, because another stage does, change as the others of their type.
    """
    wanted = {name: getattr(p, COMPUTED_IN, p.dtype) for name, p in module.named_parameters()}
    before = {name: parameter.dtype for name, parameter in twin.named_parameters()}
    others = {before[name]: dtype for name, dtype in wanted.items() if name in before}
    changed: dict[int, nn.Parameter] = {}
    for name, parameter in twin.named_parameters():
        dtype = wanted.get(name, others.get(parameter.dtype, parameter.dtype))
        if dtype != parameter.dtype:
            with _FAKE:
                empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            changed[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for part in twin.modules() if changed else ():
        for name, held in part._parameters.items():
            part._parameters[name] = changed.get(id(held), held)


@contextmanager
def running_without_data() -> Iterator[None]:
    """Context in which new tensors are fake and gradients are off."""
    with _FAKE, torch.no_grad(), quiet():
        yield


class _Call(nn.Module):
    """A layer called with its arguments as two trees, whose order export keeps. call: the layer, or around it."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of the layer."""
        return call_layer(self.call, args, kwargs)


def export(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Callable[[Tensor], dict[int, Any]] | None = None,
) -> Exported:
    """Trace the call `layer(*args, **kwargs)` of a `twin_of` copy.

    varying: returns the dynamic dimensions of an input; None traces for these shapes alone. Raises UnsplittableError.
    """
    kwargs = dict(sorted(kwargs.items()))
    args, kwargs = pytree.tree_map(_apart, (args, kwargs))
    shapes = None
    if varying is not None:  # leaves other than tensors have no shape to vary
        shapes = pytree.tree_map(lambda leaf: varying(leaf) if isinstance(leaf, Tensor) else None, (args, kwargs))
    changed, counter = list[str](), CallCounter()

    def watched(*args: Any, **kwargs: Any) -> Any:
        """Result of the layer; notes what it changes, of which export puts attributes back."""
        assigned, items = assigned_attributes(layer), changed_arguments(args, kwargs)
        with counter:
            result = layer(*args, **kwargs)
        reads.subtract({read: numbers_given(args, kwargs) for read in reads if read[1][-1] == "layer_idx"})
        changed.extend([*assigned(), *items()])
        return result

    try:
        with (
            quiet(),
            unrecorded(layer),
            traced_as_run(layer),
            code_of_backward() as lost,
            noted_reads(layer) as reads,
        ):
            program = torch.export.export(
                _Call(layer, watched),
                (args, kwargs),
                strict=False,
                dynamic_shapes=None if shapes is None else {"args": shapes[0], "kwargs": shapes[1]},
            )
    except Exception as error:  # a model's forward or torch.export may raise anything; keep the reason
        if not counter.over:
            raise _untraceable(type(layer).__name__, error) from error
    if counter.over:
        raise TooLongError(f"{type(layer).__name__} {counter.why}")
    if changed:
        raise UnsplittableError(f"{type(layer).__name__} sets {', '.join(changed)} in its forward")
    if lost():
        raise UnsplittableError(
            f"{type(layer).__name__} calls {', '.join(lost())}, whose backward is not in a traced graph"
        )
    return _read(program, layer, (args, kwargs), read_values(layer, reads))


def _untraceable(layer: str, error: Exception) -> UnsplittableError:
    failure = Failure.of(error, 0, "")
    return UnsplittableError(f"{layer} cannot be traced: {failure.cause}{failure.author and f' ({failure.author})'}")


def varying_shapes(tensor: Tensor) -> dict[int, Any]:
    """Dynamic dimensions for `export`: all lengths but ones."""
    return {dim: torch.export.Dim.AUTO for dim, length in enumerate(tensor.shape) if length > 1}


def varying_lengths(tensor: Tensor) -> dict[int, Any]:
    """Dynamic dimensions for `export` but the batch's, which some layers (BLOOM) merge with that of heads."""
    return {dim: length for dim, length in varying_shapes(tensor).items() if dim}


def _apart(value: Any) -> Any:
    """Separate fake tensor for every argument: one tensor passed twice in this call may be two in the next."""
    value = without_data(value)
    if not isinstance(value, FakeTensor):
        return value
    with _FAKE:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _read(program: torch.export.ExportedProgram, traced: nn.Module, call: Any, reads: dict[Read, Any]) -> Exported:
    layer = type(traced).__name__
    _refuse_mutation(program, layer)
    inline_grad_modes(program)
    graph = without_in_place(program.graph)
    if graph is None:
        try:
            with quiet():  # last resort: this takes long, and decomposes composite ops that the rules know
                program = program.run_decompositions({})
        except Exception as error:  # torch may raise anything; keep the reason
            raise _untraceable(layer, error) from error
        _refuse_mutation(program, layer)
        graph = program.graph
    signature = program.graph_signature
    drop_asserts(graph)
    if not differentiable_copies(graph):
        raise UnsplittableError(f"{layer} assigns a tensor to a part of another of another shape")
    normalise_linears(graph, signature.inputs_to_parameters)
    given = pytree.tree_leaves(call)
    names = iter(signature.user_inputs)
    inputs = tuple(name if isinstance(leaf, Tensor) else None for leaf, name in zip(given, names, strict=True))
    (output,) = (node for node in graph.nodes if node.op == "output")
    constants = {}
    for name, constant in signature.inputs_to_lifted_tensor_constants.items():
        value = program.constants[constant]
        if not isinstance(value, Tensor) or value.is_meta or isinstance(value, FakeTensor):
            raise UnsplittableError(f"{layer} makes the constant {constant!r} in its forward, without data")
        if value.requires_grad:
            raise UnsplittableError(f"{layer} reads {constant!r}, which requires grad but is not its parameter")
        constants[name] = value
    strip = len("layer.")
    spec = program.call_spec.out_spec
    assert spec is not None
    return Exported(
        graph,
        {name: full[strip:] for name, full in signature.inputs_to_parameters.items()},
        {name: full[strip:] for name, full in signature.inputs_to_buffers.items()},
        constants,
        inputs,
        tuple(output.args[0]),
        spec,
        dict(program.range_constraints),
        _guards(graph),
        traced,
        _cached(call, inputs),
        any(map(is_layer_cache, pytree.tree_leaves(call, is_leaf=is_layer_cache))),
        reads,
    )


def _cached(call: Any, inputs: tuple[str | None, ...]) -> tuple[str, ...]:
    """Placeholders of the keys and values of a LayerCache, where it has any."""
    names, found = iter(inputs), list[str]()
    for part in pytree.tree_leaves(call, is_leaf=is_layer_cache):
        mine = [next(names) for _ in pytree.tree_leaves(part)]
        found += [name for name in mine if name is not None] if is_layer_cache(part) else []
    return tuple(found)


def _refuse_mutation(program: torch.export.ExportedProgram, layer: str) -> None:
    signature = program.graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    changed = [name.removeprefix("layer.") for name in changed]
    if changed:
        raise UnsplittableError(f"{layer} changes {', '.join(map(repr, changed))} in its forward")


def _guards(graph: fx.Graph) -> tuple[Any, ...]:
    """Conditions that the model's code put on dynamic lengths (`if length % 2`), as symbolic expressions."""
    for node in graph.nodes:
        for length in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(length, torch.SymInt):
                known = length.node.shape_env
                later = [each.expr for several in known.deferred_runtime_asserts.values() for each in several]
                return tuple(known.simplify(each) for each in [*(guard.expr for guard in known.guards), *later])
    return ()


_TOLD = ("fx.experimental.symbolic_shapes", "_export.non_strict_utils", "export", "_subclasses.fake_tensor")
"""Modules of torch that log what callers handle."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress export's warnings on lengths of one and on meta tensors, which callers handle."""
    levels = {logger: logger.level for logger in (logging.getLogger(f"torch.{name}") for name in _TOLD)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
