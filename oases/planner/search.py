"""Search for the best plan: for every setting the chain of blocks is solved as a mixed-integer linear program.

The cost of a block in a state (degree, recomputed or not) comes from simulated stacks: time per additional layer
and constant time per stack. A change of degree costs the resharding and the overlap lost at the border. The
resulting plans and the uniform ones are then simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import TypeAlias

import numpy as np

from oases.planner.balance import StageLoad, balanced, part_blocks
from oases.planner.block_chain import Chain, StackTiming, StackTimings
from oases.planner.ends import ends_seconds
from oases.planner.memory import head_bytes, in_flight_bytes, kept_bytes
from oases.planner.milp import InfeasibleError, Solution, relaxed_cost, solve
from oases.planner.predict import Predictor
from oases.planner.space import Setting
from oases.plans.plan import Plan, Segment, Stage
from oases.plans.shape import KINDS, BlockKind

State: TypeAlias = tuple[int, bool]
"""(degree, whether the block is recomputed)."""
Row: TypeAlias = tuple[float, ...]
"""A number per state."""


class SettingSearch:
    """The chain of blocks under one setting."""

    def __init__(self, setting: Setting, timings: StackTimings, capacity: int, predictor: Predictor) -> None:
        self.model = timings.model
        self.hardware = timings.hardware
        self.setting = setting
        self.space = timings.space
        self._timings = timings
        self.capacity = capacity
        self.predictor = predictor
        self.degrees = setting.degrees(timings.model, timings.hardware, timings.space)
        self._nodes: dict[tuple[BlockKind, State, float], float] = {}
        self._timing: dict[State, StackTiming] = {}
        self._weights: dict[tuple[BlockKind, State, int], float] = {}
        self._known_edges: dict[tuple[State, ...], tuple[Row, ...]] = {}
        self._sizes: dict[tuple[tuple[int, ...], tuple[float, ...] | None], list[int]] = {}

    @cached_property
    def states(self) -> tuple[State, ...]:
        """Possible states of a block."""
        return tuple(
            (tp, recomputed)
            for tp in self.degrees
            for recomputed in ((False, True) if self.space.recompute else (False,))
        )

    def timing_of(self, state: State) -> StackTiming:
        """Timing of the fastest way to run blocks in this state."""
        if state not in self._timing:
            tp, recomputed = state
            self._timing[state] = self._timings.fastest(tp, self.setting.samples(tp), recompute=recomputed)
        return self._timing[state]

    def ways(self, tp: int) -> list[tuple[str, int]]:
        """Schedules and sub-batches that a stack of this degree can run."""
        return self._timings.ways(tp, self.setting.samples(tp))

    def least_seconds(self) -> float:
        """Lower bound of the step time: every layer in its fastest state, stages perfectly balanced."""
        layer = min(self.timing_of((tp, False)).layer_seconds for tp in self.degrees)
        return self._least([self.model.layers * layer / self.setting.stages] * self.setting.stages)

    def _least(self, stages: Sequence[float]) -> float:
        """Lower bound of the step time, given the seconds of each stage's blocks per micro-batch."""
        setting = self.setting
        # W passes may fill the whole bubble.
        fill = 0.0 if setting.has_weights else (setting.stages - 1) / setting.chunks
        return max(setting.micro_batches * max(stages), (setting.micro_batches + fill) * sum(stages) / len(stages))

    def _least_of(self, chosen: Sequence[tuple[State, ...]]) -> float:
        """Lower bound of the step time of a choice; cheap compared with simulating it."""
        return self._least([sum(self.timing_of(state).layer_seconds / 2 for state in states) for states in chosen])

    def _least_fitting(self, states: tuple[State, ...]) -> float:
        """Lower bound of the step time of any choice that fits; cheap compared with solving the stages."""
        seconds = np.array([self.timing_of(state).layer_seconds for state in states])
        stages = []
        for stage, count in enumerate(self._blocks(states)):
            heavy = np.array([sum(self._weight(kind, state, stage) for kind in KINDS) for state in states])
            free = self.capacity - min(self._once(state, stage) for state in states)
            stages.append(count / 2 * relaxed_cost(seconds, heavy, free / (count / 2)))
        return self._least(stages) * (1 - 1e-9)  # rounding

    def solve(
        self, stage: int, count: int, states: tuple[State, ...], capacity: float, gradients: float,
        border: int | None = None,
    ) -> Solution:  # fmt: skip
        """Best states of a stage's `count` blocks.

        gradients: fraction of the gradient all-reduces that is assumed exposed. border: degree of the first block,
        if the previous stage passes its samples on.
        """
        found = _solved(
            states, count, capacity, border,
            tuple(tuple(self._node_seconds(kind, state, gradients) for state in states) for kind in KINDS),
            tuple(self.setting.micro_batches * self.timing_of(state).fixed_seconds / 2 for state in states),
            tuple(tuple(self._weight(kind, state, stage) for state in states) for kind in KINDS),
            tuple(float(self._once(state, stage)) for state in states), self._edges(states),
        )  # fmt: skip
        if isinstance(found, float):
            raise InfeasibleError(found, capacity)
        return found

    def _edges(self, states: tuple[State, ...]) -> tuple[Row, ...]:
        if states not in self._known_edges:
            rows = (tuple(self._edge_seconds(one, other) for other in states) for one in states)
            self._known_edges[states] = tuple(rows)
        return self._known_edges[states]

    def _node_seconds(self, kind: BlockKind, state: State, gradients: float) -> float:
        key = (kind, state, gradients)
        if key not in self._nodes:
            self._nodes[key] = self._node_seconds_of(*key)
        return self._nodes[key]

    def _node_seconds_of(self, kind: BlockKind, state: State, gradients: float) -> float:
        tp, _ = state
        shares = {each: self._weight_in_layer(each, tp) for each in KINDS}
        share = shares[kind] / sum(shares.values())
        replicas = self.setting.stage_ranks // tp
        num_bytes = self.model.block_parameters(kind, tp) * self.model.element_bytes
        summed = self.hardware.collective_seconds("all_reduce", replicas, num_bytes, tp)
        return self.setting.micro_batches * share * self.timing_of(state).layer_seconds + gradients * summed

    def _weight_in_layer(self, kind: BlockKind, tp: int) -> float:
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

    def _weight(self, kind: BlockKind, state: State, stage: int) -> float:
        """Bytes of parameters and activations. Early recomputation holds one whole micro-batch."""
        key = kind, state, stage
        if key not in self._weights:
            self._weights[key] = self._weight_of(*key)
        return self._weights[key]

    def _weight_of(self, kind: BlockKind, state: State, stage: int) -> float:
        tp, recomputed = state
        parameters, samples = self.model.block_parameters(kind, tp), self.setting.samples(tp)
        replicas = self.setting.stage_ranks // tp
        kept = kept_bytes(self.model, kind, tp, samples, recomputed=recomputed)
        whole = kept_bytes(self.model, kind, tp, samples, recomputed=False)
        # A micro-batch in flight on a model part holds that part's share of the stage's blocks.
        held = self.setting.in_flight(stage) / self.setting.chunks * kept
        held += (whole - kept) * self.setting.recomputes_early(stage) + whole * self.setting.weights_waiting(stage)
        return self.model.state_bytes(parameters, replicas, zero=self.setting.zero) + held

    def _once(self, state: State, stage: int) -> int:
        """Bytes besides each block's: embedding and head, tensors in flight, one recomputed block."""
        tp, _ = state
        samples = self.setting.samples(tp)
        in_flight = in_flight_bytes(self.model, tp, samples, self.timing_of(state).sub_batches)
        held, last = in_flight, self.setting.stages - 1
        if stage in (0, last):
            parameters, replicas = self.model.embedding_parameters(tp), self.setting.stage_ranks // tp
            held += self.model.state_bytes(parameters, replicas, zero=self.setting.zero)
        if stage == last:
            # The head's logits are freed before a block is recomputed.
            held += max(0, head_bytes(self.model, tp, samples) - in_flight)
        return held

    def stage_blocks(self, degrees: Sequence[int], shares: Sequence[float] | None = None) -> list[int]:
        """Blocks of each stage: whole layers, balanced by their time at the best of these degrees.

        shares: fraction of each stage's layers that is recomputed; None recomputes what does not fit.
        """
        known = tuple(degrees), None if shares is None else tuple(shares)
        if known not in self._sizes:
            loads = [partial(_least, self._loads(stage, degrees, shares)) for stage in range(self.setting.stages)]
            layers = balanced(self.model.layers, loads, self.setting.chunks)
            self._sizes[known] = [2 * count for count in layers]
        return self._sizes[known]

    def _loads(self, stage: int, degrees: Sequence[int], shares: Sequence[float] | None) -> list[StageLoad]:
        found = []
        for tp in degrees:
            ends = ends_seconds(self.hardware, self.model, tp, self.setting.samples(tp))
            fixed = ends[0] * (stage == 0) + ends[1] * (stage == self.setting.stages - 1)
            keeping, recomputed = (self.timing_of((tp, each)).layer_seconds for each in (False, True))
            if shares is not None:
                seconds = keeping + shares[stage] * (recomputed - keeping)
                found.append(StageLoad(seconds, seconds, fixed))
                continue
            kept, recomputed_bytes = (
                sum(self._weight(kind, (tp, each), stage) for kind in KINDS) for each in (False, True)
            )
            if not self.space.recompute:
                recomputed, recomputed_bytes = keeping, kept
            once = self._once((tp, False), stage)
            found.append(
                StageLoad(keeping, max(keeping, recomputed), fixed, kept, recomputed_bytes, once, self.capacity)
            )
        return found

    def plan_of(self, states: tuple[tuple[State, ...], ...]) -> Plan:
        """The plan in which each block of each stage has the given state."""
        setting = self.setting
        stages = tuple(
            Stage(tuple(segment for part in _parts(of_stage, setting.chunks) for segment in self._segments(part)))
            for of_stage in states
        )
        return Plan(
            self.model, setting.world, self.hardware.ranks_per_node, setting.global_batch, setting.micro_batches,
            stages, setting.zero and any(tp < setting.stage_ranks for of_stage in states for tp, _ in of_stage),
            setting.pipeline,
        )  # fmt: skip

    def _segments(self, states: tuple[State, ...]) -> Iterator[Segment]:
        for tp, run_of_states in groupby(states, key=lambda state: state[0]):
            recomputed = [state[1] for state in run_of_states]
            way = self.timing_of((tp, sum(recomputed) * 2 > len(recomputed)))
            yield Segment(len(recomputed), tp, way.schedule, way.sub_batches, (sum(recomputed) + 1) // 2)

    def candidates(self, limit: float = np.inf) -> Iterator[Plan]:
        """Plans that fit, solved over all states and over those of each degree.

        Plans whose lower bound exceeds `limit` seconds are left out.
        """
        for states in self._choices():
            for gradients in (0.0, 1.0) if len(self.degrees) > 1 and len(states) > 2 else (0.5,):
                found = self._fitting(states, gradients, limit)
                if found is not None:
                    yield found

    def _choices(self) -> Iterator[tuple[State, ...]]:
        if self.setting.chunks == 1:  # all parts of a stage need equally many segments: one degree ensures that
            yield self.states
        yield from (tuple(state for state in self.states if state[0] == tp) for tp in self.degrees)

    def smallest_bytes(self) -> float:
        """Least bytes of any choice of states, on the stage with the most memory."""
        return self._smallest_of(self._lightest_choice)

    @cached_property
    def _lightest_choice(self) -> tuple[State, ...]:
        choices = list(self._choices())
        return choices[0] if self.setting.chunks == 1 else min(choices, key=self._smallest_of)

    def _smallest_of(self, states: tuple[State, ...]) -> float:
        most = 0.0
        for stage, count in enumerate(self._blocks(states)):
            try:
                self.solve(stage, count, states, 0.0, 0.0)
            except InfeasibleError as error:
                most = max(most, error.smallest_weight)
        return most

    def peak_of_lightest(self) -> float:
        """Simulated peak bytes of the lightest choice; infinite if there is none."""
        states = self._lightest_choice
        try:
            chosen = self._chosen(states, 0.0, [self._smallest_of(states)] * self.setting.stages)
        except _StageInfeasibleError:
            return np.inf
        plan = self.predictor.with_prediction(self.plan_of(chosen))
        assert plan.prediction is not None
        return max(plan.prediction.memory_bytes)

    def _fitting(self, states: tuple[State, ...], gradients: float, limit: float) -> Plan | None:
        """A plan whose simulated peak is within the capacity, which is first reduced by what the closed form leaves
        out.

        None if no plan can take less than `limit` seconds: less memory only takes longer.
        """
        if (least := self._least_fitting(states)) > limit or least == np.inf:
            return None
        stages = self.setting.stages
        capacities = [float(self.capacity)] * stages
        corrections = 4
        while corrections:
            try:
                chosen = self._chosen(states, gradients, capacities)
            except _StageInfeasibleError as error:
                if error.smallest > self.capacity or capacities[error.stage] == error.smallest:
                    return None
                capacities[error.stage] = error.smallest  # reduced too far: only the lightest choice is left
                corrections -= stages == 1
                continue
            corrections -= 1
            if self._least_of(chosen) > limit:
                return None
            plan = self.predictor.with_prediction(self.plan_of(chosen))
            assert plan.prediction is not None
            over = [held - self.capacity for held in plan.prediction.memory_bytes]
            if max(over) <= 0:
                return plan
            capacities = [old - 1.02 * max(0, more) for old, more in zip(capacities, over, strict=True)]
        return None

    def _blocks(self, states: tuple[State, ...]) -> list[int]:
        return self.stage_blocks(sorted({tp for tp, _ in states}))

    def _chosen(
        self, states: tuple[State, ...], gradients: float, capacities: Sequence[float]
    ) -> tuple[tuple[State, ...], ...]:
        """States of each stage's blocks. capacities: by stage. Raises _StageInfeasibleError."""
        chosen: list[tuple[State, ...]] = []
        # Stages between the ends hold no more than an earlier one that is not bound by memory.
        unbound: dict[tuple[int, int | None, bool], tuple[State, ...]] = {}
        border: int | None = None
        for stage, count in enumerate(self._blocks(states)):
            ends = stage in (0, self.setting.stages - 1)
            key = count, border, self.setting.recomputes_early(stage)
            if not ends and key in unbound:
                chosen.append(unbound[key])
            else:
                try:
                    found = self.solve(stage, count, states, capacities[stage], gradients, border)
                except InfeasibleError as error:
                    raise _StageInfeasibleError(stage, error.smallest_weight) from error
                chosen.append(tuple(states[place] for place in found.places))
                if not found.binds and not ends:
                    unbound[key] = chosen[-1]
            border = chosen[-1][-1][0]
        return tuple(chosen)


def _least(loads: Sequence[StageLoad], layers: int) -> float:
    return min(load.seconds(layers) for load in loads)


@lru_cache(maxsize=1 << 14)
def _solved(
    states: tuple[State, ...], count: int, capacity: float, border: int | None, seconds: tuple[Row, ...],
    fixed: Row, heavy: tuple[Row, ...], once: Row, edges: tuple[Row, ...],
) -> Solution | float:  # fmt: skip
    """Best states of `count` blocks, or the bytes of the lightest choice if none fits.

    Cached: settings differ in what few stages see. seconds, heavy: of a block by kind. fixed: seconds at either end.
    once: bytes besides each block's.
    """
    kinds = [b % len(KINDS) for b in range(count)]  # stages hold whole layers
    costs = [np.array(seconds[kind]) for kind in kinds]
    costs[0], costs[-1] = costs[0] + fixed, costs[-1] + fixed
    if border is not None:
        costs[0] = np.where([tp == border for tp, _ in states], costs[0], np.inf)
    weights = [np.array(heavy[kind]) for kind in kinds]
    weights[0] = weights[0] + once
    chain = Chain((states,) * count, tuple(costs), tuple(weights), (np.array(edges),) * (count - 1), capacity)
    try:
        return solve(chain, gap=1e-4)
    except InfeasibleError as error:
        return error.smallest_weight


class _StageInfeasibleError(Exception):
    """Error for a stage without a feasible choice of states. smallest: bytes of the lightest."""

    def __init__(self, stage: int, smallest: float) -> None:
        super().__init__(stage, smallest)
        self.stage = stage
        self.smallest = smallest


def _parts(states: tuple[State, ...], chunks: int) -> Iterator[tuple[State, ...]]:
    first = 0
    for count in part_blocks(len(states), chunks):
        yield states[first : first + count]
        first += count
