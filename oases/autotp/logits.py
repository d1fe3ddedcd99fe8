"""Vocabulary-parallel logits behind the interface of a full tensor, for unedited loss code.

A head sharded by rows gives each rank a part of every row of logits. The model's own loss code (`.float()`, a shift,
`.view(-1, vocabulary)`, `F.cross_entropy`) runs on that part alone. Any other op gathers the full logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from oases.core.blocks.sharding import Cut
from oases.core.execution.group import ProcessGroup, group_name, group_of
from oases.distributed.collectives import all_gather_cut, gather
from oases.layers.loss import parallel_cross_entropy

LABEL = "vocabulary logits"
"""Label in `oases.report()` of the collectives that gather full logits."""


class VocabularyLogits(Tensor):
    """Logits [..., vocabulary] of which each rank holds `part`, [..., about vocabulary / t], as `Cut` divides them.

    Shape, type and device are those of the full logits, without communication. Ops that keep the vocabulary as the
    last dimension run on the part: casts, tanh, arithmetic with numbers and with tensors that do not require grad,
    views, and indexing of other dimensions. `F.cross_entropy` with class indices is the vocabulary-parallel loss, in
    float32 or float64.

    Any other op (softmax, argmax, `detach`, printing, saving) gathers the full logits once and returns plain
    differentiable tensors. That is a collective: all ranks of the group must run the op, so printing or saving them
    on one rank alone would hang. In-place writes to the full logits count from then on, also for the loss.
    """

    _part: Tensor
    _cut: Cut
    _group_name: str
    _whole: Tensor | None = None
    _version_gathered = 0

    @staticmethod
    def of(part: Tensor, vocabulary: int, process_group: ProcessGroup) -> VocabularyLogits:
        """Wrap this rank's part, [..., length of this rank under Cut(-1, (vocabulary,))].

        ValueError for a part of another length.
        """
        cut = Cut(-1, (vocabulary,))
        ((first, last),) = cut.ranges(process_group.rank(), process_group.size())
        if part.shape[-1] != last - first:
            raise ValueError(
                f"logits of shape {tuple(part.shape)} do not fit a vocabulary of {vocabulary}: rank "
                f"{process_group.rank()} of {process_group.size()} holds {last - first}"
            )
        return _wrap(part, cut, group_name(process_group))

    @property
    def part(self) -> Tensor:
        """This rank's part, with its autograd graph. Does not communicate."""
        with torch._C.DisableTorchFunctionSubclass():
            cut_off = torch.is_grad_enabled() and self.requires_grad and not self._part.requires_grad
            # An autograd function (a checkpoint's, DistributedDataParallel's) returned these logits: its graph knows
            # them, not the part.
            return _PartOf.apply(self, self._part, self._cut, self._group_name) if cut_off else self._part

    def whole(self) -> Tensor:
        """Full logits as a plain, differentiable tensor. The first call is a collective."""
        if self._whole is None:
            # Keep the graph even in no_grad mode: the result may be used with gradients later.
            with torch.enable_grad():
                self._whole = gather(self.part, _group(self._group_name), self._cut, LABEL)
            self._version_gathered = 0 if self._whole.is_inference() else self._whole._version
        return self._whole

    @property
    def _written(self) -> bool:
        if self._whole is None:
            return False
        # Writes to an inference tensor are not counted: take it as written.
        return self._whole.is_inference() or self._whole._version != self._version_gathered

    def _like(self, part: Tensor) -> VocabularyLogits:
        return self if part is self._part else _wrap(part, self._cut, self._group_name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.register_hook and getattr(args[1], "__module__", "").startswith("torch.distributed.fsdp"):
            return args[0].part.register_hook(args[1])  # it only wants to know that a backward pass begins
        if func in _HOOKS:
            raise RuntimeError(
                f"{func.__name__} on vocabulary-parallel logits would miss the gradient of the loss, "
                "which goes to this rank's part: use logits.part"
            )
        if func is Tensor.view_as and args[0] is args[1] and not torch.is_grad_enabled():
            # Autograd calls this for an input that a function returns unchanged, then sets its grad_fn.
            return args[0]._like(args[0]._part.detach())
        rule = _RULES.get(func)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, VocabularyLogits)]
        if rule is not None and len(given) == 1 and not given[0]._written:
            result = rule(func, given[0], args, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = pytree.tree_map_only(VocabularyLogits, VocabularyLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Ops from below torch's Python functions: run on values without a graph; autograd adds its own."""
        if func in _ALIASES:
            return args[0]._like(args[0]._part.detach())
        args, kwargs = pytree.tree_map_only(VocabularyLogits, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _values(logits: VocabularyLogits) -> Tensor:
    if logits._whole is not None:
        return logits._whole.detach()
    return all_gather_cut(logits._part.detach(), logits._cut, _group(logits._group_name), LABEL)


def _group(name: str) -> ProcessGroup:
    group = group_of(name)
    assert group is not None
    return group


def _wrap(part: Tensor, cut: Cut, name: str) -> VocabularyLogits:
    logits: VocabularyLogits = _Whole.apply(part, cut, name)
    logits._part = part
    return logits


class _Whole(torch.autograd.Function):
    """Part -> logits. Connects the wrapper to the part's autograd graph, for C++ code."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut, name: str) -> VocabularyLogits:
        ctx.cut, ctx.name = cut, name
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        shape = (*part.shape[:-1], cut.size)
        logits: VocabularyLogits = make(VocabularyLogits, shape, dtype=part.dtype, device=part.device)
        logits._part, logits._cut, logits._group_name = part.detach(), cut, name
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        group = _group(ctx.name)
        return ctx.cut.take(grad, group.rank(), group.size()).contiguous(), None, None


class _PartOf(torch.autograd.Function):
    """Logits -> part, for logits returned by an autograd function."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: Tensor, cut: Cut, name: str) -> Tensor:
        ctx.cut, ctx.name = cut, name
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return all_gather_cut(grad, ctx.cut, _group(ctx.name), LABEL), None, None, None


# How a function runs on the part: (function, the logits, args, kwargs) -> result, or NotImplemented to gather.


def _elementwise(func: Callable[..., Any], logits: VocabularyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    if "out" in kwargs:
        return NotImplemented
    operands = []
    for x in (*args, *kwargs.values()):
        if x is logits:
            operands.append(logits.part)
        elif isinstance(x, Tensor):
            # Trained operands need the full gradient; operands that do not broadcast to the logits change the shape.
            if x.requires_grad or torch.broadcast_shapes(x.shape, logits.shape) != logits.shape:
                return NotImplemented
            along = x.dim() > 0 and x.shape[-1] == logits.shape[-1]
            group = _group(logits._group_name)
            operands.append(logits._cut.take(x, group.rank(), group.size()) if along else x)
        elif isinstance(x, (list, tuple)):
            return NotImplemented
        else:
            operands.append(x)
    named = dict(zip(kwargs, operands[len(args) :], strict=True))
    return logits._like(func(*operands[: len(args)], **named))


def _cast(func: Callable[..., Any], logits: VocabularyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[0] is not logits:
        return NotImplemented
    # Try on an empty tensor: a part that leaves its device could not be gathered by the group.
    tried = func(logits._part.detach().new_empty(0), *args[1:], **kwargs)
    if not isinstance(tried, Tensor):
        return tried  # `type()` without arguments
    if tried.device != logits._part.device:
        return NotImplemented
    return logits._like(func(logits.part, *args[1:], **kwargs))


def _reshape(func: Callable[..., Any], logits: VocabularyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[0] is not logits or any(isinstance(x, (torch.dtype, Tensor)) for x in (*args[1:], *kwargs.values())):
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    part = logits.part
    return logits._like(part.reshape(*shape[:-1], part.shape[-1]))


def _index(func: Callable[..., Any], logits: VocabularyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    if args[0] is not logits:
        return NotImplemented
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    taken = 0  # dimensions of the logits that the index names
    for item in index:
        if isinstance(item, Tensor):
            taken += item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif type(item) in (int, slice):
            taken += 1
        elif item is not None and item is not Ellipsis:
            return NotImplemented
    if taken == logits.dim() or any(item is Ellipsis for item in index[:-1]):
        # The last item indexes the vocabulary, which must stay complete.
        last = index[-1]
        if not isinstance(last, slice) or last.indices(logits.shape[-1]) != (0, logits.shape[-1], 1):
            return NotImplemented
        index = (*index[:-1], slice(None))
    return logits._like(logits.part[index])


def _cross_entropy(func: Callable[..., Any], logits: VocabularyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    return _loss_of_part(logits, *args[1:], **{name: x for name, x in kwargs.items() if name != "input"})


def _loss_of_part(
    logits: VocabularyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    by_class = weight is not None or target.is_floating_point()
    # With more than two dimensions torch has the classes second. Let torch report inputs that do not fit.
    if by_class or size_average is not None or reduce is not None or logits.dim() > 2:
        return NotImplemented
    if target.shape != logits.shape[:-1]:
        return NotImplemented
    return parallel_cross_entropy(
        logits.part, target, process_group=_group(logits._group_name), ignore_index=ignore_index,
        vocabulary=logits._cut.size, reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip


def _functions(names: str) -> set[Any]:
    """torch functions and Tensor methods of these names that exist."""
    found = [getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor)]
    return {function for function in found if function is not None}


def _properties(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


_METADATA = _functions(
    "size dim numel nelement ndimension element_size is_floating_point is_complex is_signed is_contiguous "
    "is_inference get_device stride storage_offset is_same_size __len__ __hash__"
) | _properties(
    "shape ndim dtype device layout requires_grad grad_fn is_leaf grad itemsize nbytes output_nr _version "
    "is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_mkldnn is_nested retains_grad"
)
_HOOKS = _functions("register_hook register_post_accumulate_grad_hook retain_grad")
_RULES: dict[Any, Callable[..., Any]] = (
    dict.fromkeys(
        _functions(
            "mul multiply div divide true_divide add sub subtract neg negative tanh clamp clip masked_fill clone "
            "contiguous __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __add__ __radd__ __sub__ __rsub__ "
            "__neg__"
        ),
        _elementwise,
    )
    | dict.fromkeys(_functions("to type float double half bfloat16"), _cast)
    | dict.fromkeys(_functions("view reshape flatten unflatten squeeze unsqueeze"), _reshape)
    | {Tensor.__getitem__: _index, F.cross_entropy: _cross_entropy}
)
_ALIASES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
