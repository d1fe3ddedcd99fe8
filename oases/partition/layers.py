"""The repeated layers of a model, found by running it once on inputs that have shapes and no data."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.errors import UsageError
from oases.partition.export import leaves, running_without_data, without_data

BATCH, SEQUENCE = 3, 11
"""Of the inputs that are made up: lengths that no other dimension of a model is likely to have."""


@dataclass
class Called:
    """One call of a layer: its arguments and result, without data."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    order: int


@dataclass
class LayerList:
    """A list of layers that the model calls one after the other.

    activations: for each layer, the place among the leaves of its call that holds the result of the one before.
    broken: why the layers cannot run together; empty where they can.
    """

    name: str
    calls: list[Called] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    broken: str = ""


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def made_up_inputs(model: nn.Module) -> Inputs:
    """Arguments that a transformers model takes, by its main input and configuration, on meta.

    Raises UsageError for a model that does not say: give `ParallelSpec(inputs=...)`.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    tokens = torch.empty(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if config is not None and main == "input_ids":
        given = {"input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = torch.empty(BATCH, SEQUENCE + 2, dtype=torch.long, device="meta")
        return (), given
    if config is not None and main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return (), {main: torch.empty(BATCH, channels, height, width, dtype=dtype, device="meta")}
    raise UsageError(
        f"what {type(model).__name__} takes as input is not known; give parallelize() "
        "spec=ParallelSpec(inputs=((arguments,), {keywords})) with tensors of the right shapes"
    )


def observe(model: nn.Module, inputs: Inputs) -> list[LayerList]:
    """The lists of layers that the model's forward calls, outermost lists alone, by one run without data.

    model: a `twin_of` one. Raises UsageError where the run fails, with the reason.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _alike(module)
    ]
    lists = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists if other != n)]
    calls: dict[str, list[Called]] = {name: [] for name, _ in lists}
    handles = []
    for name, module in lists:
        for layer in module:

            def note(layer: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls[name].append(Called(layer, args, kwargs, result, sum(map(len, calls.values()))))

            handles.append(layer.register_forward_hook(note, with_kwargs=True))
    try:
        with running_without_data():
            args, kwargs = _complete(model, inputs)
            model(*args, **kwargs)
    except Exception as error:  # a stranger's forward raises what it likes
        raise UsageError(
            f"{type(model).__name__} did not run on inputs without data ({type(error).__name__}: {error}); if its "
            "forward depends on values, or takes other inputs, give spec=ParallelSpec(inputs=..., layers=...)"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return [_chained(name, list(module), calls[name]) for name, module in lists if calls[name]]


def as_one_layer(model: nn.Module, inputs: Inputs) -> LayerList:
    """A model without lists of layers, as a list of one that is the model itself."""
    args, kwargs = _complete(model, inputs)
    why = "the model has no list of layers that it calls one after the other"
    return LayerList("", [Called(model, args, kwargs, None, 0)], [-1], why)


def _complete(model: nn.Module, inputs: Inputs) -> Inputs:
    """Without data, and for a pass that keeps no keys and values."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: without_data(tensor, device), inputs)
    return args, {"use_cache": False, **kwargs} if takes(model, "use_cache") else kwargs


def _alike(modules: Any) -> bool:
    """Whether all are of one class, and have weights."""
    return len({type(each) for each in modules}) == 1 and all(
        any(True for _ in each.parameters()) for each in modules
    )


def _chained(name: str, layers: list[nn.Module], calls: list[Called]) -> LayerList:
    found = LayerList(name, calls)
    if [id(call.module) for call in calls] != [id(layer) for layer in layers]:
        again = len(calls) != len({id(call.module) for call in calls}) or len(calls) > len(layers)
        found.broken = "a layer is called more than once" if again else "not every layer is called, in order"
        return found
    if any(call.order != calls[0].order + place for place, call in enumerate(calls)):
        found.broken = "layers of other lists are called in between"
    before: Any = None
    for place, call in enumerate(calls):
        flat, _ = leaves(call.args, call.kwargs)
        places = [i for i, leaf in enumerate(flat) if leaf is before] if place else []
        if place and len(places) != 1:
            found.broken = f"layer {place} does not get the result of the one before as it is"
            places = []
        found.activations.append(places[0] if places else -1)
        before = _first(call.result)
    if len(calls) > 1:  # the first layer gets its activation where the others do
        found.activations[0] = found.activations[1]
    for call, at in zip(calls, found.activations, strict=True):
        flat, _ = leaves(call.args, call.kwargs)
        x, result = flat[at] if 0 <= at < len(flat) else None, _first(call.result)
        if not isinstance(x, Tensor) or not isinstance(result, Tensor) or x.shape != result.shape:
            found.broken = found.broken or "a layer's result has another shape than its input"
    return found


def _first(result: Any) -> Any:
    flat = pytree.tree_leaves(result)
    return flat[0] if flat else None


def takes(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has an argument of this name."""
    return name in inspect.signature(module.forward).parameters
