"""Limits of every number that a user gives, by name: options, fields of configurations, plans and models.

A number beyond its limit is an error before anything is built from it. Limits that depend on other numbers, such as
samples that must divide, are checked where those are known.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from oases.errors import UsageError

MOST_LAYERS = 4096
"""Maximum number of layers; a search over more would not finish."""
MOST_PLACES = 2**16
"""Maximum of blocks times sub-batches, or model parts times micro-batches, of a list: half a million ops."""
MOST_LOCAL_RANKS = 1024
"""Maximum number of ranks that oases starts on one machine."""
_STEPS = 10**8
_FLOAT = 3e38
"""Largest number that float32 holds."""


class Limit(NamedTuple):
    """Smallest and largest value that any use of a name allows; integers where it counts something."""

    least: float
    most: float


_RANKS = Limit(1, 2**16)
_SAMPLES = Limit(1, 2**22)
_POSITIVE = Limit(0.0, _FLOAT)

LIMITS: dict[str, Limit] = {
    # Model.
    "hidden": Limit(1, 2**20),
    **dict.fromkeys(("expert_hidden", "shared_hidden", "intermediate", "width", "head_size"), Limit(0, 2**20)),
    "layers": Limit(1, MOST_LAYERS),
    "blocks": Limit(0, 2 * MOST_LAYERS),
    "num_blocks": Limit(0, 2 * MOST_LAYERS),
    "recomputed_layers": Limit(0, MOST_LAYERS),
    **dict.fromkeys(("heads", "kv_heads"), Limit(0, 2**16)),
    "sequence": Limit(1, 2**24),
    "vocabulary": Limit(0, 2**27),
    **dict.fromkeys(("experts", "top_k", "lora_rank"), Limit(0, 2**14)),
    "expert_memory": Limit(-1, 2**60),
    **dict.fromkeys(
        ("balance_weight", "z_weight", "bias_update_rate", "capacity_factor", "learning_rate"),
        Limit(0.0, 1e6),
    ),
    # Batch and time.
    **dict.fromkeys(("batch", "global_batch", "samples", "tokens", "negatives"), _SAMPLES),
    "micro_batches": Limit(1, 2**16),
    "sub_batches": Limit(0, 2**12),
    **dict.fromkeys(
        (
            "train_steps", "warmup", "evaluate_every", "checkpoint_every", "keep",
        ),
        Limit(0, _STEPS),
    ),
    **dict.fromkeys(("steps", "validation_batches"), Limit(1, _STEPS)),
    "clip": _POSITIVE,
    "seed": Limit(0, 2**63 - 1),
    "max_restarts": Limit(0, 10**6),
    "timeout": Limit(0.0, 1e6),
    # Ranks.
    **dict.fromkeys(("tp", "dp", "pp", "data", "pipeline", "stages", "degrees", "nodes"), _RANKS),
    **dict.fromkeys(("tensor", "expert_parallel"), Limit(0, 2**16)),
    **dict.fromkeys(("world", "ranks_per_node"), Limit(0, 10**7)),
    "memory": Limit(0, 2**60),
    # Benchmarks and replayed loads.
    **dict.fromkeys(("iterations", "repeats", "seeds"), Limit(0, 10**4)),
    **dict.fromkeys(("rows", "tables", "powersgd_rank"), Limit(0, 2**12)),
    "copies": Limit(-1, 2**14),
    **dict.fromkeys(("flops",), Limit(0.0, 1e20)),
    **dict.fromkeys(("token_us", "non_expert_ms", "latency_us", "forward_ms", "limit"), Limit(0.0, 1e9)),
    **dict.fromkeys(("cells", "concentration", "drift", "large_lambda", "bucket_mb"), Limit(0.0, 1e6)),
}  # fmt: skip
"""By the name of the option or field. The least value of one command may be above that of its name."""


def fault(name: str, value: Any, shown: str = "") -> str:
    """Error message for a value outside the limit of `name`; empty inside, without a limit, and for other types.

    shown: name to print.
    """
    limit = LIMITS.get(name)
    if limit is None or not isinstance(value, (int, float, numbers.Integral)) or isinstance(value, bool):
        return ""
    name, number = shown or name, value if isinstance(value, float) else int(value)
    if isinstance(limit.most, int) and isinstance(number, float):
        return f"{name} must be a whole number, got {value!r}"
    if isinstance(number, float) and not math.isfinite(number):
        return f"{name} must be finite, got {value!r}"
    if number < limit.least:
        return f"{name} must be at least {limit.least:g}, got {short(value)}"
    if number > limit.most:
        most = str(limit.most) if isinstance(limit.most, int) else f"{limit.most:g}"
        return f"{name} must be at most {most}, got {short(value)}"
    return ""


class _Short(reprlib.Repr):
    """Representation of any value that a parser gives: deep, long, shared many times."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 80, 80

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to print integers of over 4300 digits."""
        if abs(value) < 10**60:
            return repr(value)
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"


_SHORT = _Short()


def short(value: Any) -> str:
    """A value for an error message, cut after 80 characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flag_of(name: str) -> str:
    """Option of the command line for a field: --two-words for two_words."""
    return f"--{name.replace('_', '-')}"


def require_numbers(given: Mapping[str, Any], where: str = "", *, flags: bool = False) -> None:
    """Raise UsageError, naming the number and its limit, for one beyond it, also in a tuple.

    where: prefix of the message, e.g. "plan: ". flags: name options of the command line.
    """
    for name, value in given.items():
        for each in value if isinstance(value, tuple) else (value,):
            found = fault(name, each, flag_of(name) if flags else name)
            if found:
                raise UsageError(where + found)
