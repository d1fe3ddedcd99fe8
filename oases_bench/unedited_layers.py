"""Layers of a model as its author wrote it, for the overlap benchmark."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp import parallelize
from oases.autotp.configuration import (
    configuration,
    configured_model,
    read_configuration,
    sample_inputs,
    with_layers,
)
from oases.autotp.export import leaves
from oases.autotp.runner import Runner
from oases.core.blocks.batch import BlockInputs
from oases.core.execution.autotune import Turn
from oases.core.execution.communication import Scheduler
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup
from oases.distributed.expert_groups import EXPERT_MODES
from oases.errors import UsageError
from oases.models.options import option, require_bytes
from oases.profile.config import DTYPES, OverlapConfig


@dataclass(frozen=True)
class ModelBenchConfig(OverlapConfig):
    """Benchmark of a stack of layers, which may be those of an unedited model."""

    model: str | None = option(
        None, "benchmark the layers of an unedited model: a config.json of transformers, or a folder with one"
    )
    experts_mode: str = option(
        "sharded",
        "with --model: experts as in oases.parallelize(experts=); all-to-alls of balanced ones count as compute",
        EXPERT_MODES,
    )


_Config = TypeVar("_Config", bound=ModelBenchConfig)


class UneditedLayers:
    """The layers of a model of transformers with random weights, which `oases.parallelize` has cut.

    The model runs once, and what its loop gives to each layer besides the activation is kept; then the layers are
    called as that loop calls them. Dropout is off, so that schedules can be compared by their gradients. UsageError
    where the layers cannot be cut or are not one list.
    """

    def __init__(self, config: ModelBenchConfig, group: ProcessGroup) -> None:
        data = with_layers(read_configuration(Path(str(config.model)), "--model"), config.layers)
        torch.manual_seed(config.seed)
        model = configured_model(data, config.dtype, device="cpu").to(config.device).eval()
        whole = sum(parameter.numel() for parameter in model.parameters())
        inputs = _inputs(model, config)
        self.model = parallelize(model, mesh=group, schedule="oases", experts=config.experts_mode)
        self.runner = _runner(self.model)
        self.stack = self.runner.stack
        self.number = len(self.runner.layers)
        self._calls = self._observed(inputs)
        x = self._calls[0][0][self.runner.layers[0].activation]
        self.shape: tuple[int, ...] = tuple(x.shape)
        self.description: dict[str, Any] | None = {
            "class": type(model).__name__,
            "model_type": data["model_type"],
            "parameters": whole,
            "list": self.runner.name,
            "layers": self.number,
            "blocks_per_layer": len(self.stack.blocks) / self.number,
            "activation": list(self.shape),
        }

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, context: Context | None = None
    ) -> Tensor:
        """All layers on an activation, called one after the other."""

        def stack(x: Tensor, inputs: Sequence[BlockInputs]) -> Tensor:
            return self.stack.run(x, scheduler, turn, inputs, context)

        self.runner.run = stack
        for layer, (found, tree) in zip(self.runner.layers, self._calls, strict=True):
            args, kwargs = pytree.tree_unflatten(layer.with_activation(found, x), tree)
            x = pytree.tree_leaves(layer.module(*args, **kwargs))[0]
        return x

    @torch.no_grad()
    def _observed(self, inputs: dict[str, Any]) -> list[tuple[list[Any], pytree.TreeSpec]]:
        """Record the arguments with which the model calls each layer."""
        calls: list[tuple[list[Any], pytree.TreeSpec]] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append(leaves(args, kwargs))

        handles = [layer.module.register_forward_pre_hook(note, with_kwargs=True) for layer in self.runner.layers]
        self.model(**inputs)
        for handle in handles:
            handle.remove()
        return calls


def of_model(config: _Config, given: Collection[str], degree: int) -> _Config:
    """A benchmark of the layers of `config.model`, with that model's sizes.

    given: the options that were given and not left at their defaults. --layers takes the place of the configuration's
    number. heads are its own, or what they have in common with its width. UsageError for sizes that only the
    configuration can change, for contestants that run the built-in GPT alone, where the configuration cannot be
    built, or the model is too large for this machine.
    """
    for name in ("hidden", "heads"):
        if name in given:
            raise UsageError(f"--{name} {getattr(config, name)}: it is the model's; change it in {config.model}")
    for name in config.names:
        if ":sequence" in name:
            raise UsageError(f"schedule {name!r}: an unedited model is not cut along its sequence; leave it out")
    data = read_configuration(Path(str(config.model)), "--model")
    if "layers" in given:
        data = with_layers(data, config.layers)
    found = configuration(data)
    sizes: dict[str, Any] = {
        name: getattr(found, name, None) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    }
    wrong = [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise UsageError(
            f"--model {config.model}: its configuration gives no number {', '.join(wrong)}; the benchmark takes "
            "models of one list of layers of one width"
        )
    layers, hidden, heads = sizes.values()
    config = replace(config, layers=layers, hidden=hidden, heads=math.gcd(heads, hidden))
    model = configured_model(data, config.dtype)
    if "sequence" in given and "input_ids" not in sample_inputs(model, config.batch, config.sequence):
        raise UsageError(f"--sequence {config.sequence}: {type(model).__name__} takes no tokens; leave it out")
    sample_inputs(model, config.batch, config.sequence)  # says where the model has too few positions
    count = sum(parameter.numel() for parameter in model.parameters())
    # Each rank builds the whole model and then keeps its part; the parts get gradients.
    need = (degree + 2) * count * DTYPES[config.dtype].itemsize
    require_bytes({"weights (--model, --layers)": need}, f"--model {config.model} on each of {degree} ranks")
    return config


def _inputs(model: nn.Module, config: ModelBenchConfig) -> dict[str, Any]:
    """Random data of the shapes that the model takes."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary = getattr(embedding, "num_embeddings", 2)
    generator = torch.Generator().manual_seed(config.seed)

    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype).to(config.device)
        return torch.randint(vocabulary, value.shape, generator=generator).to(config.device)

    return {name: made(value) for name, value in sample_inputs(model, config.batch, config.sequence).items()}


def _runner(model: nn.Module) -> Runner:
    report = model.oases_partition
    runners = [each.runner for each in report.layers if each.runner is not None]  # type: ignore[union-attr]
    if len(runners) != 1:
        raise UsageError(
            f"--model: the benchmark runs one list of layers, and of this model run {len(runners)} across layers:\n"
            f"{report}"
        )
    found: Runner = runners[0]
    return found
