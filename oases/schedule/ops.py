"""Kinds of ops, one row each in `OPS`, and `Op`, one line of a schedule.

Compute ops work on one (block, sub-batch); a collective or a message carries the result of one of them. What an op
needs follows from its row, never from its place in the list, so one list can be validated, executed, simulated and
drawn. Lists are of three sorts: of tensor-parallel blocks, of blocks of experts, and of pipeline stages, whose
blocks are parts of the model and whose sub-batches are micro-batches.
Source: Oases (arXiv 2305.16121), section on scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Unit = Literal["block", "experts", "stage"]
"""The unit of a list: tensor-parallel blocks, blocks of experts, or the stages of a pipeline."""
Compute = Literal["F", "C", "R", "RC", "BC", "B", "W", "N", "E", "P", "RN", "RE", "BN", "BE"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Transfer = Literal["share", "join", "split", "return"]
"""Collectives that carry no op's result but parameters, or their gradients."""
Message = Literal["send", "receive"]
Kind = Compute | Collective | Transfer | Message | Literal["wait"]


class ScheduleError(ValueError):
    """A schedule that cannot run: the message names the op and its line.

    op_line: the number of that op in the list, from 1; 0 where the header is wrong, None where an op is missing.
    """

    def __init__(self, message: str, op_line: int | None = None) -> None:
        super().__init__(message)
        self.op_line = op_line


class Read(NamedTuple):
    """An op whose result another one reads.

    kind: of the op; "of", the one that a collective or a message carries; "start", the one that a wait ends. block:
    its block, counted from the reader's; beyond the first or the last block there is nothing to read. arrived: what
    a collective or a message brings of the result, where the list's results are carried, else what is here. when:
    whether there is something to read, "" always.
        listed      the list holds the op
        remade      an RC makes the block's input again before its R
        together    B does the backward of C, too; apart: a BC does, for every sub-batch if the block is joint
        copied      experts are computed elsewhere than at home
    """

    kind: str
    block: int = 0
    arrived: bool = False
    when: Literal["", "listed", "remade", "together", "apart", "copied"] = ""


@dataclass(frozen=True)
class OpKind:
    """A row of the table.

    stream: where it runs. backward: whether it belongs to the backward pass; a collective, a message or a wait goes
    with the op that it carries. reads: by the sort of list that may hold the op. writes: its result. carried_by:
    the ops that may carry the result to other ranks.
    """

    name: str
    stream: Literal["compute", "link"]
    backward: bool
    reads: Mapping[Unit, tuple[Read, ...]]
    writes: str
    carried_by: tuple[str, ...] = ()
    about: str = ""


_SUM = ("all_reduce", "reduce_scatter")
_ROWS = (
    # --- tensor-parallel blocks, and passes of a part of the model on a pipeline stage ---
    OpKind(
        "F", "compute", False, {"block": (Read("C", -1, True),), "stage": (Read("F", -1, True),)},
        "a partial sum over the ranks; of a stage the activation, of the last part the loss", (*_SUM, "send"),
        "forward of a block up to its row-parallel matmul",
    ),
    OpKind(
        "C", "compute", False, {"block": (Read("F", 0, True),)},
        "the next block's input, with sequence parallelism this rank's part of it", ("all_gather",),
        "combine the sum with the block's input: bias, dropout, residual",
    ),
    OpKind(
        "R", "compute", True,
        {"block": (Read("F"), Read("RC", -1, True, "remade")), "stage": (Read("F"),)},
        "what B needs of F; if a collective carries it, the partial sum, too", _SUM,
        "F again, which kept nothing for B; without the row-parallel matmul unless a collective carries the result",
    ),
    OpKind(
        "RC", "compute", True, {"block": (Read("R", 0, True),)}, "what C made", ("all_gather",),
        "C again, from the sum of R's results, because C's result was not kept",
    ),
    OpKind(
        "BC", "compute", True, {"block": (Read("RC|C"), Read("B", 1, True))}, "the gradient of the sum",
        ("all_gather",), "backward of C alone, where something must happen between it and the backward of F",
    ),
    OpKind(
        "B", "compute", True,
        {
            "block": (
                Read("RC|C", when="together"), Read("R", when="listed"), Read("B", 1, True, "together"),
                Read("BC", 0, True, "apart"),
            ),
            "stage": (Read("F"), Read("R", when="listed"), Read("B", 1, True)),
        },
        "the gradient of the input, of a block a partial sum; weight gradients, if the list holds no W",
        (*_SUM, "send"), "backward of C, unless a BC did it, and of F",
    ),
    OpKind(
        "W", "compute", True, {"block": (Read("B"),), "stage": (Read("B"),)}, "weight gradients", (),
        "the weight gradients that B left out",
    ),
    # --- blocks of experts ---
    OpKind(
        "N", "compute", False, {"experts": (Read("E", -1, True),)}, "tokens, by expert", ("all_to_all",),
        "what lies between the experts of the block before and those of this one, router included",
    ),
    OpKind(
        "P", "compute", False, {"experts": (Read("N"),)}, "the next step's placement", (),
        "where the next step's experts are computed",
    ),
    OpKind(
        "E", "compute", False, {"experts": (Read("N", 0, True), Read("join", 0, True, "copied"))},
        "what the experts make of the tokens", ("all_to_all",), "this rank's experts",
    ),
    OpKind("RN", "compute", True, {"experts": (Read("N"),)}, "what BN needs of N", (), "N again"),
    OpKind("RE", "compute", True, {"experts": (Read("E"),)}, "what BE needs of E", (), "E again"),
    OpKind(
        "BN", "compute", True, {"experts": (Read("N"), Read("BE", 0, True), Read("RN", when="listed"))},
        "gradients of what the block before sent", ("all_to_all",), "backward of N",
    ),
    OpKind(
        "BE", "compute", True, {"experts": (Read("E"), Read("BN", 1, True), Read("RE", when="listed"))},
        "gradients of the tokens, and of this rank's experts", ("all_to_all",), "backward of E",
    ),
    # --- what travels ---
    OpKind(
        "all_reduce", "link", False, {"block": (Read("of"),)}, "the sum over the ranks, in place", (),
        "start summing a result over the ranks",
    ),
    OpKind(
        "reduce_scatter", "link", False, {"block": (Read("of"),)}, "each rank's part of the sum, along the sequence",
        (), "start summing a result over the ranks",
    ),
    OpKind(
        "all_gather", "link", False, {"block": (Read("of"),)}, "the whole sequence", (),
        "start joining the ranks' parts of a result",
    ),
    OpKind(
        "all_to_all", "link", False, {"experts": (Read("of"),)}, "tokens, or gradients, where they belong", (),
        "start sending tokens, or their gradients, to whose experts and back",
    ),
    OpKind(
        "share", "link", False, {"experts": ()}, "shares of the copies' parameters", (),
        "a home sends each holder of a copy its share of the parameters",
    ),
    OpKind(
        "join", "link", False, {"experts": (Read("share", 0, True),)}, "the copies' parameters", (),
        "holders of copies exchange shares; with share, this is Trans of Pro-Prophet",
    ),
    OpKind(
        "split", "link", True, {"experts": (Read("BE"),)}, "shares of the copies' gradients, summed", (),
        "holders add up each other's shares of the gradients",
    ),
    OpKind(
        "return", "link", True, {"experts": (Read("split", 0, True),)}, "the copies' gradients, at home", (),
        "holders send their sums home; with split, this is Agg of Pro-Prophet",
    ),
    OpKind(
        "send", "link", False, {"stage": (Read("of"),)}, "a message", (),
        "start sending the result of F to the next part of the model, that of B to the one before",
    ),
    OpKind("receive", "link", False, {"stage": ()}, "the other stage's result", (), "stand still for a message"),
    OpKind(
        "wait", "link", False, {"block": (Read("start"),), "experts": (Read("start"),)},
        "what the collective carries", (), "stand still for the end of a collective",
    ),
)  # fmt: skip

OPS: dict[str, OpKind] = {row.name: row for row in _ROWS}
"""Every kind of op."""
BACKWARD = frozenset(row.name for row in _ROWS if row.backward)
"""The kinds of the backward pass."""
COMPUTE = tuple(row.name for row in _ROWS if row.stream == "compute")
STARTS = tuple(row.name for row in _ROWS if row.stream == "link" and row.name not in ("wait", "send", "receive"))
"""The collectives, each of which some wait ends."""
TRANSFERS = ("share", "join", "split", "return")


class Op(NamedTuple):
    """One line of a schedule. `of` names the op whose result a collective or a message carries, or a wait is for.

    In a pipeline's list `block` is the part of the model and `sub_batch` the micro-batch. Both count from 0.
    """

    kind: Kind
    block: int
    sub_batch: int
    of: Compute | Transfer | None = None

    def __str__(self) -> str:
        head = self.kind if self.of is None else f"{self.kind} {self.of}"
        return f"{head} {self.block}.{self.sub_batch}"

    @property
    def carried(self) -> Op:
        """The op whose result this collective, message or wait is about; of a transfer, which has none, itself."""
        if self.of is None:
            assert self.kind in TRANSFERS, f"{self} is not a collective"
            return self
        return Op(self.of, self.block, self.sub_batch)

    @property
    def in_backward(self) -> bool:
        """Whether the op belongs to the backward pass."""
        return (self.of or self.kind) in BACKWARD


def crossing(op: Op) -> Op:
    """The receive that a send ends in, or the send that a receive waits for."""
    assert op.of is not None
    up = (op.of == "F") == (op.kind == "send")
    return Op("receive" if op.kind == "send" else "send", op.block + (1 if up else -1), op.sub_batch, op.of)
