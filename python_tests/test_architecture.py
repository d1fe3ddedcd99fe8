"""The architecture, read off the sources: floors, no circles, lines, patches, options, torch-free packages, names.

Nothing of oases is imported but its root. A checker gives a list of violations, each with file, line and remedy; at
the end each is given sources that break its rule. The numbers of LINES and OPTIONS and the entries of PATCHES only
fall: raising one needs lowering another in the same commit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("oases", "oases_bench", "oases_check", "oases_sparse", "oases_staged", "oases_svm", "oases_train")
EXTENSIONS = ("oases._C", "oases._svm", "oases_staged._C", "oases_svm._svm")
"""Compiled modules, below all floors."""

BASE = (
    "errors", "limits", "records", "files", "terminal", "extension", "safetensors_files", "moved",
)  # fmt: skip
"""Modules of the lowest floor, which may import those before them."""
OLD = ("execution", "graph", "parallel", "schedule", "sparse", "train")
"""Old names of packages and modules, which lead to the new ones (moved.py)."""
FLOORS = (
    (*BASE, "oases_staged", "oases_svm", "svm", *OLD),
    ("core", "kernels"),
    ("plans", "testbed", "reporting"),
    ("distributed", "simulator", "oases_sparse"),
    ("layers", "moe", "launch"),
    ("autotp", "models", "testing"),
    ("checkpoint", "planner", "profile", "cli.options"),
    ("oases_train", "oases_check"),
    ("oases_bench",),
    ("cli",),
)
"""Packages and modules of `oases/` and its siblings, lowest floor first; each imports lower floors alone.

The root, which gives names alone, is on no floor. A dotted name is a part of a package that has a floor of its own:
options of the command line are for the commands of siblings, too.
"""

RUNTIME = ("core", "distributed", "layers", "moe", "autotp", "models", "checkpoint", "oases_train")
"""Run a plan, and so never load the search for one."""
TORCH_FREE = ("core.schedule", "core.dtypes", "plans", "simulator", "planner", "oases_svm")
APART = (("svm", "oases_svm"), ("oases_staged",))
"""Import nothing of oases but each other, of their group."""

LINES = {
    "cpp_tests": 3_765,
    "csrc": 7_599,
    "csrc/staged": 4_819,
    "csrc/svm": 624,
    "oases": 43_475,
    "oases/.": 1_811,
    "oases/autotp": 12_398,
    "oases/checkpoint": 1_781,
    "oases/cli": 1_591,
    "oases/core": 5_999,
    "oases/distributed": 4_845,
    "oases/execution": 5,
    "oases/graph": 5,
    "oases/kernels": 305,
    "oases/launch": 770,
    "oases/layers": 1_400,
    "oases/models": 743,
    "oases/moe": 2_828,
    "oases/parallel": 5,
    "oases/planner": 3_059,
    "oases/plans": 1_757,
    "oases/profile": 1_762,
    "oases/schedule": 5,
    "oases/simulator": 2_062,
    "oases/sparse": 5,
    "oases/testbed": 334,
    "oases/train": 5,
    "oases_bench": 6_494,
    "oases_check": 1_136,
    "oases_sparse": 1_313,
    "oases_staged": 116,
    "oases_svm": 2_067,
    "oases_train": 4_216,
    "python_tests": 47_429,
    "reliability": 5_346,
}
"""Most lines of Python in each package and in `oases/` in all, and of C++, CUDA and Python elsewhere."""
PATCHES = {
    "oases/autotp/trace_guard.py: Tensor.register_hook": "twice: put, and put back after a trace; export "
    "drops hooks inside of a layer without a word, and they have no point of extension (none found upstream)",
    "oases/autotp/tools/accelerate.py: accelerator.prepare_model": "save_state writes, and gather_for_metrics reads, "
    "one rank's part of tensor-parallel models (accelerate 1.15; no hook that a model reaches)",
    "oases/autotp/tools/accelerate.py: parallelism._validate_accelerator": "ParallelismConfig refuses ranks on CPUs "
    "(accelerate 1.15)",
    "oases/autotp/tools/trainer.py: owner.?": "Trainer saves model and optimizer on the first rank alone, and loads "
    "its optimizer everywhere (transformers 5.23: four methods)",
    "oases/core/execution/communication.py: names._hash_ranks_to_str": "new_group names local groups by ranks and "
    "their number, so that a name comes twice (torch 2.13)",
    "oases/distributed/dtensors.py: DTensor.?": "four attributes: .data = changes the wrapper alone; three methods "
    "name one piece of a _StridedShard (torch 2.13, checkpoint/planner_helpers.py)",
    "oases/distributed/guards.py: torch.nn.utils.clip_grads_with_norm_": "clips plain shards by a norm of one rank",
    "oases/distributed/total_norm.py: clip_grad._get_total_norm": "takes plain shards for whole gradients, fails on "
    "several meshes (pytorch issue 180346), and knows of no other stage",
    "oases/distributed/total_norm.py: torch.nn.utils.get_total_norm": "the same function by its public name",
}
"""Assignments to attributes of other packages' modules, classes and objects, with the reason for each.

Functions replaced at run time; at most ten. Handlers of DTensor's dispatcher (oases/distributed/dtensors.py) come on
top.
"""
OPTIONS = 45
"""Most fields of TrainConfig with its bases."""
CIRCLES = 0
"""Most circles of modules, with imports inside of functions and under TYPE_CHECKING."""

PUBLIC = (
    "OverlappedColumnLinear", "OverlappedColwiseParallel", "OverlappedEmbedding", "OverlappedMoE",
    "OverlappedRowLinear", "OverlappedRowwiseParallel", "OverlappedStack", "ParallelDropout", "ParallelSpec",
    "S2Reducer", "TrainConfig", "Trainer", "UsageError", "__version__", "causal_attention", "check",
    "clip_grad_norm",
    "full_state_dict", "load_checkpoint", "load_weights", "make_optimizer", "nccl_options", "parallel_cross_entropy",
    "parallelize", "plan", "quantized_hook", "report", "s2_hook", "save_checkpoint", "save_pretrained",
)  # fmt: skip
FOLDERS = (*PACKAGES, "python_tests", "reliability", "csrc", "cpp_tests")
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".sh")
PUBLIC_OF_PARTS = {
    "oases.svm": ("NonconvexSVC",),
    "oases.layers": ("BlockInputs",),
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
    tree: ast.Module
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
        found[names[path]] = Module(path, tree, imports, bound)
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
    """The room that a module belongs to: its package or module under `oases/`, or a sibling; None for others."""
    root, _, rest = name.partition(".")
    if root not in PACKAGES:
        return None
    if root != "oases" or rest in _FLOOR_OF:
        return root if root != "oases" else rest
    return {"__main__": "cli"}.get(rest, rest.partition(".")[0]) or "__init__"


_FLOOR_OF = {unit: number for number, units in enumerate(FLOORS) for unit in units}


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


def against_floors(modules: Modules) -> list[str]:
    """Imports that do not go down, and packages without a floor."""
    units = {unit_of(name) for name in modules} - {None, "__init__"}
    found = [f"{unit} has no floor; give it its place in FLOORS" for unit in sorted(map(str, units - {*_FLOOR_OF}))]
    for unit, other, where in _edges(modules):
        if unit in BASE and other in BASE:
            down = BASE.index(other) < BASE.index(unit)
        else:
            down = (unit, other) in _OWN or _FLOOR_OF.get(other, 0) < _FLOOR_OF.get(unit, len(FLOORS))
        if not down:
            found.append(
                f"{where}: {unit} does not lie above {other}; move what is shared down, or the importing code up"
            )
        if unit in RUNTIME and other == "planner":
            found.append(f"{where}: the runtime never loads the search; what both need belongs into plans")
        if any(unit in group and other not in group for group in APART):
            found.append(f"{where}: {unit} stands apart and imports nothing of oases; have a copy or do without")
    return found


_OWN = {("svm", "oases_svm"), ("extension", "oases_staged"), *((old, "moved") for old in OLD)}
"""Imports within the lowest floor: names that lead elsewhere, and the extensions, which one check reads."""


def circles_of_modules(modules: Modules) -> list[list[str]]:
    """Modules that import one another, in any order and anywhere in their code, as sorted groups."""
    graph = {
        name: {target for _, target, _ in module.imports if target in modules and target != name}
        for name, module in modules.items()
    }
    reach = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        for other in graph.get(todo.pop(), ()):
            if other not in found:
                found.add(other)
                todo.append(other)
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


def too_many_lines(lines: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """Packages over their ceiling, with their three largest files; and packages without one.

    lines: of each file, by path. most: of each package, by its folder; "oases" counts all below it, "." its root.
    """
    sums, files = Counter[str](), dict[str, list[str]]()
    for path, number in lines.items():
        for package in packages_of(path):
            sums[package] += number
            files.setdefault(package, []).append(path)
    found = [f"{package} has no ceiling; give it one in LINES" for package in sorted(sums.keys() - most.keys())]
    for package, number in sums.items():
        if number > most.get(package, number):
            largest = sorted(files[package], key=lambda path: -lines[path])[:3]
            found.append(
                f"{package}: {number} lines, and {most[package]} are the most; its largest files are "
                + ", ".join(f"{path} ({lines[path]})" for path in largest)
            )
    return found


def packages_of(path: str) -> tuple[str, ...]:
    """Packages that a file counts for."""
    first, *rest = path.split("/")
    if first == "csrc" and len(rest) > 1:
        return (f"csrc/{rest[0]}",)
    if first != "oases":
        return (first,)
    return ("oases", f"oases/{rest[0]}" if len(rest) > 1 else "oases/.")


def patches(modules: Modules) -> list[str]:
    """Assignments of functions to attributes of other packages' objects, with file and line.

    An attribute belongs to another package where its root is imported from one, or where it is given a function that
    `wraps` another, a lambda, or a call with the attribute itself, by assignment or by setattr. The forward() of a
    model's module is the model's; benchmarks of other packages may set these up.
    """
    found = []
    for module in modules.values():
        if module.path.startswith("oases_bench/"):
            continue
        foreign = set(_foreign_names(module.tree))
        wrapping = {
            node.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef)
            and any("wraps(" in ast.unparse(each) for each in node.decorator_list)
        }
        for node in ast.walk(module.tree):
            for target, value in _assigned(node):
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                name = root.id if isinstance(root, ast.Name) else ""
                again = [ast.unparse(each) for each in value.args] if isinstance(value, ast.Call) else []
                wrapped = (isinstance(value, ast.Name) and value.id in wrapping) or ast.unparse(target) in again
                wrapped |= isinstance(value, ast.Lambda)
                if name in ("self", "cls", "os", "sys") or target.attr == "forward":
                    continue
                if name in foreign or wrapped:
                    found.append(f"{module.path}:{node.lineno}: {ast.unparse(target)}")
    return found


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, (alias.asname or alias.name).split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        yield from (bound for origin, bound in names if origin.split(".")[0] not in PACKAGES)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """(attribute, value) of an assignment or a setattr."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
        yield ast.Attribute(node.args[0], "?"), node.args[2]
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else []
            pairs = zip_longest(target.elts, values[: len(target.elts)])
            yield from ((each, value) for each, value in pairs if isinstance(each, ast.Attribute))
        elif isinstance(target, ast.Attribute):
            yield target, node.value


def options_of(modules: Modules, module: str, name: str) -> list[str]:
    """Annotated fields of a dataclass and of its bases in the sources."""
    place = modules.get(module)
    if place is None:
        return []
    found: list[str] = []
    for node in place.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                for origin in {origin or module for bound, origin in place.names if bound == ast.unparse(base)}:
                    found += options_of(modules, origin, ast.unparse(base))
            found += [
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and "ClassVar" not in ast.unparse(each.annotation)
            ]
    return list(dict.fromkeys(found))


def loading_torch(modules: Modules) -> list[str]:
    """Modules of TORCH_FREE that load torch with themselves, with what leads there."""
    graph: dict[str, dict[str, str]] = {}
    for name, module in modules.items():
        edges = graph.setdefault(name, {})
        for line, target, loads in module.imports:
            if loads:
                is_torch = target.split(".")[0] == "torch" or target.endswith("._C")  # which loads it
                edges.setdefault("torch" if is_torch else target, f"{module.path}:{line}")
        parent = name.rpartition(".")[0]
        if parent in modules:
            edges.setdefault(parent, module.path)
    found = []
    for name in modules:
        if not any(unit_of(name) == each or f"{name}.".startswith(f"oases.{each}.") for each in TORCH_FREE):
            continue
        way = _way(graph, name, "torch")
        if way:
            where = graph[way[-1]]["torch"]
            found.append(f"{where}: {' -> '.join([*way, 'torch'])}; import it where it is used, or move that out")
    return found


def defined(modules: Modules, place: str, name: str) -> bool:
    """Whether a module has a function or class of this name, its own or imported from one that has it."""
    origins = {origin for bound, origin in modules[place].names if bound == name} if place in modules else ()
    return any(not origin or defined(modules, origin, name) for origin in origins)


@pytest.fixture(scope="module")
def modules():
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return modules_of({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})


def test_imports_go_down_the_floors(modules):
    assert len(FLOORS) <= 10
    assert not against_floors(modules), "\n" + "\n".join(against_floors(modules))


def test_no_package_is_in_a_circle(modules):
    assert not in_circles(modules), "\n" + "\n".join(in_circles(modules))


def test_no_module_is_in_a_circle(modules):
    found = circles_of_modules(modules)
    assert len(found) <= CIRCLES, "\n" + "\n".join(map(" <-> ".join, found))


def test_no_package_has_too_many_lines():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    assert len(files) > 100
    lines = {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in sorted(files)}
    found = too_many_lines(lines, LINES)
    assert not found, "\n" + "\n".join(found)


def test_few_functions_of_other_packages_are_replaced(modules):
    found = patches(modules)
    assert len(found) <= 10, "\n" + "\n".join(found)
    assert {re.sub(r":\d+:", ":", each) for each in found} == PATCHES.keys()


def test_training_has_few_options(modules):
    found = options_of(modules, "oases_train.config", "TrainConfig")
    assert 20 < len(found) <= OPTIONS, ", ".join(found)


def test_test_modules_have_names_of_their_own():
    """pytest imports them by name alone; of two, whichever comes second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "python_tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_schedules_plans_and_search_load_no_torch(modules):
    assert not loading_torch(modules), "\n" + "\n".join(loading_torch(modules))


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
            "oases/core/schedule/a.py",
            "import oases.plans.plan\n",
            "oases/core/schedule/a.py:1: imports oases.plans.plan: core",
        ),
        ("oases/plans/a.py", "def f():\n    from oases_train.loop import g\n", "oases/plans/a.py:2"),
        ("oases/moe/a.py", "if TYPE_CHECKING:\n    from oases_train.loop import g\n", "oases/moe/a.py:2"),
        ("oases/errors.py", "from .core import Op\n", "oases/errors.py:1: imports oases.core"),
        ("oases/checkpoint/a.py", "from oases.planner import plan\n", "the runtime never loads the search"),
        ("oases_svm/a.py", "from oases.errors import UsageError\n", "stands apart"),
        ("oases_staged/a.py", "from oases_svm import Path\n", "stands apart"),
        ("oases/new.py", "", "new has no floor"),
    ],
)
def test_an_import_against_the_floors_is_found(path, text, words):
    assert words in against_floors(modules_of({path: text}))[-1]


def test_imports_down_the_floors_are_let_through():
    text = "import oases\nimport torch\nfrom oases import _C\nfrom oases.errors import UsageError\nfrom . import b\n"
    assert not against_floors(modules_of({"oases_train/a.py": text, "oases_train/b.py": ""}))


def test_a_circle_is_found_with_its_imports():
    text = "def f():\n    import oases.moe.b\n"
    found = in_circles(modules_of({"oases/autotp/a.py": text, "oases/moe/b.py": "from oases.autotp.a import f\n"}))
    assert found == [
        "autotp -> moe -> autotp is a circle; cut one of\n"
        "  oases/autotp/a.py:2: imports oases.moe.b\n  oases/moe/b.py:1: imports oases.autotp.a"
    ]


def test_a_circle_of_modules_is_found():
    sources = {
        "oases/moe/a.py": "def f():\n    from oases.moe.b import g\n",
        "oases/moe/b.py": "if TYPE_CHECKING:\n    from oases.moe.c import h\n",
        "oases/moe/c.py": "from oases.moe import a\n",
        "oases/moe/d.py": "from oases.moe import a\n",
    }
    assert circles_of_modules(modules_of(sources)) == [["oases.moe.a", "oases.moe.b", "oases.moe.c"]]


def test_a_package_of_too_many_lines_is_found():
    lines = {"oases/moe/a.py": 30, "oases/moe/b.py": 40, "oases/errors.py": 5, "csrc/a.cpp": 9, "csrc/svm/a.h": 1}
    assert too_many_lines(lines, {"oases": 75, "oases/moe": 69, "oases/.": 5, "csrc": 9, "csrc/svm": 1}) == [
        "oases/moe: 70 lines, and 69 are the most; its largest files are oases/moe/b.py (40), oases/moe/a.py (30)"
    ]
    assert too_many_lines({"oases/new/a.py": 1}, {"oases": 1}) == ["oases/new has no ceiling; give it one in LINES"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.Linear.extra_repr = print\n",
        "from torch.nn.utils import clip_grad\nclip_grad.a, x = f, g\n",
        "def patch(module):\n    @wraps(module.f)\n    def g(): ...\n    module.f = g\n",
        "def patch(module):\n    module.f = wrapped(module.f)\n",
        "def patch(module):\n    @wraps(module.f)\n    def g(): ...\n    setattr(module, name, g)\n",
    ],
)
def test_a_patch_is_found(text):
    assert len(patches(modules_of({"oases/moe/a.py": text}))) == 1


def test_attributes_of_our_own_objects_are_no_patches():
    text = "from oases.moe import b\ndef f(self):\n    self.x = b.y = 1\n    setattr(self, 'z', g)\n"
    assert not patches(modules_of({"oases/moe/a.py": text, "oases/moe/b.py": ""}))


def test_options_of_a_class_and_its_bases_are_counted():
    sources = {
        "oases_train/config.py": "from oases_train.b import B\nclass TrainConfig(B):\n    x: int\n",
        "oases_train/b.py": "class B:\n    z: int = 2\n    y: ClassVar[int]\n",
    }
    assert options_of(modules_of(sources), "oases_train.config", "TrainConfig") == ["z", "x"]


def test_torch_is_found_behind_other_modules():
    sources = {
        "oases/planner/a.py": "from oases.layers import b\n",
        "oases/planner/c.py": "def f():\n    import torch\n",
        "oases/layers/b.py": "from torch import nn\n",
    }
    (found,) = loading_torch(modules_of(sources))
    assert found.startswith("oases/layers/b.py:1: oases.planner.a -> oases.layers.b -> torch")


def test_a_public_name_that_is_gone_is_found():
    sources = {"oases/a/__init__.py": "from oases.a.b import f, g\n", "oases/a/b.py": "def f(): ...\n"}
    modules = modules_of(sources)
    assert defined(modules, "oases.a", "f")
    assert not defined(modules, "oases.a", "g")
    assert not defined(modules, "oases.c", "f")
