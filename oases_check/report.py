"""Result of a check: as text, JSON and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from oases.terminal import table
from oases_check.compare import FOLLOWS, Finding
from oases_check.ranks import Compared

_MOST_ROWS = 20


@dataclass(frozen=True)
class CheckReport:
    """What `oases.check` found. again: the same in float64, where the first run found something."""

    first: Compared
    again: Compared | None

    @property
    def findings(self) -> list[Finding]:
        """Faults: those of float64, where rounding is ruled out, or of the only run."""
        return (self.again or self.first).findings

    @property
    def equal(self) -> bool:
        """Whether the sharded model trains as the unsharded one."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """The result as plain values."""
        run = self.again or self.first
        return {
            "equal": self.equal,
            "dtype": run.dtype,
            "findings": [each.as_json() for each in self.findings],
            "rounding": len(self.first.findings) if self.again is not None and self.equal else 0,
            "not_compared": run.skipped,
            "notes": run.notes,
            "parameters": run.parameters,
            "outputs": run.outputs,
            "losses": [{"one_process": one, "ranks": other} for one, other in run.losses],
        }

    def shown(self) -> Iterator[RenderableType]:
        """Lines and tables for a terminal."""
        run = self.again or self.first
        if self.equal:
            yield (
                f"equal to one process over {len(run.losses)} steps: {run.parameters} parameters with gradients, "
                f"norm and updates, and outputs of {run.outputs} modules ({run.dtype})"
            )
            if self.again is not None:
                yield "what differed in the model's own type is rounding: in float64 nothing differs"
        else:
            first = self.findings[0]
            told = [each for each in self.findings if each is first or not each.factor.startswith(FOLLOWS)]
            rows = [
                (each.kind, each.name, str(each.step), f"{each.difference:.1e}", each.factor, each.likely)
                for each in told[:_MOST_ROWS]
            ]
            columns = ("differs", "name", "step", "by", "is", "look at")
            yield table(columns, rows, words=6, title=f"differs from one process ({run.dtype})")
            if len(told) > _MOST_ROWS:
                yield f"and {len(told) - _MOST_ROWS} more with a factor"
            if len(self.findings) > len(told):
                yield f"and {len(self.findings) - len(told)} that have no factor, and may follow from these"
        for note in run.notes:
            yield f"note: {note}"
        for name, why in list(run.skipped.items())[:_MOST_ROWS]:
            yield f"not compared: {name}: {why}"
        if len(run.skipped) > _MOST_ROWS:
            yield f"not compared: {len(run.skipped) - _MOST_ROWS} more"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, highlight=False, markup=False, color_system=None)
        with console.capture() as captured:
            for each in self.shown():
                console.print(each)
        return captured.get()
