"""Choice of the schedule of each call of a stack: given, measured by turns, or cut otherwise for a small batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from oases.core.blocks.batch import BlockInputs
from oases.core.dtypes import LOSSY, QUANTISED, WIRE_BYTES
from oases.core.execution.autotune import Autotune, Budget, Turn, cache_key, fixed_among
from oases.core.execution.communication import WireType, carries_codes, wire_type
from oases.core.execution.failure import begin_call
from oases.core.execution.group import ProcessGroup, all_gather_objects, group_of
from oases.core.schedule import (
    AUTO,
    GENERATORS,
    LayerOf,
    Recompute,
    Schedule,
    along_sequence,
    generate,
    recomputed_layers,
    sequence_parallel,
    validate,
)
from oases.errors import UsageError

_SUB_BATCHES = (2, 4, 8)
_PENDING = "@"
"""Mark of turns in place of a label among choices: the run that is resumed had not chosen yet."""

SubBatchCount = int | Literal["auto"]
Asked = tuple[str, SubBatchCount, Recompute]
"""Schedule, sub_batches and recompute of a stack."""


class Choice(NamedTuple):
    """Candidate of a stack, or what one of its calls runs.

    wire: type of its sums; None for their own. turn: takes the seconds of a measured call. measured: whether it was
    chosen by measurements.
    """

    schedule: Schedule
    wire: WireType | None = None
    turn: Turn | None = None
    measured: bool = False


Tuning = Autotune[Choice]


def candidates(
    num_blocks: int, batch: int, schedule: str, sub_batches: int | str, recompute: Recompute,
    joint: frozenset[int] | None = None, layer_of: LayerOf = None,
) -> list[Schedule]:  # fmt: skip
    """Candidate schedules of "auto", "off" first: nothing overlapped, but no all-reduces in the recomputation.

    joint: blocks that need all tokens at once, where others do not: a batch of one is then cut along the sequence.
    layer_of: layer of each block, as for `generate`.
    """
    names = ["cross_pass", "oases"] if schedule == "auto" and recompute == "none" else ["oases"]
    if schedule != "auto":
        names = [schedule]
    counts = [s for s in _SUB_BATCHES if s <= batch] if sub_batches == "auto" else [int(sub_batches)]
    found = [generate("fine_grained", num_blocks, 1, recompute, layer_of)] if schedule == "auto" else []
    if batch == 1 and joint is not None and "oases" in names:
        parts = _SUB_BATCHES[:2] if sub_batches == "auto" else counts
        return found + [along_sequence(num_blocks, count, joint, recompute, layer_of) for count in parts if count > 1]
    found += [generate(name, num_blocks, count, recompute, layer_of) for count in counts for name in names]
    return found or [generate(schedule, num_blocks, 1, recompute, layer_of)]


def labelled(schedules: Iterable[Schedule], wires: Sequence[str] = ()) -> dict[str, Choice]:
    """Schedules by their label, first with exact sums, then with each of the wires."""
    schedules = [*schedules]
    found = {label(schedule): Choice(schedule) for schedule in schedules}
    return found | {
        f"{label(schedule)} {wire}": Choice(schedule, wire_type(wire)) for wire in wires for schedule in schedules
    }


def lossy_wires(group: ProcessGroup | None, x: Tensor) -> list[str]:
    """Wires that "auto:lossy" measures for such an activation: those that the group carries, in fewer bytes."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    quantised = group is not None and x.is_cpu and x.dtype in types and carries_codes(group)
    return [name for name in LOSSY if WIRE_BYTES[name] < x.dtype.itemsize and (name != QUANTISED or quantised)]


def label(schedule: Schedule) -> str:
    """Label of a schedule in the cache."""
    return f"{schedule.name} {schedule.num_sub_batches}"


def bucket_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Shapes that share a choice: batch rounded down, other dimensions but the last rounded up to powers of two."""
    batch = 1 << max(shape[0], 1).bit_length() - 1
    return batch, *(1 << (size - 1).bit_length() for size in shape[1:-1]), *shape[1:][-1:]


class Chooser:
    """Chooser of the schedule of each call: given, measured by turns, or cut otherwise for a small batch.

    schedule, sub_batches, recompute, small_batch: as of `OverlappedStack`. layer_of: layer of each block. place: name
    of the stack, and its first block's number in the model. may_be_off: whether "off" is a candidate where others
    are. lossy: measure wires other than the type of the sums. ranks: of the tensor-parallel group.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], schedule: str | Schedule, sub_batches: SubBatchCount | None = None,
        recompute: Recompute = "none", *, layer_of: LayerOf = None, place: tuple[str, int] = ("", 0),
        may_be_off: bool = True, lossy: bool = False, small_batch: str = "refuse", sequence_parallel: bool = False,
        ranks: int = 1,
    ) -> None:  # fmt: skip
        self._num_blocks, self._layer_of, self._place = len(blocks), layer_of, place
        self._may_be_off, self.lossy, self._small_batch = may_be_off, lossy, small_batch
        self._sequence_parallel, self._ranks = sequence_parallel, ranks
        self._senders = [b for b, block in enumerate(blocks) if getattr(block, "sends_tokens", False)]
        self._exchanging: Any = getattr(blocks[self._senders[0]], "exchanging") if self._senders else None  # noqa: B009
        self._only = self._asked_for(schedule, sub_batches, recompute)
        self.measures = lossy or self._only is None
        """Whether schedules or wires are measured."""
        self.resumed: dict[str, str] = {}
        """Choices of a run that this one resumes (`choices`); they are not measured again."""
        self._forget()
        self.schedule = self._laid_out(self.candidates(2)[-1])
        """Schedule of the last call, or of the first one, as if its batch were large enough."""

    def _asked_for(
        self, schedule: str | Schedule, sub_batches: SubBatchCount | None, recompute: Recompute
    ) -> Schedule | None:
        """Set what is asked for; return the only schedule, or None where several are measured."""
        if isinstance(schedule, Schedule):
            validate(schedule, "block")
            if schedule.num_blocks != self._num_blocks:
                have = f"the stack has {self._num_blocks}"
                raise ValueError(f"schedule '{schedule.name}' is for {schedule.num_blocks} blocks, {have}")
            self._asked: Asked = (str(schedule), schedule.num_sub_batches, recompute)
            return schedule
        self._asked = asked_for(schedule, sub_batches, recompute)
        if AUTO in self._asked[:2]:
            return None
        return generate(self._asked[0], self._num_blocks, int(self._asked[1]), recompute, self._layer_of)

    def _forget(self) -> None:
        """Start without measurements and replacements of schedules."""
        self.tunings: dict[str, Tuning] = {}
        """Measurements by key."""
        self._by_form: dict[tuple[object, ...], Tuning] = {}
        self._budget = Budget()
        # Replacements, by the id of the schedule, which is held.
        self._by_tokens: dict[tuple[int, frozenset[int]], Schedule] = {}
        self._whole: dict[int, Schedule] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave all but the choices out of copies, which may be of other ranks."""
        copied = object.__new__(Chooser)
        copied.__dict__.update(self.__dict__)
        copied.resumed = self.choices
        copied._forget()
        return copied.__dict__

    @property
    def choices(self) -> dict[str, str]:
        """Labels chosen, by the configuration of their key, for a later run that resumes this one.

        "@" and the turns so far where none is chosen yet.
        """
        chosen = {key.split(".")[0]: each.chosen or _PENDING + each.turns for key, each in self.tunings.items()}
        return self.resumed | chosen

    @choices.setter
    def choices(self, found: Mapping[str, str]) -> None:
        if self.measures:
            self.resumed = dict(found)

    def choose(
        self, x: Tensor, inputs: Sequence[BlockInputs], blocks: Iterable[nn.Module],
        parameters: Callable[[], Iterable[Tensor]], group: ProcessGroup | None, label: str, *, wider: str,
        differentiable: bool,
    ) -> Choice:  # fmt: skip
        """Choose for a call. parameters: of the blocks. group: whose ranks make the call of the stack `label`. wider:
        name of a group whose ranks choose together, which may have inputs of other batches and lengths, or "".
        differentiable: whether there will be a backward pass, so that the call can be measured. ValueError where `x`
        and `inputs` cannot be split.

        Nothing is measured where the run that is resumed chose, or torch is to be deterministic.
        """
        if not self.measures:
            return Choice(self.schedule_for(x, inputs, blocks))
        tuning = self.tuning_of(x, inputs, blocks, parameters, group, label, wider)
        turn = tuning.begin_turn() if tuning.choice is None and differentiable else None
        self.schedule, wire = (tuning.settled if turn is None else tuning.candidates[turn.label])[:2]
        return Choice(self.schedule_for(x, inputs, blocks), wire, turn, tuning.choice is not None)

    def schedule_for(self, x: Tensor, inputs: Sequence[BlockInputs], blocks: Iterable[nn.Module]) -> Schedule:
        """The schedule, or its replacement for a batch too small to split.

        That is the same along the sequence, or with small_batch="whole" the unsplit batch. Raises ValueError where
        `x` and `inputs` cannot be split.
        """
        schedule, parts = self.schedule, self.schedule.num_sub_batches
        _require_sequence(x, schedule, self._ranks, inputs, blocks)
        if schedule.along == "sequence" or x.shape[0] >= parts:
            return schedule
        joint = joint_blocks(blocks)
        if schedule.name != "oases" or not self._can_cut_tokens(x, parts, inputs, joint):
            if self._small_batch == "whole" and x.shape[0] > 0:
                return self._unsplit(schedule)
            raise ValueError(
                f"a batch of {x.shape[0]} cannot be cut into {parts} sub-batches; use a larger batch or fewer "
                "sub_batches, small_batch='whole' to run it unsplit, or with schedule='oases' token_wise = True in "
                "blocks that treat tokens independently, causal = True in those that call oases.causal_attention, "
                "and tokens in blocks' inputs, to split the sequence"
            )
        if (id(schedule), joint) not in self._by_tokens:
            again = self._recomputed(schedule)
            self._by_tokens[id(schedule), joint] = along_sequence(
                self._num_blocks, parts, joint, again, self._layer_of
            )
        return self._by_tokens[id(schedule), joint]

    def is_whole(self, schedule: Schedule) -> bool:
        """Whether a schedule is a replacement by the unsplit batch."""
        return any(schedule is each for each in self._whole.values())

    def may_cut_tokens(self, x: Tensor) -> bool:
        """Whether a call may have sub-batches of tokens if all blocks' inputs say how they are cut."""
        if self._only is not None and self._only.along == "sequence":
            return True
        parts = 2 if self._only is None else self._only.num_sub_batches
        return x.shape[0] < parts and not self._sequence_parallel and x.dim() > 2

    def candidates(self, batch: int, joint: frozenset[int] | None = None) -> list[Schedule]:
        """Candidate schedules for a batch, see `candidates`."""
        if self._only is not None:
            return [self._only]
        found = candidates(self._num_blocks, batch, *self._asked, joint, self._layer_of)
        overlapping = [schedule for schedule in found if schedule.overlaps]
        return found if self._may_be_off or not overlapping else overlapping

    def tuning_of(
        self, x: Tensor, inputs: Sequence[BlockInputs], blocks: Iterable[nn.Module],
        parameters: Callable[[], Iterable[Tensor]], group: ProcessGroup | None, label: str, wider: str = "",
    ) -> Tuning:  # fmt: skip
        """Measurements for inputs like `x`; arguments as of `choose`. Ranks agree on the shape of a new one."""
        joint: frozenset[int] | None = joint_blocks(blocks)
        if joint is not None and not self._can_cut_tokens(x, 4, inputs, joint):
            joint = None
        form: tuple[object, ...] = () if wider else (bucket_of(x.shape), x.dtype, joint)
        if form in self._by_form:
            return self._by_form[form]
        choosing = group_of(wider if self._ranks > 1 else "") or group
        batch, *others = bucket_of(x.shape)
        if wider:  # all shapes share one choice
            batch, others, joint = min(all_gather_objects(batch, choosing)), [*x.shape[-1:]], None
        among = [self._laid_out(schedule) for schedule in self.candidates(batch, joint)]
        sizes = [tuple(parameter.shape) for parameter in parameters()]
        wires = lossy_wires(choosing, x) if self.lossy else []
        laid_out = among[-1].sequence_parallel
        asked = repr((self._place, self._asked, self._num_blocks, sizes, laid_out, joint, self._may_be_off, *wires))
        key = cache_key(asked, (batch, *others), x.dtype, choosing)
        if key not in self.tunings:
            # As `form_of` begins; what follows is a collective.
            begin_call(group, label, ("shape of the input", x.shape, "type of the input", x.dtype))
            self.tunings[key] = self._tuning(among, wires, choosing, key)
        self._by_form[form] = self.tunings[key]
        return self.tunings[key]

    def _tuning(
        self, schedules: Sequence[Schedule], wires: Sequence[str], group: ProcessGroup | None, key: str
    ) -> Tuning:
        among, exact = labelled(schedules, wires), len(schedules)
        fixed = self.resumed.get(key.split(".")[0], "")
        turns = fixed.removeprefix(_PENDING) if fixed.startswith(_PENDING) else ""
        if fixed not in among and torch.are_deterministic_algorithms_enabled():
            fixed = fixed_among([*among][:exact])
        return Tuning(
            among, group, key, has_off=not schedules[0].overlaps, fixed=fixed, resumed=turns,
            waves=waves_of(schedules, wires), exact=exact if wires else 0, budget=self._budget,
        )  # fmt: skip

    def _can_cut_tokens(self, x: Tensor, parts: int, inputs: Sequence[BlockInputs], joint: frozenset[int]) -> bool:
        some = len(joint) < self._num_blocks and all(map(_says_tokens, inputs))
        return some and not self._sequence_parallel and x.dim() > 2 and x.shape[1] >= parts

    def _unsplit(self, schedule: Schedule) -> Schedule:
        """A schedule of the unsplit batch with the same recomputation."""
        if id(schedule) not in self._whole:
            again = self._recomputed(schedule)
            self._whole[id(schedule)] = self._laid_out(generate("sync", self._num_blocks, 1, again, self._layer_of))
        return self._whole[id(schedule)]

    def _recomputed(self, schedule: Schedule) -> int:
        return recomputed_layers(schedule.recomputed_blocks, self._num_blocks, self._layer_of)

    def _laid_out(self, schedule: Schedule) -> Schedule:
        """The schedule as the blocks run it.

        Blocks with a true attribute `sends_tokens` run in three pieces: their function `exchanging` makes these ops.
        """
        if self._sequence_parallel and self._ranks > 1:
            return sequence_parallel(schedule)
        return cast(Schedule, self._exchanging(schedule, self._senders)) if self._senders else schedule


def asked_for(schedule: str, sub_batches: SubBatchCount | None, recompute: Recompute) -> Asked:
    """Schedule and sub-batches that a stack is asked for. None: "auto" with schedule "auto", else 2.

    $OASES_SCHEDULE, such as oases or oases@4, replaces the schedule "auto". UsageError for an unknown one.
    """
    pinned = os.environ.get("OASES_SCHEDULE", "")
    if schedule == AUTO and pinned:
        schedule, _, count = pinned.partition("@")
        if schedule not in GENERATORS or not (count.isdecimal() or count == pinned[len(schedule) :]):
            raise UsageError(
                f"OASES_SCHEDULE={pinned!r} is no schedule; give NAME or NAME@SUB_BATCHES, where NAME is one of "
                f"{', '.join(GENERATORS)}"
            )
        sub_batches = int(count[:9]) if count else None if sub_batches == AUTO else sub_batches
    return schedule, (AUTO if schedule == AUTO else 2) if sub_batches is None else sub_batches, recompute


def waves_of(schedules: Sequence[Schedule], wires: Sequence[str] = ()) -> list[list[str]]:
    """Labels of schedules in waves, by sub-batches; those that do not overlap are in the first.

    A schedule with other wires is in its own wave.
    """
    first = min((each.num_sub_batches for each in schedules if each.overlaps), default=1)
    counts = sorted({max(first, each.num_sub_batches) for each in schedules})
    return [
        [*labelled([each for each in schedules if max(first, each.num_sub_batches) == count], wires)]
        for count in counts
    ]


def _require_sequence(
    x: Tensor, schedule: Schedule, tensor_parallel: int, inputs: Sequence[BlockInputs], blocks: Iterable[nn.Module]
) -> None:
    """Raise ValueError where `schedule` cuts the sequence, dimension 1, and `x` or further inputs cannot be cut.

    Blocks that need all tokens at once are checked where blocks have inputs.
    """
    if schedule.sequence_parallel and (x.dim() < 3 or x.shape[1] % tensor_parallel):
        raise ValueError(
            f"an input of shape {tuple(x.shape)} cannot be cut along dimension 1, the sequence, over "
            f"{tensor_parallel} ranks; pad it to a multiple, or leave out sequence_parallel"
        )
    if schedule.along == "sequence":
        parts = schedule.num_sub_batches
        if x.dim() < 3 or x.shape[1] < parts:
            raise ValueError(f"an input of shape {tuple(x.shape)} cannot be cut into {parts} parts of a sequence")
        joint = joint_blocks(blocks)
        if inputs and not (all(map(_says_tokens, inputs)) and joint <= schedule.joint):
            raise ValueError(
                f"schedule '{schedule.name}' splits the sequence, along which the blocks' inputs cannot be split, or "
                f"blocks that need all tokens ({sorted(joint)}); use a schedule that splits the batch"
            )


def joint_blocks(blocks: Iterable[nn.Module]) -> frozenset[int]:
    """Blocks whose `partial` must get all tokens at once; of compiled ones, attention must."""
    return frozenset(
        number
        for number, block in enumerate(blocks)
        if not (getattr(block, "causal", False) and not hasattr(block, "_orig_mod"))
        and not getattr(block, "token_wise", False)
    )


def _says_tokens(inputs: BlockInputs) -> bool:
    """Whether a block's inputs say how sub-batches of tokens read them."""
    return inputs.tokens is not None or not inputs.values
