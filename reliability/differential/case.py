"""Training programs as data: factors with choices, random cases, and few cases that hold every pair of choices."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

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
    "passes": ("one", "two", "peek", "noise"),
    # The ranks, and the options of oases.parallelize.
    "mesh": ("tp2", "pp2", "dp2", "dp2.tp2", "pp2.tp2", "pp2.dp2", "tp1", "tp4", "pp3", "pp1.tp2", "dp2.tp1", "pp1.dp2.tp2"),
    "schedule": ("oases", "sync", "auto", "layers", "fine_grained", "cross_pass", "sub_pipelined_1", "sub_pipelined_2"),
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
ALWAYS_DRAWN = ("mesh", "schedule", "layers")
"""Factors of which random cases draw any choice; the plain one of others is likelier."""
OWN = tuple(itertools.takewhile(lambda name: name != "head", FACTORS))[3:]
"""Factors of models that are not from transformers."""
NO_HEADS = ("keys", "position", "heads")


@dataclass(frozen=True)
class Case:
    """A training program. choices: those that are not plain, by factor, in the order of FACTORS."""

    choices: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, **choices: str) -> Case:
        """Make a case of some choices. ValueError for unknown ones."""
        for name, choice in choices.items():
            if choice not in FACTORS.get(name, ()):
                known = FACTORS.get(name) or tuple(FACTORS)
                raise ValueError(f"{name}={choice}: unknown; known are {', '.join(known)}")
        return cls(
            tuple(
                (name, choices[name]) for name in FACTORS if choices.get(name, FACTORS[name][0]) != FACTORS[name][0]
            )
        )

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `str(case)`, or JSON."""
        pairs = json.loads(text) if text.startswith("{") else dict(each.split("=", 1) for each in text.split())
        return cls.of(**pairs)

    def __getitem__(self, name: str) -> str:
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, str]:
        return {name: choices[0] for name, choices in FACTORS.items()} | dict(self.choices)

    def __str__(self) -> str:
        return " ".join(f"{name}={choice}" for name, choice in self.choices)

    def json(self) -> dict[str, str]:
        """Choices that are not plain, by factor."""
        return dict(self.choices)

    def changed(self, **choices: str) -> Case:
        """Make a case with other choices."""
        return Case.of(**{**dict(self.choices), **choices})

    def pairs(self) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        """Pairs of choices of two factors, plain ones among them."""
        return set(itertools.combinations(self._known.items(), 2))

    def degree(self, dimension: str) -> int:
        """Ranks along "pp", "dp" or "tp"."""
        return next((int(part[2:]) for part in self["mesh"].split(".") if part.startswith(dimension)), 1)

    @property
    def staged(self) -> bool:
        """Whether the mesh has a dimension "pp", and so the model `train_step`."""
        return "pp" in self["mesh"]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.degree("pp") * self.degree("dp") * self.degree("tp")

    @property
    def micro_batches(self) -> int:
        """Parts that `train_step` cuts the samples of a replica into."""
        found = self["micro_batches"]
        return int(found) if found != "default" else 2 * self.degree("pp") if self.staged else 1

    @property
    def samples(self) -> int:
        """Samples of a batch, which divide into the micro-batches of all replicas."""
        parts = self.degree("dp") * self.micro_batches * (1 if self["accumulate"] == "1" else 2)
        return -(-int(self["samples"]) // parts) * parts

    @property
    def dtype(self) -> str:
        """Type of the model; the experts of transformers have no float64."""
        return "float32" if self["family"] == "mixtral" else self["type"]

    @property
    def outside(self) -> bool:
        """Whether the loss is computed from the model's result."""
        return self["loss"] == "outside" or (self["family"] != "own" and self["loss"] in ("smooth", "z"))

    @property
    def precision(self) -> str:
        """Type whose digits can be compared: transformers computes its losses in float32."""
        return self.dtype if self["family"] == "own" or self.outside else "float32"


def _useless(case: Case) -> Iterator[str]:
    """Factors whose choice has no effect, or no meaning, beside others: they become plain."""
    if case["family"] != "own":
        yield from OWN
        yield from ("head", "adapter")
        if case["loss"] in ("mse", "auxiliary", "chunked"):
            yield "loss"
    if case["attention"] == "none":
        yield from NO_HEADS
    if case["attention"] in ("fused", "module") or case["heads"] == "3":
        yield "keys"
    if case["attention"] == "module" and case["position"] in ("rotary", "alibi"):
        yield "position"
    if case["share"] == "mlp" and case["mlp"] == "normed":
        yield "share"
    if case["passes"] != "one" and (case.staged or (case["passes"] == "noise" and case.degree("dp") > 1)):
        yield "passes"
    if case["frozen"] == "thawed" and (case["optimizer"] == "own" or case["adapter"] == "wrapped"):
        yield "frozen"
    if case["adapter"] != "none" and case["mlp"] in ("experts", "stacked", "normed"):
        yield "adapter"
    if case["heads"] == "3" and case["width"] != "24":
        yield "heads"
    if case["keys"] == "half" and case["heads"] == "3":
        yield "keys"
    if case["share"] == "mlp" and case["mlp"] in ("experts", "stacked"):
        yield "share"
    if case["share"] == "norm" and case["norm"] == "none":
        yield "share"
    if case["share"] == "tied" and case["head"] != "linear":
        yield "head"
    if case["loss"] == "mse":
        yield "head"
        if case["share"] == "tied":
            yield "share"
    if case["container"] == "sequential" and case["call"] != "plain":
        yield "call"
    if case["condition"] == "index" and case["attention"] == "none":
        yield "condition"
    if case["frozen"] == "norms" and case["norm"] == "none":
        yield "frozen"
    if case["micro_batches"] != "default" and not case.staged:
        yield "micro_batches"
    if case["pipeline"] != "one_f_one_b" and case.degree("pp") == 1:
        yield "pipeline"
    if case["accumulate"] == "no_sync" and case.staged:
        yield "accumulate"
    if case.staged and case.outside:
        yield "loss"
    if case.staged and case["scaler"] != "none":
        yield "scaler"
    if case.staged and case["buffer"] == "counter":
        yield "buffer"
    if case.staged and case["hook"] == "accumulated":  # each of several micro-batches calls it
        yield "hook"
    if case["closure"] == "yes" and case["optimizer"] != "own":  # which zeroes gradients and goes backwards by itself
        yield from ("scaler", "clip", "accumulate", "skipped")
    if case["optimizer"] == "own":
        yield from ("closure", "scaler", "made_by", "groups")
    if case["experts"] == "balanced" and case["family"] != "mixtral":
        yield "experts"
    if case["mesh"] == "dp2" and case["shards"] != "fsdp":  # refused: it names no tensor-parallel dimension
        yield "mesh"
    # What is always refused, and would hide all else.
    parts = case.degree("pp") * (2 if case["pipeline"] in ("interleaved", "zb_v") else 1)
    if parts > int(case["layers"]):
        yield "pipeline" if parts > case.degree("pp") else "mesh"
    if case["backend"] == "staged" and case.staged:
        yield "backend"
    if case["sequence_parallel"] == "yes" and (
        case["schedule"] == "layers" or int(case["sequence"]) % case.degree("tp") or case["call"] == "twice"
    ):
        yield "sequence_parallel"
    if case["shards"] == "zero" and not case.staged and (case["made_by"] != "oases" or case["scaler"] != "none"):
        yield "shards"
    if case["shards"] != "none" and case.degree("dp") == 1:
        yield "shards"
    if case["sequence_parallel"] == "yes" and case.degree("tp") == 1:
        yield "sequence_parallel"
    # Gradients that are zero but for rounding, of biases of keys, are made large by these optimizers.
    if case["optimizer"] in ("adafactor", "muon", "adagrad") and (
        case["bias"] == "yes" or case["family"] in ("gpt2", "opt", "qwen2", "phi", "neox")
    ):
        yield "optimizer"
    if case["optimizer"] == "muon" and case["groups"] != "one":
        yield "groups"
    if case["type"] == "float32" and case["optimizer"] not in ("sgd", "momentum", "own"):
        yield "type"  # whose updates would make rounding large


def settled(case: Case, keep: Mapping[str, str] | None = None) -> Case | None:
    """Make useless choices plain. keep: choices that stay; None where that cannot be."""
    while useless := {name for name in _useless(case) if case[name] != FACTORS[name][0]}:
        if keep is not None and any(name in keep for name in useless):
            return None
        case = case.changed(**{name: FACTORS[name][0] for name in useless})
    if keep is not None and any(case[name] != choice for name, choice in keep.items()):
        return None
    return case


def drawn(seed: int | str, keep: Mapping[str, str] | None = None, plain: float = 0.55) -> Case | None:
    """Draw the case of a seed. keep: choices that it has; None where it cannot. plain: share of plain choices."""
    draw = random.Random(f"{seed}")
    some = plain + (1 - plain) * draw.random() * 0.6
    chosen = {
        name: draw.choice(choices) if name in ALWAYS_DRAWN or draw.random() > some else choices[0]
        for name, choices in FACTORS.items()
    }
    if draw.random() < 0.75:
        chosen["family"] = "own"
    if draw.random() < 0.75:
        chosen["attention"] = draw.choice(FACTORS["attention"][1:])
    if draw.random() < 0.8:
        chosen["mesh"] = draw.choice([mesh for mesh in FACTORS["mesh"] if Case.of(mesh=mesh).ranks < 3])
    return settled(Case.of(**{**chosen, **(keep or {})}), keep)


def case_of(seed: int) -> Case:
    """Draw the case of a seed."""
    case = drawn(seed)
    assert case is not None, "nothing is kept"
    return case


def covering(number: int, seed: int = 0, tries: int = 12) -> list[Case]:
    """Cases of which every pair of choices of two factors is in one, if `number` suffices; equal for equal seeds.

    Made one by one: each has the first pair that is missing, and is that of some random ones with most missing pairs.
    """
    names = list(FACTORS)
    missing = dict.fromkeys(
        ((one, mine), (other, theirs))
        for one, other in itertools.combinations(names, 2)
        for mine, theirs in itertools.product(FACTORS[one], FACTORS[other])
    )
    cases: list[Case] = []
    while missing and len(cases) < number:
        pair = next(iter(missing))
        found = [
            case
            for each in range(tries)
            if (case := drawn(f"{seed} {len(cases)} {each}", dict(pair), plain=0.2)) is not None
        ]
        if not found:
            del missing[pair]  # one choice makes the other useless
            continue
        best = max(found, key=lambda case: len(case.pairs() & missing.keys()))
        cases.append(best)
        for covered in best.pairs():
            missing.pop(covered, None)
    while len(cases) < number:
        cases.append(case_of(seed + len(cases)))
    return cases
