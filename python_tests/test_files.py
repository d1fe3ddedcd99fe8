"""Files of every bad kind, given to every parser, end in one error that names the file; so does a full disk."""

import io
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from resident_memory import limited_memory

from oases.autotp.configuration import read_configuration
from oases.cli import plan_options
from oases.core.schedule import ScheduleError
from oases.errors import UsageError
from oases.files import parse_json, read_json, read_lines, read_text, write_text
from oases.limits import short
from oases.plans.plan import read_plan
from oases.plans.schedule_files import read_schedule
from oases.safetensors_files import _weight_map as read_index
from oases.safetensors_files import write_header
from oases.simulator.cluster import cluster_called
from oases.simulator.hardware_file import read_hardware
from oases.simulator.hardware_file import to_json as hardware_json
from oases_bench.loads import generate
from oases_train.config import TrainConfig
from oases_train.logs import StepLog
from oases_train.plan import plan_from_degrees
from oases_train.traces import Recorder, replay

PARSERS = {
    "plan": read_plan,
    "config.json": lambda path: read_configuration(path, "--model"),
    "hardware": lambda path: read_hardware(path),
    "schedule": lambda path: read_schedule(path, None),
    "config.yaml": TrainConfig.from_yaml,
    "config.py": lambda path: TrainConfig.from_yaml(path),
    "loads": lambda path: list(replay(path)),
    "steps": lambda path: StepLog(path, 10**6),
    "index": read_index,
}
"""Parsers by the kind of file they take."""
NOT_IN = {
    "no file": {"steps"},  # a new log
    "empty": {"steps", "config.yaml"},  # a new log; a configuration of defaults
    "zero": {"steps"}, "full": {"steps"},  # a log may go to a terminal
    "zeros": {"steps"}, "half a character": {"steps"},  # an incomplete last line
    **{kind: {"config.json"} for kind in ("NaN", "Infinity", "beyond float64", "a name twice", "one long line")},
}  # fmt: skip
"""Parsers that a kind of file is no mistake for."""
DEEP = 100_000
HEAD = '{"kind": "oases loads", "version": 1}\n'
BAD = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "zeros": b"\0" * 4096,
    "not UTF-8": b'{"format": "oases \xff"}\n',
    "half a character": "{\u20ac".encode()[:-1],
    "deep lists": b"[" * DEEP + b"]" * DEEP + b"\n",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "deep yaml": b"hidden: " + b"[" * 30_000 + b"\n",
    "long integer": b'{"format": "oases plan", "version": ' + b"9" * 5000 + b"}\n",
    "long yaml integer": b"hidden: " + b"9" * 5000 + b"\n",
    "NaN": b'{"format": "oases plan", "version": NaN, "step": NaN}\n',
    "Infinity": b'{"step": Infinity, "world": -Infinity}\n',
    "beyond float64": b'{"step": 1e999}\n',
    "a name twice": b'{"step": "x", "step": "y"}\n',
    "a list": b"[1, 2, 3]\n",
    "a number": b"17\n",
    "null": b"null\n",
    "many empty lines": b"\n" * 3_000_000 + b"x",
    "one long line": b'{"a": "' + b"x" * 40_000_000 + b'"}\n',
    "an open string": b'{"format": "oases plan\n',
    "an alias of itself": b"hidden: &a [*a]\n",
    "aliases of aliases": b"- &x0 [1]\n" + b"".join(b"- &x%d [%s]\n" % (n + 1, b"*x%d," % n * 9) for n in range(12)),
    "a tag of Python": b"hidden: !!python/object/apply:os.system ['false']\n",
    "a tag without a value": b"hidden: !!timestamp x\nlayers: !!int ''\n",
    "a day that is none": b"hidden: 2024-13-45\n",
    "a list as a name": b"? [1, 2]\n: 3\n",
}  # fmt: skip
SPECIAL = ("no file", "folder", "pipe", "zero", "full", "unreadable", "null in the name")


def special_path(tmp_path, kind):
    path = tmp_path / "given"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("zero", "full"):
        path = type(path)(f"/dev/{kind}")
    elif kind == "unreadable":
        path = type(path)("/proc/self/mem")  # a regular file, of which no byte can be read; also by root
    elif kind == "null in the name":
        path = type(path)("given\0")
    return path


@pytest.fixture
def alarm():
    """End a parser that waits forever, or a file that is read without an end."""
    import signal

    def late(*_):
        raise TimeoutError("the parser takes over 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.few(40, 170)
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("kind", [*BAD, *SPECIAL])
def test_a_bad_file_is_an_error_that_names_it(tmp_path, parser, kind):
    if parser in NOT_IN.get(kind, ()):
        return
    if kind in BAD:
        path = tmp_path / f"given{'.py' if parser == 'config.py' else '.yaml' if parser == 'config.yaml' else ''}"
        path.write_bytes(BAD[kind])
    else:
        path = special_path(tmp_path, kind)
    with limited_memory(300), pytest.raises((UsageError, ScheduleError)) as caught:
        PARSERS[parser](path)
    said = str(caught.value)
    assert path.name.strip("\0") in said
    assert len(said) < 800, said[:1000]


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    ("parser", "text", "told"),
    [
        ("steps", '{"step": 1}\n{"step": "2"}\n', "line 2 is not a step of a run"),
        ("steps", '{"step": 1}\n{"step": true}\n', "line 2 is not a step of a run"),
        ("steps", '{"step": 1}\n[2]\n', "line 2 is not a step of a run"),
        ("steps", '{"step": 1}\n{"step": NaN}\n', "line 2 is not a step of a run"),
        (
            "loads",
            '{"kind": "oases loads", "version": 1}\n{"step": 1e9, "layer": 0}\n',
            "line 2: step must be a whole",
        ),
        ("loads", f'{HEAD}{{"step": 1e9, "layer": 0}}\n', "line 2: step must be a whole"),
        ("loads", f"{HEAD}[]\n", "line 2 must be an object, got []"),
        ("loads", f'{HEAD}{{"step": 1, "layer": 0, "counts": [[1], [2, 3]]}}\n', "line 2: "),
        ("loads", f'{HEAD}{{"step": 1, "layer": 0, "counts": [[1e300]]}}\n', "line 2: "),
        ("config.yaml", "layers: 2\nhidden: !!int x\n", "line 2: hidden is no valid value"),
        ("config.yaml", "layers: 2\n? {a: 1}\n: 3\n", "line 2: unknown field"),
        ("config.py", "import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
    ],
)
def test_line_and_field_are_named(tmp_path, parser, text, told):
    path = tmp_path / f"given{'.py' if parser == 'config.py' else '.yaml' if parser == 'config.yaml' else ''}"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        PARSERS[parser](path)
    assert told in str(caught.value)


def test_good_files_are_read_by_their_parsers(tmp_path):
    plan = plan_from_degrees(TrainConfig(), 2)
    path = tmp_path / "plan.json"
    write_text(path, plan.to_json(), "plan")
    assert read_plan(path) == plan
    hardware, _ = cluster_called("4x3090")
    write_text(path, hardware_json(hardware), "hardware")
    assert read_hardware(path) == hardware
    with Recorder(path) as recorder:
        recorder.write(0, 0, next(generate(experts=4, devices=2, tokens=64)))
    assert len(list(replay(path))) == 1


def test_strict_and_lenient_json(tmp_path):
    assert parse_json('{"a": [1, 2.5, null, "x"]}', "text", "remedy") == {"a": [1, 2.5, None, "x"]}
    with pytest.raises(UsageError, match="text is not JSON: 'a' is given twice in one object; remedy"):
        parse_json('{"a": 1, "a": 2}', "text", "remedy")
    assert parse_json('{"a": Infinity, "a": 2}', "text", "", strict=False) == {"a": 2}, "as other libraries write"
    with pytest.raises(UsageError, match="line 1 column 2"):
        parse_json("[", "text", "remedy", strict=False)
    path = tmp_path / "long.json"
    path.write_text("[" + " " * 100 + "]")
    with pytest.raises(UsageError, match="has over 50 bytes"):
        read_json(path, "file", "remedy", 50)


def test_a_line_without_an_end_is_not_read_whole(tmp_path):
    path = tmp_path / "line"
    path.write_bytes(b"x" * (2**24 + 5))
    with pytest.raises(UsageError, match="line 1 has over 16777216 bytes"):
        list(read_lines(path, "log", "remedy"))


def test_values_are_shown_in_a_line():
    assert short(17) == "17"
    assert short("x") == "'x'"
    assert short(-(10**5000)) == "a number of 5001 digits"
    assert short([10**5000]) == "[a number of 5001 digits]"
    deep = []
    for _ in range(10**5):
        deep = [deep]
    assert short(deep) == "[[[[[...]]]]]"
    assert len(short(["x" * 1000] * 1000)) <= 80


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    write_text(path, "first", "--json")
    path.chmod(0o640)
    write_text(path, "second", "--json")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", 0o640)
    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "third", "--json")
    assert (tmp_path / "link").is_symlink()
    assert path.read_text() == "third"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800", "--json")
    assert path.read_text() == "third"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "out"], "no temporary file stays"


def test_a_full_disk_is_named():
    with pytest.raises(UsageError, match="--json '/dev/full' cannot be written: No space left on device"):
        write_text("/dev/full", "x", "--json")
    with pytest.raises(UsageError, match="step log '/dev/full' cannot be written: No space left on device"):
        StepLog("/dev/full", 0).write(step=1)
    StepLog("/dev/null", 0).sync()  # a log may go to a device
    log = StepLog("/dev/full", 0)
    with pytest.raises(UsageError, match="step log '/dev/full' cannot be written"), log:
        log.write(step=1)  # closing writes again what is left
    with pytest.raises(UsageError, match="trace '/dev/full' cannot be written: No space left"), Recorder("/dev/full"):
        pass


def test_a_pipe_is_no_file_whatever_comes_through_it(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDWR)), daemon=True)
    writer.start()
    with pytest.raises(UsageError, match="is not a file but a pipe; remedy"):
        read_text(path, "text", "remedy")
    writer.join()


def test_lists_of_numbers_are_parsed_or_refused():
    assert plan_options.counts("4,2,2") == (2, 4)
    for text in ("", "1,", "-1", "0", "1" * 5000, "\u0665x", "1e3"):
        with pytest.raises(UsageError):
            plan_options.counts(text)


ON_A_FULL_DISK = """
import contextlib, io, json, sys
from pathlib import Path
from oases import cli
disk, trace = Path(sys.argv[1]), sys.argv[2]
(disk / "filler").write_bytes(b"x" * 16384)
model = "--cluster 4x3090 --hidden 256 --layers 2 --heads 4 --sequence 128 --global-batch 8 --tp 1".split()
for words in (
    ["simulate", *model, "--json"],
    ["simulate", *model, "--html"],
    ["simulate", *model, "--trace"],
    ["simulate", "--schedule", "plain", "--trace"],
    ["plan", *model[:-2], "--degrees", "1", "--micro-batches", "1", "--json"],
    ["bench", "loads", "--trace", trace, "--json"],
    ["bench", "loads", "--trace", trace, "--html"],
):
    error, code = io.StringIO(), 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main([*words, str(disk / "out")])
        except SystemExit as exit:
            code = exit.code
    left = sorted(path.name for path in disk.iterdir())
    print(json.dumps([" ".join([words[0], words[-1]]), code, error.getvalue(), left]))
"""


@pytest.mark.slow
def test_every_command_says_that_the_disk_is_full_and_leaves_nothing(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are off")
    disk, trace = tmp_path / "disk", tmp_path / "loads.jsonl"
    disk.mkdir()
    with Recorder(trace) as recorder:
        recorder.write(0, 0, next(generate(experts=4, devices=2, tokens=64)))
    mounted = 'mount -t tmpfs -o size=16k none "$1"; exec "$0" -c "$3" "$1" "$2"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted, sys.executable, str(disk), str(trace), ON_A_FULL_DISK],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 7
    for command, code, error, left in rows:
        assert (code, left) == (2, ["filler"]), (command, error)
        assert error.startswith("oases: error: "), command
        assert error.rstrip().endswith("out' cannot be written: No space left on device; give another path"), error
        assert error.count("\n") == 1


def test_equal_tensors_make_equal_files_in_any_order():
    tensors = {"b": (torch.float32, (3,)), "a": (torch.bfloat16, (2, 5)), "c": (torch.float32, ())}
    files = []
    for names in ("abc", "cab", "bca"):
        files.append(io.BytesIO())
        begins = write_header(files[-1], {name: tensors[name] for name in names})
        assert sorted(begins, key=begins.__getitem__) == ["b", "c", "a"]
    assert len({file.getvalue() for file in files}) == 1
