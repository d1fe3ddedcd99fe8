"""A layer that runs by itself: its rank's graph with the sums in it, in the place of its forward.

For layers that cannot be cut into blocks, or whose list cannot run as one. Its products are the chunked ones of
csrc/linear.cpp wherever a product makes or takes a sum of its own.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.block import value_of
from oases.autotp.export import leaves
from oases.autotp.program import Form, Kind
from oases.autotp.watch import Watch


class WholeForward:
    """The forward of one layer, by its kind's programs."""

    def __init__(self, module: nn.Module, kind: Kind, path: str) -> None:
        self.module = module
        self.kind = kind
        self._watch = Watch(module, path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's author has it."""
        found, tree = leaves(args, kwargs)
        device = next(each.device for each in [*found, *self.module.parameters()] if isinstance(each, Tensor))
        form = Form.of(found, tree, self._watch.modes())
        program = self.kind.program(form, found, tree, None, device)
        run, names = program.module()
        exported = program.exported
        inputs = dict(zip(exported.inputs, found, strict=True))
        result = run(*(value_of(name, program, self.module, inputs, device) for name in names))
        return pytree.tree_unflatten(result, exported.result)
