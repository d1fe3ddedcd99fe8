"""Parameters of a parallelized model as DTensors on its tensor-parallel mesh, which torch's own tools know.

A parameter is a DTensor where a placement describes what this rank has of it: a shard, an equal part of each of equal
segments, or all. Weights fused of unequal parts (queries, keys and values of grouped attention) and balanced experts
stay plain shards. Passes read local tensors: stacks by stand-ins, modules outside of them by `LocalWeights`.

Where torch is wrong or fails for such parameters it is corrected here, once per process, for all DTensors:
- `DTensor.data = other` changes the wrapper alone, and the values that everything reads stay (no issue found).
- Three methods by which torch.distributed.checkpoint asks a DTensor for its pieces name one piece of a
  `_StridedShard`, which has several (checkpoint/planner_helpers.py:177); its storage in Hugging Face's format is
  refused for these.
- Handlers of the dispatcher: a GradScaler finds infinities on the mesh of the first gradient alone
  (distributed/tensor/_dispatch.py:117); clipping refuses plain shards beside DTensors; `item()` of a partial result
  gives this rank's part; random numbers on a mesh of CPUs are equal in all shards (distributed/tensor/_random.py:28):
  all ranks draw the full tensor, as one process does, and keep their shards. Ops that get plain tensors beside
  DTensors are refused by torch, and views along sharded dimensions are copies: see `whole_tensors`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from oases.core.blocks.sharding import Cut, cuts, holders
from oases.core.execution.dtensors import is_dtensor, local_of
from oases.core.execution.group import ProcessGroup, group_name
from oases.distributed.pieces import Piece, StateShard, pieces_of
from oases.distributed.whole_tensors import draw, part_of, refuse_collective, run_whole
from oases.errors import UsageError

TP = "tp"
"""Name of the dimension of the mesh that parameters are sharded over."""
_DRAWS = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")

_OF_STEPS = ("add_", "sub_", "mul_", "div_")
"""Ops in place, element by element, that optimizers call for each parameter: run on local tensors at once."""
_UNTOUCHED = ("lerp_", "addcmul_", "addcdiv_", "_foreach", "_fused")
"""Names, or their beginnings, of ops that only optimizers call, for DTensors alone."""

_COLLECTIVES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_",
)  # fmt: skip
"""Ops of torch.distributed, which have no meaning for DTensors."""

_PIECES = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
"""Methods of a DTensor by which torch.distributed.checkpoint asks for its pieces."""


def is_tensor_parallel(tensor: Any) -> bool:
    """Whether a tensor is a DTensor that is sharded over tensor-parallel ranks, and not by FSDP alone."""
    return is_dtensor(tensor) and TP in (tensor.device_mesh.mesh_dim_names or ())


def is_fsdp_shard(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of FSDP2 alone."""
    return is_dtensor(tensor) and not is_tensor_parallel(tensor)


def is_fused(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of which this rank has a part of each of several segments."""
    return is_tensor_parallel(tensor) and hasattr(tensor.placements[-1], "split_factor")


def part_of_rank(tensor: Tensor) -> Tensor:
    """This rank's tensor-parallel part of a parameter or its gradient or state, sharing memory.

    Shards of FSDP without tensor-parallel ranks stay as they are.
    """
    return local_of(tensor) if is_tensor_parallel(tensor) else tensor


def mesh_of_group(mesh: object, group: ProcessGroup, device: torch.device) -> DeviceMesh:
    """Mesh of the tensor-parallel ranks: that of the dimension "tp" where there is one, so that FSDP2 can join it."""
    if isinstance(mesh, DeviceMesh) and TP in (mesh.mesh_dim_names or ()):
        return mesh if mesh.ndim == 1 else mesh[TP]
    kind = device.type
    if device.type == "meta":
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None or "nccl" not in dist.get_backend_config(group) else accelerator.type
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(TP,))


def placement_of(cut: Cut | None) -> Any:
    """Placement of a parameter with a cut; None where none is true of it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if cut is None:
        return Replicate()
    if len(cut.segments) == 1:
        return Shard(cut.dim)
    return _StridedShard(cut.dim, split_factor=len(cut.segments)) if len(set(cut.segments)) == 1 else None


def to_dtensors(
    model: nn.Module, group: ProcessGroup, tp: DeviceMesh, plain: Collection[str] = ()
) -> list[nn.Parameter]:
    """Replace every parameter that a placement describes by a DTensor that shares its memory; return the old ones.

    plain: names of parameters that stay as they are.
    """
    from torch.distributed.tensor import DTensor

    correct()
    known, held_by = cuts(model), holders(model)
    made = {id(model.get_parameter(name)): model.get_parameter(name) for name in plain}
    before: list[nn.Parameter] = []  # alive, so that no new parameter gets the id of one
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is None or is_dtensor(held):
                continue
            if id(held) not in made:
                before.append(held)
                cut, holder = known.get(id(held)), held_by.get(id(held))
                placement = placement_of(cut)
                elsewhere = holder is not None and getattr(holder, "_group_name", "") != group_name(group)
                if placement is None or elsewhere:
                    made[id(held)] = held
                    continue
                shape = list(held.shape)
                if cut is not None:
                    shape[cut.dim] = cut.size
                whole = torch.empty(shape, device="meta")
                part = DTensor.from_local(
                    held.detach(), tp, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
                )
                made[id(held)] = renewed(held, part)
            module._parameters[name] = made[id(held)]
    return [each for each in before if made[id(each)] is not each]


def renewed(held: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """New parameter in the place of another, with its attributes."""
    new = nn.Parameter(tensor, requires_grad=held.requires_grad)
    new.__dict__.update(
        {name: value for name, value in held.__dict__.items() if name not in ("_local_tensor", "_spec")}
    )
    return new


def with_local(held: Tensor, local: Tensor) -> Tensor:
    """DTensor like another, of another local tensor."""
    from torch.distributed.tensor import DTensor

    of: Any = held
    return DTensor.from_local(
        local, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )


# --- corrections of torch ---

_corrected: list[bool] = []


def correct() -> None:
    """Correct what torch does with such DTensors, once per process."""
    if _corrected:
        return
    _corrected.append(True)
    from torch.distributed.tensor import DTensor

    corrected: dict[str, Any] = {name: _of_pieces(DTensor, name) for name in _PIECES}
    corrected["data"] = property(DTensor.data.__get__, _set_data)  # type: ignore[attr-defined]
    for name, function in corrected.items():
        setattr(DTensor, name, function)
    dispatcher: Any = DTensor._op_dispatcher  # type: ignore[attr-defined]
    handlers, aten = dispatcher._custom_op_handlers, torch.ops.aten
    handlers[aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale
    handlers[aten._local_scalar_dense.default] = run_whole
    of_clipping = (aten._foreach_mul_.Tensor, aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar)
    handlers.update(dict.fromkeys(of_clipping, _scale))
    views = (aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
    handlers.update(dict.fromkeys((*views, aten.diagonal.default, aten.view.default), _view))
    handlers.update({op: handler for op, handler in _handlers().items() if op not in handlers})
    handlers.update({getattr(torch.ops.c10d, name).default: refuse_collective for name in _COLLECTIVES})
    dispatcher._propagate_op_sharding_dispatch_slow_path = partial(_propagated, dispatcher)
    for name in _DRAWS:
        for overload in getattr(aten, name).overloads():
            handlers[getattr(getattr(aten, name), overload)] = _draw
    for made in (
        aten.eye,
        aten.zeros,
        aten.ones,
        aten.full,
        aten.arange,
        aten.linspace,
    ):  # torch resizes what is local
        handlers.update({getattr(made, each): run_whole for each in made.overloads() if "out" in each})


def _handlers() -> dict[Any, Any]:
    """Handlers of ops that may get plain tensors beside DTensors, for all of which torch has a rule."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator  # type: ignore[attr-defined]
    known = {*propagator.op_strategy_funcs, *getattr(propagator, "op_single_dim_strategy_funcs", ())}
    known |= {op for op in torch._decomp.decomposition_table if isinstance(op, torch._ops.OpOverload)}
    found = {}
    for op in known:
        name = op._schema.name.removeprefix("aten::")
        kinds = [str(each.type) for each in op._schema.arguments if "Tensor" in str(each.type)]
        if (len(kinds) > 1 or kinds[:1] == ["List[Tensor]"]) and not name.startswith(_UNTOUCHED):
            found[op] = _elementwise if name in _OF_STEPS else _beside_plain
    return found


def _elementwise(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op in place on local tensors, where the second tensor is placed as the first is, or a number."""
    this, other = args
    spec, theirs = getattr(this, "_spec", None), getattr(other, "_spec", None)
    if theirs is None or spec is None:
        alike = not isinstance(other, Tensor) or not other.dim()
    else:
        alike = theirs is spec or (this.shape == other.shape and this.placements == other.placements)
    if spec is None or not alike or any(each.is_partial() for each in spec.placements):
        return _beside_plain(op, args, kwargs)
    op(this._local_tensor, local_of(other), **kwargs)
    return this


def _beside_plain(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on whole tensors where plain ones are among them, which torch refuses; else as torch does."""
    given = [*args, *kwargs.values()]
    if any(isinstance(each, (list, tuple)) for each in given):
        given = tree_leaves(given)
    given = [each for each in given if isinstance(each, Tensor)]
    plain = any(not is_dtensor(each) and each.numel() != 1 for each in given)
    whole = plain and all(is_tensor_parallel(each) for each in given if is_dtensor(each))
    return run_whole(op, args, kwargs) if whole else _as_torch(op, args, kwargs)


def _propagated(dispatcher: Any, op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
    """Sharding of an op's result; the result itself, of whole tensors, where torch has no rule for it."""
    try:
        theirs = type(dispatcher)._propagate_op_sharding_dispatch_slow_path
        return theirs(dispatcher, op, args, kwargs, info, try_cache)
    except (NotImplementedError, RuntimeError):
        if not all(is_tensor_parallel(each) for each in tree_leaves((args, kwargs)) if is_dtensor(each)):
            raise
    return (refuse_collective if "c10d" in op.namespace else run_whole)(op, args, kwargs)


def _set_data(this: Any, value: Tensor) -> None:
    """Take the values of a full tensor, or of a DTensor of the same placements. UsageError for any other tensor."""
    if value.shape == this.shape and not is_dtensor(value):
        value = with_local(this, part_of(this, value.detach()).contiguous())
    if not is_dtensor(value) or value.shape != this.shape or value.placements != this.placements:  # type: ignore[attr-defined]
        raise UsageError(
            f".data of a parameter of shape {tuple(this.shape)}, placed as {this.placements}, was set to a "
            f"{type(value).__name__} of shape {tuple(value.shape)}; set it to a full tensor of its shape, or a "
            "DTensor of its placements"
        )
    torch.Tensor.data.__set__(this, value)  # type: ignore[attr-defined]
    this._local_tensor, this._spec = value._local_tensor, value._spec  # type: ignore[attr-defined]


def _cut_of(tensor: Any) -> Cut:
    """Cut of a DTensor that is sharded over a mesh of one dimension."""
    (placement,) = tensor.placements
    parts, whole = getattr(placement, "split_factor", 1), tensor.shape[placement.dim]
    return Cut(placement.dim, (whole // parts,) * parts)


def _pieces(tensor: Any) -> tuple[Piece, ...] | None:
    """Pieces of a fused weight's DTensor; None for others."""
    if len(tensor.placements) > 1 or not is_fused(tensor):
        return None
    mesh = tensor.device_mesh
    return pieces_of(tensor.shape, _cut_of(tensor), mesh.get_local_rank(), mesh.size())


def _of_pieces(kind: Any, name: str) -> Any:
    """Method of a DTensor that knows all pieces of a fused weight."""
    theirs, ours = getattr(kind, name), getattr(StateShard, name)

    def described(self: Any, *args: Any) -> Any:
        found = _pieces(self)
        if found is not None and name == "__create_write_items__":
            _refuse_hugging_face(args[0])
        return (
            theirs(self, *args) if found is None else ours(StateShard(self._local_tensor, self.shape, found), *args)
        )

    return described


def _refuse_hugging_face(name: str) -> None:
    """Raise UsageError where a fused weight is saved by a writer whose files have one piece of a tensor."""
    if type(local_above("storage_writer")).__name__ == "HuggingFaceStorageWriter":
        raise UsageError(
            f"{name} is fused of several parts, of which this rank has a piece each, and HuggingFaceStorageWriter "
            "stores one piece of a tensor; call model.save_pretrained(folder), or leave storage_writer out"
        )


def local_above(name: str, functions: Collection[str] = ()) -> Any:
    """Local variable of a caller, of functions of these names if any are given; None without."""
    frame = inspect.currentframe()
    while frame is not None:
        if (not functions or frame.f_code.co_name in functions) and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def _unscale(op: Any, args: Any, kwargs: Any) -> None:
    """Unscale gradients, and reduce what was found over the meshes of all of them."""
    gradients, found, scale = args
    op([local_of(each) for each in gradients], local_of(found), local_of(scale))
    for mesh in dict.fromkeys(each.device_mesh for each in gradients if is_dtensor(each)):
        for dim in range(mesh.ndim):
            dist.all_reduce(local_of(found), dist.ReduceOp.MAX, mesh.get_group(dim))


def _scale(op: Any, args: Any, kwargs: Any) -> None:
    """Scale or clamp gradients in place by one number, as clipping does, plain shards among them, too."""
    gradients, by = args
    op([local_of(each) for each in gradients], by.full_tensor() if is_dtensor(by) else by)


def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw numbers of a tensor-parallel DTensor as one process does; others as torch does."""
    return draw(op, args, kwargs) if is_tensor_parallel(args[0]) else _as_torch(op, args, kwargs)


def _view(op: Any, args: Any, kwargs: Any) -> Any:
    """View a part of a DTensor; where torch would copy it, and a write would be lost, as a `View`."""
    tracked = args[0].requires_grad and torch.is_grad_enabled()
    one = op is torch.ops.aten.select.int and not tracked and is_tensor_parallel(args[0])
    if one and any(each.is_shard(args[1] % args[0].dim()) for each in args[0].placements):
        return run_whole(op, args, kwargs)  # without torch's gather: one rank may set what is its own
    result = _as_torch(op, args, kwargs)
    if tracked or not is_tensor_parallel(args[0]) or type(local_of(args[0])) not in (Tensor, nn.Parameter):
        return result
    memory = local_of(args[0]).untyped_storage().data_ptr()
    found = [result] if isinstance(result, Tensor) else result
    shares = all(local_of(each).untyped_storage().data_ptr() == memory for each in found)
    return result if shares else run_whole(op, args, kwargs)


def _as_torch(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op as torch does, without its handler here."""
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    handler = handlers.pop(op, None)  # None: popped by another thread
    try:
        return op(*args, **kwargs)
    finally:
        handlers.update({} if handler is None else {op: handler})
