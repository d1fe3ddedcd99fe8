"""Record of training steps: outputs of modules, gradients, gradient norms, weights after each update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from oases.errors import UsageError
from oases_check.case import Case

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
Key = tuple[str, int]
"""A module's name, and the number of its call in a step."""


@dataclass
class Step:
    """What a step left. error: of the gradient norm, which torch refuses for some mixtures of tensors."""

    loss: float = math.nan
    norm: float = math.nan
    error: str = ""
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    output_gradients: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """Name of a parameter or module without those of wrappers around modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, shared ones by each of their names."""
    return {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}


def local_of(tensor: Tensor) -> Tensor:
    """A copy of the full value of a DTensor, which is a collective, or of this rank's tensor."""
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


def run_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, whole: bool) -> Step:
    """Train one step and record it. whole: the unsharded model; else a rank's, whose DTensors are gathered."""
    step = Step()
    own_steps: Any = getattr(model, "train_step", None)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with _outputs(model, step):
        if callable(own_steps) and not whole:
            step.loss = float(own_steps(*args, **kwargs))
        else:
            loss = case.loss_of(model(*args, **kwargs))
            loss.backward()
            step.loss = float(loss.detach())
    parameters = parameters_of(model)
    with torch.no_grad():
        for name, each in sorted(parameters.items()):
            step.gradients[name] = None if each.grad is None else local_of(each.grad)
    if case.norm is not None:
        try:
            norm: Any = case.norm(model)
            step.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        except RuntimeError as error:
            step.error = str(error).splitlines()[0]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        step.weights = {name: local_of(each) for name, each in sorted(parameters.items())}
    return step


def reference(case: Case, dtype: torch.dtype | None) -> list[Step]:
    """The steps of the unsharded model in this process. UsageError where two runs of the first step differ."""
    steps: list[Step] = []
    for seed in (1, 2):  # what draws random numbers does not agree with itself
        model = case.built(dtype)
        optimizer = case.optimizer(model.parameters())
        for number in range(case.steps if seed == 2 else 1):
            torch.manual_seed(seed)
            steps.append(run_step(case, model, optimizer, case.batch_of(number, dtype), whole=True))
    twice, *steps = steps
    if twice.loss != steps[0].loss and not (math.isnan(twice.loss) and math.isnan(steps[0].loss)):
        raise UsageError(
            f"check: two runs of the unsharded model differ (losses {twice.loss:.9g} and {steps[0].loss:.9g}): it "
            "draws random numbers; seed them in build(), and set the dropout to 0 or give training=False (--eval)"
        )
    if not math.isfinite(twice.loss):
        raise UsageError(f"check: the loss of the unsharded model is {twice.loss}; give a model that trains")
    return steps


@contextmanager
def _outputs(model: nn.Module, step: Step) -> Iterator[None]:
    """Record the first tensor that each module returns, where it has data of its own, and its gradient."""
    calls: Counter[str] = Counter()

    names = {module: plain_name(name) for name, module in model.named_modules() if name}

    def record(module: nn.Module, args: Any, result: Any) -> None:
        if module not in names:
            return
        first = next((each for each in _leaves(result) if isinstance(each, Tensor)), None)
        key = names[module], calls[names[module]]
        calls[names[module]] += 1
        if first is None or type(first) not in (Tensor, nn.Parameter, DTensor) or not first.is_floating_point():
            return
        step.outputs[key] = first.detach().clone()
        if first.requires_grad:
            first.register_hook(lambda gradient: step.output_gradients.__setitem__(key, gradient.detach().clone()))

    # Of all modules of the process: some libraries do not call hooks of single modules, or refuse those.
    handle = register_module_forward_hook(record)
    try:
        yield
    finally:
        handle.remove()


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple | list):
        for each in result:
            yield from _leaves(each)
    elif hasattr(result, "values") and not isinstance(result, Tensor):
        for each in result.values():
            yield from _leaves(each)
    else:
        yield result
