"""BlockList: the blocks of a stack, checked, with their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from torch import nn

from oases.core.blocks.sharding import register_shards, sharded_parameters
from oases.core.execution.piece import BlockParameters

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPACITIES = ("capacity_factor", "expert_capacity", "moe_expert_capacity_factor")
P = TypeVar("P", bound=BlockParameters)

preparations: list[Callable[[nn.Module], None]] = []
"""Functions called with each block of a stack when it is made; `oases.layers` has dropout converted."""


class StackParameters(BlockParameters):
    """Parameters of a block, divided into sharded and replicated ones.

    sharded, replicated: indices of those that require gradients.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        block = getattr(block, "_orig_mod", block)
        register_shards(block)
        cut = {id(parameter) for _, parameter, _ in sharded_parameters(block)}
        cut |= {id(block.get_parameter(name)) for name in getattr(block, "local", ())}
        self.sharded = [number for number in self.trained if id(self.parameters[number]) in cut]
        self.replicated = [number for number in self.trained if id(self.parameters[number]) not in cut]


class BlockList(Generic[P]):
    """Blocks of a stack as they were when it was made, with their parameters.

    kind: of their parameters. bypassed: types of modules inside of them that the stack runs without their forward(),
    whose hooks would not be called; (): those with a true attribute `runs_without_forward`. methods: of a block that
    it calls, for errors. known: the parameters, as of the last call of `parameters`; copies and pickles leave them
    out.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], kind: type[P], bypassed: tuple[type[nn.Module], ...] = (),
        methods: str = "partial() and combine()",
    ) -> None:  # fmt: skip
        self._blocks, self._kind, self._bypassed, self._methods = list(blocks), kind, bypassed, methods
        self.known: list[P] = []
        self._hooks: list[tuple[int, str, nn.Module, object]] = []

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "known": [], "_hooks": []}

    def is_of(self, blocks: nn.ModuleList) -> bool:
        """Whether these are the blocks. RuntimeError where their number has changed."""
        now = [*blocks._modules.values()]
        if len(now) != len(self._blocks):
            raise RuntimeError(
                f"the stack was made of {len(self._blocks)} blocks, for which its schedule is, and has {len(now)} "
                "now; make a new stack of them"
            )
        return now == self._blocks  # modules are equal where they are the same

    def parameters(self, *, gathered: bool) -> list[P]:
        """Current parameters of each block, refreshed where modules have changed.

        gathered: parameters are sharded by FSDP, which takes them out of their places between calls and has hooks of
        its own. Otherwise RuntimeError for hooks of a block, which would not be called.
        """
        if not self.known:
            self.known = [self._kind(block) for block in self._blocks]
            self._hooks = [*self._bypassed_hooks()]
        elif not gathered:
            for number, known in enumerate(self.known):
                if not known.current:
                    self.known[number] = self._kind(self._blocks[number])
        for number, path, part, hooks in () if gathered else self._hooks:
            if hooks:
                where = f"block {number}" + (f", module '{path}'" if path else "")
                raise RuntimeError(
                    f"{where} ({type(part).__name__}) has hooks, which would not be called: a stack calls "
                    f"{self._methods}, and no forward(); register them on the stack, on its parameters or on another "
                    "module inside of the block"
                )
        return self.known

    def _bypassed_hooks(self) -> Iterator[tuple[int, str, nn.Module, object]]:
        """(block, path, module, hooks) of each kind of hook that a stack would not call: it calls no forward()."""
        for number, block in enumerate(self._blocks):
            plain: nn.Module = getattr(block, "_orig_mod", block)
            for path, part in plain.named_modules():
                unasked = not self._bypassed and getattr(part, "runs_without_forward", False)
                if part is plain or isinstance(part, self._bypassed) or unasked:
                    yield from ((number, path, part, getattr(part, kind)) for kind in _HOOKS)


def require_blocks(blocks: nn.ModuleList) -> None:
    """Raise ValueError unless there are blocks, each has the methods of one, and treats samples independently.

    The result for one sample depends on others, so that sub-batches would change it, in batch norms, mixtures of
    experts with a capacity, and modules with a true attribute `mixes_samples`.
    """
    if not len(blocks):
        raise ValueError("OverlappedStack was given no blocks; give at least one")
    for index, block in enumerate(blocks):
        for method in ("partial", "combine"):
            if not callable(getattr(block, method, None)):
                raise ValueError(
                    f"block {index} ({type(block).__name__}) has no method {method}(); a block needs partial() "
                    "and combine(), or give the whole model to oases.parallelize"
                )
    for name, module in blocks.named_modules():
        why = None
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            why = "mixes the samples of a batch"
        elif getattr(module, "mixes_samples", False):
            why = "has mixes_samples set"
        elif any(getattr(module, attribute, None) is not None for attribute in _CAPACITIES):
            why = "drops tokens beyond a capacity that all samples of a batch share"
        if why is not None:
            raise ValueError(
                f"block module '{name}' ({type(module).__name__}) {why}, so sub-batches would change its result; use "
                "a norm per sample, such as LayerNorm, and experts without a capacity"
            )


def require_apart(parameters: Sequence[BlockParameters]) -> None:
    """Raise ValueError where blocks share a trained module, in which stand-ins of one would replace another's."""
    held: dict[tuple[int, str], int] = {}
    for block, each in enumerate(parameters):
        for place, name in each.trained_places():
            other = held.setdefault(place, block)
            if other != block:
                raise ValueError(
                    f"blocks {other} and {block} of a stack share a module, that of the trained {name}; give each "
                    "block modules of its own (they may share parameters), freeze it, or use oases.parallelize, "
                    "which takes shared modules"
                )
