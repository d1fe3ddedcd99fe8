"""Op kinds, one row each in `OPS`, and `Op`, one line of a schedule.

Compute ops work on one (block, sub-batch); a collective or a message carries the result of one of them. The inputs
of an op follow from its row, never from its position, so one schedule can be validated, executed, simulated and
drawn. There are three units: tensor-parallel blocks, blocks of experts, and pipeline stages, whose blocks are model
parts and whose sub-batches are micro-batches.
Source: Oases (arXiv 2305.16121), section on scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Unit = Literal["block", "experts", "stage"]
"""Unit of a schedule: tensor-parallel blocks, blocks of experts, or pipeline stages."""
Compute = Literal["F", "C", "D", "E", "P", "R", "RC", "RD", "RE", "BC", "BF", "BE", "B", "W"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Transfer = Literal["share", "join", "split", "return"]
"""Collectives that carry parameters or their gradients instead of an op's result."""
Message = Literal["send", "receive"]
Kind = Compute | Collective | Transfer | Message | Literal["wait"]


class ScheduleError(ValueError):
    """Error for a schedule that cannot run: the message names the op and its line.

    op_line: number of the op in the list, from 1; 0 if the header is wrong, None if an op is missing.
    """

    def __init__(self, message: str, op_line: int | None = None) -> None:
        super().__init__(message)
        self.op_line = op_line


class Read(NamedTuple):
    """Input of an op: the op whose result it reads.

    kind: of that op; "of", the op that a collective or a message carries; "start", the op that a wait completes.
    block: offset from the reader's block; outside the model there is no input. arrived: read the collective's
    result if the result is carried, else the local one. when: condition of the input, "" for always.
        listed      the list holds the op
        recomputed  an RC recomputes the block's input before its R
        together    B includes the backward of C; apart: a BC does it, for every sub-batch if the block is joint
        copied      experts have replicas on other ranks
        dispatched  the block's tokens are sent to experts by ops of the list
    """

    kind: str
    block: int = 0
    arrived: bool = False
    when: Literal["", "listed", "recomputed", "together", "apart", "copied", "dispatched"] = ""


@dataclass(frozen=True)
class OpKind:
    """Row of the op table.

    stream: where the op runs. backward: whether it belongs to the backward pass; a collective, message or wait
    follows the op it carries. reads: inputs, by unit. writes: its result. carried_by: ops that may send the result
    to other ranks.
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
    # --- compute of blocks, with and without experts, and passes of a model part on a pipeline stage ---
    OpKind("F", "compute", False,
           {"block": (Read("C", -1, True), Read("E", 0, True, "dispatched")), "experts": (Read("E", 0, True),),
            "stage": (Read("F", -1, True),)},
           "a partial sum over the ranks; of experts the next block's input; of a stage the activation or the loss",
           (*_SUM, "send"),
           "forward of a block up to its row-parallel matmul; of one with a D, what follows its experts"),
    OpKind("D", "compute", False, {"block": (Read("C", -1, True),), "experts": (Read("F", -1, True),)},
           "tokens, by expert", ("all_to_all",), "forward of a block up to its experts: the router"),
    OpKind("E", "compute", False,
           {"experts": (Read("D", 0, True), Read("join", 0, True, "copied")), "block": (Read("D", 0, True),)},
           "the experts' outputs", ("all_to_all",), "this rank's experts"),
    OpKind("P", "compute", False, {"experts": (Read("D"),)}, "the next step's placement", (),
           "search for the next step's placement of experts"),
    OpKind("C", "compute", False, {"block": (Read("F", 0, True),)},
           "the next block's input, with sequence parallelism this rank's part of it", ("all_gather",),
           "combines the sum with the block's input: bias, dropout, residual"),
    OpKind("R", "compute", True,
           {"block": (Read("F"), Read("RC", -1, True, "recomputed")), "experts": (Read("F"),), "stage": (Read("F"),)},
           "what B, or BF, needs of F; if a collective carries it, the partial sum, too", _SUM,
           "recomputes F; without the row-parallel matmul unless a collective carries the result"),
    OpKind("RC", "compute", True, {"block": (Read("R", 0, True),)}, "the result of C", ("all_gather",),
           "recomputes C from the sum of R's results"),
    OpKind("RD", "compute", True, {"experts": (Read("D"), Read("R", -1, when="listed"))}, "what B needs of D", (),
           "recomputes D from the result of the R before it"),
    OpKind("RE", "compute", True, {"experts": (Read("E"),)}, "what BE needs of E", (), "recomputes E"),
    OpKind("BC", "compute", True, {"block": (Read("RC|C"), Read("B", 1, True))}, "the gradient of the sum",
           ("all_gather",), "backward of C alone, where an op must run between it and the backward of F"),
    OpKind("BF", "compute", True,
           {"block": (Read("RC|C", when="together"), Read("B", 1, True, "together"), Read("BC", 0, True, "apart")),
            "experts": (Read("F"), Read("R", when="listed"), Read("B", 1, True))},
           "gradients of the experts' outputs", ("all_to_all",),
           "backward of what follows the experts of a block with a D, and of C unless a BC did it"),
    OpKind("BE", "compute", True,
           {"experts": (Read("E"), Read("RE", when="listed"), Read("BF", 0, True)), "block": (Read("BF", 0, True),)},
           "gradients of the tokens, and of this rank's experts", ("all_to_all",), "backward of E"),
    OpKind("B", "compute", True,
           {"block": (Read("RC|C", when="together"), Read("R", when="listed"), Read("B", 1, True, "together"),
                      Read("BC", 0, True, "apart"), Read("BE", 0, True, "dispatched")),
            "experts": (Read("D"), Read("RD", when="listed"), Read("BE", 0, True)),
            "stage": (Read("F"), Read("R", when="listed"), Read("B", 1, True))},
           "the gradient of the input, of a block a partial sum; weight gradients, if the list holds no W",
           (*_SUM, "send"), "backward of F, and of C unless a BC did it; of a block with a D, backward of that"),
    OpKind("W", "compute", True, {"block": (Read("B"),), "stage": (Read("B"),)}, "weight gradients", (),
           "weight gradients that B deferred"),
    # --- collectives and messages ---
    OpKind("all_reduce", "link", False, {"block": (Read("of"),)}, "the sum over the ranks, in place", (),
           "start an all-reduce"),
    OpKind("reduce_scatter", "link", False, {"block": (Read("of"),)},
           "each rank's part of the sum, along the sequence", (), "start a reduce-scatter"),
    OpKind("all_gather", "link", False, {"block": (Read("of"),)}, "the whole sequence", (), "start an all-gather"),
    OpKind("all_to_all", "link", False, {"experts": (Read("of"),), "block": (Read("of"),)},
           "tokens or their gradients, by destination rank", (), "start an all-to-all of tokens or their gradients"),
    OpKind("share", "link", False, {"experts": ()}, "shards of the replicas' parameters", (),
           "owner ranks scatter parameters over the ranks with replicas"),
    OpKind("join", "link", False, {"experts": (Read("share", 0, True),)}, "the replicas' parameters", (),
           "all-gather of the shards; share and join are Trans of Pro-Prophet"),
    OpKind("split", "link", True, {"experts": (Read("BE"),)}, "shards of the summed replica gradients", (),
           "reduce-scatter of the replicas' gradients"),
    OpKind("return", "link", True, {"experts": (Read("split", 0, True),)}, "replica gradients, on their owners", (),
           "gather on the owner rank; split and return are Agg of Pro-Prophet"),
    OpKind("send", "link", False, {"stage": (Read("of"),)}, "a message", (),
           "start sending the result of F to the next model part, of B to the previous one"),
    OpKind("receive", "link", False, {"stage": ()}, "the other stage's result", (), "wait for a message"),
    OpKind("wait", "link", False, {"block": (Read("start"),), "experts": (Read("start"),)},
           "what the collective carries", (), "wait for a collective"),
)  # fmt: skip

OPS: dict[str, OpKind] = {row.name: row for row in _ROWS}
"""All op kinds, by name."""
BACKWARD = frozenset(row.name for row in _ROWS if row.backward)
"""Kinds that belong to the backward pass."""
COMPUTE = tuple(row.name for row in _ROWS if row.stream == "compute")
STARTS = tuple(row.name for row in _ROWS if row.stream == "link" and row.name not in ("wait", "send", "receive"))
"""Kinds of collectives, each of which a wait completes."""
TRANSFERS = ("share", "join", "split", "return")


class Op(NamedTuple):
    """Line of a schedule. of: the op whose result a collective or message carries, or that a wait is for.

    In a pipeline `block` is the model part and `sub_batch` the micro-batch. Both count from 0.
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
        """The op whose result this collective, message or wait carries; a transfer, which has none, itself."""
        if self.of is None:
            assert self.kind in TRANSFERS, f"{self} is not a collective"
            return self
        return Op(self.of, self.block, self.sub_batch)

    @property
    def in_backward(self) -> bool:
        """Whether the op belongs to the backward pass."""
        return (self.of or self.kind) in BACKWARD


def crossing(op: Op) -> Op:
    """The matching receive of a send, or the matching send of a receive."""
    assert op.of is not None
    up = (op.of == "F") == (op.kind == "send")
    return Op("receive" if op.kind == "send" else "send", op.block + (1 if up else -1), op.sub_batch, op.of)
