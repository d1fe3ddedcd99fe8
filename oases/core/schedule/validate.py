"""Validation of schedules: every input is available, every wait follows its start, and no rank waits forever."""

from __future__ import annotations

from collections.abc import Iterator

from oases.core.schedule.ops import (
    OPS,
    STARTS,
    TRANSFERS,
    Compute,
    Kind,
    Op,
    Read,
    ScheduleError,
    Transfer,
    Unit,
    crossing,
)
from oases.core.schedule.schedule import Schedule

_ONCE: tuple[str, ...] = ("F", "R", "B", "W")
"""Ops that a joint block runs once for all sub-batches."""
SORTS: dict[Unit, str] = {
    "block": "tensor-parallel blocks", "experts": "blocks of experts", "stage": "pipeline stages",
}  # fmt: skip
"""Names of the units in error messages."""
_PARTIAL = frozenset({"F", "R", "B"})
_OF_EXPERTS = frozenset({"D", "E", "BF", "BE"})
"""Ops whose results an all-to-all carries."""
_SUMS = "the result of {of} is complete; only F, R and B leave partial sums"
_MESSAGES = "only the results of F and B go to another stage"
_CARRIES = {
    "all_reduce": _SUMS,
    "reduce_scatter": _SUMS,
    "all_gather": "only C, RC and BC leave sequence shards to gather",
    "all_to_all": "only D, E, BF and BE produce tokens or their gradients",
    "send": _MESSAGES,
    "receive": _MESSAGES,
}
"""Error for a result that this collective cannot carry, by collective."""


# --- what an op reads ---


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """Ops that must precede `op` in its rank's list: the producers of its inputs."""
    kind, b, s, _ = op
    found: list[Op] = []
    for read in OPS[kind].reads[schedule.unit]:
        if read.when and not _holds(read, b, s, schedule):
            continue
        if read.kind == "of":
            found.append(_made_by(op.carried, schedule))
        elif read.kind == "start":
            found.append(schedule.starts.get(op.carried) or _start_of(op))
        elif not read.arrived:
            source = "RC" if read.kind == "RC|C" and ("RC", b, s) in schedule.recomputed else read.kind
            found.append(Op("C" if source == "RC|C" else source, b + read.block, s))  # type: ignore[arg-type]
        elif 0 <= b + read.block < schedule.num_blocks:
            if schedule.unit == "stage":
                sender = b + read.block
                together = schedule.stage_of(sender) == schedule.stage_of(b)
                made = Op(read.kind, sender, s) if together else Op("receive", b, s, read.kind)  # type: ignore[arg-type]
                found.append(made)
                continue
            at_once = b in schedule.joint and kind in _ONCE
            for each in range(schedule.num_sub_batches) if at_once else (s,):
                found.append(_arrival(read.kind, b + read.block, each, schedule))
    return found


def _holds(read: Read, b: int, s: int, schedule: Schedule) -> bool:
    when = read.when
    if when == "listed":
        return (read.kind, b + read.block, s) in schedule.recomputed
    if when == "recomputed":
        return (b, s) in schedule.recomputed_inputs
    if when == "copied":
        return schedule.copies
    if when == "dispatched":
        return (b, s) in schedule.dispatched
    apart = schedule.sequence_parallel or b in schedule.joint or Op("BC", b, s) in schedule.backward_set
    return apart == (when == "apart")


def _arrival(kind: str, b: int, s: int, schedule: Schedule) -> Op:
    """Op after which a result can be read: the wait for the collective that carries it, if there is one."""
    partial = kind in _PARTIAL and schedule.unit == "block"
    carried = kind in _OF_EXPERTS or kind in TRANSFERS or partial or schedule.sequence_parallel
    return Op("wait", b, s, kind) if carried else Op(kind, b, s)  # type: ignore[arg-type]


def _start_of(wait: Op) -> Op:
    if wait.of in TRANSFERS:
        return wait.carried._replace(kind=wait.of, of=None)
    carrier: Kind = "all_to_all" if wait.of in _OF_EXPERTS else "all_reduce"
    return wait._replace(kind=carrier)


def _made_by(op: Op, schedule: Schedule) -> Op:
    """Op that computes this sub-batch's result: a joint block computes all sub-batches at once."""
    return op._replace(sub_batch=0) if op.block in schedule.joint and op.kind in _ONCE else op


def required(schedule: Schedule) -> Iterator[Op]:
    """Ops that the list must hold to be a complete step."""
    places = [(b, s) for b in range(schedule.num_blocks) for s in range(schedule.num_sub_batches)]
    if schedule.unit == "stage":
        kinds: tuple[Compute, ...] = ("F", "B", "W") if schedule.has_weight_passes else ("F", "B")
        yield from (Op(kind, b, s) for b, s in places for kind in kinds)
        return
    if schedule.unit == "experts":
        kinds = ("D", "E", "P", "F", "BF", "BE", "B", *(("RD", "RE", "R") if schedule.recompute == "full" else ()))
        yield from (Op(kind, b, 0) for kind in kinds for b in range(schedule.num_blocks))
        moved: tuple[Transfer, ...] = ("join", "return") if schedule.copies else ()
        yield from (Op("wait", b, 0, kind) for kind in moved for b in range(schedule.num_blocks))
        return
    gathered = schedule.sequence_parallel
    reduce: Kind = "reduce_scatter" if gathered else "all_reduce"
    pairs: list[tuple[Kind, Compute | None]] = [("F", None), (reduce, "F"), ("wait", "F"), ("C", None)]
    if gathered:
        pairs += [("all_gather", "C"), ("wait", "C")]
    if schedule.backward:
        pairs += [("BC", None), ("all_gather", "BC"), ("wait", "BC")] if gathered else []
        pairs += [("B", None), (reduce, "B"), ("wait", "B")]
    for b, s in places:
        for each, of in pairs:
            if s == 0 or each not in _ONCE or b not in schedule.joint:
                yield Op(each, b, s, of)
    of_experts: tuple[Compute, ...] = ("D", "E", "BF", "BE") if schedule.backward else ("D", "E")
    for place in schedule.dispatched:
        for kind in of_experts:
            yield from (Op(kind, *place), Op("all_to_all", *place, kind), Op("wait", *place, kind))


# --- any list ---


def _fault(op: Op, line: int, text: str) -> ScheduleError:
    return ScheduleError(f"op {line} ({op}): {text}", line)


def validate(schedule: Schedule, unit: Unit | None = None) -> None:
    """Raise ScheduleError, naming op and line, unless every rank can run `schedule` to the end.

    unit: required unit; None for any.
    """
    if unit is not None and schedule.unit != unit:
        raise ScheduleError(
            f"{schedule.name} is a schedule of {SORTS[schedule.unit]}, but one of {SORTS[unit]} is required", 0
        )
    _require_sizes(schedule)
    done: dict[Op, int] = {}
    backward_since: int | None = None
    ordered = schedule.unit != "stage"  # stages go forward and backward in turn
    for line, op in enumerate(schedule.ops, start=1):
        _require_possible(op, line, schedule, done)
        if ordered and op.in_backward:
            backward_since = backward_since or line
        elif backward_since is not None:
            begun = f"a forward op after the backward pass began with op {backward_since}"
            raise _fault(op, line, f"{begun}; the loss needs the whole forward pass first")
        done[op] = line
    for op in required(schedule):
        if op not in done:
            raise ScheduleError(f"'{op}' is missing: without it the step is incomplete")
    _require_recompute_as_said(schedule)
    if schedule.unit == "stage":
        _require_messages(schedule)
        _require_progress(schedule)
        return
    waited = {schedule.starts[op.carried] for op in schedule.ops if op.kind == "wait"}
    for op in schedule.collectives:
        if op not in waited:
            line = schedule.lines[op]
            raise ScheduleError(f"op {line} ({op}) is never waited for", line)


def _require_sizes(schedule: Schedule) -> None:
    blocks, subs, stages, joint = schedule.num_blocks, schedule.num_sub_batches, schedule.num_stages, schedule.joint
    of_tokens, what = schedule.along == "sequence", schedule.unit
    faults = {
        f"a schedule needs at least 1 block and 1 sub-batch, got {blocks} and {subs}": blocks < 1 or subs < 1,
        f"{blocks} model parts cannot be divided over {stages} pipeline stages": stages < 1
        or blocks % stages
        or (stages > 1 and what != "stage"),
        f"an expert schedule does not split the batch, got {subs} sub-batches": what == "experts" and subs > 1,
        "only tensor-parallel blocks have joint blocks or sub-batches along=sequence": what != "block"
        and (joint or of_tokens),
        "joint blocks are for sub-batches along=sequence; samples are independent": joint and not of_tokens,
        f"joint block {max(joint, default=0)} is beyond the {blocks} blocks": max(joint, default=-1) >= blocks,
        "sub-batches along=sequence cannot be combined with sequence parallelism; split the batch": of_tokens
        and schedule.sequence_parallel,
        "op RC is not allowed with joint blocks, which keep the result of C": joint
        and any(kind == "RC" for kind, _, _ in schedule.recomputed),
    }
    for text, holds in faults.items():
        if holds:
            raise ScheduleError(text, 0)


def _require_recompute_as_said(schedule: Schedule) -> None:
    extent = schedule.extent
    if extent == schedule.recompute and (extent != "some" or schedule.unit != "experts"):
        return
    if schedule.unit == "block" and not schedule.backward:
        return
    kind = "R, RD and RE" if schedule.unit == "experts" else "R"
    found, whole, what = len(schedule.recomputed_blocks), schedule.num_blocks, "blocks"
    if schedule.unit == "stage":
        found, whole, what = len(schedule.recomputed), whole * schedule.num_sub_batches, "passes"
    holds = f"ops {kind} of {found} of {whole} {what}" if found else f"no op {kind}"
    raise ScheduleError(f"the header says recompute={schedule.recompute}, but the list holds {holds}", 0)


def _require_possible(op: Op, line: int, schedule: Schedule, done: dict[Op, int]) -> None:
    """Raise ScheduleError unless `op` can run after the ops in `done` (op -> line)."""
    blocks, subs = schedule.num_blocks, schedule.num_sub_batches
    if schedule.unit not in OPS[op.kind].reads:
        raise _fault(op, line, f"{op.kind} is not an op of {SORTS[schedule.unit]}")
    if not (0 <= op.block < blocks and 0 <= op.sub_batch < subs):
        sizes = {
            "block": f"{blocks} blocks and {subs} sub-batches",
            "experts": f"{blocks} blocks of experts and 1 sub-batch",
            "stage": f"{blocks} model parts and {subs} micro-batches",
        }[schedule.unit]  # fmt: skip
        raise _fault(op, line, f"the schedule has {sizes}, counted from 0")
    if OPS[op.kind].stream == "link":
        _require_meaning(op, line, schedule)
    elif op.of is not None:
        raise _fault(op, line, f"{op.kind} carries no result, so it cannot name another op")
    if op.sub_batch and op.kind in _ONCE and op.block in schedule.joint:
        raise _fault(op, line, f"block {op.block} is joint, so its {op.kind} runs once, as sub-batch 0")
    if op in done:
        raise _fault(op, line, f"duplicate of op {done[op]}")
    _require_inputs(op, line, schedule, done)


def _require_inputs(op: Op, line: int, schedule: Schedule, done: dict[Op, int]) -> None:
    for need in needs(op, schedule):
        if need in done:
            continue
        if need.kind == "wait" and schedule.starts.get(need.carried) in done:
            raise _fault(op, line, f"uses the result of {need.carried} before '{need}'")
        if op.kind == "wait":
            raise _fault(op, line, f"waits for a collective that was not started by '{need}'")
        raise _fault(op, line, f"its input is missing; '{need}' must come before it")


def _require_meaning(op: Op, line: int, schedule: Schedule) -> None:
    """Raise ScheduleError for a collective, message or wait that carries no valid result."""
    kind, of = op.kind, op.of
    if kind in TRANSFERS:
        if of is not None:
            raise _fault(op, line, f"{kind} carries replica parameters, not an op's result")
        return
    if of is None or (of not in OPS) or schedule.unit not in OPS[of].reads:
        raise _fault(op, line, f"'{kind}' must name the op whose result it carries")
    if kind in STARTS and schedule.starts[op.carried] != op:
        other = schedule.starts[op.carried]
        raise _fault(op, line, f"the result of {op.carried} is carried twice, also by {other}")
    carrier = "send" if kind == "receive" else kind
    if kind != "wait" and carrier not in OPS[of].carried_by:
        raise _fault(op, line, _CARRIES[kind].format(of=of))
    if kind == "all_reduce" and schedule.sequence_parallel:
        raise _fault(op, line, "the list is sequence-parallel, so sums are scattered; use reduce_scatter")


# --- pipelines ---


def _lanes(schedule: Schedule) -> dict[tuple[int, int, str], tuple[list[Op], list[Op]]]:
    """Messages of a pipeline by (sending stage, receiving stage, F or B): its sends, its receives.

    Each in the order of its stage's list.
    """
    found: dict[tuple[int, int, str], tuple[list[Op], list[Op]]] = {}
    for op in schedule.ops:
        if op.kind in ("send", "receive"):
            here, there = schedule.stage_of(op.block), schedule.stage_of(crossing(op).block)
            ends = (here, there) if op.kind == "send" else (there, here)
            assert op.of is not None
            found.setdefault((*ends, op.of), ([], []))[op.kind == "receive"].append(op)
    return found


def _require_messages(schedule: Schedule) -> None:
    """Raise ScheduleError unless sends match receives, and messages keep their order."""
    lines, before = schedule.lines, 0
    for op, line in lines.items():
        stage = schedule.stage_of(op.block)
        if stage < before:
            raise _fault(op, line, f"it is of stage {stage}, after ops of stage {before}; sort ops by stage")
        before = stage
        if op.kind not in ("send", "receive"):
            continue
        other, sends = crossing(op), op.kind == "send"
        if not 0 <= other.block < schedule.num_blocks:
            none = f"so it has no part {other.block} to {'send to' if sends else 'receive from'}"
            raise _fault(op, line, f"the model has {schedule.num_blocks} parts, {none}")
        if schedule.stage_of(other.block) == stage:
            both = f"parts {op.block} and {other.block} are both on stage {stage}"
            raise _fault(op, line, f"{both}, which needs no message between them; leave it out")
        if other not in lines:
            raise _fault(op, line, f"it has no {'receive' if sends else 'send'}; '{other}' is missing")
    for (source, target, of), (sent, received) in _lanes(schedule).items():
        for one, other in zip(sent, received, strict=True):
            if crossing(one) != other:
                what = "activations" if of == "F" else "gradients"
                first = f"stage {target} waits for {other} where {crossing(one)} comes first"
                order = f"{what} of stage {source} arrive in the order in which they are sent"
                raise _fault(other, lines[other], f"{first}; {order}")


def _require_progress(schedule: Schedule) -> None:
    """Raise ScheduleError for stages that deadlock waiting for each other's messages."""
    at = [0] * schedule.num_stages
    sent: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.stages):
            begin = at[stage]
            while at[stage] < len(ops):
                op = ops[at[stage]]
                if op.kind == "receive" and crossing(op) not in sent:
                    break
                if op.kind == "send":
                    sent.add(op)
                at[stage] += 1
            moved = moved or at[stage] > begin
    for stage, ops in enumerate(schedule.stages):
        if at[stage] < len(ops):
            op = ops[at[stage]]
            other = schedule.stage_of(crossing(op).block)
            stuck = schedule.stages[other][at[other]]
            waits = f"waits at op {schedule.lines[stuck]} ({stuck})"
            text = f"stage {stage} waits for it forever, because stage {other}, which sends it, {waits}"
            raise _fault(op, schedule.lines[op], text)
