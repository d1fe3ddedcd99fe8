"""The text form: a lossless round trip, and errors with line and column."""

import pytest

from oases.schedule import GENERATORS, ScheduleSyntaxError, format_schedule, generate, parse_schedule


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("sub_batches", [1, 2, 5])
def test_round_trip(name, sub_batches):
    schedule = generate(name, 4, sub_batches)
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_comments_and_blank_lines():
    text = "# one block\n\nschedule x blocks=1 sub_batches=1   # header\n  F 0.0  # go\nall_reduce F 0.0\n"
    schedule = parse_schedule(text)
    assert [str(op) for op in schedule] == ["F 0.0", "all_reduce F 0.0"]
    assert schedule.recompute == "none"


HEADER = "schedule x blocks=1 sub_batches=1\n"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "holds no schedule"),
        ("  blocks=3", 1, 3, "expected the header"),
        ("schedule x blocks=two sub_batches=1", 1, 1, "expected the header"),
        (HEADER + "F 0.0\n  G 0.0", 3, 3, "unknown op 'G'"),
        (HEADER + "F", 2, 2, "expected BLOCK.SUB_BATCH, e.g. 3.1, got the end of the line"),
        (HEADER + "F 0", 2, 3, "expected BLOCK.SUB_BATCH, e.g. 3.1, got '0'"),
        (HEADER + "F 0.-1", 2, 3, "got '0.-1'"),
        (HEADER + "\nall_reduce 0.0", 3, 12, "'all_reduce' carries a compute op"),
        (HEADER + "wait", 2, 5, "expected the op whose result 'wait' carries"),
        (HEADER + "F 0.0 0.1", 2, 7, "nothing may follow the op, got '0.1'"),
    ],
)
def test_syntax_errors(text, line, column, message):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_schedule(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert message in str(caught.value)
    assert f"line {line}, column {column}" in str(caught.value)
