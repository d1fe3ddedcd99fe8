"""Refusals: every UsageError of the product, with the test that shows it.

    OASES_REFUSALS=build/refusals.jsonl pytest ...                     log those that tests raise
    python -m reliability.refusals build/refusals.jsonl --page FILE    write the page

A refusal that no logged test raises is listed as such. Exit code 1 where there are any.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("oases", "oases_train", "oases_check", "oases_sparse", "oases_bench", "oases_svm")


class Site(NamedTuple):
    """A place that raises UsageError. first, last: its lines. text: of the message, `…` for values."""

    file: str
    first: int
    last: int
    text: str


def sites() -> Iterator[Site]:
    """Every place of the product where a UsageError is made."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UsageError":
                    text = "".join(_text(each) for each in node.args)
                    yield Site(str(path.relative_to(ROOT)), node.lineno, node.end_lineno or node.lineno, text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return "…"


def tests_of(log: Path) -> dict[tuple[str, int], list[str]]:
    """Tests by file and line of the error that they raise."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in log.read_text().splitlines():
        where, test, _ = json.loads(line)
        file, _, number = where.rpartition(":")
        found[file, int(number)].append(test)
    return found


def page(found: Sequence[tuple[Site, str]]) -> Iterator[str]:
    """The page: by file, the message and a test that raises it."""
    shown = sum(bool(test) for _, test in found)
    yield from (
        "# Refusals",
        "",
        f"What oases refuses, with the value and the remedy, and a test that shows it: {shown} of {len(found)}",
        "places that raise `UsageError`.",
        "`…` stands for values. Written by `python -m reliability.refusals`.",
    )
    before = ""
    for site, test in found:
        if site.file != before:
            before = site.file
            yield from ("", f"## {site.file}", "", "| message | test |", "|---|---|")
        text = " ".join(site.text.split()).replace("|", "/").replace("<", "&lt;")
        name = test.partition("[")[0].removeprefix("python_tests/")
        yield f"| {text} | {f'`{name}`' if name else '**none**'} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    tests = tests_of(given.log)
    found = []
    for site in sites():
        raised = [test for line in range(site.first, site.last + 1) for test in tests.get((site.file, line), ())]
        found.append((site, next((test for test in raised if test), "")))
    if given.page is not None:
        given.page.write_text("\n".join(page(found)) + "\n")
    missing = [site for site, test in found if not test]
    for site in missing:
        print(f"{site.file}:{site.first}: {site.text[:120]}")
    print(f"{len(found) - len(missing)} of {len(found)} refusals are raised by a test", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
