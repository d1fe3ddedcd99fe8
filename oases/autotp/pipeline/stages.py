"""Division of a model into the parts of a pipeline: what each part computes, receives and passes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from oases.autotp.pipeline.dataflow import Dataflow, Value
from oases.errors import UsageError
from oases.plans.balance import balanced_starts

_SMALL = 1e-3
"""Share of a layer's mean cost that every layer has, so that layers without matmuls are spread evenly."""


@dataclass(frozen=True)
class Division:
    """Parts of a model. stage_of: stage of each part.

    layers: names of each part's layers. part_of: part of each call of the sample pass, by (unit, occurrence).
    stages_of: stages that have the weights of a unit. holders: stages that have a parameter, by each of its names.
    """

    stage_of: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    part_of: Mapping[tuple[str, int], int]
    stages_of: Mapping[str, frozenset[int]]
    holders: Mapping[str, frozenset[int]]

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.layers)

    def layers_on(self, stage: int) -> list[tuple[str, ...]]:
        """Names of the layers of each part of a stage."""
        return [layers for layers, of in zip(self.layers, self.stage_of, strict=True) if of == stage]

    def part(self, unit: str, occurrence: int) -> int:
        """Part that runs a call. One that the sample pass did not have runs in the last part, as the loss does."""
        return self.part_of.get((unit, occurrence), self.parts - 1)


def divide(
    model: nn.Module,
    flow: Dataflow,
    units: Sequence[str],
    layers: Collection[str],
    stage_of: Sequence[int],
    counts: Sequence[int],
) -> Division:
    """Divide a model where its layers begin.

    flow: of a sample pass. units: names of the model's; layers: those in lists. stage_of, counts: stage and number of
    layers of each part. Other units belong to the part of the layer before them; those that read no results, such as
    a decoder's embedding, to that of the layer after them.
    """
    ends = list(accumulate(counts))
    names: list[list[str]] = [[] for _ in counts]
    part_of: dict[tuple[str, int], int] = {}
    seen = part = 0
    waiting: list[tuple[str, int]] = []
    for call in flow.calls[:-1]:
        key = (call.unit, call.occurrence)
        if call.unit in layers:
            part += seen == ends[part]
            seen += 1
            names[part].append(call.unit)
            part_of |= dict.fromkeys([*waiting, key], part)
            waiting = []
        elif call.reads:
            part_of[key] = part
        else:
            waiting.append(key)
    part_of |= dict.fromkeys([*waiting, ("", 0)], len(counts) - 1)
    read_between = {(name, part_of[call.unit, call.occurrence]) for call in flow.calls for name in call.parameters}
    stages_of: dict[str, frozenset[int]] = {}
    tied: dict[int, set[int]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for unit in units:
        module = model.get_submodule(unit)
        inside = [f"{unit}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        parts = {where for (name, _), where in part_of.items() if name == unit}
        parts |= {where for name, where in read_between if name in inside}
        stages_of[unit] = frozenset(stage_of[where] for where in parts or {len(counts) - 1})
        for name in inside:
            tied.setdefault(id(parameters[name]), set()).update(stages_of[unit])
    for name, where in read_between:
        tied.setdefault(id(parameters[name]), set()).add(stage_of[where])
    holders = {name: frozenset(tied.get(id(each), {stage_of[-1]})) for name, each in parameters.items()}
    return Division(tuple(stage_of), tuple(map(tuple, names)), part_of, stages_of, holders)


def balanced_counts(costs: Sequence[float], parts: int, kind: str) -> list[int]:
    """Layers of each part, so that the costliest part costs least. UsageError for more parts than layers."""
    if parts > len(costs):
        many = "1 layer" if len(costs) == 1 else f"{len(costs)} layers"
        raise UsageError(
            f"{kind} has {many}, too few for {parts} parts of a pipeline; give at most {len(costs)} "
            "stages (pp), with pipeline='interleaved' or 'zb_v' half as many"
        )
    least = _SMALL * (sum(costs) / len(costs) or 1.0)
    starts = [0, *balanced_starts([cost + least for cost in costs], parts), len(costs)]
    return [end - start for start, end in pairwise(starts)]


@dataclass(frozen=True)
class Crossings:
    """Values that pass from part to part. parts: part of each call of the pass.

    received: by each part, in order; those it passes on are the next one's.
    """

    parts: tuple[int, ...]
    received: tuple[tuple[Value, ...], ...]

    @staticmethod
    def of(flow: Dataflow, division: Division) -> Crossings:
        """Crossings of a pass. UsageError for a value that is not a floating-point tensor."""
        parts = [division.part(call.unit, call.occurrence) for call in flow.calls]
        parts[-1] = division.parts - 1
        for part, call in zip(parts, flow.calls, strict=True):
            stage, own = division.stage_of[part], division.stages_of.get(call.unit)
            missing = [name for name in sorted(call.parameters) if stage not in division.holders[name]]
            if missing or (own is not None and stage not in own):
                raise UsageError(
                    f"{call.unit or 'the loss'}, in part {part} of the pipeline, reads "
                    f"{missing[0] if missing else 'weights'} of another stage, which no pass at parallelize() did; "
                    "give it inputs like those of train_step(), labels included: spec=ParallelSpec(inputs=...)"
                )
        needed: list[set[Value]] = [set() for _ in range(division.parts)]
        for part, call in zip(parts, flow.calls, strict=True):
            for value in call.reads:
                made = flow.calls[value.call]
                if parts[value.call] == part:
                    continue
                if parts[value.call] > part:
                    raise UsageError(
                        f"{call.unit}, in part {part} of the pipeline, reads the result of {made.unit}, in part "
                        f"{parts[value.call]}; train this model without pipeline stages"
                    )
                if value.leaf not in made.floating:
                    raise UsageError(
                        f"{call.unit or 'the loss'}, in part {part} of the pipeline, reads result {value.leaf} of "
                        f"{made.unit}, in part {parts[value.call]}, which is not a floating-point tensor and cannot "
                        "be passed between stages; divide the model elsewhere, by other numbers of layers"
                    )
                for between in range(parts[value.call] + 1, part + 1):
                    needed[between].add(value)
        return Crossings(tuple(parts), tuple(tuple(sorted(values)) for values in needed))

    def passed_on(self, part: int) -> tuple[Value, ...]:
        """Values that a part passes on."""
        return self.received[part + 1] if part + 1 < len(self.received) else ()
