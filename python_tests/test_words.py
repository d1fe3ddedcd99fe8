"""Words of the project: docstrings open with a category noun or a verb, and no private vocabulary comes back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "oases",
    "oases_bench",
    "oases_sparse",
    "oases_staged",
    "oases_svm",
    "oases_train",
    "benchmarks",
    "build_tools",
    "examples",
    "python_tests",
    "reliability",
)
OPENING = re.compile(r"^ *\"\"\"((What|Which|Who|How|Of|As)\b.*)", re.MULTILINE)
GONE = re.compile(r"\b(put off|had here|mend|mended|perceptron)\b", re.IGNORECASE)
KEEPS_THEM = ("python_tests/test_words.py", "reliability/mutation_list/")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def faults(text):
    """Docstrings of definitions, constants and fields that open otherwise: lines that begin with one."""
    return [found[1][:60] for found in OPENING.finditer(text)]


def test_docstrings_open_with_a_noun_or_a_verb():
    found = {str(path.relative_to(ROOT)): faults(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("text", ['"""What it is."""', 'X = 1\n"""Of a rank."""', 'def f():\n    """How it goes."""'])
def test_the_guard_sees_an_opening(text):
    assert len(faults(text)) == 1


def test_words_that_went_stay_away():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SOURCES]
    pages += [path for kind in ("*.h", "*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)]
    found = {}
    for path in pages:
        name = str(path.relative_to(ROOT))
        if not name.startswith(KEEPS_THEM) and name != "CHANGELOG.md" and (word := GONE.search(path.read_text())):
            found[name] = word[0]
    assert found == {}
