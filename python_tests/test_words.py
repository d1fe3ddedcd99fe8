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
PHRASES = re.compile(
    r"\b(loops? of your own|beside its sums|joined norms|remade|had ended its call|heed"
    r"|in the eyes of|nobody is told|tell nobody|not told|with no less time and memory"
    r"|responses alone|of this rank alone \(peft\)|work besides their blocks"
    r"|switch of a module|in other pieces|of before rounding|go on with fewer replicas when"
    r"|type of activations in all-reduces|copies of the state in memory)\b",
    re.IGNORECASE,
)
"""Phrases with a word of the field: custom training loop, replicated, recomputed, stub, communication dtype, ..."""
NAMES = re.compile(
    r"\b(PartEnd|StandIn|EarlierKeys|remade_inputs|made_anew|(?<=def )(?:heed|there|here|extremes|triangle))\b"
)
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


def pages_and_sources():
    """Names and texts of all pages, Python and C++ files that are held to these words."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SOURCES]
    pages += [path for kind in ("*.h", "*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)]
    named = ((str(path.relative_to(ROOT)), path) for path in pages)
    return {name: path.read_text() for name, path in named if not name.startswith((*KEEPS_THEM, "CHANGELOG.md"))}


@pytest.mark.parametrize("gone", [GONE, PHRASES, NAMES], ids=["words", "phrases", "names"])
def test_words_that_went_stay_away(gone):
    # A phrase may be broken over two lines, of a docstring, a comment or a text in quotes.
    texts = {name: re.sub(r'"?\n *(?:#|//|f?")? *', " ", text) for name, text in pages_and_sources().items()}
    assert {name: word[0] for name, text in texts.items() if (word := gone.search(text))} == {}


@pytest.mark.parametrize(
    "text",
    ["steps in a loop of your own", "whole, beside its sums", "a remade input", "in the eyes of a layer"],
)
def test_the_guard_sees_a_phrase(text):
    assert PHRASES.search(text)
