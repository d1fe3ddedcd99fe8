"""Pages that quote the code: schedules, glossary, support, troubleshooting, and the reading guide."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from oases.core.schedule.ops import COMPUTE, OPS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("oases", "oases_staged", "oases_train")


def page(name: str) -> str:
    """Text of a page, without its line breaks."""
    return " ".join((DOCS / name).read_text().split())


def test_pages_of_schedules_are_what_their_script_writes():
    spec = importlib.util.spec_from_file_location("schedules_of_docs", DOCS / "schedules.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.pages()
    assert {path.name for path in script.FOLDER.iterdir()} == set(written)
    for name, text in written.items():
        assert (script.FOLDER / name).read_text(encoding="utf-8") == text, f"run python docs/schedules.py ({name})"


def test_the_glossary_has_every_op():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(OPS) <= named
    assert {name for name in named if name.isupper()} == set(COMPUTE)


def test_tests_that_the_support_page_names_exist():
    named = set(re.findall(r"`(test_\w+)`", page("support.md")))
    defined = {
        name
        for path in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 10
    assert named <= defined


def test_the_support_page_marks_every_pair():
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]]
        for line in (DOCS / "support.md").read_text().splitlines()
        if line.startswith("| **")
    ]
    for number, cells in enumerate(rows, start=1):
        kinds = [re.sub(r" \(\d\)$", "", cell) for cell in cells]
        filled = min(number, len(kinds))
        assert set(kinds[:filled]) <= {"works", "refused", "untested"}
        assert not any(kinds[filled:])


@cache
def texts() -> list[str]:
    """Constant parts of all texts in the sources."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [
        node.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


QUOTED = re.findall(r"\*\*`(.+?)`\*\*", page("troubleshooting.md"))


@pytest.mark.parametrize("fragment", QUOTED)
def test_errors_that_the_page_quotes_are_in_the_sources(fragment):
    assert any(fragment in text for text in texts())


def test_every_quoted_error_has_cause_and_remedy():
    entries = re.split(r"^- \*\*`", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)[1:]
    assert 15 <= len(entries) <= len(QUOTED)
    assert all("*Cause:*" in entry and "*Remedy:*" in entry for entry in entries)


def test_the_reading_guide_names_files_and_what_they_hold():
    text = (DOCS / "read-the-code.md").read_text()
    core = ROOT / "oases" / "core"
    listed = re.findall(r"^\| \d+ \| `(\S+)` \|", text, re.MULTILINE)
    questions = text.split("\n### ")[1:]
    assert len(listed) <= 12
    assert len(questions) == 10
    for question in questions:
        paths = set(re.findall(r"`(\w+/\w+\.py)`", question))
        assert paths, question
        assert paths <= set(listed), "answered by files of the list alone"
        words = {word for path in paths for word in re.findall(r"\w+", (core / path).read_text())}
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", question):
            missing = {part for part in name.split(".") if part not in words}
            assert not missing, f"{name} is not in {sorted(paths)}"
