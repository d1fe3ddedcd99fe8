"""Sections of `oases.report()`: what other parts of the library add to it, which it does not import."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol


class Section(Protocol):
    """What one owner has to tell; prints as a table. title: the line above it."""

    title: str

    def json(self) -> dict[str, Any]:
        """Plain data."""


class Owner(Protocol):
    """Something that counts what it sends. ranks: global ones of those that it sends among; () without a group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """See above."""

    def section(self) -> Section | None:
        """What it counted; None before there is anything."""


_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in the order in which they came


def register(owner: Owner) -> None:
    """Have reports show an owner, as long as it lives: nothing but a weak reference is kept."""
    _owners[next(_numbers)] = owner


def sections_of(ranks: tuple[int, ...]) -> list[Section]:
    """The sections of all owners among these ranks, in the order in which they were registered."""
    found = [owner.section() for owner in _owners.values() if owner.ranks == ranks]
    return [section for section in found if section is not None]
