"""What is checked: functions that build a model, shard it, and give its batches."""

from __future__ import annotations

import importlib.util
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oases.errors import UsageError
from oases.limits import short

Batch = Mapping[str, Any] | tuple[Any, ...]
"""Arguments of the model's forward, by name or in order."""
MOST_RANKS = 8


def torch_norm(model: nn.Module) -> Any:
    """Norm of all gradients by torch's clip_grad_norm_, which leaves them as they are."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD: an update shows the factor of its gradient, which Adam hides."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Case:
    """A model and how it is sharded.

    build: makes the unsharded model, in every process. parallelize: shards it on ranks of a default group, and
    returns it. batch: arguments of a step's forward pass, of all samples, or a function of the step's number. tp, dp:
    ranks along each dimension, tp innermost; over dp each rank takes its part of dimension 0 of the batch's tensors.
    loss: of the forward pass's result; None: its `loss`, or itself where it is a scalar. optimizer: made of the
    parameters.
    norm: of the model's gradients, as clipping computes it; None: not compared. training: call train() on the model,
    else eval().
    """

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module], nn.Module]
    batch: Callable[[int], Batch] | Batch
    steps: int = 2
    tp: int = 2
    dp: int = 1
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    norm: Callable[[nn.Module], Any] | None = torch_norm
    training: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "tp", "dp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"check: {name} is {short(value)}; give a whole number from 1")
        if self.ranks > MOST_RANKS:
            raise UsageError(f"check: tp {self.tp} x dp {self.dp} are {self.ranks} ranks; give at most {MOST_RANKS}")
        for name in ("build", "parallelize", "loss", "optimizer", "norm"):
            value = getattr(self, name)
            if not callable(value) and not (name in ("loss", "norm") and value is None):
                raise UsageError(f"check: {name} is {short(value)}; give a function")
        try:
            pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"check: its functions go to other processes, and one cannot ({error}); define them at the top level "
                "of a module"
            ) from error

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def built(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The unsharded model, the same at each call; UsageError for one that is not, or is no model."""
        torch.manual_seed(0)
        model = self.build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"check: build() returned {short(model)}; return an nn.Module")
        made_distinct(model)
        model.train(self.training)
        return model if dtype is None else model.to(dtype)

    def batch_of(self, step: int, dtype: torch.dtype | None = None, share: int | None = None) -> Batch:
        """Arguments of a step. share: of this data-parallel rank; None for all of it."""
        found = self.batch(step) if callable(self.batch) else self.batch
        if not isinstance(found, Mapping | tuple) or not found:
            raise UsageError(f"check: the batch is {short(found)}; give a dict or tuple of the forward's arguments")
        cast = {name: _part(value, dtype, self.dp, share) for name, value in _items(found)}
        return cast if isinstance(found, Mapping) else tuple(cast.values())

    def loss_of(self, result: Any) -> Tensor:
        """Loss of a forward pass. UsageError where it is no scalar that has a gradient."""
        loss = self.loss(result) if self.loss is not None else getattr(result, "loss", result)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"check: the loss is {short(loss)}; have the model return a scalar, or an object with a `loss`, or "
                "give loss=, a function of what it returns"
            )
        return loss


def _items(batch: Batch) -> list[tuple[Any, Any]]:
    return list(batch.items()) if isinstance(batch, Mapping) else list(enumerate(batch))


def _part(value: Any, dtype: torch.dtype | None, dp: int, share: int | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if share is None or dp == 1 or value.dim() == 0:
        return value
    if value.shape[0] % dp:
        raise UsageError(f"check: a batch of {value.shape[0]} samples does not divide over dp {dp}; give a multiple")
    return value.chunk(dp)[share]


def made_distinct(model: nn.Module) -> None:
    """Add noise to parameters that have equal rows, such as biases of zeros and norms of ones.

    What a rank holds of a parameter is found by its values, and a bias of zero would hide what is wrong with it.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() and not parameter.is_meta and _repeats(parameter):
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(noise.to(parameter))


def _repeats(parameter: Tensor) -> bool:
    flat = parameter.detach().reshape(parameter.shape[0], -1)
    return len(torch.unique(flat, dim=0)) < len(flat)


@lru_cache
def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class FromScript:
    """A function of a script, by its path and name; picklable wherever the script is."""

    path: str
    name: str

    @classmethod
    def parse(cls, text: str) -> FromScript:
        """SCRIPT:FUNCTION. UsageError where there is no such script or function."""
        path, _, name = text.rpartition(":")
        if not path or not Path(path).is_file():
            raise UsageError(f"{text!r} is no SCRIPT:FUNCTION; give the path of a Python file and a function in it")
        found = cls(str(Path(path).resolve()), name)
        if not callable(getattr(_module(found.path), name, None)):
            raise UsageError(f"{path} has no function {name!r}")
        return found

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return getattr(_module(self.path), self.name)(*args)


@dataclass(frozen=True)
class Item:
    """One of the results of a function of no arguments that returns (model, batch)."""

    of: FromScript
    place: int

    def __call__(self, *_: Any) -> Any:
        """Call the function; UsageError unless it returns a pair."""
        found = self.of()
        if not isinstance(found, tuple) or len(found) != 2:
            raise UsageError(f"{self.of.name}() returned {short(found)}; return (model, batch)")
        return found[self.place]
