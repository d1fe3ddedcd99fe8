"""Parameters that are DTensors: passes read this rank's local tensors; gradients get the parameters' placements."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, whose module is not loaded for this."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing memory, outside of autograd; any other tensor itself."""
    found: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return found


def stand_in_of(parameter: Tensor) -> Tensor:
    """Tensor that a stand-in is made of: this rank's part, which requires a gradient where the parameter does."""
    return (
        local_of(parameter).detach().requires_grad_(parameter.requires_grad) if is_dtensor(parameter) else parameter
    )


def read(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiable."""
    if not is_dtensor(parameter):
        return parameter
    found: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    if found.requires_grad:
        found.register_hook(_at_its_start)
    return found


def _at_its_start(gradient: Tensor) -> Tensor:
    """A gradient in memory of its own: torch does not copy a DTensor whose part begins inside of another tensor."""
    return gradient.clone() if gradient.storage_offset() else gradient


def as_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Gradient of this rank's part as one of the parameter, which may be of another type."""
    if gradient is None or not is_dtensor(parameter):
        return gradient
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = parameter._spec  # type: ignore[attr-defined]
    if spec.tensor_meta.dtype != gradient.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, gradient.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    made: Tensor = DTensor(_at_its_start(gradient), spec, requires_grad=False)  # type: ignore[call-arg]
    return made
