"""Layer graph of a whole model as plain data: ops in execution order with inputs, FLOPs and bytes.

Serialised as JSON, so that a model can be planned where neither it nor torch is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from oases.errors import UsageError
from oases.files import parse_json, read_json
from oases.limits import short

LARGEST = 10**24
"""Upper bound of FLOPs, bytes and features; anything larger is a typing error."""
_Made = TypeVar("_Made")


class Record:
    """JSON object. Each method reads a field of one type and raises UsageError with the field's name."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise UsageError(f"graph: {where} must be an object, got {short(data)}")
        self._data = data
        self._where = where

    def made(self, kind: type[_Made], **values: Any) -> _Made:
        """Build an instance of `kind`. Raises UsageError for fields that are not among `values`."""
        for name in self._data:
            if name not in values:
                raise UsageError(
                    f"graph: {self._where} has an unknown field {short(name)}; known are {', '.join(values)}"
                )
        return kind(**values)

    def text(self, name: str) -> str:
        """Read a string."""
        value = self._field(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of strings", values)
        return tuple(values)

    def flag(self, name: str) -> bool:
        """Read a boolean."""
        value = self._field(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def count(self, name: str) -> int:
        """Read a whole number of at least 0."""
        value = self._field(name)
        if not _is_count(value):
            raise self._wrong(name, "a whole number of at least 0", value)
        return int(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """Read a list of whole numbers of at least 0."""
        values = self._list(name)
        if not all(map(_is_count, values)):
            raise self._wrong(name, "a list of whole numbers of at least 0", values)
        return tuple(values)

    def shapes(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Read a list of shapes."""
        values = self._list(name)
        if not all(isinstance(value, list) and all(map(_is_count, value)) for value in values):
            raise self._wrong(name, "a list of shapes", values)
        return tuple(map(tuple, values))

    def records(self, name: str, kind: str) -> list[Record]:
        """Read a list of objects; error messages name them by `kind` and index."""
        return [Record(item, f"{kind} {number}") for number, item in enumerate(self._list(name))]

    def _field(self, name: str) -> Any:
        if name not in self._data:
            raise UsageError(f"graph: {self._where} has no field {name!r}")
        return self._data[name]

    def _list(self, name: str) -> list[Any]:
        value = self._field(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _wrong(self, name: str, wanted: str, value: Any) -> UsageError:
        return UsageError(f"graph: {self._where}: {name} must be {wanted}, got {short(value)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


VERSION = 1
FORMAT = "oases graph"
_REMEDY = "write one with: oases plan --graph MODEL --json FILE"
LARGEST_FILE = 2**26
"""Maximum size of a graph file in bytes; a model of 1000 layers takes 20 MB."""
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16, "int64": 8, "int32": 4,
    "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip
_LAYER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter or buffer under one of its names. Names of one tensor share its `identity`."""

    name: str
    shape: Shape
    dtype: str
    num_bytes: int
    identity: int
    buffer: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Input:
    """Input tensor of the model."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Node:
    """One op. inputs: names of the nodes and model inputs it reads, without duplicates. parameters: with buffers.

    shapes, dtypes: of each output. module: path of the calling module, "" for the model itself. flops: of the
    forward pass. bytes_out: bytes written, 0 if the output is a view of the input.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    module: str = ""
    parameters: tuple[str, ...] = ()
    flops: int = 0
    bytes_out: int = 0


class Run:
    """Nodes in execution order: a whole graph or a part of it."""

    if TYPE_CHECKING:

        @property
        def nodes(self) -> tuple[Node, ...]:
            """Nodes in execution order."""

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass."""
        return sum(node.flops for node in self.nodes)

    @property
    def activation_bytes(self) -> int:
        """Bytes written by one forward pass."""
        return sum(node.bytes_out for node in self.nodes)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Paths of the modules in module lists, in execution order, e.g. "model.layers.0"."""
        return tuple(dict.fromkeys(layer for node in self.nodes if (layer := layer_of(node.module))))


@dataclass(frozen=True)
class LayerGraph(Run):
    """Graph of a model: nodes in execution order, inputs, output names, and parameters under all their names."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def __post_init__(self) -> None:
        self._check_parameters()
        known: dict[str, str] = {}
        for each in self.inputs:
            _check_sizes(f"input {each.name!r}", each.shape, each.dtype)
            _add(known, each.name, "input")
        for node in self.nodes:
            where = f"graph: node {node.name!r}"
            for name in node.inputs:
                if name not in known:
                    raise UsageError(f"{where}: inputs: {name!r} is not a model input or an earlier node")
            for name in node.parameters:
                if name not in self.table:
                    raise UsageError(f"{where}: parameters: {name!r} is not in the table of parameters")
            _check_node(node)
            _add(known, node.name, "node")
        for name in self.outputs:
            if name not in known:
                raise UsageError(f"graph: outputs: {name!r} is not a model input or a node")

    def _check_parameters(self) -> None:
        names: dict[str, str] = {}
        first: dict[int, Parameter] = {}
        for each in self.parameters:
            where = f"parameter {each.name!r}"
            _add(names, each.name, "parameter")
            _check_sizes(where, each.shape, each.dtype)
            if each.num_bytes != each.size * DTYPE_BYTES[each.dtype]:
                raise UsageError(
                    f"graph: {where}: num_bytes must be {each.size * DTYPE_BYTES[each.dtype]}, got {each.num_bytes}"
                )
            other = first.setdefault(each.identity, each)
            if (other.shape, other.dtype) != (each.shape, each.dtype):
                raise UsageError(
                    f"graph: {where}: identity {each.identity} is that of {other.name!r}, of another shape or dtype"
                )

    @cached_property
    def table(self) -> dict[str, Parameter]:
        """Parameters and buffers by name."""
        return {each.name: each for each in self.parameters}

    @cached_property
    def place(self) -> dict[str, int]:
        """Index of each node by its name."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Indices of the nodes that read each value (input or node), ascending."""
        found: dict[str, list[int]] = {name: [] for name in self._names()}
        for index, node in enumerate(self.nodes):
            for name in node.inputs:
                found[name].append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    def _names(self) -> Iterator[str]:
        yield from (each.name for each in self.inputs)
        yield from (node.name for node in self.nodes)

    @cached_property
    def value_bytes(self) -> dict[str, int]:
        """Bytes of each value (input or node), views included."""
        sizes = {each.name: prod(each.shape) * DTYPE_BYTES[each.dtype] for each in self.inputs}
        for node in self.nodes:
            pairs = zip(node.shapes, node.dtypes, strict=True)
            sizes[node.name] = sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in pairs)
        return sizes

    @cached_property
    def trained(self) -> frozenset[str]:
        """Values with gradients: floating-point, and computed from a parameter."""
        found: set[str] = set()
        for node in self.nodes:
            reads = any(not self.table[name].buffer for name in node.parameters)
            if (reads or not found.isdisjoint(node.inputs)) and any("float" in dtype for dtype in node.dtypes):
                found.add(node.name)
        return frozenset(found)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once, without buffers."""
        return sum({each.identity: each.size for each in self.parameters if not each.buffer}.values())

    def to_json(self) -> str:
        """Serialise the graph as JSON for `from_json`."""
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Lines of the JSON text, one node per line for readable diffs."""
        yield f'{{"format": "{FORMAT}", "version": {VERSION}, "name": {json.dumps(self.name)}'
        for field in ("inputs", "parameters", "nodes"):
            lines = (f"\n {json.dumps(asdict(each))}" for each in getattr(self, field))
            yield f',\n"{field}": [' + ",".join(lines) + "]"
        yield f',\n"outputs": {json.dumps(self.outputs)}}}\n'

    @staticmethod
    def from_json(text: str) -> LayerGraph:
        """Parse a graph. Raises UsageError naming the field that is missing, unknown or of the wrong type."""
        return LayerGraph._of(parse_json(text, "graph", _REMEDY))

    @staticmethod
    def _of(data: Any) -> LayerGraph:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"graph: this is not an {FORMAT}; write one with: oases plan --graph MODEL --json FILE")
        if data.get("version") != VERSION:
            raise UsageError(
                f"graph: version {short(data.get('version'))} is unknown; this oases reads version {VERSION}"
            )
        body = Record({key: value for key, value in data.items() if key not in ("format", "version")}, "graph")
        return body.made(
            LayerGraph,
            name=body.text("name"),
            inputs=tuple(
                item.made(Input, name=item.text("name"), shape=item.counts("shape"), dtype=item.text("dtype"))
                for item in body.records("inputs", "input")
            ),
            outputs=body.texts("outputs"),
            parameters=tuple(
                item.made(
                    Parameter, name=item.text("name"), shape=item.counts("shape"), dtype=item.text("dtype"),
                    num_bytes=item.count("num_bytes"), identity=item.count("identity"), buffer=item.flag("buffer"),
                )
                for item in body.records("parameters", "parameter")
            ),
            nodes=tuple(
                item.made(
                    Node, name=item.text("name"), op=item.text("op"), inputs=item.texts("inputs"),
                    shapes=item.shapes("shapes"), dtypes=item.texts("dtypes"), module=item.text("module"),
                    parameters=item.texts("parameters"), flops=item.count("flops"),
                    bytes_out=item.count("bytes_out"),
                )
                for item in body.records("nodes", "node")
            ),
        )  # fmt: skip


def layer_of(module: str) -> str | None:
    """First module in a module list on a path: "model.layers.3" of "model.layers.3.mlp.act"; None without one."""
    match = _LAYER.match(module)
    return match[0] if match else None


def read_graph(path: str | Path) -> LayerGraph:
    """Read a graph file. Raises UsageError for a file that cannot be read or is not a graph."""
    data = read_json(path, "graph", _REMEDY, LARGEST_FILE)
    try:
        return LayerGraph._of(data)
    except UsageError as error:
        raise UsageError(f"graph {str(path)!r}: {str(error).removeprefix('graph: ')}") from error


def _add(known: dict[str, str], name: str, kind: str) -> None:
    if name in known:
        raise UsageError(f"graph: {kind} {name!r}: duplicate name of a {known[name]}")
    known[name] = kind


def _check_node(node: Node) -> None:
    where = f"node {node.name!r}"
    if len(node.shapes) != len(node.dtypes):
        raise UsageError(f"graph: {where}: {len(node.shapes)} shapes, but {len(node.dtypes)} dtypes")
    for shape, dtype in zip(node.shapes, node.dtypes, strict=True):
        _check_sizes(where, shape, dtype)
    for field in ("flops", "bytes_out"):
        if getattr(node, field) < 0:
            raise UsageError(f"graph: {where}: {field} must be at least 0, got {getattr(node, field)}")


def _check_sizes(where: str, shape: Shape, dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"graph: {where}: unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if any(size < 0 for size in shape):
        raise UsageError(f"graph: {where}: sizes must be at least 0, got {list(shape)}")
