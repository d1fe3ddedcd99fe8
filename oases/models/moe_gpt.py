"""GPT with mixtures of experts in place of MLPs, sharded across all ranks of a run; attention as in `GPT`.

A run has N ranks: N / t replicas of t tensor-parallel ranks each. A replica has its own share of the samples, and
each of its ranks dispatches its share of the replica's tokens to the experts. Weights are drawn from one seed,
independently of N and t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from oases.core.execution.group import ProcessGroup, resolve
from oases.distributed.mesh import Mesh
from oases.distributed.planned_stack import BlockMaker, PlannedStack
from oases.models.gpt import Attention, Decoder, GPTConfig, in_order, plan_of_one_stage
from oases.moe.layer import OverlappedMoE
from oases.moe.router import Gate
from oases.moe.stack import ExpertStack
from oases.plans.check import check
from oases.plans.expert_schedules import resolve_experts
from oases.plans.plan import Experts, Plan, Segment


@dataclass(frozen=True)
class MoEGPTConfig(GPTConfig):
    """Sizes of a GPT with experts. `experts` must be divisible by the number of ranks.

    top_k: experts per token. expert_hidden: width of an expert, 0 for 4 x hidden. shared_hidden: width of the
    shared expert, 0 for none. gate: of the router, "softmax" or "sigmoid".
    """

    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0
    gate: Gate = "softmax"

    @property
    def intermediate(self) -> int:
        """Width of an expert."""
        return self.expert_hidden or 4 * self.hidden


class MoEBlock(nn.Module):
    """Layer of an `ExpertStack`: attention, norm, experts, with residuals."""

    def __init__(self, attention: Attention, experts: OverlappedMoE) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(experts.hidden)
        self.experts = experts

    def before(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Attention, and the normed input of the experts."""
        x_BSH = self.attention(x_BSH)
        return x_BSH, self.norm(x_BSH)

    def after(self, x_BSH: Tensor, y_BSH: Tensor) -> Tensor:
        """Residual."""
        return x_BSH + y_BSH


class ExpertChain(PlannedStack):
    """Layers of a stage, each segment an `ExpertStack`; the plan's two blocks, attention and MLP, form one layer.

    options: those of ExpertStack, overriding the plan's.
    """

    def _numbers(self, first: int, segment: Segment) -> range:
        return range(first // 2, (first + segment.num_blocks) // 2)

    def _stack(self, blocks: list[nn.Module], first: int, segment: Segment, options: dict[str, Any]) -> nn.Module:
        if isinstance(options["schedule"], str):
            again = options.get("recompute", segment.recomputed_layers > 0)
            options = options | {"schedule": resolve_experts(options["schedule"], len(blocks), again)}
        # An expert's gradient on its owner rank is that of the sum of the replicas' losses.
        return ExpertStack(blocks, gradient_scale=1 / self.mesh.replicas(segment.tp), **options)

    def _unshared(self, block: Any) -> list[nn.Parameter]:
        return list(block.experts.experts.parameters())

    def at_call(self, number: int) -> None:
        """Does nothing: no random numbers are drawn in a pass."""


class MoEGPT(Decoder):
    """Decoder-only language model whose layers are attention and a mixture of experts, run by an `ExpertStack`.

    process_group: all ranks of the run, None for the default group; experts are sharded across those of a stage.
    plan: with experts, defines their sizes, schedule and options, as config does for the model. Without a plan:
    mesh, of one stage with one tensor-parallel degree, created with degree 1 if not given; schedule, recompute: of
    the stack. expert_options: those of `OverlappedMoE`, overriding the plan's. Gradients averaged over `parts` are
    those of the mean of the replicas' losses. Raises UsageError for unsupported combinations.
    """

    def __init__(
        self,
        config: MoEGPTConfig,
        *,
        process_group: ProcessGroup | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        schedule: str = "block_wise",
        recompute: bool = False,
        **expert_options: Any,
    ) -> None:
        run = resolve(process_group)
        stack_options: dict[str, Any] = {"schedule": schedule, "recompute": recompute}
        if plan is not None:
            assert plan.experts is not None, "a plan with experts"
            stack_options = {"schedule": plan.experts.expert_schedule}
            expert_options = _options_of(plan.experts) | expert_options
            if mesh is None:
                check(plan)
                mesh = Mesh.of(plan, process_group=run)
        else:
            mesh = Mesh([1], process_group=run) if mesh is None else mesh
            experts = Experts(config.experts, config.top_k, config.expert_hidden, config.shared_hidden)
            plan = plan_of_one_stage(config, mesh.ranks, mesh.degrees[0], experts)
        maker = _layer_maker(config, {"process_group": mesh.stage_group, "gate": config.gate} | expert_options)
        super().__init__(config, plan, mesh, ExpertChain(plan, maker, mesh, **stack_options))
        for layer in self.layers:
            layer.router.loss_scale = 1 / plan.micro_batches

    @property
    def layers(self) -> list[OverlappedMoE]:
        """Mixtures of experts, in order of the layers."""
        return [cast(MoEBlock, block).experts for block in self.stack.blocks]

    def layers_of(self, part: int) -> dict[int, OverlappedMoE]:
        """Mixtures of experts of a model part on this rank, by layer number."""
        chunk = self.stack.chunks[part // self.mesh.num_stages]
        first, blocks = chunk.first_block, sum(segment.num_blocks for segment in chunk.segments)
        numbers = range(first // 2, (first + blocks) // 2)
        return {number: cast(MoEBlock, self.stack.blocks[number]).experts for number in numbers}

    def settle(self) -> None:
        """Update the routers' biases by the demand since their last update, as the next pass would. Collective: all
        ranks.

        What each rank has counted locally is then in the biases, and so in a checkpoint.
        """
        for layer in self.layers:
            layer.router.update_bias(layer.process_group)


def _options_of(experts: Experts) -> dict[str, Any]:
    """Options of every `OverlappedMoE` in a plan, besides its sizes."""
    return {
        "placement": experts.placement, "balance_weight": experts.balance_weight, "z_weight": experts.z_weight,
        "bias_update_rate": experts.bias_update_rate, "capacity_factor": experts.capacity_factor or None,
        "memory_budget": None if experts.expert_memory < 0 else float(experts.expert_memory),
    }  # fmt: skip


def _layer_maker(config: MoEGPTConfig, options: Mapping[str, Any]) -> BlockMaker:
    """Factory of the layers, each with its attention sharded over its own group."""
    generator = torch.Generator().manual_seed(config.seed)
    with torch.random.fork_rng(devices=[]):  # experts are initialised from torch's global generator
        torch.manual_seed(config.seed)
        state = torch.get_rng_state()

    @torch.no_grad()
    def draw(number: int, group: ProcessGroup | None) -> nn.Module:
        nonlocal state
        attention = Attention(config, generator, group)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            experts = OverlappedMoE(
                config.hidden, config.intermediate, config.experts, top_k=config.top_k, tensor_group=group,
                shared_intermediate=config.shared_hidden, name=f"experts of layer {number}", **options,
            )  # fmt: skip
            state = torch.get_rng_state()
        experts.experts.down.mul_((2 * config.layers) ** -0.5)  # as the dense GPT's output projections
        return MoEBlock(attention, experts)

    return in_order(draw)
