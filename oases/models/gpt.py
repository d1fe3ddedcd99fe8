"""GPT with overlapped tensor parallelism: pre-norm, causal attention, GELU, tied embeddings.

Every weight is initialised whole from one seed and then sharded, so any tensor-parallel degree starts from the same
model. Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.core.execution.executor import Context
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_size, resolve
from oases.distributed.fsdp import FsdpUnit
from oases.distributed.mesh import Mesh
from oases.distributed.planned_stack import BlockMaker, PlannedStack
from oases.distributed.reshard import reshard
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.errors import UsageError
from oases.layers import (
    OverlappedColumnLinear,
    OverlappedEmbedding,
    OverlappedRowLinear,
    causal_attention,
    parallel_cross_entropy,
)
from oases.layers.fused_norm import PreNormBlock
from oases.layers.linear import shard_size
from oases.limits import require_numbers
from oases.plans.check import check
from oases.plans.gpt import gpt
from oases.plans.plan import Experts, Plan, Segment, Stage


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `heads` must divide `hidden`, and the tensor-parallel degree must divide `heads`."""

    vocabulary: int = 256
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    sequence: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        require_numbers(vars(self))
        for name in ("vocabulary", "hidden", "layers", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} does not divide by heads {self.heads}")


def _linear(config: GPTConfig, generator: torch.Generator, inputs: int, outputs: int, scale: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    nn.init.normal_(linear.weight, std=0.02 * scale, generator=generator)
    nn.init.zeros_(linear.bias)
    return linear


class Attention(PreNormBlock):
    """Norm, fused column-parallel QKV (sharded by head), causal attention, row-parallel projection."""

    causal = True

    def __init__(self, config: GPTConfig, generator: torch.Generator, group: ProcessGroup | None) -> None:
        super().__init__()
        h = config.hidden
        self.local_heads = shard_size("heads", config.heads, group)
        self.head_width = h // config.heads
        self.norm = nn.LayerNorm(h)
        # Rows of the weight are ordered by head, q, k and v together, so a slice of rows holds whole heads.
        self.qkv = OverlappedColumnLinear.from_linear(_linear(config, generator, h, 3 * h, 1), process_group=group)
        scale = (2 * config.layers) ** -0.5
        self.projection = OverlappedRowLinear.from_linear(
            _linear(config, generator, h, h, scale), process_group=group
        )

    @property
    def row(self) -> Any:
        """The projection."""
        return self.projection

    def product(self, h_BSH: Tensor) -> Tensor:
        """[B, S, H] -> this rank's partial sum of the projection, [B, S, H]."""
        return self.projection.partial(self._attend(self.qkv.partial(h_BSH)))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H], replicated -> the block's output, with an exposed all-reduce."""
        return x_BSH + self.projection(self._attend(self.qkv(self.prepare(x_BSH))))

    def _attend(self, qkv: Tensor) -> Tensor:
        qkv = qkv.unflatten(-1, (self.local_heads, 3, self.head_width))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-2))
        return causal_attention(q, k, v).transpose(1, 2).flatten(-2)


class Mlp(PreNormBlock):
    """Norm, column-parallel up, GELU, row-parallel down."""

    token_wise = True

    def __init__(self, config: GPTConfig, generator: torch.Generator, group: ProcessGroup | None) -> None:
        super().__init__()
        h = config.hidden
        self.norm = nn.LayerNorm(h)
        self.up = OverlappedColumnLinear.from_linear(_linear(config, generator, h, 4 * h, 1), process_group=group)
        scale = (2 * config.layers) ** -0.5
        self.down = OverlappedRowLinear.from_linear(_linear(config, generator, 4 * h, h, scale), process_group=group)

    @property
    def row(self) -> Any:
        """The down projection."""
        return self.down

    def product(self, h_BSH: Tensor) -> Tensor:
        """[B, S, H] -> this rank's partial sum of the down projection, [B, S, H]."""
        return self.down.partial(F.gelu(self.up.partial(h_BSH), approximate="tanh"))


def transformer_blocks(config: GPTConfig, group: ProcessGroup | None) -> list[nn.Module]:
    """The 2 x layers blocks of an OverlappedStack, equal for every tensor-parallel degree."""
    maker = block_maker(config)
    return [maker(index, group) for index in range(2 * config.layers)]


def block_maker(config: GPTConfig) -> BlockMaker:
    """Factory of those blocks, each sharded over its own group; weights are drawn in order of the blocks."""
    generator = torch.Generator().manual_seed(config.seed)
    return in_order(lambda index, group: (Attention, Mlp)[index % 2](config, generator, group))


def in_order(draw: BlockMaker) -> BlockMaker:
    """Draw blocks from the first one on, whichever are requested.

    Skipped blocks are drawn too and freed, so that later ones have the weights of the whole model. Raises
    ValueError for a block before one that was already created.
    """
    drawn = 0

    def make(index: int, group: ProcessGroup | None) -> nn.Module:
        nonlocal drawn
        if index < drawn:
            raise ValueError(f"block {index} was requested after block {drawn - 1}; request blocks in order")
        while drawn <= index:
            block = draw(drawn, group)
            drawn += 1
        return block

    return make


def plan_of_one_stage(config: GPTConfig, ranks: int, tp: int, experts: Experts | None = None) -> Plan:
    """Plan of one stage and one degree for a model built without a plan; its stack's options decide how it runs."""
    for name in ("heads", "hidden", "vocabulary"):
        if getattr(config, name) % tp:
            fits = ", ".join(str(t) for t in range(1, 65) if getattr(config, name) % t == 0)
            raise ValueError(
                f"{name} is {getattr(config, name)}, which does not divide by the tensor-parallel degree {tp}; "
                f"degrees that divide it: {fits}"
            )
    shape = gpt(config.hidden, config.layers, config.heads, config.sequence, config.vocabulary)
    stage = Stage((Segment(2 * config.layers, tp, "sync", 1),))
    return Plan(shape, ranks, ranks, ranks // tp, 1, (stage,), experts=experts)


class Decoder(HoldsGroup, nn.Module):
    """Decoder without its blocks: embedding, positions, norm, head and loss. `stack` runs the blocks.

    Embedding and head have the degree of the plan's first segment. With several stages the model is this rank's
    part: the embedding with the first part, norm and head with the last, the tied table with both. Names and weights
    are those of the whole model. Inputs and loss are those of this rank's share of the samples
    (`mesh.replica(degree)`). Raises UsageError for a plan of another model size.
    """

    stack: PlannedStack

    def __init__(self, config: GPTConfig, plan: Plan, mesh: Mesh, stack: PlannedStack) -> None:
        super().__init__()
        _require_sizes(config, plan)
        self.config, self.mesh = config, mesh
        self.is_first = stack.chunks[0].number == 0
        self.is_last = stack.chunks[-1].number == len(plan.parts) - 1
        around = plan.stages[0 if self.is_first or self.is_last else mesh.stage]
        self.process_group = mesh.tensor(around.segments[0].tp)
        self.ends: FsdpUnit | None = None
        """FSDP unit of embedding, norm and head, if they are sharded."""
        generator = torch.Generator().manual_seed(config.seed + 1)
        table = torch.empty(config.vocabulary, config.hidden).normal_(std=0.02, generator=generator)
        positions = torch.empty(config.sequence, config.hidden).normal_(std=0.02, generator=generator)
        self.embedding = self.positions = None
        if self.is_first or self.is_last:
            self.embedding = OverlappedEmbedding.from_embedding(
                nn.Embedding.from_pretrained(table, freeze=False), process_group=self.process_group
            )
        if self.is_first:
            self.positions = nn.Parameter(positions)
        self.stack = stack
        self.norm = nn.LayerNorm(config.hidden) if self.is_last else None

    def at_call(self, number: int) -> None:
        """Set the number of the next pass in the whole training, from which random numbers are derived."""
        self.stack.at_call(number)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Tokens, equal on a replica's ranks -> logits of this rank's shard of the vocabulary, [B, S, V/t]."""
        return self._logits(tokens_BS)

    def _logits(self, tokens_BS: Tensor) -> Tensor:
        # Not in forward(): FSDP2's hooks surround it if weights are sharded.
        return self.head(self.stack(self.embed(tokens_BS)))

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Tokens -> the first block's input, [B, S, H]. Raises ValueError for too long a sequence."""
        length = tokens_BS.shape[1]
        if length > self.config.sequence:
            raise ValueError(f"a sequence of {length} tokens exceeds the model's {self.config.sequence}")
        if self.embedding is None or self.positions is None:
            raise RuntimeError("this stage has no embedding; only that of the first part reads tokens")
        with self._gathered():
            embedded: Tensor = self.embedding(tokens_BS) + self.positions[:length]
        return embedded

    def head(self, x_BSH: Tensor) -> Tensor:
        """The last block's output -> logits, [B, S, V/t], for the samples of a replica of the head's degree."""
        if self.embedding is None or self.norm is None:
            raise RuntimeError("this stage has no head; only that of the last part computes logits")
        x_BSH = reshard(x_BSH, self.stack.last_degree, self.tensor_parallel, self.mesh)
        with self._gathered():
            x_BSH = self.norm(x_BSH)
            weight = self.embedding.weight
            if self.tensor_parallel == 1:
                return F.linear(x_BSH, weight)
            logits: Tensor = torch.ops.oases.column_linear(x_BSH, weight, None, self._group_name, 2, False)
        return logits

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Context in which embedding, norm and head are gathered; without gradients they are freed on exit."""
        if self.ends is not None:
            self.ends.gather()
        yield
        if self.ends is not None and not torch.is_grad_enabled():
            self.ends.release()

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, equal on every rank of a replica."""
        return parallel_cross_entropy(self._logits(tokens_BS), targets_BS, process_group=self.process_group)

    @property
    def tied(self) -> nn.Parameter | None:
        """The tied table if it is on two stages: its gradient is summed over both, its norm counts once."""
        return None if self.embedding is None or self.is_first == self.is_last else self.embedding.weight

    def shard_weights(
        self, dtype: torch.dtype | None = None, *, keep: bool = False, gradient_wire: str = ""
    ) -> ShardedGradientAverager:
        """Shard every weight over the data-parallel ranks of `parts` (`oases.distributed.fsdp`).

        Call it after moving the model to its device. dtype, keep: see `FsdpUnit`. gradient_wire: see
        `ShardedGradientAverager`. Embedding, norm and head stay gathered from their first use in a step until its
        end, like the root module of FSDP2.
        """
        mesh, units = self.mesh, self.stack.shard_weights(dtype, keep=keep)
        own = [*self.parameters(recurse=False), *([] if self.embedding is None else self.embedding.parameters())]
        data, weights = mesh.data(self.tensor_parallel), mesh.weights(self.tensor_parallel)
        if own and group_size(data) > 1:
            assert data is not None
            assert weights is not None
            others = set(self.stack.parameters())
            self.ends = FsdpUnit(self, data, weights, "embedding and head", others, dtype=dtype, keep=keep)
            units = [self.ends, *units]
        return ShardedGradientAverager(units, gradient_wire)

    def run_part(
        self, part: int, x_BSH: Tensor | None, tokens_BS: Tensor, targets_BS: Tensor, context: Context
    ) -> Tensor:
        """Run one model part: returns its output, or the loss for the last part.

        part: number of the part in the model. x_BSH: output of the previous part; None for the first, which reads
        the tokens. targets_BS: read by the last part. context: passed to its stacks.
        """
        x_BSH = self.embed(tokens_BS) if x_BSH is None else x_BSH
        y = self.stack.run(x_BSH, part // self.mesh.num_stages, context)
        if self.is_last and part == self.stack.chunks[-1].number:
            return parallel_cross_entropy(self.head(y), targets_BS, process_group=self.process_group)
        return y

    def parts(self) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """Parameters and their data-parallel group, in order of the forward pass, for GradientAverager."""
        data = self.mesh.data(self.tensor_parallel)
        # On one stage the table comes first although the head uses it too: its gradient is complete when the
        # embedding's is.
        table = [] if self.embedding is None else [self.embedding.weight]
        if self.positions is not None:
            yield [*table, self.positions], data
        yield from self.stack.parts()
        if self.norm is not None:
            yield [*([] if self.is_first else table), *self.norm.parameters()], data


class GPT(Decoder):
    """Decoder-only language model.

    process_group: the tensor-parallel group; with a plan, all ranks of the run. stack_options: those of
    OverlappedStack. plan: defines how the blocks run, in the groups of `mesh` (`Mesh.of`), which are created (and
    the plan checked) if none are given.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        process_group: ProcessGroup | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        **stack_options: Any,
    ) -> None:
        group = resolve(process_group)
        if plan is None:
            degree = group_size(group)
            plan = plan_of_one_stage(config, degree, degree)
            mesh = Mesh([degree], process_group=group)
        elif mesh is None:
            check(plan)
            mesh = Mesh.of(plan, process_group=group)
        super().__init__(config, plan, mesh, PlannedStack(plan, block_maker(config), mesh, **stack_options))


def _require_sizes(config: GPTConfig, plan: Plan) -> None:
    for name in ("vocabulary", "hidden", "layers", "heads", "sequence"):
        ours, theirs = getattr(config, name), getattr(plan.model, name)
        if ours != theirs:
            raise UsageError(f"plan: it is for {name} {theirs}, but the model has {name} {ours}")
