"""Finds the best plan: for every setting the chain of blocks is solved as a mixed-integer programme.

Costs of a block in a state (degree, computed again or not) come from simulated stacks: what one more layer takes, and
what a stack takes besides. Where the degree changes there is the resharding, and one overlap ends and another begins.
The plans that come out, and the uniform ones, are then simulated whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import groupby

import numpy as np

from oases.planner.chain import Chain
from oases.planner.memory import head_bytes, in_flight_bytes, kept_bytes, state_bytes
from oases.planner.plan import Plan, Segment, Stage
from oases.planner.predict import Predictor
from oases.planner.programme import InfeasibleError, Solution, solve
from oases.planner.runs import Run, Runs
from oases.planner.space import Setting
from oases.simulator.model import KINDS, BlockKind, ModelShape

State = tuple[int, bool]
"""(degree, whether the block is computed again)."""


class SettingSearch:
    """The chain of blocks under one setting."""

    def __init__(self, setting: Setting, runs: Runs, capacity: int, predictor: Predictor) -> None:
        self.model = runs.model
        self.hardware = runs.hardware
        self.setting = setting
        self.space = runs.space
        self._runs = runs
        self.capacity = capacity
        self.predictor = predictor
        self.degrees = setting.degrees(runs.model, runs.hardware, runs.space)
        self._nodes: dict[tuple[BlockKind, State, float], float] = {}

    @cached_property
    def states(self) -> tuple[State, ...]:
        """What a block may be."""
        return tuple(
            (tp, again) for tp in self.degrees for again in ((False, True) if self.space.recompute else (False,))
        )

    def run_of(self, state: State) -> Run:
        """The fastest way to run blocks in this state."""
        tp, again = state
        return self._runs.fastest(tp, self.setting.samples(tp), again=again)

    def ways(self, tp: int) -> list[tuple[str, int]]:
        """Schedules and sub-batches that a stack of this degree can run."""
        return self._runs.ways(tp, self.setting.samples(tp))

    def least_seconds(self) -> float:
        """Less than any plan of this setting takes: every layer in its fastest state, stages as even as can be."""
        layer = min(self.run_of((tp, False)).layer_seconds for tp in self.degrees)
        turns = self.setting.micro_batches + self.setting.stages - 1
        return turns * self.model.layers * layer / self.setting.stages

    def solve(
        self, blocks: range, in_flight: int, states: tuple[State, ...], capacity: float, gradients: float
    ) -> Solution:
        """The best states of these blocks. gradients: share of the gradients' sums that is taken for exposed."""
        count = len(blocks)
        by_kind = {kind: np.array([self._node_seconds(kind, state, gradients) for state in states]) for kind in KINDS}
        costs = [by_kind[self.model.kind_of(b)] for b in blocks]
        besides = np.array([self.setting.micro_batches * self.run_of(state).besides_seconds / 2 for state in states])
        costs[0], costs[-1] = costs[0] + besides, costs[-1] + besides
        heavy = {kind: np.array([float(self._weight(kind, state, in_flight)) for state in states]) for kind in KINDS}
        weights = [heavy[self.model.kind_of(b)] for b in blocks]
        weights[0] = weights[0] + np.array([float(self._once(state, blocks)) for state in states])
        edges = np.array([[self._edge_seconds(one, other) for other in states] for one in states])
        return solve(
            Chain((states,) * count, tuple(costs), tuple(weights), (edges,) * (count - 1), capacity), gap=1e-4
        )

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
        return self.setting.micro_batches * share * self.run_of(state).layer_seconds + gradients * summed

    def _weight_in_layer(self, kind: BlockKind, tp: int) -> float:
        samples = self.setting.samples(tp)
        times = self.hardware.block_times(self.model, kind, tp, samples)
        sent = self.hardware.collective_seconds("all_reduce", tp, self.model.unit_bytes(samples))
        return times.forward + times.backward + times.weight_gradient + times.combine + sent

    def _edge_seconds(self, one: State, other: State) -> float:
        if one[0] == other[0]:
            # Within a segment the first layers are those computed again; the other order is the same plan.
            return np.inf if other[1] and not one[1] else 0.0
        low, high = sorted((one[0], other[0]))
        num_bytes = self.model.unit_bytes(self.setting.samples(high))
        seconds = self.hardware.collective_seconds("all_gather", high // low, num_bytes, low)
        ends = (self.run_of(one).besides_seconds + self.run_of(other).besides_seconds) / 2
        return self.setting.micro_batches * (seconds + ends)

    def _weight(self, kind: BlockKind, state: State, in_flight: int) -> int:
        tp, again = state
        parameters = self.model.block_parameters(kind, tp)
        replicas = self.setting.stage_ranks // tp
        kept = kept_bytes(self.model, kind, tp, self.setting.samples(tp), recomputed=again)
        return state_bytes(self.model, parameters, replicas, zero=self.setting.zero) + in_flight * kept

    def _once(self, state: State, blocks: range) -> int:
        """Held besides what each block holds: embedding and head, what is on the wire, a block computed again."""
        tp, _ = state
        samples = self.setting.samples(tp)
        in_flight = in_flight_bytes(self.model, tp, samples, self.run_of(state).sub_batches)
        held = in_flight
        if blocks.start == 0 or blocks.stop == self.model.num_blocks:
            parameters, replicas = self.model.embedding_parameters(tp), self.setting.stage_ranks // tp
            held += state_bytes(self.model, parameters, replicas, zero=self.setting.zero)
        if blocks.stop == self.model.num_blocks:
            # The head's logits are gone before a block is computed again.
            held += max(0, head_bytes(self.model, tp, samples) - in_flight)
        return held

    def plan_of(self, states: tuple[tuple[State, ...], ...]) -> Plan:
        """The plan in which each block of each stage is in the state given."""
        stages = tuple(Stage(tuple(self._segments(of_stage))) for of_stage in states)
        setting = self.setting
        return Plan(
            self.model, setting.world, self.hardware.ranks_per_node, setting.global_batch, setting.micro_batches,
            stages, setting.zero and any(tp < setting.stage_ranks for of_stage in states for tp, _ in of_stage),
            setting.pipeline,
        )  # fmt: skip

    def _segments(self, states: tuple[State, ...]) -> Iterator[Segment]:
        for tp, run_of_states in groupby(states, key=lambda state: state[0]):
            again = [state[1] for state in run_of_states]
            way = self.run_of((tp, sum(again) * 2 > len(again)))
            yield Segment(len(again), tp, way.schedule, way.sub_batches, (sum(again) + 1) // 2)

    def candidates(self) -> Iterator[Plan]:
        """Plans that fit, by programmes over all states and over those of each degree alone."""
        choices = [self.states, *([s for s in self.states if s[0] == tp] for tp in self.degrees)]
        for states in map(tuple, choices):
            for gradients in (0.0, 1.0) if len(self.degrees) > 1 and len(states) > 2 else (0.5,):
                found = self._fitting(states, gradients)
                if found is not None:
                    yield found

    def smallest_bytes(self) -> float:
        """The least that any choice of states holds, on the stage that holds most."""
        most, first = 0.0, 0
        for number, count in enumerate(stage_sizes(self.model, self.setting.stages)):
            try:
                self.solve(range(first, first + count), self.setting.in_flight(number), self.states, 0.0, 0.0)
            except InfeasibleError as error:
                most = max(most, error.smallest_weight)
            first += count
        return most

    def peak_of_lightest(self) -> float:
        """The simulated peak of the choice that holds the least; infinite where there is none."""
        try:
            plan = self._plan_with(self.states, 0.0, self.smallest_bytes())
        except InfeasibleError:
            return np.inf
        assert plan.prediction is not None
        return max(plan.prediction.memory_bytes)

    def _fitting(self, states: tuple[State, ...], gradients: float) -> Plan | None:
        """A plan whose simulated peak is within the capacity; what the closed form leaves out is taken off first."""
        capacity = float(self.capacity)
        for _ in range(4):
            try:
                plan = self._plan_with(states, gradients, capacity)
            except InfeasibleError as error:
                if error.smallest_weight > self.capacity or capacity == error.smallest_weight:
                    return None
                capacity = error.smallest_weight  # too much was taken off: the lightest choice is left to try
                continue
            assert plan.prediction is not None
            over = max(plan.prediction.memory_bytes) - self.capacity
            if over <= 0:
                return plan
            capacity -= 1.02 * over
        return None

    def _plan_with(self, states: tuple[State, ...], gradients: float, capacity: float) -> Plan:
        chosen: list[tuple[State, ...]] = []
        solved: dict[tuple[int, int, bool], tuple[State, ...]] = {}
        unbound: dict[int, tuple[State, ...]] = {}  # of the stages between the ends; later ones hold less
        first = 0
        for number, count in enumerate(stage_sizes(self.model, self.setting.stages)):
            blocks = range(first, first + count)
            ends = number in (0, self.setting.stages - 1)
            key = (count, self.setting.in_flight(number), ends)
            if key not in solved and not ends and count in unbound:
                solved[key] = unbound[count]
            if key not in solved:
                found = self.solve(blocks, key[1], states, capacity, gradients)
                solved[key] = tuple(states[place] for place in found.places)
                if not found.binds and not ends:
                    unbound[count] = solved[key]
            chosen.append(solved[key])
            first += count
        return self.predictor.with_prediction(self.plan_of(tuple(chosen)))


def stage_sizes(model: ModelShape, stages: int) -> list[int]:
    """Blocks of each stage: whole layers, as even as they come, the longer ones in the middle."""
    least, more = divmod(model.layers, stages)
    order = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
    return [2 * (least + (order.index(stage) < more)) for stage in range(stages)]
