"""The text form: a lossless round trip, and errors with line and column."""

import random
import re

import pytest

from oases.core.schedule import (
    GENERATORS,
    PIPELINES,
    Schedule,
    ScheduleError,
    ScheduleSyntaxError,
    format_schedule,
    from_text,
    generate,
    generate_pipeline,
    is_text,
    parse_schedule,
    sequence_parallel,
)
from oases.plans.expert_schedules import generate_experts, resolve_experts
from oases.plans.schedule_files import name_or_text, read_schedule


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
        ("pipeline x blocks=1", 1, 1, "expected the header 'pipeline NAME stages=N micro_batches=N [chunks=N] ["),
        ("pipeline x stages=2 micro_batches=1 placement=w", 1, 1, "[placement=loop|v]', got 'pipeline x stages=2"),
        ("pipeline x stages=0 micro_batches=2", 1, 1, "at least 1 stage"),
        ("experts x blocks=1 recompute=some", 1, 1, "expected the header 'experts NAME blocks=N"),
        ("experts x blocks=1\nC 0.0", 2, 1, "unknown op 'C'; known are F, D, E, P,"),
        ("experts x blocks=1\nBN 0.0", 2, 1, "BN of older lists is two ops now, of F in a block and of D in the"),
        ("experts x blocks=1\nwait C 0.0", 2, 6, "'wait' carries a compute op (F,"),
        ("experts x blocks=1\nshare D 0.0", 2, 7, "expected BLOCK.SUB_BATCH, e.g. 3.0, got 'D'"),
        ("pipeline x stages=1 micro_batches=1\nwait F 0.0", 2, 1, "unknown op 'wait'; known are F, R, B, W, send"),
        (HEADER + "\nall_reduce 0.0", 3, 12, "'all_reduce' carries a compute op"),
        (HEADER + "wait", 2, 5, "expected the op whose result 'wait' carries"),
        (HEADER + "F 0.0 0.1", 2, 7, "unexpected text after the op: '0.1'"),
    ],
)
def test_syntax_errors(text, line, column, message):
    with pytest.raises(ScheduleSyntaxError) as caught:
        parse_schedule(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert message in str(caught.value)
    assert f"line {line}, column {column}" in str(caught.value)


LISTS = {
    "block": sequence_parallel(generate("oases", 2, 2, "full")),
    "experts": generate_experts("block_wise", 2, True),
    "stage": generate_pipeline("interleaved", 2, 2),
}
SIZES = {
    "block": ({"num_blocks": 2}, {"num_blocks": 3}, "for 2 blocks, but 3 are required"),
    "experts": ({"num_blocks": 2}, {"num_blocks": 4}, "for 2 blocks, but 4 are required"),
    "stage": (
        {"num_stages": 2, "num_sub_batches": 2, "num_blocks": 4},
        {"num_stages": 2, "num_sub_batches": 8},
        "for 2 micro-batches, but 8 are required",
    ),
}


@pytest.mark.parametrize("unit", LISTS)
def test_a_file_of_each_sort(tmp_path, unit):
    path, (sizes, others, message) = tmp_path / "list.txt", SIZES[unit]
    lines = format_schedule(LISTS[unit]).splitlines()
    commented = ["# by hand", "", *(f"{line}  # {number}" for number, line in enumerate(lines))]
    path.write_text("\n".join(commented))
    assert read_schedule(path, unit) == read_schedule(str(path), unit, **sizes) == LISTS[unit]
    with pytest.raises(ScheduleError, match=rf"schedule file '.*list.txt', line 3: it is {message}"):
        read_schedule(path, unit, **others)
    for other in LISTS:
        if other != unit:
            with pytest.raises(ScheduleError, match=r"line 3: .* is a schedule of .*, but one of .* is required"):
                read_schedule(path, other)

    for end in range(3, len(commented)):
        path.write_text("\n".join(commented[:end]))
        with pytest.raises(ScheduleError, match=r"list\.txt', line \d+"):
            read_schedule(path, unit)
    path.write_text("\n".join([*commented[:-9], commented[-9][:1]]))
    with pytest.raises(ScheduleError, match=rf"line {len(commented) - 8}, column \d+: "):
        read_schedule(path, unit)
    path.write_text("\n".join([*commented[:3], commented[-1], *commented[3:-1]]))
    with pytest.raises(ScheduleError, match=rf"line 4: op 1 \({lines[-1]}\): "):
        read_schedule(path, unit)


@pytest.mark.parametrize("unit", LISTS)
def test_a_file_with_slips_of_the_pen_is_read_or_refused_with_its_line(tmp_path, unit):
    rng, path, whole = random.Random(1), tmp_path / "list.txt", format_schedule(LISTS[unit])
    for _ in range(60):
        at = rng.randrange(len(whole))
        path.write_text(whole[:at] + rng.choice(["", "\n", " ", "0", "1", "B", "F", "-", "."]) + whole[at + 1 :])
        said = f"list.txt', line {LISTS[unit].num_blocks}"
        try:
            assert read_schedule(path, unit).num_blocks == LISTS[unit].num_blocks
        except ScheduleError as error:
            said = str(error)
        assert re.search(r"list\.txt', line \d+", said), said


def test_experts_by_name_and_by_text():
    made = generate_experts("blocking", 3, True)
    assert resolve_experts("blocking", 3, True) == resolve_experts(format_schedule(made), 3) == made
    with pytest.raises(ScheduleError, match="for 3 blocks, but the model has 4"):
        resolve_experts(format_schedule(made), 4)


def test_a_name_or_the_text_of_a_file(tmp_path):
    made = generate_pipeline("zb_h1", 2, 4, False)
    path = tmp_path / "mine.txt"
    path.write_text("# mine\n" + format_schedule(made))
    assert name_or_text("zb_h1", PIPELINES, "stage", num_stages=3) == "zb_h1"
    text = name_or_text(str(path), PIPELINES, "stage", num_stages=2, num_sub_batches=4)
    assert is_text(text)
    assert from_text(text, "stage") == from_text(text, None) == made
    with pytest.raises(ScheduleError, match=r"mine.txt', line 2: it is for 2 stages, but 3 are required"):
        name_or_text(str(path), PIPELINES, "stage", num_stages=3)
    with pytest.raises(ScheduleError, match=r"'nosuch' is unknown; known are gpipe, .*, or a schedule file's path"):
        name_or_text("nosuch", PIPELINES, "stage")
    path.write_text(format_schedule(Schedule("x", 2, 2, generate("oases", 2, 2).forward)))
    with pytest.raises(ScheduleError, match=r"where the file ends: it has no backward pass, which training requires"):
        name_or_text(str(path), PIPELINES, "block")


def test_a_file_that_is_no_text(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read: No such file"):
        read_schedule(tmp_path / "none", "block")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="is not UTF-8 text"):
        read_schedule(path, "stage")
