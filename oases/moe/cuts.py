"""Pieces of a computation with graphs of their own, cut where something travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


class Cut:
    """One call of `function`, whose backward pass can be run when its gradients have come.

    Gradients of parameters are added to theirs, with all hooks, as autograd does; inputs get none but by `backward`.
    recompute: keep the inputs and the random state alone; `again` then has to come before the backward pass.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], *, recompute: bool = False) -> None:
        self._function = function
        self.inputs = [_leaf(each) for each in inputs]
        """What the call was given, cut off from what made it."""
        self._random = _random_states(inputs) if recompute else None
        with torch.set_grad_enabled(not recompute):
            outputs = function(*self.inputs)
        self._outputs = None if recompute else outputs
        self.results = tuple(output.detach() for output in outputs)
        """What the call returned; to be taken once, by `take`."""

    def take(self) -> tuple[Tensor, ...]:
        """The results, which are not kept here any longer."""
        results, self.results = self.results, ()
        return results

    def again(self) -> None:
        """Compute once more, with the same random numbers, for the backward pass."""
        assert self._random is not None, "asked for with recompute"
        states, self._random = self._random, None
        devices = [device for device, _ in states if device.type == "cuda"]
        with torch.random.fork_rng(devices), torch.enable_grad():
            for device, state in states:
                torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)
            self._outputs = self._function(*self.inputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the inputs, for those of the outputs; None for what no output depends on. Frees the graph."""
        assert self._outputs is not None, "computed again before"
        outputs, self._outputs = self._outputs, None
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad and g is not None]
        if pairs:
            roots, given = zip(*pairs, strict=True)
            torch.autograd.backward(roots, given)
        found = [each.grad for each in self.inputs]
        self.inputs = []
        return found


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _random_states(inputs: Sequence[Tensor]) -> list[tuple[torch.device, Tensor]]:
    states = [(torch.device("cpu"), torch.get_rng_state())]
    for device in {each.device for each in inputs if each.is_cuda}:
        states.append((device, torch.cuda.get_rng_state(device)))
    return states
