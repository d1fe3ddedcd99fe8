"""Schedules in place of a stack's own where a batch has fewer samples than sub-batches."""

from __future__ import annotations

from collections.abc import Callable

from oases.schedule import LayerOf, Schedule, along_sequence, generate, recomputed_layers


class SmallBatches:
    """Replacements of schedules, with the same recomputation, made once each.

    lay_out: makes a schedule that the stack can run.
    """

    def __init__(self, num_blocks: int, layer_of: LayerOf, lay_out: Callable[[Schedule], Schedule]) -> None:
        self._num_blocks, self._layer_of, self._lay_out = num_blocks, layer_of, lay_out
        # By the id of the schedule, which the stack holds.
        self._by_tokens: dict[tuple[int, frozenset[int]], Schedule] = {}
        self._whole: dict[int, Schedule] = {}

    def by_tokens(self, schedule: Schedule, joint: frozenset[int]) -> Schedule:
        """Sub-batches of tokens. joint: blocks that need all tokens at once."""
        if (id(schedule), joint) not in self._by_tokens:
            again, parts = self._recomputed(schedule), schedule.num_sub_batches
            self._by_tokens[id(schedule), joint] = along_sequence(
                self._num_blocks, parts, joint, again, self._layer_of
            )
        return self._by_tokens[id(schedule), joint]

    def whole(self, schedule: Schedule) -> Schedule:
        """The unsplit batch."""
        if id(schedule) not in self._whole:
            again = self._recomputed(schedule)
            self._whole[id(schedule)] = self._lay_out(generate("sync", self._num_blocks, 1, again, self._layer_of))
        return self._whole[id(schedule)]

    def is_whole(self, schedule: Schedule) -> bool:
        """Whether a schedule is such a replacement by the unsplit batch."""
        return any(schedule is each for each in self._whole.values())

    def _recomputed(self, schedule: Schedule) -> int:
        return recomputed_layers(schedule.recomputed_blocks, self._num_blocks, self._layer_of)
