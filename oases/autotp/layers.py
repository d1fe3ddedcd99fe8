"""Repeated layers of a model, found by one forward pass on fake tensors.

The cost is one such pass for all layers, so every layer is inspected, not one per class.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from oases.autotp.as_run import masks_as_run
from oases.autotp.configuration import sample_inputs
from oases.autotp.export import leaves, running_without_data, without_data
from oases.autotp.trace_guard import assigned_attributes, changed_arguments
from oases.errors import UsageError, author_line

Ops = tuple[str, ...]
"""Ops of one layer call, in order, each with its arguments; tensors by where they came from."""


class OpRecorder(TorchDispatchMode):
    """Notes every op while a model runs.

    layers: modules that are called one after the other. vocabulary: embedding tables and output heads. ops: the ops
    of each layer call. outside_reads: names of parameters that are read outside of the layer, table or head that
    holds them. read: numbers of the layer calls whose first result is read outside of the layers.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], vocabulary: Iterable[nn.Module]) -> None:
        super().__init__()
        self.ops: list[Ops] = []
        self.outside_reads: set[str] = set()
        self.read: set[int] = set()
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._inside: list[nn.Module] = []
        self._running: list[str] = []
        self._places: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps ids unique
        self._results: dict[int, int] = {}
        self._layers = list(dict.fromkeys(layers))
        self._users: dict[int, set[int]] = {}
        for module in {*self._layers, *vocabulary}:
            for parameter in module.parameters():
                self._users.setdefault(id(parameter), set()).add(id(module))
        self._modules = list({*self._layers, *vocabulary})
        parts = {id(part) for module in self._modules for part in module.modules()}
        for part in model.modules():  # shared with another module, which may read it in another mode
            for held in [] if id(part) in parts else part.parameters(recurse=False):
                if id(held) in self._users:
                    self.outside_reads.update(self._names[id(held)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the model runs."""
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, prepend=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)
        if module in self._layers:
            self._running, self._places = [], {}
            named: list[tuple[str, Mapping[str, Tensor]]] = [
                ("parameter", dict(module.named_parameters())),
                ("buffer", dict(module.named_buffers())),
            ]
            for kind, tensors in named:
                for name, tensor in tensors.items():
                    self._places.setdefault(id(tensor), f"{kind} {name}")

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside.pop()
        if module in self._layers:
            flat = pytree.tree_leaves(result)
            if flat and isinstance(flat[0], Tensor):
                self._results[id(flat[0])] = len(self.ops)
                self._kept.append(flat[0])
            self._running.append(f"-> {[self._placed(each) for each in flat]}")
            self.ops.append(tuple(self._running))

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record the op and run it."""
        kwargs = kwargs or {}
        flat, _ = pytree.tree_flatten((args, kwargs))
        for tensor in (each for each in flat if isinstance(each, Tensor)):
            users = self._users.get(id(tensor))
            if users is not None and not any(id(module) in users for module in self._inside):
                self.outside_reads.update(self._names[id(tensor)])
            if id(tensor) in self._results and not self._inside:
                self.read.add(self._results[id(tensor)])
        result = func(*args, **kwargs)
        if any(module in self._layers for module in self._inside):
            self._running.append(f"{func} {[self._placed(each) for each in flat]}")
            for each in pytree.tree_leaves(result):
                self._placed(each)
        return result

    def _placed(self, value: Any) -> str:
        """Label of a value in a layer's ops."""
        if not isinstance(value, Tensor):
            return repr(value)
        if id(value) not in self._places:
            self._kept.append(value)
            shape = f"{tuple(value.shape)} {value.dtype}"
            self._places[id(value)] = f"{len(self._places)} {shape} {_content(value)}".rstrip()
        return self._places[id(value)]


def _content(value: Tensor) -> str:
    """Hash of a constant, so that layers with different constants differ; "" for a fake tensor."""
    if isinstance(value, FakeTensor) and value.constant is not None:
        value = value.constant
    if isinstance(value, FakeTensor) and value.constant is not None:
        value = value.constant
    if isinstance(value, FakeTensor) or value.is_meta or value.is_complex() or type(value) is not Tensor:
        return ""
    with torch.utils._python_dispatch._disable_current_modes():
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


BATCH, SEQUENCE = 3, 11
"""Lengths of sample inputs, unlikely to equal any other dimension of a model."""


@dataclass
class TracedCall:
    """One call of a layer: arguments and result as fake tensors, and its ops (see `OpRecorder`)."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    order: int
    ops: Ops = ()


@dataclass
class LayerList:
    """A list of layers that the model calls one after the other.

    paths: the layers' names in the model, each layer once; calls: the first call of each. activations: for each
    layer, the place among the leaves of its call that holds the result of the one before; -1 where there is none.
    broken: reason why the layers cannot run as one stack, or "". outside_reads: names within a layer of parameters
    that other code reads, which are replicated. assigned: attributes, and items of arguments, that forwards set, by
    the layer's name.
    """

    name: str
    paths: list[str] = field(default_factory=list)
    calls: list[TracedCall] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    broken: str = ""
    outside_reads: set[str] = field(default_factory=set)
    assigned: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Observation:
    """Result of a fake forward pass. outside_reads: names of parameters read outside of their modules."""

    lists: list[LayerList]
    outside_reads: set[str]


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs(model: nn.Module) -> Inputs:
    """Sample arguments of a transformers model (see `sample_inputs`), with lengths that distinguish its dimensions.

    Raises UsageError for a model whose inputs are unknown.
    """
    try:
        given = sample_inputs(model, BATCH, SEQUENCE)
    except UsageError as error:
        raise UsageError(
            f"{error}; pass them to parallelize() as spec=ParallelSpec(inputs=(args, kwargs))"
        ) from error
    if "decoder_input_ids" in given:
        given["decoder_input_ids"] = torch.empty(BATCH, SEQUENCE + 2, dtype=torch.long, device="meta")
    return (), given


def observe(model: nn.Module, inputs: Inputs, vocabulary: Iterable[nn.Module] = ()) -> Observation:
    """Outermost lists of layers that the model's forward calls, by one forward pass on fake tensors.

    model: a `twin_of` copy. vocabulary: its embedding tables and heads. Raises UsageError where the pass fails, with
    the reason.
    """
    _activate_adapters(model)
    lists = _outermost_lists(model)
    layers = dict.fromkeys(layer for _, module in lists for layer in module)
    recorder = OpRecorder(model, layers, vocabulary)
    calls: list[TracedCall] = []
    changes = {layer: assigned_attributes(layer) for layer in layers}
    changed: dict[nn.Module, list[str]] = {}
    running: list[tuple[Any, Any, Callable[[], list[str]]]] = []

    def begin(layer: nn.Module, args: Any, kwargs: Any) -> None:
        since = changed_arguments(args, kwargs)
        # Copies of lists and the like, which this layer or a later one may change.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        running.append((args, kwargs, since))

    def note(layer: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs, since = running.pop()
        changed.setdefault(layer, []).extend(since())
        calls.append(TracedCall(layer, args, kwargs, result, len(calls), recorder.ops[-1]))

    handles = [layer.register_forward_pre_hook(begin, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with running_without_data(), masks_as_run(), recorder.watching():
            args, kwargs = complete_inputs(model, inputs)
            given_back = model(*args, **kwargs)
    except Exception as error:  # a model's forward may raise anything
        raise UsageError(
            f"{type(model).__name__} failed on fake tensors ({type(error).__name__}: {error}) at "
            f"{author_line(error)}; if it takes other inputs, give spec=ParallelSpec(inputs=...); a data-dependent "
            "forward (layers dropped at random, branches on a sum) cannot be parallelized: turn that off"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    results = {id(leaf) for leaf in pytree.tree_leaves(given_back) if isinstance(leaf, Tensor)}
    read = {call.order for call in calls if call.order in recorder.read or id(first_leaf(call.result)) in results}
    found = []
    for name, module in lists:
        mine = [call for call in calls if any(call.module is layer for layer in module)]
        chain = _chained(name, module, mine, read) if mine else None
        if chain is not None and (_is_sure(module) or not chain.broken):
            found.append(chain)
            found[-1].outside_reads = _within(found[-1].paths, recorder.outside_reads)
            since = {
                path: [*changes[call.module](), *changed[call.module]]
                for path, call in zip(found[-1].paths, found[-1].calls, strict=True)
            }
            found[-1].assigned = {path: names for path, names in since.items() if names}
    return Observation(found, recorder.outside_reads)


def _activate_adapters(twin: nn.Module) -> None:
    """Activate all LoRA pairs of a copy that will be traced, so that those that are inactive now are sharded, too."""
    for part in twin.modules():
        pairs, held = part._modules.get("lora_A"), vars(part)
        if not isinstance(pairs, nn.ModuleDict) or not pairs or "_active_adapter" not in held:
            continue
        active = held["_active_adapter"]
        if set([active] if isinstance(active, str) else active) != set(pairs):
            part._active_adapter = list(pairs)  # type: ignore[assignment]
        part._disable_adapters, part.merged_adapters = False, []  # type: ignore[assignment]


def _outermost_lists(model: nn.Module) -> list[tuple[str, Any]]:
    """Lists of modules of one class that are in no other such list, and what may be one (see `_is_sure`).

    A ModuleList that holds a list of one class is none itself: it may be a single stage of layers.
    """
    lists: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0 and _have_weights(module)
    ]
    sure = [name for name, module in lists if _is_sure(module)]
    lists = [
        (name, module)
        for name, module in lists
        if _is_sure(module) or (isinstance(module, nn.ModuleList) and not any(_is_in(other, name) for other in sure))
    ]
    return [(n, m) for n, m in lists if not any(_is_in(n, other) for other, _ in lists)]


def _is_sure(modules: Any) -> bool:
    """Whether a list is one of layers, however they are called: several modules of one class.

    A single module, and modules of several classes (attention and Mamba), are layers where they are called as such.
    """
    return len(modules) > 1 and len({type(each) for each in modules}) == 1


def _is_in(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _within(paths: list[str], names: Iterable[str]) -> set[str]:
    """Parameter names relative to the layers that hold them."""
    return {name[len(path) + 1 :] for name in names for path in paths if name.startswith(f"{path}.")}


def single_layer(model: nn.Module, inputs: Inputs) -> LayerList:
    """List of one layer, the model itself, for a model without lists of layers."""
    args, kwargs = complete_inputs(model, inputs)
    why = "the model has no list of layers that it calls one after the other"
    return LayerList("", [""], [TracedCall(model, args, kwargs, None, 0)], [-1], why)


def complete_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Inputs as fake tensors, without a key-value cache."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: without_data(tensor, device), inputs)
    return args, {"use_cache": False, **kwargs} if has_argument(model, "use_cache") else kwargs


def _have_weights(modules: Any) -> bool:
    return all(any(True for _ in each.parameters()) for each in modules)


def _chained(name: str, module: Any, calls: list[TracedCall], read: set[int]) -> LayerList:
    """LayerList of a module list from its calls. read: numbers of calls whose results other code reads."""
    path = f"{name}." if name else ""
    first = {id(call.module): call for call in reversed(calls)}
    paths: dict[int, str] = {}
    for place, layer in enumerate(module):  # each layer once, by its first call
        if id(layer) in first:
            paths.setdefault(id(layer), f"{path}{place}")
    found = LayerList(name, list(paths.values()), [first[layer] for layer in paths], [-1] * len(paths))
    called = [id(call.module) for call in calls]
    early = read & {call.order for call in calls[:-1]}
    if len(set(called)) != len(called):
        found.broken = "a layer is called more than once"
    elif called != [id(layer) for layer in module]:
        found.broken = "not every layer is called, in order"
    elif any(call.order != calls[0].order + place for place, call in enumerate(calls)):
        found.broken = "layers of other lists are called in between"
    elif early:
        found.broken = f"the result of layer {min(early) - calls[0].order} is read by other code than the next layer"
    else:
        found.activations, found.broken = _activations(calls)
    return found


def _activations(calls: list[TracedCall]) -> tuple[list[int], str]:
    """Place of the previous result among each call's leaves, and the reason why the calls are not a chain, or ""."""
    places, results, why = [], list[Any](), ""
    for number, call in enumerate(calls):
        flat, _ = leaves(call.args, call.kwargs)
        mine = [at for at, leaf in enumerate(flat) if results and leaf is results[-1]]
        if number and len(mine) != 1:
            why = f"layer {number} does not get the result of the one before as it is"
        elif any(leaf is other for leaf in flat for other in results[:-1]):
            why = f"layer {number} reads the results of several layers before it"
        places.append(mine[0] if len(mine) == 1 else -1)
        results.append(first_leaf(call.result))
    # The first layer gets its activation where the others do, an only one in its first argument.
    places[0] = places[1] if len(calls) > 1 else 0
    for call, at in zip(calls, places, strict=True):
        flat, _ = leaves(call.args, call.kwargs)
        x, result = flat[at] if 0 <= at < len(flat) else None, first_leaf(call.result)
        if not isinstance(x, Tensor) or not isinstance(result, Tensor) or x.shape != result.shape:
            why = why or "a layer's result has another shape than its input"
    return places, why


def first_leaf(result: Any) -> Any:
    """First leaf of a layer's result."""
    flat = pytree.tree_leaves(result)
    return flat[0] if flat else None


def turn_off_inner_caches(model: nn.Module) -> list[str]:
    """Turn off the key-value caches of models in `model` that its own forward has no option for; returns their names.

    A multimodal model calls its language model with that one's configuration.
    """
    if has_argument(model, "use_cache"):
        return []
    found = []
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if has_argument(module, "past_key_values") and getattr(config, "use_cache", None) is True:
            config.use_cache = False
            found.append(name)
    return found


def has_argument(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of this name."""
    return name in inspect.signature(module.forward).parameters
