"""Run of a case: the unsharded model and the sharded one on every rank, compared step by step."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from oases.errors import UsageError
from oases.testing import RankPool
from oases_check import compare
from oases_check.case import Case
from oases_check.compare import BOUNDS, Finding, everyone
from oases_check.placement import Part, part_of
from oases_check.record import local_of, parameters_of, reference, run_step

_STACKS_BEFORE = 5.0
"""Seconds before the timeout at which every rank prints what it does."""


@dataclass
class Compared:
    """Comparison of one run. findings: of the first step that differs. skipped: parameters not compared, and why.

    notes: what is worth knowing and no fault. outputs: of modules, compared. parameters: compared.
    """

    dtype: str
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outputs: int = 0
    parameters: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)


def run(case: Case, dtype: torch.dtype | None, timeout_seconds: float) -> Compared:
    """Run a case on new ranks. UsageError for what a function of the case does wrong, with its traceback."""
    with RankPool(case.ranks) as pool:
        try:
            found: Compared | str = pool.run(_on_rank, case, dtype, timeout_seconds, timeout_seconds=timeout_seconds)[
                0
            ]
        except RuntimeError as error:
            raise UsageError(f"check: a rank failed, so that nothing was compared:\n{error}") from error
        except TimeoutError as error:
            raise UsageError(
                f"check: {error}: a hang, or a case that is too large; the stacks of the ranks are above"
            ) from error
    if isinstance(found, str):
        raise UsageError(found)
    return found


def _on_rank(case: Case, dtype: torch.dtype | None, timeout_seconds: float) -> Compared | str:
    """The comparison; the text of a UsageError of any rank."""
    if timeout_seconds > 2 * _STACKS_BEFORE:
        faulthandler.dump_traceback_later(timeout_seconds - _STACKS_BEFORE)
    try:
        right = _on_all(lambda: reference(case, dtype))
        if isinstance(right, str):
            return right
        model = _on_all(lambda: case.parallelize(case.built(dtype)))
        return model if isinstance(model, str) else _compared(case, dtype, right, model)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _on_all(make: Callable[[], Any]) -> Any:
    """What a function makes; where it raises UsageError on any rank, the text of that on all."""
    try:
        found, fault = make(), ""
    except UsageError as error:
        found, fault = None, str(error)
    return next(filter(None, everyone(fault)), found)


def _compared(case: Case, dtype: torch.dtype | None, right: list[Any], model: Any) -> Compared | str:
    if not isinstance(model, torch.nn.Module):
        return f"check: parallelize() returned {type(model).__name__}; return the sharded model"
    plain = case.built(dtype)
    whole = dict(plain.named_parameters())
    of_type = next((each.dtype for each in whole.values() if each.is_floating_point()), torch.float32)
    bounds = BOUNDS.get(of_type, BOUNDS[torch.float32])
    result = Compared(str(of_type).removeprefix("torch."))
    batches = everyone([_digest(case.batch_of(number, dtype)) for number in range(case.steps)])
    if any(each != batches[0] for each in batches):
        return "check: ranks have different batches; give every rank the same one, of which each takes its part"
    held = {name: local_of(each) for name, each in sorted(parameters_of(model).items())}
    parts: dict[str, Part | None] = {
        name: part_of(whole[name].detach(), value) for name, value in held.items() if name in whole
    }
    known = {name for each in everyone([name for name, part in parts.items() if part]) for name in each}
    unplaced = {name for each in everyone([name for name, part in parts.items() if part is None]) for name in each}
    parts = {name: part for name, part in parts.items() if name not in unplaced}
    result.skipped = dict.fromkeys(sorted(unplaced), "its rows are not those of the unsharded parameter")
    result.skipped |= dict.fromkeys(sorted(set(whole) - known - unplaced), "no rank has a parameter of this name")
    added = sorted({name for each in everyone([*held]) for name in each} - set(parameters_of(plain)))
    result.skipped |= dict.fromkeys(added, "the unsharded model has none of this name")
    result.parameters = len(known - unplaced)
    if not result.parameters:
        name = next(iter(whole), "")
        return f"check: no parameter of the sharded model has the name of an unsharded one, such as {name!r}"
    result.findings = compare.tensors(
        case, "weight", 0, held, {n: w.detach() for n, w in whole.items()}, parts, bounds
    )
    optimizer = case.optimizer([each for each in model.parameters() if each.requires_grad])
    share, seen = dist.get_rank() // case.tp, 0
    for number, wanted in enumerate(right):
        if result.findings:
            break
        step = run_step(case, model, optimizer, case.batch_of(number, dtype, share), whole=False)
        losses = everyone(step.loss)
        mean = sum(losses) / len(losses)
        result.losses.append((wanted.loss, mean))
        seen = max(seen, len(set(step.outputs) & set(wanted.outputs)))
        result.findings = compare.outputs(case, "output", number, step.outputs, wanted.outputs, bounds)
        if not abs(mean - wanted.loss) <= bounds[0] * abs(wanted.loss):
            apart = abs(mean - wanted.loss) / (abs(wanted.loss) or 1.0)
            result.findings.append(Finding("loss", "", number, apart, f"{mean:.9g} for {wanted.loss:.9g}"))
        wrong = compare.tensors(case, "gradient", number, step.gradients, wanted.gradients, parts, bounds)
        if not result.findings:
            backwards = step.output_gradients, wanted.output_gradients
            result.findings += compare.outputs(case, "output gradient", number, *backwards, bounds)
        result.findings += wrong
        result.findings += compare.norms(case, number, step, wanted, parts, bounds)
        if not wrong:
            result.findings += compare.tensors(case, "update", number, step.weights, wanted.weights, parts, bounds)
        if any(errors := everyone(step.error)) and number == 0:
            result.notes.append(f"the norm of gradients is refused: {next(filter(None, errors))}")
    return replace(result, outputs=seen)


def _digest(batch: Any) -> str:
    values = batch.values() if isinstance(batch, dict) else batch
    return repr([float(each.double().sum()) if isinstance(each, torch.Tensor) else repr(each) for each in values])


def check_case(case: Case, timeout_seconds: float) -> tuple[Compared, Compared | None]:
    """Compare, and again in float64 where something differs: rounding does not there. Returns both."""
    first = run(case, None, timeout_seconds)
    if not first.findings or first.dtype == "float64":
        return first, None
    try:
        again = run(case, torch.float64, timeout_seconds)
    except UsageError as error:
        reason = str(error).strip().splitlines()[-1]
        return replace(first, notes=[*first.notes, f"not confirmed in float64, which fails: {reason}"]), None
    return first, again
