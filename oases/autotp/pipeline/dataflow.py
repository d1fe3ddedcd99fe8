"""Dataflow between the modules of a model: the calls of a forward pass and the values that each reads.

A unit is a layer, or outside the lists of layers a largest module with weights that can be called: an embedding, a
final norm, a head. Code between units (masks, position tables, the loss) is the model's own and runs wherever its
results are needed. One forward pass on fake tensors finds which results of earlier units reach each unit through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from oases.autotp.export import running_without_data
from oases.autotp.layers import Inputs, complete_inputs
from oases.errors import UsageError
from oases.layers.loss import IGNORED

_MEAN = 1
"""torch's number of the reduction "mean"."""
_CROSS_ENTROPIES = (
    torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default,
    torch.ops.aten.nll_loss.default, torch.ops.aten.nll_loss_nd.default,
)  # fmt: skip
_MOVES = {getattr(torch.ops.aten, name) for name in (
    "view", "_unsafe_view", "reshape", "slice", "select", "squeeze", "unsqueeze", "expand", "permute", "t", "alias",
    "transpose", "detach", "clone", "_to_copy", "copy_", "lift_fresh", "constant_pad_nd", "clamp", "clamp_", "fill_",
    "new_zeros", "new_full", "new_ones", "new_empty", "empty_like", "zeros_like", "full_like", "roll",
)}  # fmt: skip
"""Ops that move targets whatever their values; limits do not change which are ignored."""
_QUOTIENTS = (torch.ops.aten.div, torch.ops.aten.div_)
_LINEAR = _MOVES | {getattr(torch.ops.aten, name) for name in (
    "add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "mul", "mul_", "div", "div_", "sum", "mean", "stack", "cat",
)}  # fmt: skip
"""Ops that are linear in one argument, those of products where the others depend on no sample."""
_PRODUCTS = {torch.ops.aten.mul, torch.ops.aten.mul_, *_QUOTIENTS}


@dataclass(frozen=True, order=True)
class Value:
    """Tensor among the leaves of the result of call number `call`."""

    call: int
    leaf: int


@dataclass(frozen=True)
class _Read:
    """Parameter that code between the units reads."""

    name: str


@dataclass(frozen=True)
class _Inside:
    """Tensor computed within a unit that is not part of its result."""

    unit: str


_Source = Value | _Read | _Inside


@dataclass
class UnitCall:
    """One call of a unit. reads: results of earlier calls that its arguments depend on through code between units.

    occurrence: number of earlier calls of the unit in the pass. parameters: those that this code reads. flops: of the
    forward pass. floating: numbers of the leaves of its result that are floating-point tensors.
    """

    unit: str
    occurrence: int
    reads: frozenset[Value] = frozenset()
    parameters: frozenset[str] = frozenset()
    flops: float = 0.0
    floating: tuple[int, ...] = ()


@dataclass(frozen=True)
class Targets:
    """Targets of a cross entropy. leaf: number of the input's leaf that they are, -1 where they are made of several,
    of an input's values or of a part of it.

    shifted: whether the first one of each sample is left out, as by a causal model, which predicts each token from
    those before it. ignored: target without a loss. weighted: it is a mean by weights of classes.
    """

    leaf: int
    shifted: bool
    ignored: int
    weighted: bool = False

    def count(self, given: Tensor) -> int:
        """Number of targets with a loss in an input."""
        return int(((given[..., 1:] if self.shifted else given) != self.ignored).sum())


@dataclass
class Dataflow:
    """Forward pass as a list of calls in order; the last entry stands for the model's result and has the unit "".

    targets: of its cross entropies, as far as they are computed from integers among the inputs. divisors: inputs, -1
    for several, of which a number is computed that code between units divides by, as a mask's sum. mean: inputs over
    whose targets the loss is a mean, or a linear function of such means; None for a loss with other terms.
    """

    calls: list[UnitCall] = field(default_factory=list)
    targets: tuple[Targets, ...] = ()
    divisors: frozenset[int] = frozenset()
    mean: frozenset[int] | None = None

    def number_of(self, unit: str, occurrence: int) -> int:
        """Number of a call. KeyError where the pass had none."""
        return self._numbers[unit, occurrence]

    def __post_init__(self) -> None:
        self._numbers = {(call.unit, call.occurrence): number for number, call in enumerate(self.calls)}


def units_of(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Names of a model's units, each module once. layers: names of the layers, the units within lists."""
    layers = set(layers)
    above = {".".join(parts[:end]) for parts in (name.split(".") for name in layers) for end in range(len(parts))}
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, path: str) -> None:
        whole = path not in above and getattr(module.forward, "__func__", None) is not nn.Module.forward
        if path in layers or (whole and any(True for _ in module.parameters())):
            found.setdefault(module, path)
        elif not whole:
            for name, child in module.named_children():
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return list(found.values())


class DataflowRecorder(TorchDispatchMode):
    """Mode that follows tensors from unit to unit by their storages. model: a `twin_of` copy."""

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        super().__init__()
        self.calls: list[UnitCall] = []
        self._units = {name: model.get_submodule(name) for name in units}
        self._counts = Counter[str]()
        self._sources: dict[int, frozenset[_Source]] = {}
        self._kept: list[Any] = []  # keeps storages, whose addresses are keys
        self._running: list[str] = []
        self._copies: dict[int, tuple[Tensor, int, bool]] = {}
        """Tensors with data in place of those computed from integer inputs alone, the number of that input, and
        whether its values were only moved."""
        self._sizes: dict[int, set[int]] = {}
        """Numbers of targets that an input may have: all, or all but the first of each sample."""
        self._made: set[int] = set()
        """Integer tensors computed from such ones and others."""
        self._targets: dict[Targets, None] = {}
        self._divisors: set[int] = set()
        self._means: dict[int, frozenset[int]] = {}
        """Inputs over whose targets a number is a mean, by its storage; none for what depends on no sample."""
        for name, parameter in model.named_parameters():
            self._set(parameter, frozenset([_Read(name)]))
        for buffer in model.buffers():
            self._set(buffer, frozenset())
        self._means |= dict.fromkeys(self._sources, frozenset())

    def follow(self, leaf: int, given: Any) -> None:
        """Find out whether an input holds targets of the loss, and whether it reads the first one of a sample."""
        if isinstance(given, Tensor):
            self._means.pop(self._key(given), None)
        if not isinstance(given, Tensor) or given.dim() == 0 or given.is_floating_point() or given.is_complex():
            return
        with _disable_current_modes():
            probe = torch.full(given.shape, IGNORED, dtype=given.dtype)
            probe[..., 0] = 0
        self._copies[id(given)] = probe, leaf, True
        self._sizes[leaf] = {probe.numel(), probe[..., 1:].numel()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the model runs."""
        handles = []
        for name, module in self._units.items():
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._left))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            if len(self._running) == 1:
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._set(leaf, self._of(leaf))
                self.calls.append(self._call(name, (args, kwargs)))

        return enter

    def _call(self, name: str, values: Any, *, partly: bool = False) -> UnitCall:
        sources = {one for leaf in pytree.tree_leaves(values) for one in self._of(leaf)}
        inside = sorted({one.unit for one in sources if isinstance(one, _Inside)})
        if inside and not partly:
            raise UsageError(
                f"{name or 'the loss'} reads what {inside[0]} computes inside and does not return; a pipeline passes "
                "results of layers alone: leave out output_hidden_states, output_attentions, output_router_logits "
                "and the like, or train without pipeline stages"
            )
        reads = frozenset(one for one in sources if isinstance(one, Value))
        parameters = frozenset(one.name for one in sources if isinstance(one, _Read))
        self._counts[name] += 1
        return UnitCall(name, self._counts[name] - 1, reads, parameters)

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        self._running.pop()
        if self._running:
            return
        call, number = self.calls[-1], len(self.calls) - 1
        tensors = [(leaf, each) for leaf, each in enumerate(pytree.tree_leaves(result)) if isinstance(each, Tensor)]
        call.floating = tuple(leaf for leaf, each in tensors if each.is_floating_point())
        values: dict[int, frozenset[_Source]] = {}
        for leaf, each in tensors:  # two leaves may be views of one tensor
            key = self._key(each)
            values[key] = values.get(key, frozenset()) | {Value(number, leaf)}
            self._set(each, values[key])

    def finish(self, result: Any, *, partly: bool = False) -> Dataflow:
        """Dataflow of the pass. result: the loss, or with `partly` all that it may be computed from."""
        calls = [*self.calls, self._call("", result, partly=partly)]
        mean = self._means.get(self._key(result)) if isinstance(result, Tensor) else None
        return Dataflow(calls, tuple(self._targets), frozenset(self._divisors), mean)

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the op; its results depend on what its arguments depend on."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._follow_means(func, args, kwargs, result)
        self._compute_copy(func, args, kwargs, result)
        if self._running:
            flops = flop_registry.get(func.overloadpacket)
            if flops is not None:
                self.calls[-1].flops += float(flops(*args, **kwargs, out_val=result))
            sources: frozenset[_Source] = frozenset([_Inside(self._running[0])])
        else:
            given = [self._of(each) for each in pytree.tree_leaves((args, kwargs))]
            sources = frozenset().union(*given) if given else frozenset()
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for each in pytree.tree_leaves((result, written)):
            if not isinstance(each, Tensor):
                continue
            if not self._running:
                self._set(each, self._of(each) | sources)
            elif self._key(each) not in self._sources:  # a view of what came from outside stays that
                self._set(each, sources)
        return result

    def _compute_copy(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Compute with data what depends on integer inputs alone, down to the targets of a cross entropy."""
        if func in _CROSS_ENTROPIES:
            self._note_targets(result, *args)
        if func in _CROSS_ENTROPIES or not isinstance(result, Tensor):
            return
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or any(id(each) not in self._copies for each in tensors):
            self._note_mixture(func, args, tensors, result)
            return
        leaves = {self._copies[id(each)][1] for each in tensors}
        moved = func.overloadpacket in _MOVES and all(self._copies[id(each)][2] for each in tensors)
        with _disable_current_modes():
            given = pytree.tree_map_only(Tensor, lambda each: self._copies[id(each)][0], (args, kwargs))
            try:
                copy = func(*given[0], **given[1])
            except (RuntimeError, IndexError):  # of an op that does not take the values put in
                self._note_mixture(func, args, tensors, result)
                return
        self._copies[id(result)] = copy, leaves.pop() if len(leaves) == 1 else -1, moved
        self._kept.append(result)
        if func._schema.is_mutable and not moved:
            self._change(copy)

    def _follow_means(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Note whether a result depends on no sample, or is linear in means over targets."""
        given = [self._means.get(self._key(x)) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        op, known = func.overloadpacket, [each for each in given if each is not None]
        linear = op in _LINEAR and not (op in _PRODUCTS and sum(map(bool, known)) > 1)
        linear = linear and not (op in _QUOTIENTS and isinstance(args[1], Tensor) and given[-1])
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                self._means.pop(self._key(each), None)
                if len(known) == len(given) and (linear or not any(known)):
                    self._means[self._key(each)] = frozenset().union(*known)

    def _note_targets(
        self, result: Any, _: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN,
        ignored: int = IGNORED,
    ) -> None:  # fmt: skip
        probe, leaf, moved = self._copies.get(id(target), (None, -1, False))
        if probe is None and id(target) not in self._made:
            return
        with _disable_current_modes():
            shifted = probe is not None and bool((probe == IGNORED).all())
        known = moved and leaf >= 0 and target.numel() in self._sizes[leaf]
        found = Targets(leaf if known else -1, shifted, ignored, weight is not None and reduction == _MEAN)
        self._targets[found] = None
        if reduction == _MEAN:
            self._means[self._key(pytree.tree_leaves(result)[0])] = frozenset([found.leaf])

    def _change(self, copy: Tensor) -> None:
        """Note that values were written to a tensor, of which others may be views."""
        memory = copy.untyped_storage()._cdata
        for key, (other, leaf, _) in list(self._copies.items()):
            if other.untyped_storage()._cdata == memory:
                self._copies[key] = other, leaf, False

    def _note_mixture(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Tensor) -> None:
        """Note integers that are not of inputs alone, and divisions of other numbers by one that is."""
        if not (result.is_floating_point() or result.is_complex()):
            if any(id(each) in self._copies or id(each) in self._made for each in tensors):
                self._made.add(id(result))
                self._kept.append(result)
            if func._schema.is_mutable and func.overloadpacket not in _MOVES and id(args[0]) in self._copies:
                self._change(self._copies[id(args[0])][0])
        elif func.overloadpacket in _QUOTIENTS and not self._running:
            by = args[1]
            # Of no dimension: those of one sample are its own, such as the length that it is pooled over.
            if isinstance(by, Tensor) and by.dim() == 0 and id(by) in self._copies:
                self._divisors.add(self._copies[id(by)][1])
                self._means[self._key(result)] = frozenset([self._copies[id(by)][1]])

    def _of(self, value: Any) -> frozenset[_Source]:
        return self._sources.get(self._key(value), frozenset()) if isinstance(value, Tensor) else frozenset()

    def _set(self, tensor: Tensor, sources: frozenset[_Source]) -> None:
        self._kept.append(tensor)
        self._sources[self._key(tensor)] = sources

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


def dataflow_of(
    model: nn.Module, units: Iterable[str], inputs: Inputs, loss: Callable[[Any], Any] | None = None
) -> Dataflow:
    """Dataflow of a forward pass on fake tensors. model: a `twin_of` copy. loss: takes the loss from the result;
    None where that is unknown.

    UsageError where the pass fails, or a unit reads what another one does not return.
    """
    recorder, ran = DataflowRecorder(model, units), False
    try:
        with running_without_data(), recorder.watching():
            args, kwargs = complete_inputs(model, inputs)
            for leaf, each in enumerate(pytree.tree_leaves((args, {name: kwargs[name] for name in inputs[1]}))):
                recorder.follow(leaf, each)
            result, ran = model(*args, **kwargs), True
            if loss is None:  # all tensors of the result, also where it is no pytree
                more = {} if isinstance(result, Tensor) else getattr(result, "__dict__", {})
                return recorder.finish((result, more), partly=True)
            return recorder.finish(loss(result))
    except UsageError:
        raise
    except Exception as error:  # a model's forward may raise anything
        if ran:
            raise UsageError(
                f"spec.loss failed on the result of {type(model).__name__} ({type(error).__name__}: {error}): it may "
                "read that result alone, not hidden states that a hook keeps, which other stages do not have; ask "
                "for them in the result (output_hidden_states=True), or train without pipeline stages"
            ) from error
        raise UsageError(
            f"{type(model).__name__} failed on fake tensors ({type(error).__name__}: {error}); give "
            "spec=ParallelSpec(inputs=...) with inputs like those of train_step()"
        ) from error


def flops_by_layer(flow: Dataflow, layers: Iterable[str]) -> list[float]:
    """FLOPs of each layer's call in order, those of units around the layers with the nearest layer before.

    Units before the first layer count with it.
    """
    layers, found, before = set(layers), [], 0.0
    for call in flow.calls:
        if call.unit in layers:
            found.append(call.flops + before)
            before = 0.0
        elif found:
            found[-1] += call.flops
        else:
            before += call.flops
    return found
