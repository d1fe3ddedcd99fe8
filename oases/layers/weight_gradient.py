"""Deferred weight gradients: a linear's backward returns the input gradient and records the rest for a W op.

The next all-reduce needs the input gradient; only the optimizer needs the weight gradient. Deferred, it is computed
during that all-reduce, and summed over sub-batches inside the matmul (as in zero-bubble pipelines).

torch.compile turns a block into one graph for its forward and one for its backward pass, where the products that make
weight gradients could not wait for an op W. So there a linear is one op of each graph, into which the compiler does
not look: the forward op passes a ticket, the number of the `CompiledDeferral` in effect, to the backward op, which
gives it its operands and returns the gradient of the input alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.execution.piece import defer_compiled_by, deferring, in_piece
from oases.extension import DeferredGradients, Leaves


def active_deferral(*parameters: Tensor | None) -> DeferredGradients | None:
    """Where the current forward pass defers the gradients of `parameters`; None where autograd computes them."""
    # Compiled ops other than `linear` compute their own weight gradients.
    deferred = None if torch.compiler.is_compiling() else deferring.get()
    if deferred is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return deferred if deferred.takes(list(parameters)) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """`F.linear`, whose weight gradient is deferred while `deferring` is set.

    [..., in] -> [..., out]; weight: [out, in], or [in, out] if transposed, as in GPT-2's Conv1D. The gradient has its
    layout.
    """
    if torch.compiler.is_compiling():
        if in_piece[0] and x.dim() > 1:
            return compiled_linear(x, weight, bias, transposed)
        return F.linear(x, weight.t() if transposed else weight, bias)
    deferred = deferring.get()
    if deferred is not None:
        found: Tensor | None = deferred.linear(x, weight, bias, transposed)
        if found is not None:
            return found
    return F.linear(x, weight.t() if transposed else weight, bias)


# --- linears of compiled blocks ---

_tickets = itertools.count()
_open: WeakValueDictionary[int, CompiledDeferral] = WeakValueDictionary()
# By block: for each method and training mode what `leave_out` found.
_last_products: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], int | None]] = WeakKeyDictionary()


class _Recorder(DeferredGradients):  # type: ignore[misc]
    """Deferral that keeps the weight and the result of each linear."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__(leaves)
        self.products: list[tuple[Tensor, Tensor]] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
        """See DeferredGradients."""
        made: Tensor | None = super().linear(x, weight, bias, transposed)
        if made is not None:
            self.products.append((weight, made))
        return made


class CompiledDeferral(DeferredGradients):  # type: ignore[misc]
    """Weight gradients that a piece of a compiled block defers.

    left_out: index of the stand-in whose product need not be computed in this forward pass.
    """

    def __init__(self, leaves: Leaves) -> None:
        super().__init__(leaves)
        self.leaves, self.stand_ins = leaves, leaves.stand_ins
        self.ticket = next(_tickets)
        self.left_out: int | None = None
        _open[self.ticket] = self

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The stand-in that has a graph's tensor, which may be another object. RuntimeError where there is none."""
        for known in self.stand_ins:
            if known is tensor or (known.data_ptr() == tensor.data_ptr() and known.shape == tensor.shape):
                return known
        raise RuntimeError(
            f"a compiled block multiplies by a tensor of shape {tuple(tensor.shape)} that is no parameter of it; "
            "leave torch.compile out"
        )

    def leave_out(self, block: nn.Module, name: str, call: Callable[[Callable[..., Any]], Any]) -> None:
        """Leave out the product that is the result of a compiled block's method, if one is.

        Calls the method once uncompiled, since the memory of a compiled one's result may be that of an earlier value.
        call: calls a method with the operands.
        """
        plain: Any = getattr(block, "_orig_mod", block)
        known, key = _last_products.setdefault(block, {}), (name, plain.training)
        if key not in known:
            recorder = _Recorder(self.leaves)
            token = deferring.set(recorder)
            try:
                with torch.no_grad():
                    result = call(getattr(plain, name))
            finally:
                deferring.reset(token)
            known[key] = _index_of(result, recorder.products, self.leaves)
        self.left_out = known[key]


def _index_of(result: Tensor, products: list[tuple[Tensor, Tensor]], leaves: Leaves) -> int | None:
    if not products:
        return None
    weight, made = products[-1]
    same = made.shape == result.shape and torch._C._is_alias_of(made, result)  # type: ignore[attr-defined]
    if not same or sum(each is weight for each, _ in products) > 1:
        return None
    return next((at for at, each in enumerate(leaves.stand_ins) if each is weight), None)


defer_compiled_by(CompiledDeferral)


def autocast(operand: Tensor) -> Tensor:
    """Cast an operand of a matmul to autocast's type where that is on and takes it; float64 stays."""
    device = operand.device.type
    # meta has no autocast to ask for; is_autocast_available is not traced by the Dynamo of torch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operand
    casts = operand.is_floating_point() and operand.dtype != torch.float64
    return operand.to(torch.get_autocast_dtype(device)) if casts else operand


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """`F.linear` in a graph that torch.compile records, in autocast's dtype where that is on."""
    if not weight.is_leaf or not (bias is None or bias.is_leaf):  # autograd needs its gradient at once
        return F.linear(x, weight.t() if transposed else weight, bias)
    used, used_bias = None, None
    if torch.is_autocast_enabled(x.device.type):
        x, used = autocast(x), autocast(weight.detach())
        used_bias = None if bias is None else autocast(bias.detach())
    made: Tensor = torch.ops.oases.deferred_linear(x, weight, bias, used, used_bias, transposed)[0]
    return made


_library = torch.library.Library("oases", "FRAGMENT")
# A replayed CUDA graph would not run them.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_library.define(
    "deferred_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? used, Tensor? used_bias, bool transposed) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? used, Tensor ticket, bool transposed) -> Tensor"
)
_library.define(f"deferred_linear_backward{_BACKWARD}", tags=_TAGS)
_library.define(f"deferred_linear_backward_kept{_BACKWARD}", tags=_TAGS)


def _sizes(x: Tensor, weight: Tensor, transposed: bool) -> list[int]:
    return [*x.shape[:-1], weight.shape[1 if transposed else 0]]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor | None, used_bias: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor]:
    deferred = deferring.get()
    if not isinstance(deferred, CompiledDeferral):
        raise RuntimeError(
            "a linear of a compiled block runs outside of its stack's ops, as in an activation checkpoint inside the "
            "block; use the stack's recompute instead"
        )
    ticket = torch.tensor(deferred.ticket)
    if deferred.left_out is not None and deferred.stand_in(weight) is deferred.stand_ins[deferred.left_out]:
        return x.new_empty(_sizes(x, weight, transposed)), ticket
    matrix = weight if used is None else used
    y = F.linear(x, matrix.t() if transposed else matrix, bias if used is None else used_bias)
    return y.contiguous(), ticket


def _backward_kept(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    used: Tensor | None,
    ticket: Tensor,
    transposed: bool,
) -> Tensor:
    """Gradient of the input. The memory of `grad` and `x` is read again by an op W."""
    deferred = _open.get(int(ticket))
    if deferred is None:
        raise RuntimeError("a compiled block's backward pass ran after its stack's call had ended")
    stand_in, of_bias = deferred.stand_in(weight), None if bias is None else deferred.stand_in(bias)

    def work(leaves: Leaves) -> None:
        rows, columns = x.flatten(0, -2), grad.flatten(0, -2)
        if stand_in.requires_grad:
            leaves.add(stand_in, rows.t() @ columns if transposed else columns.t() @ rows)
        if of_bias is not None and of_bias.requires_grad:
            leaves.add(of_bias, columns.sum(0))

    deferred.note(grad, work)
    matrix = weight if used is None else used
    return torch.matmul(grad, matrix.t() if transposed else matrix).contiguous()


def _backward(grad: Tensor, x: Tensor, *others: Any) -> Tensor:
    """The same where a compiler may write over the memory of both."""
    return _backward_kept(grad.clone(), x.clone(), *others)


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor | None, used_bias: Tensor | None, transposed: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(_sizes(x, weight, transposed)), torch.empty((), dtype=torch.int64)


def _fake_backward(grad: Tensor, x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, used, _, transposed = inputs
    ctx.transposed = transposed
    ctx.save_for_backward(x, weight, bias, used, output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, used, ticket = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    transposed, none = ctx.transposed, (None, None, None)
    if of_x and (of_weight or of_bias):
        _teach_inductor()
        op = torch.ops.oases.deferred_linear_backward
        return op(grad.contiguous(), x, weight, bias, used, ticket, transposed), None, None, *none
    matrix = weight if used is None else used
    back = torch.matmul(grad, matrix.t() if transposed else matrix) if of_x else None
    rows, columns = (x, grad) if transposed else (grad, x)
    product = torch.matmul(rows.flatten(0, -2).t(), columns.flatten(0, -2)).to(weight.dtype) if of_weight else None
    return back, product, grad.flatten(0, -2).sum(0).to(bias.dtype) if of_bias else None, *none


# On every device: they are made of torch's own ops.
_library.impl("deferred_linear", _forward, "CompositeExplicitAutograd")
_library.impl("deferred_linear_backward", _backward, "CompositeExplicitAutograd")
_library.impl("deferred_linear_backward_kept", _backward_kept, "CompositeExplicitAutograd")
torch.library.register_fake("oases::deferred_linear", _fake_forward, lib=_library)
for _name in ("deferred_linear_backward", "deferred_linear_backward_kept"):
    torch.library.register_fake(f"oases::{_name}", _fake_backward, lib=_library)
torch.library.register_autograd("oases::deferred_linear", _gradients, setup_context=_save, lib=_library)


def _teach_inductor() -> None:
    """Have inductor, where it is loaded, keep the operands that an op W will read, which saves their copies."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    op = torch.ops.oases.deferred_linear_backward.default
    if lowering is None or op in lowering.lowerings:
        return
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    kept = lowering.fallback_handler(torch.ops.oases.deferred_linear_backward_kept.default)

    def lower(grad: Any, x: Any, *others: Any) -> Any:
        operands = [ExternKernel.realize_input(each) for each in (grad, x)]
        for each in operands:
            V.graph.never_reuse_buffers.add(each.get_name())
        return kept(*operands, *others)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
