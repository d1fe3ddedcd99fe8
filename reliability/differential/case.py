"""Training programs as data: random cases, and few cases that hold every pair of choices."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from reliability.differential.factors import FACTORS, PLAIN, USELESS, holds

ALWAYS_DRAWN = ("mesh", "schedule", "layers")
"""Factors of which random cases draw any choice; the plain one of others is likelier."""


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
        return cls(tuple((name, choices[name]) for name in FACTORS if choices.get(name, PLAIN[name]) != PLAIN[name]))

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read `str(case)`, or JSON."""
        pairs = json.loads(text) if text.startswith("{") else dict(each.split("=", 1) for each in text.split())
        return cls.of(**pairs)

    def __getitem__(self, name: str) -> str:
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, str]:
        return PLAIN | dict(self.choices)

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
        _, found, after = self["mesh"].partition(dimension)
        return int(after[0]) if found else 1

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

    def facts(self) -> dict[str, str]:
        """Choices, and what follows from them: what conditions are on."""
        parts = self.degree("pp") * (2 if self["pipeline"] in ("interleaved", "zb_v") else 1)
        own, replicas = self["family"] == "own", self.degree("dp") > 1
        flags = {
            "own": own, "outside": self.outside, "staged": self.staged, "replicas": replicas,
            "direct": own and not self.outside, "cut": replicas or self["accumulate"] != "1",
            "deep": parts <= int(self["layers"]), "even": int(self["sequence"]) % self.degree("tp") == 0,
        }  # fmt: skip
        numbers = {"stages": f"{self.degree('pp')}", "tensor": f"{self.degree('tp')}"}
        return self._known | numbers | {name: "yes" if each else "no" for name, each in flags.items()}

    @property
    def precision(self) -> str:
        """Type whose digits can be compared: transformers has norms, angles and losses in float32, Muon bfloat16."""
        if self["optimizer"] == "muon":
            return "bfloat16"
        return self.dtype if self["family"] == "own" else "float32"


SMALL_MESHES = [mesh for mesh in FACTORS["mesh"] if Case.of(mesh=mesh).ranks < 3]
"""Meshes that most random cases have, since cores are few."""


def _useless(case: Case) -> set[str]:
    facts, chosen = case.facts(), dict(case.choices).keys()
    return {
        name
        for condition, names in USELESS.items()
        if names & chosen and holds(condition, facts)
        for name in names & chosen
    }


def settled(case: Case, keep: Mapping[str, str] | None = None) -> Case | None:
    """Make useless choices plain. keep: choices that stay; None where that cannot be."""
    kept = keep or {}
    while useless := _useless(case):
        if useless & kept.keys():
            return None
        case = case.changed(**{name: PLAIN[name] for name in useless})
    return case if all(case[name] == choice for name, choice in kept.items()) else None


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
        chosen["mesh"] = draw.choice(SMALL_MESHES)
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
    choices = [[(name, each) for each in found] for name, found in FACTORS.items()]
    both = (itertools.product(*two) for two in itertools.combinations(choices, 2))
    missing = dict.fromkeys(itertools.chain.from_iterable(both))
    cases: list[Case] = []
    while missing and len(cases) < number:
        pair = next(iter(missing))
        tried = (drawn(f"{seed} {len(cases)} {each}", dict(pair), plain=0.2) for each in range(tries))
        found = [case for case in tried if case is not None]
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
