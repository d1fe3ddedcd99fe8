"""Costs of blocks under one setting: seconds and bytes by kind and state, and the loads that balance stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np

from oases.planner.balance import StageLoad, least_load
from oases.planner.ends import ends_seconds
from oases.planner.memory import divided, head_bytes, in_flight_bytes, kept_bytes, sharding_bytes
from oases.planner.space import Setting
from oases.planner.timings import StackTiming, StackTimings, Way
from oases.plans.layered import Kind
from oases.plans.shape import GRADIENT_BYTES

State: TypeAlias = tuple[int, bool]
"""(degree, whether the block is recomputed)."""
Row: TypeAlias = tuple[float, ...]
"""A number per state."""


class BlockCosts:
    """Costs of a model's blocks under one setting, cached."""

    def __init__(self, setting: Setting, timings: StackTimings, capacity: int) -> None:
        self.model = timings.model
        self.hardware = timings.hardware
        self.setting = setting
        self.space = timings.space
        self._timings = timings
        self.capacity = capacity
        self.degrees = setting.degrees(timings.model, timings.hardware, timings.space)
        self.timing_of = cache(self._timing_of)
        self._node_seconds = cache(self._node_seconds_of)
        self._weight = cache(self._weight_of)
        self._edges = cache(self._edges_of)
        self._run_seconds = cache(self._run_seconds_of)
        self._kinds: tuple[Kind, ...] = tuple(kind for kinds in self.model.layer_kinds for kind in kinds)
        self._layer_of_kind = {kind: at for at, kinds in enumerate(self.model.layer_kinds) for kind in kinds}

    @cached_property
    def states(self) -> tuple[State, ...]:
        """Possible states of a block."""
        return tuple(
            (tp, recomputed)
            for tp in self.degrees
            for recomputed in ((False, True) if self.space.recompute else (False,))
        )

    def _timing_of(self, state: State) -> StackTiming:
        """Timing of the fastest way to run blocks in this state."""
        tp, recomputed = state
        return self._timings.fastest(tp, self.setting.samples(tp), recomputed, self.setting.wire)

    def ways(self, tp: int) -> list[Way]:
        """Schedules and sub-batches that a stack of this degree can run."""
        return self._timings.ways(tp, self.setting.samples(tp))

    def _edges_of(self, states: tuple[State, ...]) -> tuple[Row, ...]:
        return tuple(tuple(self._edge_seconds(one, other) for other in states) for one in states)

    def _seconds(self, kind: Kind, state: State) -> float:
        """Seconds of a block per micro-batch: its share of its layer's."""
        layer = self._layer_of_kind[kind]
        shares = {each: self._weight_in_layer(each, state[0]) for each in self.model.layer_kinds[layer]}
        return shares[kind] / sum(shares.values()) * self.timing_of(state).by_kind[layer]

    def _node_seconds_of(self, kind: Kind, state: State, gradients: float) -> float:
        tp, _ = state
        summed, collective_seconds = 0.0, self.hardware.collective_seconds
        for count, degree in divided(self.model, kind, tp):
            replicas, num_bytes = self.setting.stage_ranks // degree, count * self.model.element_bytes
            if not (self.setting.fsdp or self.setting.zero):
                summed += collective_seconds("all_reduce", replicas, count * GRADIENT_BYTES, degree)
                continue
            # Gathered twice per micro-batch, or once; gradients reduced in each.
            gathered = collective_seconds("all_gather", replicas, num_bytes, degree)
            summed += gathered * (2 * self.setting.micro_batches if self.setting.fsdp else 1)
            reduced = collective_seconds("reduce_scatter", replicas, count * GRADIENT_BYTES, degree)
            summed += self.setting.micro_batches * reduced
        return self.setting.micro_batches * self._seconds(kind, state) + gradients * summed

    def _weight_in_layer(self, kind: Kind, tp: int) -> float:
        samples = self.setting.samples(tp)
        times = self.hardware.block_times(self.model, kind, tp, samples)
        sent = self.hardware.collective_seconds("all_reduce", tp, self.model.unit_bytes(samples))
        return times.forward + times.backward + times.weight_gradient + times.combine + sent

    def _edge_seconds(self, one: State, other: State) -> float:
        if one[0] == other[0]:
            # Within a segment the recomputed layers come first; the other order is the same plan.
            return np.inf if other[1] and not one[1] else 0.0
        low, high = sorted((one[0], other[0]))
        num_bytes = self.model.unit_bytes(self.setting.samples(high))
        seconds = self.hardware.collective_seconds("all_gather", high // low, num_bytes, low)
        ends = (self.timing_of(one).fixed_seconds + self.timing_of(other).fixed_seconds) / 2
        return self.setting.micro_batches * (seconds + ends)

    def _weight_of(self, kind: Kind, state: State, stage: int) -> float:
        """Bytes of parameters and activations. Early recomputation holds one whole micro-batch."""
        tp, recomputed = state
        samples = self.setting.samples(tp)
        along = self.timing_of(state).way.sequence_parallel
        kept, whole = (
            kept_bytes(self.model, kind, tp, samples, recomputed=again, along=along) for again in (recomputed, False)
        )
        # A micro-batch in flight on a model part holds that part's share of the stage's blocks.
        most = max(flying * kept + waiting * whole for flying, waiting in self.setting.held(stage))
        held = most / self.setting.chunks + (whole - kept) * self.setting.recomputes_early(stage)
        states = (
            self.model.state_bytes(
                count, self.setting.stage_ranks // degree, zero=self.setting.zero, fsdp=self.setting.fsdp
            )
            for count, degree in divided(self.model, kind, tp)
        )
        return sum(states) + held

    def _once(self, state: State, stage: int) -> int:
        """Bytes besides each block's: embedding and head, tensors in flight, one recomputed block."""
        tp, _ = state
        samples = self.setting.samples(tp)
        in_flight = in_flight_bytes(self.model, tp, samples, self.timing_of(state).way.sub_batches)
        held, last = in_flight, self.setting.last_stage
        if stage in (0, last):
            layers = self.model.layers
            ends = (0, layers) if last == 0 else (0, 1) if stage == 0 else (layers - 1, layers)
            parameters, replicas = self.model.end_parameters(*ends, tp), self.setting.stage_ranks // tp
            held += self.model.state_bytes(parameters, replicas, zero=self.setting.zero, fsdp=self.setting.fsdp)
            if replicas > 1 and (self.setting.zero or self.setting.fsdp):
                held += sharding_bytes(self.model, tp, parameters, fsdp=self.setting.fsdp)
        if stage == last:
            # The head's logits are freed before a block is recomputed.
            held += max(0, head_bytes(self.model, tp, samples) - in_flight)
        return held

    def _run_seconds_of(
        self, degrees: tuple[int, ...], shares: tuple[float, ...] | None, stage: int, first: int, last: int
    ) -> float:
        """Seconds of layers [first, last) on a stage."""
        order = self.model.layer_order[first:last]
        return least_load(self._loads(stage, degrees, shares, order), last - first)

    def _loads(
        self, stage: int, degrees: Sequence[int], shares: Sequence[float] | None, order: Sequence[int]
    ) -> list[StageLoad]:
        """Load of a stage at each degree. order: kinds of layers, of which each layer counts as the mean."""
        found = []
        numbers = [(kind, many / len(order)) for kind, many in Counter(order).items()]
        for tp in degrees:
            ends = ends_seconds(self.hardware, self.model, tp, self.setting.samples(tp))
            fixed = ends[0] * (stage == 0) + ends[1] * (stage == self.setting.last_stage)
            keeping, recomputed = (
                sum(many * self.timing_of((tp, each)).by_kind[kind] for kind, many in numbers)
                for each in (False, True)
            )
            if shares is not None:
                seconds = keeping + shares[stage] * (recomputed - keeping)
                found.append(StageLoad(seconds, seconds, fixed))
                continue
            kept, recomputed_bytes = (
                sum(
                    many * sum(self._weight(block, (tp, each), stage) for block in self.model.layer_kinds[kind])
                    for kind, many in numbers
                )
                for each in (False, True)
            )
            if not self.space.recompute:
                recomputed, recomputed_bytes = keeping, kept
            once = self._once((tp, False), stage)
            found.append(
                StageLoad(keeping, max(keeping, recomputed), fixed, kept, recomputed_bytes, once, self.capacity)
            )
        return found
