"""Reduction of a case while its verdict stays, and a program of its own that shows it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from reliability.differential.case import Case, settled
from reliability.differential.factors import PLAIN
from reliability.differential.program import program

WIDTH = 150
"""Most columns of a line."""
MAIN = """
dist.init_process_group("gloo")
one, (many, replica), seen, found = build(), parallel(build()), [], []
train(one, None, lambda kind, value: seen.append(value.tolist()))
train(many, replica, lambda kind, value: found.append(float(value)))
state = oases.full_state_dict(many)
apart = max((float((state[n] - p).abs().max()), n) for n, p in one.state_dict().items()) if state else "see rank 0"
print(f"rank {dist.get_rank()}: losses {found}, in one process {seen}; weights apart: {apart}")
"""
"""Comparison at the end of a program of its own."""


def shrunk(case: Case, bad: Callable[[Case], bool], most: int = 60) -> Case:
    """Make choices plain, several at a time and then one by one, while a case stays bad. most: cases tried."""
    tried = 0

    def better(names: list[str]) -> Case | None:
        nonlocal tried
        smaller = settled(case.changed(**{name: PLAIN[name] for name in names}))
        if smaller is None or smaller == case or tried >= most:
            return None
        tried += 1
        return smaller if bad(smaller) else None

    size = max(1, len(case.choices) // 2)
    while size:
        names = [name for name, _ in case.choices]
        parts = [names[at : at + size] for at in range(0, len(names), size)]
        found = next((smaller for part in parts if (smaller := better(part)) is not None), None)
        if found is None:
            size //= 2
        else:
            case = found
            size = min(size, max(1, len(case.choices)))
    return case


def standalone(case: Case) -> str:
    """Text of a program for torchrun: the case in one process and on ranks, with losses and weights side by side."""
    head = f"# torchrun --nproc-per-node {case.ranks} FILE    ({case or 'the plain case'})\n"
    return head + compact(program(case) + MAIN)


def compact(text: str) -> str:
    """Put simple statements of one block on common lines, without comments."""
    return "\n".join(_lines(ast.parse(text).body, "")) + "\n"


def _is_kept(each: ast.stmt) -> bool:
    """Whether a statement is not a log of more than the loss."""
    text = ast.unparse(each)
    return not text.startswith("log(") or text.startswith("log('loss'")


def _lines(body: list[ast.stmt], pad: str) -> list[str]:
    found: list[str] = []
    open_line = False  # whether the last line takes another statement
    for each in filter(_is_kept, body):
        inner = getattr(each, "body", None)
        if not isinstance(inner, list):
            text = ast.unparse(each)
            if open_line and len(found[-1]) + 2 + len(text) <= WIDTH:
                found[-1] += "; " + text
            else:
                found.append(pad + text)
            open_line = True
            continue
        open_line = False
        inner = [*filter(_is_kept, inner)]
        lines = _lines(inner, pad + "    ")
        head = [line for line in ast.unparse(each).splitlines() if line]
        head = head[: next(at for at, line in enumerate(head) if line.startswith("    "))]
        simple = all(not isinstance(getattr(one, "body", None), list) for one in inner)
        if (
            len(lines) == 1
            and simple
            and len(pad + head[-1]) + len(lines[0].strip()) < WIDTH
            and not getattr(each, "orelse", None)
        ):
            found += [pad + line for line in head[:-1]] + [f"{pad}{head[-1]} {lines[0].strip()}"]
        else:
            found += [pad + line for line in head] + lines
        if getattr(each, "orelse", None):
            found += [pad + "else:", *_lines(each.orelse, pad + "    ")]  # type: ignore[attr-defined]
    return found
