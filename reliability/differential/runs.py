"""Runs of cases over pools of ranks: a verdict for each, with the stacks of ranks that hang."""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import shutil
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oases.errors import UsageError
from oases.launch import fork_server
from oases.testing import RankPool
from reliability.differential import record
from reliability.differential.case import Case
from reliability.differential.program import program

EQUAL, REFUSED, WRONG, CRASH, HANG, VOID = "equal", "refused", "WRONG", "crash", "hang", "void"
BAD = (WRONG, CRASH, HANG)
LIMIT_SECONDS = 60.0
"""Time for a case on ranks; then it hangs."""
AFTER_ERROR_SECONDS = 20.0
"""Time for the other ranks once one has an error."""
MODELING = {"neox": "gpt_neox"}
"""Names of models of transformers where these are not those of families."""

fork_server.MODULES += [
    "torch.export._trace",
    "torch._export.non_strict_utils",
    "oases.autotp.parallelization",
    __name__,
]


@dataclass(frozen=True)
class Outcome:
    """Verdict of a case. why: an error, or the first differences, in words."""

    case: Case
    verdict: str
    why: str = ""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The outcome as plain values."""
        return {"case": self.case.json(), "verdict": self.verdict, "why": self.why, "seconds": round(self.seconds, 2)}


class Ranks:
    """Pools of ranks by their number, started at need. A context.

    folder: for programs and results. families: of models, whose modules ranks are to find loaded.
    """

    def __init__(self, folder: Path, families: Iterable[str] = ()) -> None:
        self._folder, self._pools = folder, dict[int, RankPool]()
        names = [MODELING.get(each, each) for each in sorted({*families} - {"own"})]
        fork_server.MODULES += [f"transformers.models.{name}.modeling_{name}" for name in names]
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def judge(self, case: Case, sure: bool = True) -> Outcome:
        """Run a case in one process and on ranks, and compare. sure: run what is bad again, on new ranks."""
        begin = time.perf_counter()
        found = self._judge(case)
        if sure and found.verdict in BAD:
            if case.ranks in self._pools:
                self._pools.pop(case.ranks).close()
            again = self._judge(case)
            if again.verdict != found.verdict:
                again.details.append(f"the first run, on used ranks: {found.verdict}, {found.why}")
            found = again
        return Outcome(case, found.verdict, found.why, time.perf_counter() - begin, found.details)

    def _judge(self, case: Case) -> Outcome:
        for old in self._folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        path = self._folder / "case.py"
        path.write_text(program(case), encoding="utf-8")
        try:
            with quiet():
                wanted = record.reference(path)
        except Exception as error:
            return Outcome(
                case, VOID, f"in one process: {type(error).__name__}: {error}", details=[traceback.format_exc()]
            )
        if case.ranks not in self._pools:
            self._pools[case.ranks] = RankPool(case.ranks)
        try:
            self._pools[case.ranks].run(_serve, str(path), LIMIT_SECONDS, timeout_seconds=LIMIT_SECONDS + 30.0)
        except (RuntimeError, TimeoutError):  # ranks were killed, or ended by themselves; their files say why
            self._pools.pop(case.ranks, None)
        return verdict_of(case, wanted, [_result(self._folder, rank) for rank in range(case.ranks)])


@contextmanager
def quiet() -> Iterator[None]:
    """Context without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _serve(path: str, limit: float) -> None:
    """Run a program on this rank; write its events, its error, or the stacks of its threads."""
    folder, rank = Path(path).parent, dist.get_rank()
    done = threading.Event()
    threading.Thread(target=_watch, args=(folder, rank, done, limit), daemon=True).start()
    events, error, refused = record.Record(ranks=True), "", False
    try:
        with quiet():
            record.on_rank(Path(path), events)
    except Exception as found:
        error, refused = "".join(traceback.format_exception(found)), is_refusal(found)
        text = f"{type(found).__name__}: {found}"
        (folder / f"failed{rank}").touch()
    else:
        text = ""
    (folder / f"rank{rank}.new").write_bytes(pickle.dumps((events.events, text, refused, error)))
    os.replace(folder / f"rank{rank}.new", folder / f"rank{rank}")
    done.set()


def _watch(folder: Path, rank: int, done: threading.Event, limit: float) -> None:
    end = time.monotonic() + limit
    while not done.wait(0.2):
        if any(folder.glob("failed*")):
            end = min(end, time.monotonic() + AFTER_ERROR_SECONDS)
        if time.monotonic() > end:
            with (folder / f"stacks{rank}").open("w") as file:
                faulthandler.dump_traceback(file)
            time.sleep(1.0)  # for the others to do the same
            os._exit(3)


def is_refusal(error: BaseException) -> bool:
    """Whether an error was raised on purpose by oases: a UsageError, or one whose innermost line there raises it."""
    if isinstance(error, AssertionError | KeyError | IndexError | AttributeError | TypeError):
        return False
    if isinstance(error, UsageError):
        return True
    if error.__cause__ is not None:  # of an error of one rank, which all raise
        return is_refusal(error.__cause__)
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    package = Path(record.__file__).parents[2] / "oases"
    inside = Path(last.filename).is_relative_to(package)
    return inside and linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise ")


def _result(folder: Path, rank: int) -> tuple[list[record.Event], str, bool, str] | str:
    """Events, error, whether that is a refusal, traceback; or the stacks of a rank that did not end."""
    path = folder / f"rank{rank}"
    if path.exists():
        return pickle.loads(path.read_bytes())  # of our own ranks
    stacks = folder / f"stacks{rank}"
    return stacks.read_text() if stacks.exists() else "the process died"


def verdict_of(case: Case, wanted: list[record.Event], results: list[Any]) -> Outcome:
    """Judge the results of all ranks of a case."""
    ended = [each for each in results if not isinstance(each, str)]
    errors = [each for each in ended if each[1]]
    dp, tp = case.degree("dp"), case.degree("tp")
    replicas = [rank // tp % dp for rank in range(case.ranks)]
    events = [each[0] if not isinstance(each, str) else [] for each in results]
    whole = len(ended) == case.ranks and not errors
    comparison = record.Comparison(wanted, replicas, case.precision, case["experts"] == "balanced")
    apart = comparison.differences(events, whole=whole)
    details = [f"rank {rank}:\n{each if isinstance(each, str) else each[3]}" for rank, each in enumerate(results)]
    if apart:
        return Outcome(case, WRONG, apart[0], details=apart[:8] + (details if errors else []))
    if whole:
        return Outcome(case, EQUAL)
    first = next((each for each in errors if not each[2]), None)
    if first is not None:
        return Outcome(case, CRASH, first[1], details=details)
    if not errors:
        died = "the process died" in results
        return Outcome(case, CRASH if died else HANG, "a rank died" if died else "ranks wait", details=details)
    if len(errors) < case.ranks:
        return Outcome(
            case,
            HANG if len(ended) < case.ranks else CRASH,
            f"refused on {len(errors)} of {case.ranks} ranks alone: {errors[0][1]}",
            details=details,
        )
    return Outcome(case, REFUSED, errors[0][1])


def setup_process() -> None:
    """Prepare the process that computes references."""
    torch.set_num_threads(1)
