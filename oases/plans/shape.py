"""Sizes of a GPT and of its experts, and bytes of parameters with their gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from oases.core.schedule import from_text, is_text
from oases.errors import UsageError
from oases.limits import require_numbers, short

KINDS = ("attention", "mlp")
"""Names of the blocks of a GPT's layer."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, whatever the parameter's dtype: gradients accumulate in float32."""
REDUCED_UNITS = 2
"""Blocks whose whole gradients are being reduced at a time, with fsdp or zero; another one waits for the first."""

LARGEST = 2**31 - 1
"""Upper bound of any size or count; anything larger is a typing error."""


def state_bytes(element: int, parameters: int, replicas: int, *, zero: bool = False, fsdp: bool = False) -> int:
    """Bytes of parameters, gradients and Adam state on a rank. element: bytes of a parameter.

    Gradients are float32. 16-bit weights have float32 masters beside the two moments: 18 bytes per parameter in all,
    against 16 in float32. zero, fsdp: `replicas` share float32 weights, gradients and moments; with zero each has
    whole weights besides. Not in it: what is whole for a while, see `planner.memory.sharding_bytes`.
    """
    if replicas > 1 and (zero or fsdp):
        return parameters * (GRADIENT_BYTES + 12) // replicas + parameters * element * zero
    return parameters * (element + GRADIENT_BYTES + (8 if element == GRADIENT_BYTES else 12))


@dataclass(frozen=True)
class GPTSizes:
    """Sizes of a GPT: `layers` times attention and an MLP of four times the width. sequence: tokens per sample.

    Differences from a GPT, 0 or False if there are none: head_size: features per head. kv_heads: key/value heads
    (GQA). intermediate: MLP width. gated: gated MLP with a third matmul. tied: tied embeddings.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = 50304
    dtype: str = "float32"
    name: str = "gpt"
    head_size: int = 0
    kv_heads: int = 0
    intermediate: int = 0
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model: {name} must be a whole number of at least 1, got {short(value)}")
        for name in ("head_size", "kv_heads", "intermediate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"model: {name} must be a whole number of at least 0, got {short(value)}")
        require_numbers(vars(self), "model: ")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UsageError(f"model: {self.heads} heads do not divide by kv_heads {self.kv_heads}")
        if not self.head_size and self.hidden % self.heads:
            raise UsageError(f"model: hidden {self.hidden} does not divide by {self.heads} heads")
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"model: unknown dtype {self.dtype!r}; known are {', '.join(ELEMENT_BYTES)}")

    @property
    def is_gpt(self) -> bool:
        """Whether its blocks are a GPT's, as those of measured profiles are."""
        same = self.intermediate in (0, 4 * self.hidden) and self.kv_heads in (0, self.heads)
        return same and self.attended == self.hidden and not self.gated

    @property
    def attended(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_size if self.head_size else self.hidden

    @property
    def divisor(self) -> int:
        """Largest degree that divides heads, widths and vocabulary."""
        return gcd(self.heads, self.kv_heads, self.hidden, self.intermediate, self.vocabulary)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces every MLP: sizes, router, and replication of busy experts.

    experts: per layer, sharded across all ranks of its stage. top_k: experts per token. expert_hidden: width of an
    expert, 0 for 4 x hidden. shared_hidden: width of the shared expert, 0 for none. gate: of the router.
    balance_weight, z_weight: weights of its auxiliary losses. bias_update_rate: 0 = no bias. capacity_factor: 0 =
    drops no tokens. placement: method that replicates experts. expert_memory: bytes of one layer's replicas per
    rank, -1 = unlimited. expert_schedule: name of one in `oases.plans.expert_schedules`, or the text of one for a
    segment's layers.
    """

    experts: int
    top_k: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0
    gate: str = "softmax"
    balance_weight: float = 0.01
    z_weight: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float = 0.0
    placement: str = "prophet"
    expert_memory: int = -1
    expert_schedule: str = "block_wise"

    def __post_init__(self) -> None:
        require_numbers(vars(self))
        if self.experts < 1:
            raise UsageError(f"experts must be at least 1, or 0 for a dense model, got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top_k must be from 1 to the {self.experts} experts, got {self.top_k}")
        if self.placement != "none" and self.expert_schedule == "plain":
            raise UsageError(
                f"expert_schedule plain moves no experts, but placement is {self.placement}; give placement none, or "
                "another schedule"
            )

    @property
    def name(self) -> str:
        """Name of the expert schedule."""
        text = self.expert_schedule
        return from_text(text, "experts").name if is_text(text) else text

    def layer_parameters(self, hidden: int) -> int:
        """Parameters of a layer's experts on all ranks together."""
        return 2 * hidden * (self.experts * (self.expert_hidden or 4 * hidden) + self.shared_hidden)
