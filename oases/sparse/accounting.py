"""What reductions cost: bytes on the wire, seconds to encode, send and decode, and error, by tensor and mode."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Reduction:
    """One tensor's reduction in one step, on this rank.

    mode: by which it went in the end. bytes: sent by this rank, by the formulas of a ring; dense_bytes: what dense
    would have sent. union: rows that any rank has, of `rows`; None where nobody looked. encode_seconds and
    decode_seconds: this rank's work; send_seconds: from the start of a collective until it was found done, other work
    in between included; seconds: from start to result. phases: rounds of collectives that had to wait for one
    another. fallback: why another mode was taken than was asked for, or empty. error: the relative L2 error against
    the exact mean; None where it was not asked for.
    """

    name: str
    mode: str
    rows: int = 0
    union: int | None = None
    bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    decode_seconds: float = 0.0
    phases: int = 0
    fallback: str = ""
    error: float | None = None

    @property
    def bytes_sent(self) -> int:
        """The same as `bytes`."""
        return self.bytes


@dataclass
class Account:
    """Sums over the reductions of one tensor. bytes, dense_bytes: what was sent, and what dense would have sent."""

    name: str
    steps: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0
    decode_seconds: float = 0.0
    worst_error: float | None = None

    def add(self, found: Reduction) -> None:
        """Count one reduction."""
        self.steps += 1
        self.modes[found.mode] += 1
        if found.fallback:
            self.fallbacks[found.fallback] += 1
        for name in ("bytes", "dense_bytes", "seconds", "encode_seconds", "send_seconds", "decode_seconds"):
            setattr(self, name, getattr(self, name) + getattr(found, name))
        if found.error is not None:
            self.worst_error = max(found.error, self.worst_error or 0.0)


@dataclass
class Report:
    """Accounts by tensor, in the order in which tensors first came; prints as a table, below its title in reports."""

    accounts: list[Account]
    title: str = "sparse gradients"

    @property
    def bytes(self) -> int:
        """Sent by this rank, over all tensors."""
        return sum(account.bytes for account in self.accounts)

    @property
    def saved(self) -> float | None:
        """The share of dense all-reduce's bytes that was not sent; None where dense would send nothing either."""
        dense = sum(account.dense_bytes for account in self.accounts)
        return 1 - self.bytes / dense if dense else None

    def json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            asdict(account) | {"modes": dict(account.modes), "fallbacks": dict(account.fallbacks)}
            for account in self.accounts
        ]
        return {"bytes": self.bytes, "saved": self.saved, "tensors": rows}

    def __str__(self) -> str:
        lines = [
            f"{'tensor':28} {'steps':>6} {'MB/step':>9} {'of dense':>9} {'enc ms':>7} {'send':>7} {'dec':>7}  modes"
        ]
        for one in self.accounts:
            steps = max(1, one.steps)
            share = f"{one.bytes / one.dense_bytes:.1%}" if one.dense_bytes else "-"
            times = [
                f"{1e3 * one_time / steps:7.2f}"
                for one_time in (one.encode_seconds, one.send_seconds, one.decode_seconds)
            ]
            modes = ", ".join(f"{mode} {count}" for mode, count in one.modes.items())
            why = "; ".join(f"{reason} ({count})" for reason, count in one.fallbacks.items())
            lines.append(
                f"{one.name:28} {one.steps:6} {one.bytes / steps / 1e6:9.3f} {share:>9} {' '.join(times)}  {modes}"
                + (f"; fell back: {why}" if why else "")
            )
        return "\n".join(lines)
