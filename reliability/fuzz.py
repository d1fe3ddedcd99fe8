"""Coverage-guided fuzzing of every parser: each input must be read, or refused by a UsageError, in 300 MB.

    python -m reliability.fuzz [--minutes N] [--parsers a,b] [--seed N] [--folder FOLDER]         (make fuzz)

atheris changes valid files, half of them as JSON and half as bytes, and keeps those that reach new lines of oases. An
input that is read must also be written and read again without a difference. Found inputs stay in FOLDER/PARSER:
`corpus` for the next run, and `crash-*` with the traceback beside. Exit code 1 where there is any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "python_tests"))

LIMIT_MB = 300
SLOW_SECONDS = 5.0
"""An input that takes more CPU time is a crash."""
PARSERS = (
    "plan", "hardware", "schedule", "yaml", "loads", "steps", "configuration", "index", "record", "options",
)  # fmt: skip
OF_JSON = ("plan", "hardware", "configuration", "index", "record")
TOKENS = (
    "NaN", "Infinity", "1e999", "9" * 400, "\\u0000",
    '"format"', "[[[[", "{}", "null", "&a", "*a", "!!int", "<<: ", "- ",
)  # fmt: skip
"""Texts that byte mutations insert."""


def seeds_of(name: str) -> list[bytes]:
    """Valid inputs of a parser."""
    import reliability.input_mutations as valid
    from oases_train.config import TrainConfig

    texts: dict[str, Callable[[], list[Any]]] = {
        "plan": valid.plans,
        "hardware": valid.hardware,
        "schedule": valid.schedules,
        "yaml": lambda: [TrainConfig().to_yaml(), "hidden: 64\ndegrees: {data: 2}\nlearning_rate: 1e-3\n"],
        "loads": valid.traces,
        "steps": lambda: ['{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n'],
        "configuration": lambda: ['{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}'],
        "index": lambda: ['{"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'],
        "record": valid.records,
        "options": lambda: [
            "0 1,2,4", "1 24GiB", "2 500mbit", "3 sim:alpha=20us,bandwidth=12GB/s", "4 64x3090", "5 merak:0.8",
        ],
    }  # fmt: skip
    return [text if isinstance(text, bytes) else text.encode() for text in texts[name]()]


def target_of(name: str, folder: Path) -> Callable[[bytes], None]:
    """The parser, called with an input's bytes. It raises AssertionError where what was read is not read again."""
    from oases.autotp.configuration import read_configuration
    from oases.checkpoint.metadata import RECORD, Metadata
    from oases.cli.plan_options import counts, parse_bytes
    from oases.core.schedule import format_schedule, parse_schedule
    from oases.planner.recomputation import Recomputation
    from oases.plans.check import check
    from oases.plans.plan import Plan, read_plan
    from oases.plans.schedule_files import read_schedule
    from oases.safetensors_files import _weight_map
    from oases.simulator.cluster import cluster_called
    from oases.simulator.hardware_file import read_hardware
    from oases.simulator.hardware_file import to_json as hardware_json
    from oases.testbed import Backend, link_bytes_per_second
    from oases_train.config import TrainConfig
    from oases_train.logs import StepLog, last_logged_step
    from oases_train.traces import replay

    path = folder / {"yaml": "input.yaml", "record": RECORD}.get(name, "input")

    def plan(path: Path) -> None:
        found = read_plan(path)
        assert Plan.from_json(found.to_json()) == found
        assert found.text()
        check(found)

    def hardware(path: Path) -> None:
        found = read_hardware(path)
        assert read_hardware(hardware_json(found)) == found

    def schedule(path: Path) -> None:
        found = read_schedule(path, None)
        assert parse_schedule(format_schedule(found)) == found

    def yaml(path: Path) -> None:
        found = TrainConfig.from_yaml(path)
        assert path.write_text(found.to_yaml())
        assert TrainConfig.from_yaml(path) == found

    def steps(path: Path) -> None:
        last = last_logged_step(path)
        with StepLog(path, last) as log:
            log.write(step=last + 1)
        assert last_logged_step(path) == last + 1

    def options(path: Path) -> None:
        text = path.read_bytes().decode("utf-8", "replace")
        each = (counts, parse_bytes, link_bytes_per_second, Backend.parse, cluster_called, Recomputation.parse)
        each[int(text[0]) % len(each) if text[:1].isdecimal() else 0](text[2:])

    parsers: dict[str, Callable[[Path], Any]] = {
        "plan": plan, "hardware": hardware, "schedule": schedule, "yaml": yaml, "steps": steps,
        "options": options, "loads": lambda path: list(replay(path)), "index": _weight_map,
        "configuration": lambda path: read_configuration(path, "--model"),
        "record": lambda path: Metadata.read(path.parent),
    }  # fmt: skip
    parse = parsers[name]

    def target(data: bytes) -> None:
        path.write_bytes(data)
        parse(path)

    return target


class Findings:
    """Inputs so far of a parser, its crashes by reason, and its memory; written to FOLDER/result.json."""

    def __init__(self, folder: Path, target: Callable[[bytes], None], seconds: float) -> None:
        from resident_memory import peak, resident

        self.folder, self.target = folder, target
        self.inputs, self.crashes = 0, dict[str, str]()
        self._before, self._peak = resident(), peak
        self._end, self._last = time.monotonic() + seconds, 0.0

    def try_one(self, data: bytes) -> bool:
        """Parse one input; returns whether time is left."""
        self.inputs += 1
        reason, text = self._reason(data)
        if reason and reason not in self.crashes:
            self.crashes[reason] = hashlib.sha1(data).hexdigest()[:12]
            file = self.folder / f"crash-{self.crashes[reason]}"
            file.write_bytes(data)
            file.with_suffix(".txt").write_text(f"{reason}\n{text}")
        now = time.monotonic()
        if reason or now > self._last + 1:
            self._last = now
            found = {"inputs": self.inputs, "crashes": self.crashes, "peak_mb": self._peak() - self._before}
            found["peak_mb"] = max(0, found["peak_mb"]) / 2**20
            (self.folder / "result.json").write_text(json.dumps(found))
        return now < self._end

    def _reason(self, data: bytes) -> tuple[str, str]:
        """Describe what is wrong with how an input ends, with its traceback; empty for nothing."""
        from oases.core.schedule import ScheduleError
        from oases.errors import UsageError

        start, reason, text = time.process_time(), "", ""
        try:
            self.target(data)
        except (UsageError, ScheduleError) as error:
            reason = "long message" if len(str(error)) > 2000 else ""
        except Exception as error:
            where, text = traceback.extract_tb(error.__traceback__)[-1], traceback.format_exc()
            reason = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        return reason or ("slow" if time.process_time() > start + SLOW_SECONDS else ""), text


def fuzz(name: str, seconds: float, seed: int, folder: Path) -> None:
    """Fuzz one parser in this process, with atheris; ends it."""
    import atheris

    with atheris.instrument_imports(include=["oases", "yaml"], enable_loader_override=False):
        import oases_train.config  # noqa: F401  (and most that it needs)
    from reliability.input_mutations import mutated

    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = seeds_of(name)
    for data in seeds:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    escaped = ("".join(rf"\x{byte:02x}" for byte in word.encode()) for word in TOKENS)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    scratch = Path(tempfile.mkdtemp(prefix="oases-fuzz-"))
    findings = Findings(folder, target_of(name, scratch), seconds)

    def one(data: bytes) -> None:
        if not findings.try_one(data):
            shutil.rmtree(scratch)
            os._exit(0)

    def change(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if name in OF_JSON and random.random() < 0.7:
            try:
                return json.dumps(mutated(json.loads(data), random, random.randrange(1, 4))).encode()[:most]
            except (ValueError, RecursionError):
                data = random.choice(seeds)
        return bytes(atheris.Mutate(data, most))

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + LIMIT_MB * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    options = [f"-seed={seed}", "-max_len=16384", f"-dict={words}", "-rss_limit_mb=0", "-timeout=1200"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()


def campaign(parsers: list[str], minutes: float, seed: int, folder: Path) -> int:
    """Fuzz each parser in a process of its own; prints a table. Returns the number of crashes."""
    from rich.table import Table

    from oases.terminal import console, progress

    table = Table("parser", "inputs", "crashes", "peak memory")
    total = 0
    for name in parsers:
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        (own / "result.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "reliability.fuzz", "--one", name, "--minutes", str(minutes)]
        command += ["--seed", str(seed), "--folder", str(own)]
        with (own / "output").open("w") as output, progress(name, max(1, round(60 * minutes)), True) as advance:
            child = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
            start = time.monotonic()
            while child.poll() is None:
                time.sleep(0.5)
                found = _result(own)
                advance(min(round(60 * minutes), int(time.monotonic() - start)), f"{found['inputs']} inputs")
        found = _result(own)
        if child.returncode != 0 or not found["inputs"]:
            found["crashes"][f"exit code {child.returncode}, see {own / 'output'}"] = ""
        total += len(found["crashes"])
        table.add_row(name, f"{found['inputs']:,}", str(len(found["crashes"])), f"{found['peak_mb']:.0f} MB")
        for reason, digest in found["crashes"].items():
            console.print(f"{name}: {reason} {f'({own}/crash-{digest})' if digest else ''}", soft_wrap=True)
    console.print(table)
    return total


def _result(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):  # not yet, or in this moment
        return {"inputs": 0, "crashes": {}, "peak_mb": 0.0}
    return found


def main() -> None:
    """Fuzz one parser, in a process of its own, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="per parser (default: 30)")
    parser.add_argument("--parsers", default=",".join(PARSERS), help=f"of {', '.join(PARSERS)} (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "fuzz", help="of inputs (default: build/fuzz)"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        fuzz(given.one, 60 * given.minutes, given.seed, given.folder)
        return
    unknown = [name for name in given.parsers.split(",") if name not in PARSERS]
    if unknown:
        parser.error(f"unknown parsers {', '.join(unknown)}; known are {', '.join(PARSERS)}")
    sys.exit(min(1, campaign(given.parsers.split(","), given.minutes, given.seed, given.folder)))


if __name__ == "__main__":
    main()
