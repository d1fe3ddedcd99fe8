"""StandaloneForward: a layer outside of a stack, by its traced programs."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.block import value_of
from oases.autotp.cache import CacheSlot, cache_in
from oases.autotp.export import CallSignature, leaves
from oases.autotp.signatures import LayerSignature
from oases.autotp.trace_guard import TraceGuard


class StandaloneForward:
    """Forward of one layer outside of a stack, by its traced programs."""

    def __init__(self, module: nn.Module, signature: LayerSignature, path: str) -> None:
        self.module = module
        self.signature = signature
        self.guard = TraceGuard(module, path, signature.states)

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
        program = self.signature.program(call_signature, found, tree, -1, device, self.module)
        run, names = program.module()
        exported = program.exported
        inputs = dict(zip(exported.inputs, found, strict=True))
        result = run(*(value_of(name, program, self.module, inputs, device) for name in names))
        return pytree.tree_unflatten(result, exported.result)
