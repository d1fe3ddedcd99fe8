"""Sphinx configuration: Markdown pages (MyST), a reference from docstrings and from the parsers of the commands."""

import argparse
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import oases
from oases.cli import _COMPLETION, _parser

project = "oases"
version = release = oases.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"oases {version}"
html_show_copyright = False
smartquotes = False
highlight_language = "none"  # of indented blocks: commands and their output
exclude_patterns = ["conf.py"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
nitpicky = False  # docstrings name what is not documented here, in plain text
ROOT = Path(__file__).parents[1]


def docstring_lines(lines: list[str]) -> Iterator[str]:
    """reStructuredText of a plain docstring: `code`, `name: text` for arguments, indented examples."""
    example = False
    previous = ""
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        indented = line.startswith("    ")
        if indented and not example and not previous.strip():
            example = True
            yield from ("::", "")
        example = example and (indented or not line.strip())
        if example:
            yield line
        else:
            text = re.sub(r"(?<!`)`([^`]+)`(?!`)", "\0\\1\0", line.strip())  # code is kept as it is
            parts = text.split("\0")
            parts[::2] = [re.sub(r"([\\*|]|_\b)", r"\\\1", part) for part in parts[::2]]
            parts[1::2] = [f"``{part}``" for part in parts[1::2]]
            text = "".join(parts)
            if re.match(r"[a-z_]+(, [a-z_]+)*( \([^)]*\))?: ", text):
                yield ""
            yield text
        previous = line


def plain_docstring(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring by reStructuredText."""
    lines[:] = docstring_lines(lines)


class CommandLine(SphinxDirective):
    """Every command with its options, from the parsers."""

    def run(self) -> list[nodes.Node]:
        """Sections, one per command."""
        found: list[nodes.Node] = []
        for name, parser in all_commands():
            lines = list(command_lines(parser))
            if sum(line.startswith("- `") for line in lines) < 2:  # a parser that is not filled has --json alone
                raise self.error(f"oases {name} has no options of its own here: its parser was not filled")
            section = nodes.section(ids=[nodes.make_id(f"oases {name}")])
            section += nodes.title(text=f"oases {name}")
            self.state.nested_parse(StringList(lines), 0, section)
            found.append(section)
        return found


def all_commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command of oases that takes options, by name."""
    return commands(_parser([_COMPLETION]))  # other arguments leave out options of other commands


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands of a parser, and theirs, that take options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                below = list(commands(inner))
                yield from ((f"{name} {deeper}", each) for deeper, each in below) if below else [(name, inner)]


def command_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A command's description and a list of its options, as MyST."""
    yield from (str(parser.description), "")
    for group in parser._action_groups:
        shown = [
            action for action in group._group_actions if action.help != argparse.SUPPRESS and action.dest != "help"
        ]
        if shown and group.title not in ("options", "positional arguments"):
            yield from (f"**{group.title}**", "", *((group.description, "") if group.description else ()))
        for action in shown:
            yield from option_lines(parser, action)


def option_lines(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """One option: names, value, help."""
    default = str(action.metavar or action.dest.upper())
    value = "" if action.nargs == 0 else parser._get_formatter()._format_args(action, default)
    names = ", ".join(action.option_strings) or value
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    text = re.sub(r"([\\*<>`|])", r"\\\1", text).replace("--", r"\-\-")
    yield from (f"- `{names}{' ' + value if action.option_strings and value else ''}`: {text}", "")


def link_outside(app: Sphinx, docname: str, source: list[str]) -> None:
    """Check links to files outside docs, and replace them by the file's path: the site does not have these files."""
    page = Path(app.env.doc2path(docname))

    def shown(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[2].partition("#")[0]))
        if match[2].startswith(("http", "#")) or target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            logging.getLogger(__name__).warning("link to a file that does not exist: %s", match[2], location=docname)
            return match[0]
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if match[1] == path else f"{match[1]} (`{path}`)"

    source[0] = re.sub(r"(?<!!)\[([^\]\[]+)\]\(([^)\s]+)\)", shown, source[0])


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("source-read", link_outside)
    app.add_directive("command-line", CommandLine)
