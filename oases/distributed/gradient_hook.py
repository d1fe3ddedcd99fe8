"""`quantized_hook`: DDP communication hook that averages buckets of quantised gradients, with error feedback.

What rounding loses is kept in fp32 beside each bucket and added to the next step's gradients, so that no part of a
gradient is lost for good: 4 bytes per parameter on each rank. It is not saved in checkpoints.
"""

# No `from __future__ import annotations`: DDP checks the types of its hook's annotations.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from oases.core.dtypes import QUANTISED
from oases.core.execution.communication import quantised_type
from oases.core.execution.group import ProcessGroup, group_name, group_of, group_size, resolve
from oases.distributed.collectives import agreed_group
from oases.errors import UsageError

_residuals: Any = WeakTensorKeyDictionary()
"""Residual of the bucket that begins with each parameter. DDP forms other buckets after the first step."""


def quantized_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks: `model.register_comm_hook("int8", oases.quantized_hook)`.

    state: "int8" or None, which is the same; or a pair of it and DDP's process group, where that is not the default
    one. The result is equal on all ranks. UsageError for another state, for states that differ between ranks, for a
    bucket of sparse gradients, and for a group whose backend cannot carry them.
    """
    group = _group_in(state)
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise UsageError("quantized_hook: a gradient is sparse; register oases.s2_hook for a model with such ones")
    if group is None or group_size(group) == 1:
        done: Any = torch.futures.Future()
        done.set_result(buffer)
        return done
    about = ("numbers in a bucket", buffer.numel())
    wire = group_of(agreed_group(group_name(group), "quantized_hook", QUANTISED, about=about))
    assert wire is not None
    work = wire.allreduce([buffer, _residual_of(bucket.parameters()[0], buffer)])
    return work.get_future().then(lambda _: buffer.div_(group_size(group)))


def _group_in(state: Any) -> ProcessGroup | None:
    code, group = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if code is not None:
        quantised_type("quantized_hook: the state, or the first of a pair of it and a process group,", code)
    return resolve(group)


def _residual_of(first: Tensor, buffer: Tensor) -> Tensor:
    found: Tensor | None = _residuals.get(first)
    if found is None or found.shape != buffer.shape:
        found = _residuals[first] = torch.zeros_like(buffer, dtype=torch.float32)
    return found
