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
    return re.sub(r"-?\d[\d.]*(e-?\d+)?|'[^']*'|\"[^\"]*\"", "#", why).replace("\n", " ")[:100]


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


def page(results: Results, text: str) -> str:
    """Page of the documentation with the tables of a run. text: the page so far, with marks around them."""
    found, seconds = counts(results), sum(each.get("seconds", 0.0) for each in results)
    pairs, every = covered(results)
    lines = [
        f"{len(results)} cases, {seconds / max(len(results), 1):.1f} s each.",
        "",
        "| verdict | cases | meaning |",
    ]
    lines += ["|---|---|---|", *(f"| {each} | {found[each]} | {meaning} |" for each, meaning in MEANINGS.items()), ""]
    lines += [
        f"Of {every} pairs of choices, of which some exclude one another, {pairs} are in a case that is equal.",
        "",
    ]
    lines += ["| cases | refused with |", "|---|---|"]
    for kind, number in kinds(results, "refused").most_common(25):
        lines += [f"| {number} | `{kind.partition(': ')[2].replace('|', '/').replace('`', '')}` |"]
    lines += ["", "| factor | choices, the plain one first |", "|---|---|"]
    lines += [f"| {name} | {', '.join(choices)} |" for name, choices in FACTORS.items()]
    start, _, rest = text.partition("<!-- run -->\n")
    return (
        f"{start}<!-- run -->\n"
        + "\n".join(lines)
        + f"\n<!-- end of run -->{rest.partition('<!-- end of run -->')[2]}"
    )


MEANINGS = {
    "equal": "losses, gradients, weights, buffers, random and model states are those of one process, on all ranks",
    "refused": "an error of oases with its remedy, on all ranks, before any wrong number",
    "WRONG": "a number differs",
    "crash": "an error without a remedy, or on some ranks alone",
    "hang": "ranks wait for one another",
}
