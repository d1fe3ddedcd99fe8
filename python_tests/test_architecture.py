"""The architecture, read off the sources: layers, no circles, sizes of files, torch-free packages, public names.

Nothing of oases is imported but its root. A checker gives a list of violations, each with file, line and remedy; at
the end each is given sources that break its rule.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("oases", "oases_bench", "oases_svm")
EXTENSIONS = ("oases._C", "oases._svm", "oases_svm._svm")
"""Compiled modules, below all layers."""

LAYERS = (
    "errors", "limits", "files", "terminal", "extension", "oases_svm", "svm",
    "schedule", "plans", "simulator", "graph", "planner",
    "execution", "reporting", "kernels", "sparse", "parallel", "safetensors_files", "moe", "autotp",
    "models", "testbed", "launch", "testing", "train", "profile", "cli.options", "oases_bench", "cli", "__main__",
)  # fmt: skip
"""Packages and modules of `oases/`, lowest first; each imports only those before it.

The root, which gives names alone, is no layer. A dotted name is a part of a package that has a layer of its own:
options of the command line are for the benchmarks' commands, too.
"""

RUNTIME = ("execution", "parallel", "moe", "autotp", "models", "train")
"""Run a plan, and so never load the search for one."""
TORCH_FREE = ("schedule", "plans", "simulator", "planner", "oases_svm")
APART = ("svm", "oases_svm")
"""Import nothing of oases but each other."""

FOLDERS = (*PACKAGES, "python_tests", "csrc", "cpp_tests")
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".sh")
MOST_LINES = 400

FEW_LINES = 60
ALGORITHMS = {"oases/moe/shadowing.py": "an algorithm with a citation"}
"""Modules below FEW_LINES that one other module imports, and why they stand alone."""

PUBLIC = (
    "OverlappedColumnLinear", "OverlappedColwiseParallel", "OverlappedEmbedding", "OverlappedMoE",
    "OverlappedRowLinear", "OverlappedRowwiseParallel", "OverlappedStack", "ParallelDropout", "ParallelSpec",
    "S2Reducer", "TrainConfig", "Trainer", "UsageError", "__version__", "causal_attention", "clip_grad_norm",
    "full_state_dict", "load_checkpoint", "load_weights", "make_optimizer", "nccl_options", "parallel_cross_entropy",
    "parallelize", "plan", "quantized_hook", "report", "s2_hook", "save_checkpoint", "save_pretrained",
)  # fmt: skip
PUBLIC_OF_PARTS = {
    "oases.svm": ("NonconvexSVC",),
    "oases.parallel": ("BlockInputs",),
    "oases.testing": ("RankPool",),
}
"""Other names that README and documentation give to users."""


class Import(NamedTuple):
    """target: a module, as exactly as the sources tell. loads: it runs when the importing module is loaded."""

    line: int
    target: str
    loads: bool


class Module(NamedTuple):
    """A module of PACKAGES. names: bound at its top level, with the module each is imported from, "" for its own.

    path: from the root of the tree. Those that only `if TYPE_CHECKING` imports, for a `__getattr__`, are
    among them.
    """

    path: str
    lines: int
    docstring: str
    imports: tuple[Import, ...]
    names: tuple[tuple[str, str], ...]


Modules = Mapping[str, Module]
"""By dotted name; a package has the name of its folder."""


def modules_of(sources: Mapping[str, str]) -> dict[str, Module]:
    """Parse sources, given by path."""
    names = {path: _name(path) for path in sources}
    known, found = set(names.values()), {}
    for path, text in sources.items():
        tree = ast.parse(text, path)
        imports = tuple(_imports(tree, names[path], path.endswith("__init__.py"), known))
        bound = tuple(_bound(tree))
        found[names[path]] = Module(path, text.count("\n"), ast.get_docstring(tree) or "", imports, bound)
    return found


def _bound(tree: ast.Module | ast.If) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.If):
            yield from _bound(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((alias.asname or alias.name, node.module or "") for alias in node.names)


def _name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(tree: ast.Module, name: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    for node, loads in _nodes(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, loads)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) + is_package - node.level]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(node.lineno, inner if inner in known or inner in EXTENSIONS else base, loads)


def _nodes(node: ast.AST, loads: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement, and whether it runs when its module is loaded: not in functions and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        yield child, loads
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            for inner in child.body:
                yield inner, False
                yield from _nodes(inner, False)
            for inner in child.orelse:
                yield inner, loads
                yield from _nodes(inner, loads)
            continue
        yield from _nodes(child, loads and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def unit_of(name: str) -> str | None:
    """The layer that a module belongs to: its package or module under `oases/`; None outside of PACKAGES."""
    root, _, rest = name.partition(".")
    if root not in PACKAGES:
        return None
    if root != "oases" or rest in LAYERS:
        return root if root != "oases" else rest
    return rest.partition(".")[0] or "__init__"


def _edges(modules: Modules) -> Iterator[tuple[str, str, str]]:
    """(importing unit, imported unit, where), of two units; the compiled extensions and the root count as none."""
    for name, module in modules.items():
        unit = unit_of(name)
        for line, target, _ in module.imports:
            other = unit_of(target)
            if unit in (None, "__init__") or other in (None, "__init__", unit) or target in EXTENSIONS:
                continue
            assert unit is not None
            assert other is not None
            yield unit, other, f"{module.path}:{line}: imports {target}"


def against_layers(modules: Modules) -> list[str]:
    """Imports that go up, and packages without a layer."""
    place = {unit: number for number, unit in enumerate(LAYERS)}
    units = {unit_of(name) for name in modules} - {None, "__init__"}
    found = [f"{unit} has no layer; give it its place in LAYERS" for unit in sorted(map(str, units - {*LAYERS}))]
    for unit, other, where in _edges(modules):
        if unit in place and place[unit] < place.get(other, -1):
            found.append(
                f"{where}: {unit} lies below {other}; move what is shared down, or the importing code up into {other}"
            )
        if unit in RUNTIME and other == "planner":
            found.append(f"{where}: the runtime never loads the search; what both need belongs into plans")
        if unit in APART and other not in APART:
            found.append(f"{where}: {unit} stands apart and imports nothing of oases; have a copy or do without")
    return found


def in_circles(modules: Modules) -> list[str]:
    """Circles of packages; imports inside of functions count."""
    places: dict[str, dict[str, str]] = {}
    for unit, other, where in _edges(modules):
        places.setdefault(unit, {}).setdefault(other, where)
    found, seen = [], set[frozenset[str]]()
    for start in places:
        circle = _way(places, start, start)
        if circle and frozenset(circle) not in seen:
            seen.add(frozenset(circle))
            steps = [places[unit][other] for unit, other in zip(circle, [*circle[1:], start], strict=True)]
            found.append(f"{' -> '.join([*circle, start])} is a circle; cut one of\n  " + "\n  ".join(steps))
    return found


def _way(graph: Mapping[str, Iterable[str]], start: str, end: str) -> list[str]:
    """The shortest way from `start` to `end`, of one edge at least, without the end; empty where there is none."""
    ways, known = [[start]], set[str]()
    for way in ways:
        for other in graph.get(way[-1], ()):
            if other == end:
                return way
            if other not in known:
                known.add(other)
                ways.append([*way, other])
    return []


def too_long(lines: Mapping[str, int]) -> list[str]:
    """Files of too many lines, by path."""
    return [
        f"{path}: {number} lines, and {MOST_LINES} are the most; split it by its nouns"
        for path, number in lines.items()
        if number > MOST_LINES
    ]


def loading_torch(modules: Modules) -> list[str]:
    """Modules of TORCH_FREE that load torch with themselves, with what leads there."""
    graph: dict[str, dict[str, str]] = {}
    for name, module in modules.items():
        edges = graph.setdefault(name, {})
        for line, target, loads in module.imports:
            if loads:
                is_torch = target.split(".")[0] == "torch" or target == "oases._C"  # which loads torch
                edges.setdefault("torch" if is_torch else target, f"{module.path}:{line}")
        parent = name.rpartition(".")[0]
        if parent in modules:
            edges.setdefault(parent, module.path)
    found = []
    for name in modules:
        if unit_of(name) not in TORCH_FREE:
            continue
        way = _way(graph, name, "torch")
        if way:
            where = graph[way[-1]]["torch"]
            found.append(f"{where}: {' -> '.join([*way, 'torch'])}; import it where it is used, or move that out")
    return found


def too_small(modules: Modules) -> list[str]:
    """Modules of few lines with a single importer that are no listed algorithm with a source.

    What only its package's root imports is a public part of the package, and stays.
    """
    importers: dict[str, set[str]] = {}
    for name, module in modules.items():
        for _, target, _ in module.imports:
            importers.setdefault(target, set()).add(name)
    found = []
    for name, module in modules.items():
        users = importers.get(name, set()) - {name}
        if module.path in ALGORITHMS:
            if not re.search(r"arXiv \d{4}\.\d{4,5}|\b(19|20)\d\d\)", module.docstring):
                found.append(f"{module.path}: is listed as an algorithm; cite its paper in the docstring")
        elif module.path.endswith("__init__.py") or users == {name.rpartition(".")[0]}:
            continue
        elif module.lines < FEW_LINES and len(users) == 1:
            found.append(f"{module.path}: {module.lines} lines for {users.pop()} alone; merge it into that")
    return found


def defined(modules: Modules, place: str, name: str) -> bool:
    """Whether a module has a function or class of this name, its own or imported from one that has it."""
    origins = {origin for bound, origin in modules[place].names if bound == name} if place in modules else ()
    return any(not origin or defined(modules, origin, name) for origin in origins)


@pytest.fixture(scope="module")
def modules():
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return modules_of({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})


def test_imports_go_down_the_layers(modules):
    assert not against_layers(modules), "\n" + "\n".join(against_layers(modules))


def test_no_package_is_in_a_circle(modules):
    assert not in_circles(modules), "\n" + "\n".join(in_circles(modules))


def test_no_file_is_too_long():
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES)
    assert len(files) > 100
    found = too_long({str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in files})
    assert not found, "\n" + "\n".join(found)


def test_test_modules_have_names_of_their_own():
    """pytest imports them by name alone; of two, whichever comes second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "python_tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_schedules_plans_and_search_load_no_torch(modules):
    assert not loading_torch(modules), "\n" + "\n".join(loading_torch(modules))


def test_small_modules_have_several_importers_or_a_source(modules):
    assert not too_small(modules), "\n" + "\n".join(too_small(modules))


def test_the_public_names_are_these():
    import oases

    assert sorted(oases.__all__) == sorted(PUBLIC), "a public name came or went: say so in PUBLIC and README"


def test_every_public_name_is_defined_where_it_is_looked_up(modules):
    import oases

    looked_up = [(place, name) for name, place in oases._PUBLIC.items()]
    assert {name for _, name in looked_up} == {*PUBLIC} - {"__version__"}
    looked_up += [(place, name) for place, names in PUBLIC_OF_PARTS.items() for name in names]
    missing = [f"{place}.{name}" for place, name in looked_up if not defined(modules, place, name)]
    assert not missing, f"{', '.join(missing)}: defined nowhere; put the name back, or correct its place"


# --- each rule can be broken ---


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        (
            "oases/schedule/a.py",
            "import oases.plans.plan\n",
            "oases/schedule/a.py:1: imports oases.plans.plan: schedule",
        ),
        ("oases/plans/a.py", "def f():\n    from oases.train import g\n", "oases/plans/a.py:2"),
        ("oases/moe/a.py", "if TYPE_CHECKING:\n    from oases.train import g\n", "oases/moe/a.py:2"),
        ("oases/errors.py", "from .schedule import Op\n", "oases/errors.py:1: imports oases.schedule"),
        ("oases/train/a.py", "from oases.planner import plan\n", "the runtime never loads the search"),
        ("oases_svm/a.py", "from oases.errors import UsageError\n", "stands apart"),
        ("oases/new.py", "", "new has no layer"),
    ],
)
def test_an_import_against_the_layers_is_found(path, text, words):
    (found,) = against_layers(modules_of({path: text}))
    assert words in found


def test_imports_down_the_layers_are_let_through():
    text = "import oases\nimport torch\nfrom oases import _C\nfrom oases.errors import UsageError\nfrom . import b\n"
    assert not against_layers(modules_of({"oases/train/a.py": text, "oases/train/b.py": ""}))


def test_a_circle_is_found_with_its_imports():
    text = "def f():\n    import oases.moe.b\n"
    found = in_circles(modules_of({"oases/autotp/a.py": text, "oases/moe/b.py": "from oases.autotp.a import f\n"}))
    assert found == [
        "autotp -> moe -> autotp is a circle; cut one of\n"
        "  oases/autotp/a.py:2: imports oases.moe.b\n  oases/moe/b.py:1: imports oases.autotp.a"
    ]


def test_a_long_file_is_found():
    assert too_long({"csrc/a.cpp": MOST_LINES, "csrc/b.cpp": MOST_LINES + 1}) == [
        "csrc/b.cpp: 401 lines, and 400 are the most; split it by its nouns"
    ]


def test_torch_is_found_behind_other_modules():
    sources = {
        "oases/planner/a.py": "from oases.parallel import b\n",
        "oases/planner/c.py": "def f():\n    import torch\n",
        "oases/parallel/b.py": "from torch import nn\n",
    }
    (found,) = loading_torch(modules_of(sources))
    assert found.startswith("oases/parallel/b.py:1: oases.planner.a -> oases.parallel.b -> torch")


def test_a_small_module_is_found(monkeypatch):
    sources = {"oases/moe/a.py": "x = 1\n", "oases/moe/b.py": "from oases.moe.a import x\n"}
    assert too_small(modules_of(sources)) == ["oases/moe/a.py: 1 lines for oases.moe.b alone; merge it into that"]
    monkeypatch.setitem(ALGORITHMS, "oases/moe/a.py", "an algorithm with a citation")
    assert "cite its paper" in too_small(modules_of(sources))[0]
    cited = sources | {"oases/moe/a.py": '"""Source: arXiv 2305.16121."""\n'}
    assert not too_small(modules_of(cited))


def test_a_public_name_that_is_gone_is_found():
    sources = {"oases/a/__init__.py": "from oases.a.b import f, g\n", "oases/a/b.py": "def f(): ...\n"}
    modules = modules_of(sources)
    assert defined(modules, "oases.a", "f")
    assert not defined(modules, "oases.a", "g")
    assert not defined(modules, "oases.c", "f")
