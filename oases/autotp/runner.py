"""Runner: the layers of a model as one OverlappedStack behind the model's own loop over them; or a layer alone.

The model calls layer after layer. Each call but the last is recorded and returns a `Pending` tensor, which has a
shape and no data; the last call runs all layers by the schedule. Masks, tables and flags thus reach each layer as the
model passes them, and the code around the layers stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.block import GraphBlock, LayerCall, value_of
from oases.autotp.cache import NO_CACHE, CacheSlot, cache_in
from oases.autotp.cutting import Piece
from oases.autotp.export import CallSignature, UnsplittableError, leaves
from oases.autotp.program import Program
from oases.autotp.signatures import LayerSignature
from oases.autotp.splitter import ABSENT
from oases.autotp.trace_guard import TraceGuard
from oases.core.blocks.batch import BlockInputs
from oases.core.blocks.chooser import asked_for
from oases.core.blocks.randomness import hash_of
from oases.core.blocks.stack import OverlappedStack
from oases.core.execution.executor import Context
from oases.core.execution.failure import FailTogether, monitor_of
from oases.core.execution.group import ProcessGroup, group_of
from oases.core.schedule import Schedule
from oases.errors import UsageError
from oases.plans.plan import AUTO


class StandaloneForward:
    """Forward of one layer outside of a stack, by its traced programs."""

    def __init__(self, module: nn.Module, signature: LayerSignature, path: str) -> None:
        self.module = module
        self.signature = signature
        self.path = path
        self.guard = TraceGuard(module, path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's program; arguments and result are those of the layer."""
        found, tree = leaves(args, kwargs)
        cache = cache_in(found)
        if cache is None:
            return self._run(found, tree)
        slot = CacheSlot(cache, self.module)
        state = slot.state()
        args, kwargs = pytree.tree_map(lambda leaf: state if leaf is cache else leaf, (args, kwargs))
        result, new = self._run(*leaves(args, kwargs))
        slot.update(*new)
        return result

    def _run(self, found: list[Any], tree: pytree.TreeSpec) -> Any:
        device = next(each.device for each in [*found, *self.module.parameters()] if isinstance(each, Tensor))
        call_signature = CallSignature.of(found, tree, self.guard.modes())
        program = self.signature.program(call_signature, found, tree, -1, device, self.guard)
        run, names = program.module
        exported = program.exported
        inputs = dict(zip(exported.inputs, found, strict=True))
        with FailTogether(monitor_of(group_of(self.signature.tp.group)), self.path or "the model"):
            result = run(*(value_of(name, program, self.module, inputs, device) for name in names))
        return pytree.tree_unflatten(result, exported.result)


class Pending(Tensor):
    """Result of a layer before the last layer has run: a shape without data."""

    origin: str

    @staticmethod
    def of(x: Tensor, where: str) -> Pending:
        """Pending result with the shape and type of `x`."""
        found: Pending = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Pending, x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )
        found.origin = where
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow reading shape and type; raise RuntimeError for anything else."""
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "is_floating_point", "is_complex", "element_size", "numel"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        where = next(each.origin for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Pending))
        raise RuntimeError(
            f"{where} has no result of its own: its layers run together, overlapped, when the last one is called, "
            f"and something called {name or function}() on it; leave out output_hidden_states and the like, or give "
            "parallelize() schedule='layers', which hides communication inside each layer alone"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise RuntimeError for ops below torch's Python functions."""
        raise RuntimeError(f"{function} on the result of a layer that has not run yet")


class Layer:
    """One layer of a Runner. activation: index of its hidden states among the leaves of a call.

    path: its name in the model.
    """

    def __init__(self, module: nn.Module, signature: LayerSignature, activation: int, path: str) -> None:
        self.module = module
        self.signature = signature
        self.activation = activation
        self.path = path
        self.alone = StandaloneForward(module, signature, path)
        self.guard = self.alone.guard
        self.follows = False
        """Whether what it computes in full before its first sum runs between the layer before it and itself."""
        self.read: list[set[str]] = []
        """Parameters that each block of the stack has of it."""
        self._unlike: dict[int, str] = {}

    def deferred(self, found: list[Any], tree: pytree.TreeSpec, x: Tensor) -> DeferredCall:
        """Record a call by its leaves, with `x` as its activation."""
        call_signature = CallSignature.of(self.with_activation(found, x), tree, self.guard.modes())
        versions = [_version(leaf) for leaf in self.with_activation(found, x)]
        return DeferredCall(found, tree, call_signature, self.program(call_signature, found, tree, x), versions)

    def program(self, call_signature: CallSignature, found: list[Any], tree: pytree.TreeSpec, x: Tensor) -> Program:
        """Program for a call with this signature, with `x` as its activation."""
        made = self.signature.program(
            call_signature, self.with_activation(found, x), tree, self.activation, x.device, self.guard
        )
        return (self.follows and bool(made.blocks) and made.behind) or made

    def unlike(self, program: Program) -> str:
        """Reason why the blocks of the stack cannot run a program, whose layer was traced in other modes, or ""."""
        if id(program) not in self._unlike and program.blocks:
            reads = [pieces.parameters(program.exported.parameters) for pieces in program.blocks]
            other = [name for mine, known in zip(reads, self.read, strict=False) for name in mine - known]
            why = f"it reads {', '.join(sorted(other))}, unlike at parallelize()" if other else ""
            if len(reads) != len(self.read):
                why = f"it has {len(reads)} all-reduces, and had {len(self.read)} at parallelize()"
            self._unlike[id(program)] = why
        return self._unlike.get(id(program), "")

    def with_activation(self, found: list[Any], x: Tensor) -> list[Any]:
        """Leaves of a call, with `x` as its activation."""
        return [*found[: self.activation], x, *found[self.activation + 1 :]]


@dataclass(frozen=True)
class DeferredCall:
    """Recorded call of a layer that runs with the last one: leaves, signature, program, and the leaves' versions."""

    found: list[Any]
    tree: pytree.TreeSpec
    call_signature: CallSignature
    program: Program
    versions: list[int]

    def is_causal(self, block: int, known: dict[int, bool]) -> bool:
        """Whether a block's `partial` relates tokens, and none to a later one.

        known: by id of a mask, whether it is causal.
        """
        pieces = self.program.sub_batches_of_tokens[block]
        if pieces.relates != "earlier" or not pieces.masks <= self.program.leaf_of.keys():
            return False
        masks = [self.found[self.program.leaf_of[name]] for name in pieces.masks]
        known.update((id(mask), is_causal_mask(mask)) for mask in masks if id(mask) not in known)
        return all(known[id(mask)] for mask in masks)


def _version(leaf: Any) -> int:
    """Number of a tensor's in-place changes; 0 where they are not counted (`torch.inference_mode`)."""
    counted = isinstance(leaf, Tensor) and not isinstance(leaf, Pending) and not leaf.is_inference()
    return leaf._version if counted else 0


@dataclass
class LayerForward:
    """Forward of layer `index` of a runner; an object, so that a copied model gets a copied runner."""

    runner: Runner
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call; the last layer's call runs all layers."""
        return self.runner.called(self.index, args, kwargs)


class Runner:
    """A list of layers that run as one OverlappedStack.

    layers: in call order. name: of the list in the model. programs: one per layer, for a sample call, whose blocks
    make up the stack. options: of OverlappedStack.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[Layer],
        programs: Sequence[Program],
        group: ProcessGroup | None,
        **options: Any,
    ) -> None:
        self.name = name
        self.layers = list(layers)
        self._asked = (options.get("schedule", AUTO), options.get("sub_batches"))
        along = options.get("sequence_parallel") or getattr(self._asked[0], "sequence_parallel", False)
        blocks: list[GraphBlock] = []
        self.layer_of: list[int] = []
        self.read_beside = [
            {program.exported.parameters.get(source, "") for other in program.other_results
             if isinstance(other, Piece) for source in other.reads}
            for program in programs
        ]  # fmt: skip
        """Names of parameters that each layer's further results read, beside its blocks."""
        for index, (layer, program) in enumerate(zip(layers, programs, strict=True)):
            if index > 0 and not along and program.behind is not None:
                layer.follows, program = True, program.behind
            for number, pieces in enumerate(program.blocks):
                names = pieces.parameters(program.exported.parameters)
                layer.read.append(names)
                cuts = dict(layer.signature.cuts)
                apart = bool(layer.signature.balanced) and program.in_pieces[number] is not None
                blocks.append(
                    GraphBlock(
                        layer.module, number, names, cuts, group, layer.signature.balanced, sends_tokens=apart,
                        has_prologue=pieces.prologue is not None,
                    )
                )  # fmt: skip
                self.layer_of.append(index)
        # Other masks of dropout in each list of layers, and the same however stages or segments divide a list.
        place = layers[0].path.rpartition(".")[2]
        before = (int(place) if place.isdecimal() else 0) * (len(blocks) // len(layers))
        self.stack = OverlappedStack(
            blocks, process_group=group, layer_of=self.layer_of, name=name,
            first_block=hash_of(name) % 2**32 + before, **options,
        )  # fmt: skip
        self.run: Callable[[Tensor, Sequence[BlockInputs]], Tensor] = self.stack
        """Function that runs the stack on its input and its blocks' inputs; benchmarks replace it."""
        self.part: int | None = None
        """Part of an interleaved pipeline that it is in; None for other models."""
        self.sharded = False
        """Whether the blocks' weights are sharded (FSDP), and gathered by the stack's schedule."""
        self.context: Context | None = None
        """Context of the stack's call in a pipeline."""
        self._calls: list[DeferredCall] = []
        self._x: Tensor | None = None
        self._pending: Pending | None = None

    @property
    def schedule(self) -> str:
        """Name of the schedule; "auto" where it is chosen by measuring."""
        schedule, sub_batches = self._asked
        measured = not isinstance(schedule, Schedule) and AUTO in asked_for(schedule, sub_batches, "none")[:2]
        return AUTO if measured else self.stack.schedule.name

    def recompute(self, layers: Literal["none", "full"] | int) -> None:
        """Change what later calls recompute. UsageError where the schedule was given op by op."""
        schedule, sub_batches = self._asked
        if isinstance(schedule, Schedule):
            raise UsageError(
                f"{self.name or 'the model'} runs the given schedule {schedule.name}, whose recomputation cannot be "
                "changed; give parallelize() a schedule's name, or a schedule that recomputes"
            )
        self.stack.run_as(schedule, sub_batches, layers)

    def install(self) -> None:
        """Replace the layers' forward."""
        for index, layer in enumerate(self.layers):
            layer.module.forward = LayerForward(self, index)

    def called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the model's call of layer `index`. RuntimeError unless its input is the previous layer's result."""
        found, tree = leaves(args, kwargs)
        layer = self.layers[index]
        if cache_in(found) is not None:  # a few tokens: nothing to overlap
            if self.sharded:
                raise UsageError(
                    f"{layer.path} was given a key-value cache, and its weights are sharded (fsdp or zero) and "
                    f"gathered for all layers together; {NO_CACHE}"
                )
            return layer.alone(*args, **kwargs)
        x = found[layer.activation] if layer.activation < len(found) else None
        if index == 0:
            self._calls, self._x, self._pending = [], x, None
        elif index != len(self._calls) or x is not self._pending:
            got = "the result of another layer or of code in between" if isinstance(x, Tensor) else repr(x)
            raise RuntimeError(
                f"{layer.path} was called with {got}, where its layers run together, one on the result of the "
                "one before; give parallelize() schedule='layers', which hides communication inside each layer alone"
            )
        first = self._x
        assert first is not None
        call = layer.deferred(found, tree, first)
        self._calls.append(call)
        where, program = layer.path, call.program
        why = layer.unlike(program) or program.why_not_in_a_stack
        if why and (not program.blocks or first.shape[0] > 1 or layer.unlike(program)):
            raise UnsplittableError(
                f"{where} with these arguments: {why}; give parallelize() schedule='layers', which hides "
                "communication inside each layer alone"
            )
        out: Tensor
        if index + 1 == len(self.layers):
            out = self._run()
        else:
            out = self._pending = Pending.of(first, where)
        rest = [self._other_result(each, layer, program, layer.with_activation(found, first), where)
                for each in program.other_results]  # fmt: skip
        return pytree.tree_unflatten([out, *rest], program.exported.result)

    def _other_result(self, other: Any, layer: Layer, program: Program, found: list[Any], where: str) -> Any:
        """One of a layer's other results: its value if it does not depend on the layers' run, else a Pending."""
        if other is ABSENT:
            return Pending.of(found[layer.activation], f"{where}, of which this is another result,")
        if not isinstance(other, Piece):
            return other
        x = found[layer.activation]
        inputs = dict(zip(program.exported.inputs, found, strict=True))
        read = [value_of(source, program, layer.module, inputs, x.device) for source in other.reads]
        return other.run(x, *read)

    def _run(self) -> Tensor:
        x, calls = self._x, self._calls
        assert x is not None
        self._x, self._calls, self._pending = None, [], None
        for layer, call in zip(self.layers, calls, strict=True):
            if [_version(leaf) for leaf in layer.with_activation(call.found, x)] != call.versions:
                raise RuntimeError(
                    f"{layer.path} was called with a tensor that was changed in place before the last layer's call, "
                    "with which all layers run; change a copy of it (step = step + 1), or give parallelize() "
                    "schedule='layers', which hides communication inside each layer alone"
                )
        by_tokens = self.stack.chooser.may_cut_tokens(x) and all(call.program.sub_batches_of_tokens for call in calls)
        of_layer = [self._inputs(layer, call, by_tokens) for layer, call in zip(self.layers, calls, strict=True)]
        causal: dict[int, bool] = {}
        for block, index in zip(self.stack.blocks, self.layer_of, strict=True):
            assert isinstance(block, GraphBlock)
            call = calls[index]
            pieces = call.program.sub_batches_of_tokens[block.number] if by_tokens else None
            block.token_wise = pieces is not None and pieces.relates == "none"
            block.causal = pieces is not None and call.is_causal(block.number, causal)
            if not self.sharded:
                block.adopt(self.layers[index].module)
        training = any(any(call.call_signature.modes) for call in calls)
        if training != self.stack.training:
            self.stack.train(training)
        inputs = [of_layer[index] for index in self.layer_of]
        return self.run(x, inputs) if self.context is None else self.stack(x, inputs, context=self.context)

    def _inputs(self, layer: Layer, call: DeferredCall, by_tokens: bool) -> BlockInputs:
        """Further inputs of a layer's blocks. by_tokens: whether sub-batches may be of tokens."""

        def programs(part: Tensor, rest: tuple[Any, ...]) -> Program:
            return layer.program(call.call_signature, list(rest), call.tree, part)

        found = call.found
        flags = [
            isinstance(leaf, Tensor) and at != layer.activation and call.program.per_sample(at)
            for at, leaf in enumerate(found)
        ]
        values = [None if at == layer.activation else leaf for at, leaf in enumerate(found)]
        parts = self.stack.tensor_parallel if self.stack.schedule.sequence_parallel else 1
        if parts > 1:
            _ = call.program.tokens  # outside of compiled blocks; UsageError where a program of this call cannot
        tokens = tuple(call.program.tokens_of(at) for at in range(len(found))) if by_tokens else None
        layer_call = LayerCall(layer.module, programs, parts, call.program if by_tokens else None)
        return BlockInputs((layer_call, *values), (False, *flags), None if tokens is None else (None, *tokens))


_CERTAINLY_EXCLUDED = -1e4
"""Addend of a score from which on its weight is zero, whatever the others are."""


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a mask [..., tokens, tokens] excludes all later tokens, and in no row all tokens. Reads the values."""
    if mask.dim() < 2 or mask.shape[-2] != mask.shape[-1]:
        return False
    allowed = mask if mask.dtype == torch.bool else mask > _CERTAINLY_EXCLUDED
    return bool(allowed.any(-1).all() & ~allowed.triu(1).any())
