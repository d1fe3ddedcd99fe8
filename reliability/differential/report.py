"""Tables of verdicts: for a terminal, and as a page of the documentation."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reliability.differential.case import Case
from reliability.differential.factors import FACTORS

Results = Sequence[Mapping[str, Any]]
VERDICTS = ("equal", "refused", "WRONG", "crash", "hang", "void")


def counts(results: Results) -> Counter[str]:
    """Number of cases by verdict."""
    return Counter(each["verdict"] for each in results)


def kinds(results: Results, *verdicts: str) -> Counter[str]:
    """Number of cases by verdict and reason, without numbers and names."""
    return Counter(f"{each['verdict']}: {kind_of(each['why'])}" for each in results if each["verdict"] in verdicts)


def kind_of(why: str) -> str:
    """Reason without numbers, names and values."""
    return re.sub(r"-?[\d.]+(e-?\d+)?|'[^']*'|\"[^\"]*\"", "#", why).replace("\n", " ")[:100]


def covered(results: Results) -> tuple[int, int]:
    """Pairs of choices that some case with the verdict "equal" has, and all pairs."""
    pairs = set().union(*(Case.of(**each["case"]).pairs() for each in results if each["verdict"] == "equal"))
    every = sum(len(FACTORS[one]) * len(FACTORS[other]) for one, other in itertools.combinations(FACTORS, 2))
    return len(pairs), every


def summary(results: Results) -> str:
    """Counts, seconds per case, and reasons of what is not equal."""
    found, seconds = counts(results), sum(each.get("seconds", 0.0) for each in results)
    pairs, every = covered(results)
    lines = [", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])]
    lines += [f"{len(results)} cases, {seconds / max(len(results), 1):.2f} s each"]
    lines += [f"pairs of choices in equal ones: {pairs} of {every}"]
    lines += [f"{number:5} {kind}" for kind, number in kinds(results, *VERDICTS[1:]).most_common(40)]
    return "\n".join(lines)


def page(results: Results) -> str:
    """Page of the documentation on a run, in Markdown."""
    found, seconds = counts(results), sum(each.get("seconds", 0.0) for each in results)
    pairs, every = covered(results)
    rows = "\n".join(f"| {verdict} | {found[verdict]} | {MEANINGS[verdict]} |" for verdict in VERDICTS[:-1])
    reasons = "\n".join(
        f"| {number} | `{kind.partition(': ')[2].replace('|', '/').replace('`', '')}` |"
        for kind, number in kinds(results, "refused").most_common(25)
    )
    return PAGE.format(
        number=len(results), rows=rows, reasons=reasons, pairs=pairs, every=every,
        each=seconds / max(len(results), 1),
        factors="\n".join(f"| {name} | {', '.join(choices)} |" for name, choices in FACTORS.items()),
    )  # fmt: skip


MEANINGS = {
    "equal": "losses, gradients, weights, buffers and the whole state are those of one process, on all ranks",
    "refused": "an error of oases with its remedy, on all ranks, before any wrong number",
    "WRONG": "a number differs",
    "crash": "an error without a remedy, or on some ranks alone",
    "hang": "ranks wait for one another",
}
PAGE = """# Random training programs

Does a parallelized model train as one process does, whatever the program is? A case is a training program as data:
one choice of each factor below. Its text is run in one process and on one to four CPU ranks over gloo. Half of the
digits of the type (float64, where the model can) must agree in every loss, gradient and weight of three steps.

    make differential                                                # all pairs of choices, 400 cases
    make differential DIFFERENTIAL="--cases 20000 --minutes 480"     # a night; goes on where it was cut off
    make differential DIFFERENTIAL="--case 'mlp=gated mesh=dp2.tp2' --shrink"
    make differential DIFFERENTIAL="--faults"                        # must find faults that are planted

With `--shrink` what is bad is reduced to the smallest case with the same verdict, and written as a program of its own
for torchrun. Ranks that hang print the stacks of their threads. `--page docs/benchmarks/differential.md` writes this
page.

## The last run

{number} cases, {each:.1f} s each on two shared cores.

| verdict | cases | meaning |
|---|---|---|
{rows}

Of {every} pairs of choices, of which some exclude one another, {pairs} stand in a case that is equal.

What was refused, without names and numbers:

| cases | error |
|---|---|
{reasons}

## Factors

The first choice is the plain one, to which a case is reduced.

| factor | choices |
|---|---|
{factors}
"""
