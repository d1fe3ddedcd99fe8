"""Configuration files of training runs: YAML, or Python that defines `config`; written as commented YAML."""

from __future__ import annotations

import re
import runpy
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, is_dataclass
from pathlib import Path
from typing import Any

import yaml

import oases.records as records
from oases.errors import UsageError
from oases.files import read_text
from oases.limits import short
from oases.moved import REMOVED

_ALL = "oases train --write-config lists all"
_WIDTH = 100
_MOST_LISTS = 400
_MOST_BYTES = 2**15
"""Size of a configuration: YAML is parsed at a hundred kilobytes a second."""


class _Loader(yaml.SafeLoader):
    """Loader with YAML 1.2 scalars: `off` is a string and 1e-3 a number."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in known if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def read_values(path: str | Path, kind: type[Any]) -> dict[str, Any]:
    """Read the fields that a file sets, by name. kind: class of the configuration.

    A Python file defines `config`, a configuration; fields at their default are left out. UsageError, with the file
    and the line if known, for an unreadable file, an unknown field (with the nearest known one) and a wrong type.
    """
    path = Path(path)
    text = read_text(path, "config", "write one with: oases train --write-config", _MOST_BYTES)
    return _of_python(path, kind) if path.suffix == ".py" else _of_yaml(path, text, kind)


def config_text(values: Mapping[str, Any], known: Sequence[Field[Any]]) -> str:
    """YAML of all `known` fields, each with its help as a comment and its value or default."""
    lines = []
    for item in known:
        value = values.get(item.name, item.default)
        choices = item.metadata.get("choices")
        text = item.metadata["help"] + (f"; one of {', '.join(map(str, choices))}" if choices else "")
        lines += textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        shown = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
        shown = shown.removesuffix("...\n").strip()
        lines += [f"{item.name}: {shown}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _of_yaml(path: Path, text: str, kind: type[Any]) -> dict[str, Any]:
    where, known = f"config {str(path)!r}", records.names_of(kind)
    if sum(map(text.count, ("[", "{", "- "))) > _MOST_LISTS:  # which PyYAML takes seconds for
        raise UsageError(f"{where} has too many lists and mappings; give lines such as 'hidden: 512'")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{where}: expected lines such as 'hidden: 512', got {text.strip()[:40]!r}")
        given: dict[str, Any] = {}
        for key, node in root.value:
            line = f"{where}, line {key.start_mark.line + 1}"
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name not in known:
                raise UsageError(f"{line}: {_unknown(key.value, known)}")
            if name in given:
                raise UsageError(f"{line}: {name} is given twice; leave one out")
            given[name] = _value(loader, node, f"{line}: {name}")
            records.require(kind, name, given[name], f"{line}: {name}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{where}{line}: invalid YAML: {problem}") from error
    except RecursionError as error:
        raise UsageError(f"{where} is nested too deeply; give lines such as 'hidden: 512'") from error
    return given


def _unknown(name: object, known: Sequence[str]) -> str:
    """Error message for a field that is not known, or not any more."""
    gone = REMOVED.get(str(name))
    return records.unknown(name, known, _ALL) if gone is None else f"{name} is no option any more: {gone}"


def _value(loader: _Loader, node: yaml.Node, where: str) -> Any:
    """Plain value of a node. UsageError where its tag does not take it, e.g. `!!int x`."""
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        raise UsageError(f"{where} is no valid value: {error!s:.200}") from error


def _of_python(path: Path, kind: type[Any]) -> dict[str, Any]:
    where = f"config {str(path)!r}"
    try:
        found = runpy.run_path(str(path)).get("config")
    except (Exception, SystemExit) as error:  # the user's code may raise anything; report it with its line
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        message = str(error)
        misspelt = re.search(r"unexpected keyword argument '(\w+)'", message)
        if misspelt:
            message = _unknown(misspelt.group(1), records.names_of(kind))
        elif not isinstance(error, UsageError):
            message = f"{type(error).__name__}: {message}"
        raise UsageError(f"{where}{'' if line is None else f', line {line}'}: {message}") from error
    if not is_dataclass(found) or isinstance(found, type) or not hasattr(found, "given"):
        raise UsageError(f"{where} must define config = TrainConfig(...), got {short(found)}")
    values: dict[str, Any] = found.given()
    return values
