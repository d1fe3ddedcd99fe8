"""A tiny Llama of transformers, trained over data x pipeline x tensor parallel ranks: ours, and what peers share.

Contestants start from the same weights and take the same samples, micro-batches and optimizer. Shapes: B samples of a
replica in a step, S tokens.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import oases
from oases.core.execution.dtensors import local_of
from oases.core.schedule.tensor import WHOLE
from oases_bench.harness import timed_step

IGNORED = -100
"""Target that has no loss."""
_SEED = 1


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of the model and of a step.

    samples: of a micro-batch on a replica. keep: recompute no layer. keep_last: none of the last stage, in peers;
    ours do as their pipeline says.
    """

    hidden: int = 256
    layers: int = 8
    sequence: int = 128
    vocabulary: int = 512
    samples: int = 4
    micro_batches: int = 8
    keep: bool = False
    keep_last: bool = False

    @property
    def heads(self) -> int:
        """Attention heads, twice as many as key-value heads."""
        return max(4, self.hidden // 32)

    def model(self) -> Any:
        """The whole model, equal on every rank."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(_SEED)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.hidden * 11 // 4,
                num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads // 2,
                max_position_embeddings=self.sequence, use_cache=False,
            )
        )  # fmt: skip

    def tokens(self, replica: int) -> Tensor:
        """[B, S] tokens of a replica."""
        generator = torch.Generator().manual_seed(_SEED + replica)
        return torch.randint(self.vocabulary, (self.samples * self.micro_batches, self.sequence), generator=generator)


def targets(tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S]: for each token the next one, for the last one of a sample none."""
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


class Stage(nn.Module):
    """Layers of a Llama as its author wrote them, with the embedding before the first and the head after the last.

    A stage of the peers. [b, S] tokens or [b, S, H] activations -> the latter, or [b, S, V] logits. layers: which.
    `layer` and `outside` name the modules that peers replace by their own; with sequence parallelism an activation
    is [b, S / tp, H].
    """

    def __init__(self, model: Any, layers: range, keep: bool) -> None:
        super().__init__()
        inner = model.model
        self.tok_embeddings = inner.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): inner.layers[number] for number in layers})
        last = layers.stop == len(inner.layers)
        self.norm: nn.Module | None = inner.norm if last else None
        self.output: nn.Module | None = model.lm_head if last else None
        self.rotary, self.keep = inner.rotary_emb, keep
        self.sequence = model.config.max_position_embeddings

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        positions = torch.arange(self.sequence)[None]
        rotated = self.rotary(x, positions)
        for layer in self.layers.values():
            given = {"position_embeddings": rotated, "attention_mask": None}
            x = layer(x, **given) if self.keep else checkpoint(layer, x, use_reentrant=False, **given)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def stages_of(shape: LlamaShape, stage: int, stages: int, chunks: int = 1) -> dict[int, Stage]:
    """The parts of the whole model on a stage, by number; as many layers in each."""
    model, parts = shape.model(), stages * chunks
    each = shape.layers // parts
    return {
        number: Stage(
            model,
            range(number * each, (number + 1) * each),
            shape.keep or (shape.keep_last and number == parts - 1),
        )
        for number in range(stage, parts, stages)
    }


def names_in_model(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """A stage's parameters by their names in the author's model."""
    for name, parameter in stage.named_parameters():
        outside = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
        first, _, rest = name.partition(".")
        yield f"{outside.get(first, f'model.{first}')}.{rest}", parameter


class LlamaSteps(ABC):
    """A contestant: steps of training on this rank, timed.

    parameters: of the optimizer, the same for all contestants.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.seconds: list[float] = []
        """Durations of the steps so far."""
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    @abstractmethod
    def backward(self) -> Tensor | None:
        """Forward and backward passes of a step, gradients averaged; the mean loss where it is known."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """Whole gradients of this stage by the names of the author's model. Collective over its ranks."""

    def update(self) -> None:
        """Step the optimizer on the averaged gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> Tensor | None:
        """One step."""
        loss = self.backward()
        self.update()
        return loss

    def step(self) -> None:
        """One step, timed from when every rank has begun to when the slowest has ended."""
        self.seconds.append(timed_step(self.train))

    def row(self) -> dict[str, Any]:
        """Result row."""
        return {"step_seconds": statistics.median(self.seconds), "steps": self.seconds}


class OursLlama(LlamaSteps):
    """`oases.parallelize` and `train_step`. mesh: of "pp", "dp" and "tp". wire: type of sums; "" for the model's."""

    def __init__(
        self, shape: LlamaShape, mesh: DeviceMesh, pipeline: str, schedule: str, sub_batches: int, wire: str
    ) -> None:
        cuts: dict[str, Any] = {} if schedule in WHOLE else {"sub_batches": sub_batches}
        self.model: Any = oases.parallelize(
            shape.model(), mesh=mesh, micro_batches=shape.micro_batches, pipeline=pipeline, schedule=schedule,
            recompute="none" if shape.keep else "full", wire_dtype=wire or None, **cuts,
        )  # fmt: skip
        self.tokens = shape.tokens(mesh.get_local_rank("dp"))
        self._group = mesh.get_group("tp")
        super().__init__(list(self.model.parameters()))

    def backward(self) -> Tensor:
        """See `LlamaSteps`."""
        loss: Tensor = self.model.train_step(input_ids=self.tokens, labels=self.tokens)
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """See `LlamaSteps`."""
        return {
            name: local_of(parameter.grad).clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
