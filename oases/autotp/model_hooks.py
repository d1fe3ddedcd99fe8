"""Hooks around every forward pass of a parallelized model: no key-value cache, equal random draws on all ranks."""

from __future__ import annotations

import copy
import sys
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp.layers import has_argument
from oases.autotp.local_weights import FORWARDS, LocalWeights
from oases.autotp.tools.recomputation import checkpoints
from oases.core.blocks.randomness import default_generators
from oases.core.execution.dtensors import is_dtensor
from oases.core.execution.failure import begin_call, is_sampled
from oases.core.execution.group import (
    ProcessGroup,
    all_gather_objects,
    group_name,
    group_of,
    group_size,
)
from oases.core.execution.piece import BlockParameters
from oases.distributed.failures import watch_passes
from oases.errors import UsageError

_CAPTURED = ("output_attentions", "output_router_logits")
"""Outputs that transformers captures by hooks inside of layers, which the traced graphs bypass."""


class ModelHooks:
    """Forward hooks of a parallelized model.

    `use_cache` is False unless the caller sets it. In training, random ops around the layers (dropout of embeddings)
    draw the same numbers on all ranks, because their tensors are replicated; the caller's generator state is restored
    afterwards.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None) -> None:
        self._group = group_name(group)
        self._caches = has_argument(model, "use_cache")
        self.seed: int | None = None
        """Seed of the draws; None before the first training call, which takes rank 0's initial seed."""
        self.calls = self._number = 0
        """Number of training calls, which selects the draws."""
        self._before: list[list[tuple[torch.Generator, Tensor]]] = []
        self._filled = False
        self._parameters: BlockParameters | None = None
        self._plain: set[str] | None = None
        self._forwards: list[tuple[str, nn.Module, Any]] = []
        """Layers, and modules outside of them with shards, with the forwards that the objects have of their own."""
        self.weights = LocalWeights(())
        """Local tensors that modules outside of layers read in a forward pass."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHooks:
        """Hooks of a copied model."""
        made = ModelHooks.__new__(ModelHooks)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise UsageError: the model holds this, and its groups and traced layers are of this run alone."""
        raise UsageError(
            "a parallelized model cannot be pickled, as by torch.save(model): it is bound to the process groups of "
            "this run; save it by oases.save_checkpoint or model.save_pretrained, or this rank's shards by "
            "torch.save(model.state_dict(), ...)"
        )

    def begin(self, model: nn.Module) -> None:
        """Register the hooks on the model."""
        named = dict(model.named_parameters())
        plain = {name for name, each in named.items() if not is_dtensor(each)}
        self._plain = plain if len(plain) < len(named) else None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        watch_passes(model, self._group_now)

    def note_forwards(self, model: nn.Module) -> None:
        """Refuse other forwards of layers, and of modules outside of them that have shards, from now on."""
        layers = {name for name, part in model.named_modules() if isinstance(vars(part).get("forward"), FORWARDS)}
        for name, part in model.named_modules():
            inside = any(name.startswith(f"{layer}.") for layer in layers)
            if name in layers or (not inside and "tensor_parallel" in vars(part)):
                self._forwards.append((name, part, vars(part).get("forward")))

    def _group_now(self) -> ProcessGroup | None:
        return group_of(self._group)

    def at_call(self, number: int, seed: int | None = None) -> None:
        """Set the number of training calls so far, and the seed unless it is None, for a resumed run."""
        self.calls, self.seed = number, self.seed if seed is None else seed

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._require_right_time(model)
        self._agree(model, args, kwargs)
        for name in _CAPTURED:
            if kwargs.get(name, getattr(getattr(model, "config", None), name, None)):
                raise UsageError(
                    f"{name}=True asks for a result inside of the layers, which is sharded over the ranks; leave it "
                    "out of the call and of the model's configuration"
                )
        if self._caches and kwargs.get("use_cache") is None:
            kwargs = {**kwargs, "use_cache": False}
        if self._group and any(part.training for part in model.modules()):
            generators = default_generators(next(model.parameters()).device)
            self._before.append([(generator, generator.get_state()) for generator in generators])
            torch.manual_seed(self._next_seed())
        self.weights.put()
        return args, kwargs

    def _require_right_time(self, model: nn.Module) -> None:
        if not self._filled:
            empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
            if empty is not None:
                raise RuntimeError(f"{empty} has no data; call oases.load_weights(model, ...) first")
            self._filled = True
        _require_unwrapped_layers(model)
        for name, part, forward in self._forwards:
            if part.__dict__.get("forward") is not forward:
                raise UsageError(
                    f"{name} got another forward, which would read this rank's shards: put it there before "
                    "parallelize(), as a method of the class or of the module itself"
                )
        if model.training and checkpoints(model):
            raise RuntimeError(
                "gradient checkpointing would recompute layers one by one, but they run as one stack: call "
                "gradient_checkpointing_disable() and give parallelize() recompute='full'"
            )
        if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{type(model).__name__} is recomputed in a backward pass, by torch.utils.checkpoint around it, and "
                "would draw other random masks; give parallelize() recompute='full' instead"
            )

    def _agree(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UsageError unless all ranks call the model with equal shapes, types and modes, and, where they are
        compared, with equal inputs.
        """
        group = group_of(self._group)
        if group is None or group_size(group) == 1:
            return
        given = {**{f"argument {at}": value for at, value in enumerate(args)}, **kwargs}
        tensors = {name: value for name, value in sorted(given.items()) if isinstance(value, Tensor)}
        if self._parameters is None or not self._parameters.current:
            self._parameters = BlockParameters(model)
            self._refuse_others(self._parameters)
        trained, digest = self._parameters.form
        form: list[Any] = [
            "computation of gradients", torch.is_grad_enabled(), "training mode", model.training,
            "number of parameters that require gradients", trained,
            "digest of the parameters that require gradients", digest,
        ]  # fmt: skip
        for name, tensor in tensors.items():
            form += [f"shape of {name}", tensor.shape, f"type of {name}", tensor.dtype]
        self._number += 1
        sampled = [*tensors.values()] if is_sampled(self._number) else None
        begin_call(group, type(model).__name__, tuple(form), sampled)

    def _refuse_others(self, now: BlockParameters) -> None:
        """Raise UsageError for plain parameters that came since `parallelize`, as those of adapters."""
        pairs = zip(now.names, now.parameters, strict=True)  # of local tensors in their places, too
        plain = {name for name, each in pairs if type(each) is not Tensor and not is_dtensor(each)}
        new = set() if self._plain is None else plain - self._plain
        if new:
            raise UsageError(
                f"{min(new)} came after parallelize(), which shards parameters and averages their gradients; "
                "add it before, as model = get_peft_model(model, config), then oases.parallelize(model)"
            )

    def _end(self, model: nn.Module, args: Any, result: Any) -> None:
        self.weights.put_back()
        if self._before:
            for generator, state in self._before.pop():
                generator.set_state(state)

    def _next_seed(self) -> int:
        """Seed of this call, equal on all ranks: from rank 0's initial seed at the first training call, and a
        counter.
        """
        if self.seed is None:
            self.seed = all_gather_objects(torch.initial_seed(), group_of(self._group))[0]
        self.calls += 1
        return zlib.crc32(f"{self.seed} {self.calls}".encode())


def _require_unwrapped_layers(model: nn.Module) -> None:
    """Raise UsageError where FSDP2 shards layers of a stack one by one, which run together."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    partition: Any = getattr(model, "oases_partition", None)
    for found in [] if fsdp is None or partition is None else partition.layers:
        for layer in [] if found.runner is None else found.runner.layers:
            if isinstance(layer.module, fsdp.FSDPModule):
                raise UsageError(
                    f"fully_shard was called on {layer.path}, whose weights it gathers when it is called, but the "
                    "layers run together, overlapped, when the last one is called; call "
                    'fully_shard(model, mesh=mesh["dp"]) alone'
                )
