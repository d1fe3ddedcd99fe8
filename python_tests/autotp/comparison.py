"""Helpers for tests of parallelized models: gradients beside those of one process, and errors as text."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from oases.core.blocks.sharding import cuts
from oases.core.execution.dtensors import local_of

CLOSE = 1e-12
"""Relative differences of models in double precision."""
ACROSS, INSIDE, WHOLE = "across layers", "inside layers", "replicated"

FLOOR = 1e-3
"""Share of the largest gradient that smaller ones are compared with at the least. A bias of keys has the gradient 0
but for rounding; at a tolerance of 1e-5 this lets 1e-8 of the largest pass, a twelfth of what float32 can tell
there."""


def whole(part, cut):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local_of(part))
    return cut.join(parts)


def gradients_apart(model, parallel):
    """The largest difference of a parameter's gradient, relative to its largest entry (see FLOOR); and whose."""
    known, theirs = cuts(parallel), dict(parallel.named_parameters())
    worst = (0.0, "")
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        mine = theirs.pop(name)
        if parameter.grad is None:
            assert mine.grad is None or not mine.grad.any(), name
            continue
        assert mine.grad is not None, f"{name} has no gradient"
        gradient = whole(mine.grad, known[id(mine)]) if id(mine) in known else local_of(mine.grad)
        scale = torch.maximum(parameter.grad.abs().max(), FLOOR * largest)
        worst = max(worst, (float((gradient - parameter.grad).abs().max() / scale), name))
    assert not theirs, theirs
    return worst


def said(function):
    """The error that a function raises, in one line."""
    try:
        function()
    except CheckpointException as error:  # of torch.distributed.checkpoint, with the errors of ranks
        ((found, _), *_) = error.failures.values()
        return f"{type(found).__name__}: {found}".replace("\n", " ")
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "nothing was raised"
