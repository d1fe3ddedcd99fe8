"""Search for the best plan: for every setting the chain of blocks is solved for its cheapest states that fit.

The cost of a block in a state (degree, recomputed or not) comes from simulated stacks: time per additional layer
and constant time per stack. A change of degree costs the resharding and the overlap lost at the border. The
resulting plans and the uniform ones are then simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, groupby, pairwise

import numpy as np

from oases.planner.balance import balanced, balanced_runs, least_load, part_blocks
from oases.planner.block_costs import BlockCosts, Row, State
from oases.planner.chain import Chain, InfeasibleError, Solution, relaxed_cost, solve
from oases.planner.predict import Predictor
from oases.planner.space import Setting
from oases.planner.timings import StackTimings
from oases.plans.plan import Plan, Segment, Stage


class SettingSearch(BlockCosts):
    """The chain of blocks under one setting."""

    def __init__(self, setting: Setting, timings: StackTimings, capacity: int, predictor: Predictor) -> None:
        super().__init__(setting, timings, capacity)
        self.predictor = predictor
        self._sizes = cache(self._sizes_of)

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
        if self.model.mixed:
            return self._least(
                [sum(self.timing_of(state).layer_seconds / 2 for state in states) for states in chosen]
            )
        places = iter(range(self.model.num_blocks))
        kinds = ([self.model.kind_of(next(places)) for _ in states] for states in chosen)
        pairs = (zip(of_stage, states, strict=True) for of_stage, states in zip(kinds, chosen, strict=True))
        return self._least([sum(self._seconds(*pair) for pair in each) for each in pairs])

    def _least_fitting(self, states: tuple[State, ...]) -> float:
        """Lower bound of the step time of any choice that fits; cheap compared with solving the stages."""
        if len(self.model.layer_kinds) > 1:
            fastest = [
                min(self.timing_of(state).by_kind[kind] for state in states) for kind in self.model.layer_order
            ]
            return self._least([sum(fastest) / self.setting.stages] * self.setting.stages) * (1 - 1e-9)
        seconds = np.array([self.timing_of(state).layer_seconds for state in states])
        (kinds,) = self.model.layer_kinds
        stages = []
        for stage, count in enumerate(self._blocks(states)):
            heavy = np.array([sum(self._weight(kind, state, stage) for kind in kinds) for state in states])
            free = self.capacity - min(self._once(state, stage) for state in states)
            layers = count / len(kinds)
            stages.append(layers * relaxed_cost(seconds, heavy, free / layers))
        return self._least(stages) * (1 - 1e-9)  # rounding

    def solve(
        self, stage: int, kinds: tuple[int, ...], states: tuple[State, ...], capacity: float, gradients: float,
        border: int | None = None,
    ) -> Solution:  # fmt: skip
        """Best states of a stage's blocks, given by the numbers of their kinds.

        gradients: fraction of the gradient all-reduces that is assumed exposed. border: degree of the first block,
        if the previous stage passes its samples on.
        """
        found = _solved(
            states, kinds, capacity, border,
            tuple(tuple(self._node_seconds(kind, state, gradients) for state in states) for kind in self._kinds),
            tuple(self.setting.micro_batches * self.timing_of(state).fixed_seconds / 2 for state in states),
            tuple(tuple(self._weight(kind, state, stage) for state in states) for kind in self._kinds),
            tuple(float(self._once(state, stage)) for state in states), self._edges(states),
        )  # fmt: skip
        if isinstance(found, float):
            raise InfeasibleError(found, capacity, stage)
        return found

    def stage_blocks(self, degrees: Sequence[int], shares: Sequence[float] | None = None) -> list[int]:
        """Blocks of each stage: whole layers, balanced by their time at the best of these degrees.

        shares: fraction of each stage's layers that is recomputed; None recomputes what does not fit.
        """
        return self._sizes(tuple(degrees), None if shares is None else tuple(shares))

    def _sizes_of(self, degrees: tuple[int, ...], shares: tuple[float, ...] | None) -> list[int]:
        stages, layers = self.setting.stages, self.model.layers
        if len(self.model.layer_kinds) == 1:
            loads = [partial(least_load, self._loads(stage, degrees, shares, (0,))) for stage in range(stages)]
            counts = balanced(layers, loads, self.setting.chunks)
        else:
            counts = balanced_runs(layers, stages, partial(self._run_seconds, degrees, shares))
        ends = [self.model.first_block(layer) for layer in accumulate(counts, initial=0)]
        return [after - before for before, after in pairwise(ends)]

    def plan_of(self, states: tuple[tuple[State, ...], ...]) -> Plan:
        """The plan in which each block of each stage has the given state."""
        setting, each = self.setting, len(self.model.layer_kinds[0])
        firsts = accumulate(map(len, states), initial=0)
        stages = tuple(
            Stage(
                tuple(
                    segment
                    for part in _parts(of_stage, setting.chunks, each)
                    for segment in self._segments(part, first if setting.chunks == 1 else 0)
                )
            )
            for first, of_stage in zip(firsts, states, strict=False)
        )
        return Plan(
            self.model, setting.world, self.hardware.ranks_per_node, setting.global_batch, setting.micro_batches,
            stages, setting.zero and any(tp < setting.stage_ranks for of_stage in states for tp, _ in of_stage),
            setting.pipeline, fsdp=setting.fsdp and any(t < setting.stage_ranks for s in states for t, _ in s),
            wire=setting.wire if any(tp > 1 for of_stage in states for tp, _ in of_stage) else "none",
        )  # fmt: skip

    def _segments(self, states: tuple[State, ...], first: int) -> Iterator[Segment]:
        for tp, run_of_states in groupby(states, key=lambda state: state[0]):
            recomputed = [state[1] for state in run_of_states]
            count = sum(recomputed)
            way = self.timing_of((tp, count * 2 > len(recomputed))).way
            layers = self.model.num_layers(first, count) if count else 0
            yield Segment(len(recomputed), tp, way.schedule, way.sub_batches, layers, way.sequence_parallel)
            first += len(recomputed)

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
        if self._mixes:
            yield self.states
        yield from (tuple(state for state in self.states if state[0] == tp) for tp in self.degrees)

    @property
    def _mixes(self) -> bool:
        """Whether degrees may differ by block: all parts of a stage need equally many segments, so only with one."""
        return self.setting.chunks == 1 and self.model.mixed

    def smallest_bytes(self) -> float:
        """Least bytes of any choice of states, on the stage with the most memory."""
        return self._smallest_of(self._lightest_choice)

    @cached_property
    def _lightest_choice(self) -> tuple[State, ...]:
        choices = list(self._choices())
        return choices[0] if self._mixes else min(choices, key=self._smallest_of)

    def _smallest_of(self, states: tuple[State, ...]) -> float:
        most = 0.0
        for stage, kinds in enumerate(self._kinds_by_stage(states)):
            try:
                self.solve(stage, kinds, states, 0.0, 0.0)
            except InfeasibleError as error:
                most = max(most, error.smallest_weight)
        return most

    def peak_of_lightest(self) -> float:
        """Simulated peak bytes of the lightest choice; infinite if there is none."""
        states = self._lightest_choice
        try:
            chosen = self._chosen(states, 0.0, [self._smallest_of(states)] * self.setting.stages)
        except InfeasibleError:
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
            except InfeasibleError as error:
                least = error.smallest_weight
                if least > self.capacity or capacities[error.stage] == least:
                    return None
                capacities[error.stage] = least  # reduced too far: only the lightest choice is left
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

    def _kinds_by_stage(self, states: tuple[State, ...]) -> Iterator[tuple[int, ...]]:
        """Numbers of the kinds of each stage's blocks; stages hold whole layers."""
        number, first = {kind: at for at, kind in enumerate(self._kinds)}, 0
        for count in self._blocks(states):
            yield tuple(number[self.model.kind_of(block)] for block in range(first, first + count))
            first += count

    def _chosen(
        self, states: tuple[State, ...], gradients: float, capacities: Sequence[float]
    ) -> tuple[tuple[State, ...], ...]:
        """States of each stage's blocks. capacities: by stage. Raises InfeasibleError."""
        chosen: list[tuple[State, ...]] = []
        # Stages between the ends hold no more than an earlier one that is not bound by memory.
        unbound: dict[tuple[tuple[int, ...], int | None, bool], tuple[State, ...]] = {}
        border: int | None = None
        for stage, kinds in enumerate(self._kinds_by_stage(states)):
            ends = stage in (0, self.setting.stages - 1)
            key = kinds, border, self.setting.recomputes_early(stage)
            if not ends and key in unbound:
                chosen.append(unbound[key])
            else:
                found = self.solve(stage, kinds, states, capacities[stage], gradients, border)
                chosen.append(tuple(states[place] for place in found.places))
                if not found.binds and not ends:
                    unbound[key] = chosen[-1]
            border = chosen[-1][-1][0]
        return tuple(chosen)


@lru_cache(maxsize=1 << 14)
def _solved(
    states: tuple[State, ...], kinds: tuple[int, ...], capacity: float, border: int | None, seconds: tuple[Row, ...],
    fixed: Row, heavy: tuple[Row, ...], once: Row, edges: tuple[Row, ...],
) -> Solution | float:  # fmt: skip
    """Best states of blocks of these kinds, or the bytes of the lightest choice if none fits.

    Cached: settings differ in what few stages see. seconds, heavy: of a block by kind. fixed: seconds at either end.
    once: bytes besides each block's.
    """
    count = len(kinds)
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


def _parts(states: tuple[State, ...], chunks: int, each: int) -> Iterator[tuple[State, ...]]:
    first = 0
    for count in part_blocks(len(states), chunks, each):
        yield states[first : first + count]
        first += count
