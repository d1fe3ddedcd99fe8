"""Records: what is written is read back; what is wrong is named with its place, value and remedy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from oases import records
from oases.errors import UsageError
from oases.records import Check, Inline, Name, Number, OneOf, Within


@dataclass(frozen=True)
class Times:
    forward: Annotated[float, Number("seconds", above=0, usual=(0.0, 3600.0, "not milliseconds"))]
    backward: float = 0.0


@dataclass(frozen=True)
class Small:
    text: str
    even: Annotated[int, Check(lambda value: "must be even" if value % 2 else "")] = 0


@dataclass(frozen=True)
class Other:
    count: int = 0


@dataclass(frozen=True)
class Whole:
    hidden: int
    kind: Annotated[str, OneOf(("a", "b"))]
    times: Annotated[Times, Inline("_seconds")]
    speed: Annotated[float, Name("bytes_per_second")]
    left: Annotated[int, Within("ends")]
    right: Annotated[int, Within("ends")]
    parts: tuple[Small, ...] = ()
    rates: Mapping[Annotated[str, OneOf(("x", "y"))], float] = field(default_factory=dict)
    either: Small | Other | None = None
    note: str | None = None
    flag: bool = False

    def __post_init__(self) -> None:
        if self.left > self.right:
            raise UsageError(f"left {self.left} is beyond right {self.right}")


WHOLE = Whole(
    4, "a", Times(1.5, 2.0), 1e9, 1, 2, (Small("p", 2), Small("q")), {"x": 3.0}, Other(7), None, True,
)  # fmt: skip
DATA = {
    "hidden": 4, "kind": "a", "forward_seconds": 1.5, "backward_seconds": 2.0, "bytes_per_second": 1e9,
    "ends": {"left": 1, "right": 2}, "parts": [{"text": "p", "even": 2}, {"text": "q", "even": 0}],
    "rates": {"x": 3.0}, "either": {"count": 7}, "note": None, "flag": True,
}  # fmt: skip


def read(data):
    return records.read(Whole, data, "file", "write it anew")


def test_what_is_written_is_read_back():
    assert records.plain(WHOLE) == DATA
    assert read(DATA) == WHOLE
    assert read({name: DATA[name] for name in ("hidden", "kind", "forward_seconds", "bytes_per_second", "ends")})
    assert isinstance(read(DATA | {"either": {"text": "x"}}).either, Small)
    assert isinstance(read(DATA | {"forward_seconds": 2}).times.forward, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiddn": 1}, "file: unknown field 'hiddn'; did you mean 'hidden'?"),
        ({"forward_ms": 1}, "did you mean 'forward_seconds'? (times are in seconds)"),
        ({"zzz": 1}, "file: unknown field 'zzz'; known are hidden, kind, forward_seconds"),
        ({"hidden": None}, "file: hidden must be a whole number, got None"),
        ({"hidden": True}, "file: hidden must be a whole number, got True"),
        ({"hidden": 2**21}, "file: hidden must be at most 1048576, got 2097152"),
        ({"kind": "c"}, "file: kind is 'c'; known are a, b"),
        ({"forward_seconds": "1"}, "file: forward_seconds must be a number of seconds, got '1'"),
        ({"forward_seconds": 4000}, "forward_seconds is 4000, above 3600; the unit is seconds, not milliseconds"),
        ({"forward_seconds": 0}, "forward_seconds must be above 0, got 0"),
        ({"backward_seconds": 10**400}, "backward_seconds must be finite"),
        ({"ends": {"left": 1}}, "file: ends: field 'right' is missing; write it anew"),
        ({"ends": {"left": 1, "right": 2, "up": 3}}, "file: ends: unknown field 'up'"),
        ({"ends": {"left": 3, "right": 2}}, "file: left 3 is beyond right 2"),
        ({"ends": 3}, "file: ends must be an object, got 3"),
        ({"parts": {}}, "file: parts must be a list, got {}"),
        ({"parts": [{"text": "p"}, 5]}, "file: parts[1] must be an object, got 5"),
        ({"parts": [{"text": "p", "even": 3}]}, "file: parts[0]: even must be even"),
        ({"parts": [{"text": "a\0b"}]}, "file: parts[0]: text must be a text without null characters"),
        ({"rates": {"z": 1}}, "file: rates: a name is 'z'; known are x, y"),
        ({"rates": {"x": "fast"}}, "file: rates: x must be a number, got 'fast'"),
        ({"either": 5}, "file: either must be an object or null, got 5"),
        ({"note": 5}, "file: note must be a text, or null for none, got 5"),
        ({"flag": 1}, "file: flag must be true or false, got 1"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    with pytest.raises(UsageError) as caught:
        read(DATA | change)
    assert words in str(caught.value)


def test_a_missing_field_and_another_file():
    with pytest.raises(UsageError, match="file: field 'hidden' is missing; write it anew"):
        read({})
    with pytest.raises(UsageError, match=r"file must be an object, got \[\]"):
        read([])
    head = {"format": "oases plan", "version": 1}
    assert records.body(head | {"x": 1}, "oases plan", 1, "file", "write it anew") == {"x": 1}
    for data in ([], {}, {"format": "oases graph", "version": 1}):
        with pytest.raises(UsageError, match="file is not an oases plan; write it anew"):
            records.body(data, "oases plan", 1, "file", "write it anew")
    with pytest.raises(UsageError, match="version 2 is unknown; this oases reads version 1"):
        records.body(head | {"version": 2}, "oases plan", 1, "file", "write it anew")


def test_instances_are_checked():
    records.check(WHOLE)
    with pytest.raises(UsageError, match="hidden must be a whole number, got '4'"):
        records.check(Whole("4", "a", Times(1.0), 1e9, 1, 2))
