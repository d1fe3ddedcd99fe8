"""A GPT whose perceptrons are mixtures of experts, spread over all ranks of a run; attention as in `GPT`.

A run is N ranks: N / t replicas of t tensor-parallel ranks each. A replica has its own share of the samples, and
each of its ranks sends its share of the replica's tokens to the experts. Weights are drawn from one seed, whatever N
and t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.execution.group import ProcessGroup, resolve
from oases.models.gpt import Attention, Decoder, GPTConfig
from oases.moe.layer import OverlappedMoE
from oases.moe.router import Gate
from oases.moe.stack import ExpertStack
from oases.parallel.mesh import Mesh


@dataclass(frozen=True)
class MoEGPTConfig(GPTConfig):
    """Sizes of a GPT with experts. The run's ranks must divide `experts`.

    top_k: experts of a token. expert_hidden: width inside of an expert, 0 for 4 x hidden. shared_hidden: of an expert
    for every token, 0 for none. gate: of the router, "softmax" or "sigmoid".
    """

    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0
    gate: Gate = "softmax"

    @property
    def intermediate(self) -> int:
        """Width inside of an expert."""
        return self.expert_hidden or 4 * self.hidden


class MoEBlock(nn.Module):
    """A layer for an `ExpertStack`: attention, norm, experts, with residuals."""

    def __init__(self, attention: Attention, experts: OverlappedMoE) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(experts.hidden)
        self.experts = experts

    def before(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Attention, and what the experts read of it."""
        x_BSH = self.attention(x_BSH)
        return x_BSH, self.norm(x_BSH)

    def after(self, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        """The residual."""
        return x_BSH + y_BSH


class MoEGPT(Decoder):
    """Decoder-only language model; each layer is attention and a mixture of experts, run by an `ExpertStack`.

    process_group: all ranks of the run, over which the experts are spread; None is the default group. mesh: of one
    stage with one tensor-parallel degree, over which attention, embedding and head are cut; made here, for a degree
    of 1, where none is given. schedule, recompute: of the stack. expert_options: those of `OverlappedMoE`.
    Inputs and the loss are those of this rank's share of the samples (`mesh.replica(degree)`). Gradients, averaged
    over `parts`, are those of the mean of the replicas' losses. UsageError for what cannot work.
    """

    stack: ExpertStack

    def __init__(
        self,
        config: MoEGPTConfig,
        *,
        process_group: ProcessGroup | None = None,
        mesh: Mesh | None = None,
        schedule: str = "block_wise",
        recompute: bool = False,
        **expert_options: Any,
    ) -> None:
        run = resolve(process_group)
        self_mesh = Mesh([1], process_group=run) if mesh is None else mesh
        (degree,) = self_mesh.degrees
        group = self_mesh.tensor(degree)
        super().__init__(config, group)
        self.mesh = self_mesh
        generator = torch.Generator().manual_seed(config.seed)
        options = {"process_group": run, "tensor_group": group, "gate": config.gate} | expert_options
        with torch.random.fork_rng(devices=[]):  # experts are drawn by torch's own
            torch.manual_seed(config.seed)
            blocks = [self._block(config, number, generator, group, options) for number in range(config.layers)]
        # At home an expert has the gradient of the sum of the replicas' losses.
        scale = 1 / self.mesh.replicas(degree)
        self.stack = ExpertStack(blocks, schedule=schedule, recompute=recompute, gradient_scale=scale)
        self._make_norm()

    @staticmethod
    @torch.no_grad()
    def _block(
        config: MoEGPTConfig, number: int, generator: torch.Generator, group: ProcessGroup | None, options: Any
    ) -> MoEBlock:
        attention = Attention(config, generator, group)
        experts = OverlappedMoE(
            config.hidden, config.intermediate, config.experts, top_k=config.top_k,
            shared_intermediate=config.shared_hidden, name=f"experts of layer {number}", **options,
        )  # fmt: skip
        experts.experts.down.mul_((2 * config.layers) ** -0.5)  # as the dense GPT's last products
        return MoEBlock(attention, experts)

    @property
    def layers(self) -> list[OverlappedMoE]:
        """The mixtures of experts, from the first layer's on."""
        return [cast(MoEBlock, block).experts for block in self.stack.blocks]

    def at_call(self, number: int) -> None:
        """Nothing here is drawn at random in a pass."""

    def settle(self) -> None:
        """Move the routers' biases by the demand since they were last moved, as the next pass would. All ranks.

        What each rank has counted by itself is then in what all have, and so in a checkpoint.
        """
        for layer in self.layers:
            layer.router.update_bias(self.stack.process_group)

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters and the ranks that hold the same ones, in the order of the forward pass; for GradientAverage.

        Experts have no such ranks: each is on one.
        """
        assert self.embedding is not None
        assert self.positions is not None
        assert self.norm is not None
        data = self.mesh.data(self.tensor_parallel)
        yield [self.embedding.weight, self.positions], data
        for block, layer in zip(self.stack.blocks, self.layers, strict=True):
            experts = list(layer.experts.parameters())
            spread = {id(parameter) for parameter in experts}
            yield [parameter for parameter in block.parameters() if id(parameter) not in spread], data
            yield experts, None
        yield list(self.norm.parameters()), data
