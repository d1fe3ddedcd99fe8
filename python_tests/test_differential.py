"""reliability/differential: cases and their texts, what covers all pairs, reduction, and verdicts on ranks."""

import ast
import itertools

import pytest
import torch

from reliability.differential import record, runs
from reliability.differential.__main__ import main
from reliability.differential.case import Case, case_of, covering, drawn
from reliability.differential.factors import FACTORS
from reliability.differential.program import program
from reliability.differential.report import covered, page, summary
from reliability.differential.shrink import compact, shrunk, standalone


def test_a_case_is_a_line_of_text_and_json():
    for case in map(case_of, range(20)):
        assert Case.parse(str(case)) == Case.of(**case.json()) == case
    with pytest.raises(ValueError, match=r"mlp=wide: unknown; known are plain, gated"):
        Case.of(mlp="wide")


def test_every_choice_is_in_a_program():
    for name, choices in FACTORS.items():
        for choice in choices:
            tried = (drawn(f"{choice} {seed}", {name: choice}, plain=0.3) for seed in range(60))
            case = next((each for each in tried if each is not None), None)
            assert case is not None, f"{name}={choice}"
            assert case[name] == choice
            ast.parse(program(case))


def test_covering_cases_hold_the_pairs_that_may_be():
    cases = covering(40)
    assert cases == covering(40)
    held = {(case["family"], case["layers"]) for case in cases}
    assert held == {*itertools.product(FACTORS["family"], FACTORS["layers"])}


def test_a_case_is_reduced_to_what_makes_it_bad():
    case = Case.of(mlp="gated", clip="torch", mesh="dp2.tp2", layers="4", optimizer="adamw", bias="no", sequence="8")
    small = shrunk(case, lambda one: one["mlp"] == "gated" and "dp2" in one["mesh"])
    assert small == Case.of(mlp="gated", mesh="dp2.tp2")
    assert shrunk(case, lambda one: False) == case


@pytest.mark.parametrize("case", [Case(), Case.of(mesh="pp2"), Case.of(family="llama", mesh="dp2.tp2")])
def test_a_program_of_its_own_is_short(case):
    text = standalone(case)
    assert text.count("\n") <= 36
    assert ast.dump(ast.parse(compact(program(Case.of(closure="yes"))))).count("log") == 2


def test_half_of_the_digits_must_agree():
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64)
    wanted = [("loss", torch.tensor(1.0)), ("gradients", {"a": weight, "b": None}), ("weights", {"a": weight})]

    def found(value, b=None, dtype="float64"):
        events = [("loss", torch.tensor(1.0)), ("gradients", {"a": value, "b": b}), ("weights", {"a": weight})]
        return record.Comparison(wanted, [0, 0], dtype).differences([wanted, events], whole=True)

    assert found(weight + 1e-9) == found(weight, torch.zeros(1)) == found(weight + 1e-4, dtype="float32") == []
    assert found(weight + 1e-6) == ["rank 1 event 1 gradients a: differs by 5e-07 of its largest value"]
    assert found(weight, torch.ones(1)) == ["rank 1 event 1 gradients b: a tensor in place of none"]
    assert found(weight[:1]) == ["rank 1 event 1 gradients a: shape (1,), not (2,)"]
    assert found(weight * torch.nan) == ["rank 1 event 1 gradients a: differs by inf of its largest value"]
    cut_off = record.Comparison(wanted, [0, 0])
    assert cut_off.differences([wanted[:1]] * 2, whole=False) == []
    assert len(cut_off.differences([wanted[:1]] * 2, whole=True)) == 2


FAULTS = {
    runs.EQUAL: "",
    runs.WRONG: "model.last.weight.data.add_(0.5)",
    runs.CRASH: "raise KeyError('a')",
    runs.REFUSED: "raise oases.UsageError('a is 1; give 2')",
    runs.HANG: "dist.barrier() if replica is not None and dist.get_rank() else None",
}


@pytest.mark.long
@pytest.mark.parametrize("verdict", FAULTS)
def test_verdicts(tmp_path, monkeypatch, verdict):
    line = f"    if replica is not None:\n        {FAULTS[verdict] or 'pass'}\n"
    start = "def train(model, replica=None, log=lambda *_: None):\n"
    monkeypatch.setattr(runs, "program", lambda case: program(case).replace(start, start + line))
    monkeypatch.setattr(runs, "LIMIT_SECONDS", 60.0 if verdict != runs.HANG else 15.0)
    with runs.Ranks(tmp_path / "ranks") as ranks:
        found = ranks.judge(Case(), sure=False)
    assert found.verdict == verdict, found.details
    if verdict == runs.HANG:
        assert any("barrier" in each for each in found.details)


@pytest.mark.long
def test_a_run_goes_on_where_it_ended(tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    assert main(["--cases", "1", "--first", "2", "--results", str(results)]) == 0
    lines = results.read_text()
    (tmp_path / "page.md").write_text("# Run\n<!-- run -->\nold\n<!-- end of run -->\nEnd\n")
    assert main(["--cases", "1", "--first", "2", "--results", str(results), "--page", str(tmp_path / "page.md")]) == 0
    assert results.read_text() == lines
    text = (tmp_path / "page.md").read_text()
    assert "1 cases" in text
    assert "old" not in text


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path):
    assert main(["--faults", "residual_counted_twice", "--results", str(tmp_path / "none.jsonl")]) == 0


def test_the_page_counts_verdicts():
    results = [
        {"case": {"mlp": "gated"}, "verdict": "equal", "why": "", "seconds": 1.0},
        {"case": {}, "verdict": "refused", "why": "UsageError: 3 are too few", "seconds": 2.0},
    ]
    assert covered(results)[0] == len(Case.of(mlp="gated").pairs())
    assert summary(results).splitlines()[0] == "1 equal, 1 refused"
    assert "| 1 | `UsageError: # are too few` |" in page(results, "")
