"""Layer traces shared by the models of one test file: layers that one model would share a trace for are traced once.

A trace takes more time than all else that a test of a small model does. It holds no weights and does not depend on
the schedule, on recomputation or on sub-batches.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.utils._pytree as pytree
from torch import Tensor

from oases.autotp import signatures, trace_guard

_sharing = contextlib.ExitStack()


def share_traces() -> None:
    """Start with no traces, in this process."""
    stop_sharing()
    _sharing.enter_context(_shared_signatures())


def stop_sharing() -> None:
    """Trace every model's layers anew, and forget those of before."""
    _sharing.close()


@contextlib.contextmanager
def _shared_signatures() -> Iterator[None]:
    made, known = signatures._layer_signature, {}

    def shared(call: Any, kept: frozenset[str], refused: str, tp: Any) -> Any:
        with mock.patch.object(trace_guard, "comparison_key", _by_value):
            look = trace_guard.look_of(call.module, set())
        modes = tuple(part.training for part in call.module.modules())
        key = look, modes, _arguments(call), call.ops, kept, refused, repr(tp)
        if key not in known:  # the call keeps alive what the key holds by identity
            known[key] = made(call, kept, refused, tp), call
        return known[key][0]

    with mock.patch.object(signatures, "_layer_signature", shared):
        yield


_comparison_key = trace_guard.comparison_key


def _by_value(value: Any) -> Any:
    """Compare configurations of transformers, of which each model has its own, by value."""
    if hasattr(value, "to_diff_dict"):
        return repr((value.to_dict(), value._attn_implementation))
    return _comparison_key(value)


def _arguments(call: Any) -> str:
    leaves, tree = pytree.tree_flatten((call.args, call.kwargs))
    shapes = [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return repr((shapes, tree))
