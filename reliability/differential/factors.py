"""Factors of training programs and their choices, and rules on which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

FACTORS: dict[str, tuple[str, ...]] = {
    # The model. Of each factor the first choice is the plain one, to which cases are reduced.
    "family": ("own", "llama", "qwen2", "gpt2", "opt", "mixtral", "qwen3", "phi", "neox", "gemma3"),
    "layers": ("2", "4", "3"),
    "width": ("16", "24", "8"),
    "heads": ("4", "2", "3"),
    "residual": ("pre", "post", "parallel", "sandwich", "scaled"),
    "norm": ("layer", "rms", "none", "own"),
    "attention": ("none", "sdpa", "eager", "fused", "module"),
    "keys": ("all", "half", "one"),
    "position": ("none", "rotary", "alibi", "table"),
    "mlp": ("plain", "gated", "halves", "experts", "stacked", "normed"),
    "act": ("gelu", "relu", "silu", "tanh"),
    "bias": ("yes", "no"),
    "share": ("none", "mlp", "layer", "norm", "tied"),
    "unused": ("none", "parameter", "layer", "module"),
    "buffer": ("none", "scale", "counter", "transient"),
    "condition": ("none", "index", "training", "length", "attribute"),
    "container": ("list", "sequential", "dict", "attributes", "two_lists"),
    "call": ("plain", "keyword", "pair", "skip", "twice", "collected", "mask", "table", "checkpoint"),
    "head": ("linear", "bias", "mlp"),
    "loss": ("cross", "ignored", "outside", "mse", "auxiliary", "smooth", "z", "chunked"),
    "type": ("float64", "float32"),
    "sequence": ("6", "8", "5", "12"),
    "samples": ("8", "4", "12"),
    "changing": ("no", "length", "samples"),
    # The loop.
    "optimizer": ("sgd", "momentum", "adamw", "single", "adafactor", "muon", "adagrad", "own"),
    "made_by": ("torch", "oases"),
    "groups": ("one", "decay"),
    "accumulate": ("1", "2", "no_sync"),
    "hook": ("none", "gradient", "accumulated", "forward", "module"),
    "closure": ("no", "yes"),
    "clip": ("none", "torch", "oases", "value"),
    "scaler": ("none", "yes", "overflow"),
    "skipped": ("no", "batch", "gradient"),
    "evaluated": ("no", "between", "first"),
    "saved": ("no", "oases", "state"),
    "frozen": ("none", "table", "layer", "norms", "later", "thawed"),
    "adapter": ("none", "own", "wrapped"),
    "zeroed": ("none", "zeros"),
    "edited": ("no", "data", "average", "row"),
    "passes": ("one", "two", "peek"),
    # The ranks, and the options of oases.parallelize.
    "mesh": (
        "tp2", "pp2", "dp2", "dp2.tp2", "pp2.tp2", "pp2.dp2", "tp1", "tp4", "pp3", "pp1.tp2", "dp2.tp1",
        "pp1.dp2.tp2",
    ),
    "schedule": (
        "oases", "sync", "auto", "layers", "fine_grained", "cross_pass", "sub_pipelined_1", "sub_pipelined_2",
    ),
    "sub_batches": ("default", "1", "2", "4"),
    "recompute": ("none", "full", "1"),
    "sequence_parallel": ("no", "yes"),
    "shards": ("none", "zero", "fsdp"),
    "micro_batches": ("default", "1", "2", "4"),
    "pipeline": (
        "one_f_one_b", "gpipe", "pre_recompute", "last_no_recompute", "shifted_critical_path", "interleaved", "zb_h1",
        "zb_v",
    ),
    "backend": ("none", "staged"),
    "wire": ("none", "torch.float64"),
    "experts": ("sharded", "balanced"),
}  # fmt: skip
"""Choices of each factor."""

PLAIN = {name: choices[0] for name, choices in FACTORS.items()}
"""Case of the first choices."""

# Conditions are terms `factor=choice,choice` or `factor!=choice`, joined by " & ". Facts: see `Case.facts`.
USELESS = {
    "own=no": "width heads residual norm attention keys position mlp act bias unused buffer condition container call "
    "head adapter",
    "own=no & share!=tied": "share",
    "own=no & loss=mse,auxiliary,chunked": "loss",
    "attention=none": "heads keys",
    "own=yes & attention=none & position=rotary,alibi": "position",
    "attention=fused,module": "keys",
    "attention=module & position=rotary,alibi": "position",
    "heads=3": "keys",
    "heads=3 & width!=24": "heads",
    "mlp=experts,stacked,normed & share=mlp": "share",
    "mlp=experts,stacked,normed": "adapter",
    "norm=none & share=norm": "share",
    "norm=none & frozen=norms": "frozen",
    "share=tied": "head",
    "loss=mse": "head",
    "loss=mse & share=tied": "share",
    "container=sequential": "call",
    "condition=index & attention=none": "condition",
    "optimizer=own": "closure scaler made_by groups",
    "closure=yes": "scaler clip accumulate skipped",  # it zeroes gradients and goes backwards by itself
    "frozen=thawed & optimizer=own": "frozen",
    "adapter=wrapped": "frozen",
    "share=layer & frozen=layer,thawed,later": "share",  # which would freeze all layers
    "family!=mixtral": "experts",
    "staged=no": "micro_batches",
    "stages=1": "pipeline",
    "replicas=no": "shards",
    "tensor=1": "sequence_parallel",
    # One process has no such result: it is called by several micro-batches, or computes a loss in stages.
    "staged=yes": "scaler backend passes",
    "staged=yes & accumulate=no_sync": "accumulate",
    "staged=yes & outside=yes": "loss",
    "staged=yes & buffer=counter": "buffer",
    "staged=yes & hook=accumulated": "hook",
    # What is always refused would hide all else.
    "deep=no & pipeline=interleaved,zb_v": "pipeline",
    "deep=no": "mesh",
    "mesh=dp2 & shards!=fsdp": "mesh",
    "even=no": "sequence_parallel",
    "schedule=layers": "sequence_parallel",
    "call=twice": "sequence_parallel",
    "staged=no & shards=zero & made_by=torch": "shards",
    "staged=no & shards=zero & scaler!=none": "shards",
    # Gradients that are zero but for rounding, of biases of keys, are made large by these optimizers.
    "own=yes & bias=yes & optimizer=adafactor,muon,adagrad": "optimizer",
    "family=gpt2,opt,qwen2,phi,neox & optimizer=adafactor,muon,adagrad": "optimizer",
    "optimizer=muon": "groups",
    "type=float32 & optimizer=adamw,single,adafactor,muon,adagrad": "type",
}
"""Factors that are plain where a condition holds: other choices have no effect, or no meaning, there."""


def holds(condition: str, facts: Mapping[str, str]) -> bool:
    """Whether all terms of a condition are true; an empty one is."""
    return all((facts[name] in choices) == wanted for name, choices, wanted in _terms(condition))


@cache
def _terms(condition: str) -> list[tuple[str, frozenset[str], bool]]:
    terms = [each.partition("=") for each in condition.split(" & ")] if condition else []
    return [(name.rstrip("!"), frozenset(found.split(",")), not name.endswith("!")) for name, _, found in terms]
