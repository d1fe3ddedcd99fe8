"""Factors of training programs and their choices, and rules on which of them go together, read from factors.txt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path


def _read() -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[str]]]:
    text = Path(__file__).with_name("factors.txt").read_text(encoding="utf-8")
    pairs = [line.split(": ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    choices = {name: tuple(found.split()) for name, found in pairs if "=" not in name}
    return choices, {name: frozenset(found.split()) for name, found in pairs if "=" in name}


FACTORS, USELESS = _read()
"""Choices of each factor, and the factors that are plain where a condition holds."""
PLAIN = {name: choices[0] for name, choices in FACTORS.items()}
"""Case of the first choices."""


def holds(condition: str, facts: Mapping[str, str]) -> bool:
    """Whether all terms of a condition are true; an empty one is."""
    return all((facts[name] in choices) == wanted for name, choices, wanted in _terms(condition))


@cache
def _terms(condition: str) -> list[tuple[str, frozenset[str], bool]]:
    terms = [each.partition("=") for each in condition.split(" & ")] if condition else []
    return [(name.rstrip("!"), frozenset(found.split(",")), not name.endswith("!")) for name, _, found in terms]
