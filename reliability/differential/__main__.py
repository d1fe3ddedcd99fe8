"""Differential fuzzing: random training programs in one process and over ranks of oases.

    python -m reliability.differential [--covering N] [--cases N] [--minutes M] [--page FILE]     (make differential)
    python -m reliability.differential --case "mlp=gated mesh=dp2.tp2" [--shrink]
    python -m reliability.differential --faults NAME ...

Verdicts go to a file of JSON Lines, by the number of the case; a run goes on where that file ends. The exit code is 1
where a case is wrong, crashes or hangs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from oases.terminal import console
from reliability import mutations
from reliability.differential.case import Case, case_of, covering
from reliability.differential.report import kind_of, page, summary
from reliability.differential.runs import BAD, Outcome, Ranks, setup_process
from reliability.differential.shrink import shrunk, standalone
from reliability.mutation_list import MUTATIONS

FOLDER = Path("build") / "differential"
FAULTS = (
    "residual_counted_twice", "replicated_gradients_not_summed", "executor_swaps_sub_batches_of_c",
    "embedding_off_by_one",
    "averaging_divides_by_wrong_number", "clip_counts_replicated_per_rank", "zero_parameters_not_sent",
    "checkpoint_shards_swapped", "fsdp_bucket_halved",
)  # fmt: skip
"""Mutations that cases must find."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--covering", type=int, default=0, metavar="N", help="first N cases that cover all pairs")
    parser.add_argument("--cases", type=int, default=0, metavar="N", help="then the random cases of N seeds")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed of random cases (default 0)")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="end after M minutes")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results.jsonl", metavar="FILE", help="file of verdicts"
    )
    parser.add_argument("--case", metavar="TEXT", action="append", help="run such cases alone: factor=choice, ...")
    parser.add_argument(
        "--shrink", action="store_true", help="reduce cases that are bad, and write a program of each"
    )
    parser.add_argument("--until-bad", action="store_true", help="end at the first case that is bad")
    parser.add_argument("--page", type=Path, metavar="FILE", help="update a page with all verdicts of the file")
    parser.add_argument("--faults", nargs="*", metavar="NAME", help=f"plant mutations (default: {', '.join(FAULTS)})")
    options = parser.parse_args(arguments)
    setup_process()
    if options.faults is not None:
        return plant(options.faults or FAULTS, options.covering or 400, options.results)
    if options.case is not None:
        cases = [(text, Case.parse(text)) for text in options.case]
    else:
        cases = numbered(options.covering, options.cases, options.first)
    found = run(cases, options)
    everything = [json.loads(line) for line in options.results.read_text().splitlines()]
    console.print(summary(everything))
    if options.page:
        options.page.write_text(page(everything, options.page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if any(each.verdict in BAD for each in found) else 0


def numbered(number: int, random: int, first: int) -> list[tuple[str, Case]]:
    """Cases with their names: those that cover all pairs, then those of seeds."""
    cover = [(f"covering {at}", case) for at, case in enumerate(covering(number) if number else ())]
    return cover + [(f"seed {seed}", case_of(seed)) for seed in range(first, first + random)]


def run(cases: Sequence[tuple[str, Case]], options: argparse.Namespace) -> list[Outcome]:
    """Run cases whose names are not in the file of results, and add them there."""
    results: Path = options.results
    results.parent.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, results.read_text().splitlines() if results.exists() else ())
    known = {(line["name"], str(Case.of(**line["case"]))) for line in lines}
    end, found = time.monotonic() + 60 * options.minutes, []
    families, folder = {case["family"] for _, case in cases}, results.parent / f"{results.stem}-ranks"
    with Ranks(folder, families) as ranks, results.open("a", encoding="utf-8") as file:
        for name, case in cases:
            if (name, str(case)) in known:
                continue
            if time.monotonic() > end:
                break
            outcome = ranks.judge(case)
            found.append(outcome)
            file.write(json.dumps({"name": name, **outcome.as_json()}) + "\n")
            file.flush()
            if outcome.verdict in BAD:
                tell(name, outcome)
                if options.shrink:
                    reduce(name, outcome, ranks, results.parent)
                if options.until_bad:
                    break
    return found


def tell(name: str, outcome: Outcome) -> None:
    """Print a verdict with its details."""
    console.print(f"{name}: {outcome.verdict}: {outcome.why}\n  {outcome.case}", markup=False, highlight=False)
    for each in outcome.details[:4]:
        console.print("  " + each[-900:].replace("\n", "\n  "), markup=False, highlight=False)


def reduce(name: str, outcome: Outcome, ranks: Ranks, folder: Path) -> None:
    """Write the program of the smallest case with the same verdict, and the same kind of error."""

    def alike(case: Case) -> bool:
        again = ranks.judge(case, sure=False)
        same = outcome.verdict != "crash" or kind_of(again.why)[:40] == kind_of(outcome.why)[:40]
        return again.verdict == outcome.verdict and same

    small = shrunk(outcome.case, alike)
    path = folder / f"{name.replace(' ', '-')}.py"
    path.write_text(standalone(small), encoding="utf-8")
    console.print(f"  reduced to: {small or 'the plain case'}\n  {path}", markup=False, highlight=False)


def plant(names: Sequence[str], number: int, results: Path) -> int:
    """Plant each mutation in a copy of the tree, and run the covering cases there until one is bad that is good here.

    results: a file beside those of the mutations. Returns 1 where a fault is not found.
    """
    mutations.update_copy(build=False)
    results.absolute().parent.mkdir(parents=True, exist_ok=True)
    missed = []
    for mutation in (each for each in MUTATIONS if each.name in names):
        found, alone = (results.absolute().with_name(f"{mutation.name}{end}.jsonl") for end in ("", "-without"))
        found.unlink(missing_ok=True)
        text = "NOT FOUND"
        while True:
            with mutations.mutated(mutation):
                clean = _in_copy("--until-bad", "--covering", f"{number}", "--results", f"{found}")
            ran = [json.loads(line) for line in found.read_text().splitlines()]
            last = ran[-1]
            if clean or last["verdict"] not in BAD:
                break
            alone.unlink(missing_ok=True)
            if _in_copy("--case", str(Case.of(**last["case"])), "--results", f"{alone}"):
                text = f"after {len(ran)} cases, {last['name']}: {last['verdict']}: {last['why']}"
                break
        console.print(f"{mutation.name}: {text}", markup=False, highlight=False)
        missed += [mutation.name] if text == "NOT FOUND" else []
    return 1 if missed else 0


def _in_copy(*arguments: str) -> bool:
    """Run this command in the copy of the tree; return whether no case was bad."""
    command = [sys.executable, "-m", "reliability.differential", *arguments]
    done = subprocess.run(command, cwd=mutations.COPY, env=mutations._environment(), check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
