"""Step time against link speed, tensor-parallel degree and model size: synchronous, overlapped, and as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from oases.errors import UsageError
from oases.planner.choose import rank_plans, seconds_of
from oases.planner.space import Space
from oases.plans.plan import Plan
from oases.plans.shape import ModelShape
from oases.simulator.hardware import Hardware
from oases.simulator.links import LinkModel

SPEEDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Times as fast as the cluster's are all its links."""
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Times as many layers as the model has; the width stays, so that measured blocks go on holding."""
SERIES = ("sync", "oases", "planner")
"""The best uniform plan of each schedule, and the best of all plans."""


@dataclass(frozen=True)
class Point:
    """What was found at one place of a panel: a plan in a line and its seconds, None where nothing fits."""

    step_seconds: float | None
    plan: str


@dataclass(frozen=True)
class Panel:
    """A picture's panel. x: where; points: by series, one for each x."""

    name: str
    label: str
    x: tuple[float, ...]
    points: dict[str, tuple[Point, ...]]


@dataclass(frozen=True)
class Problem:
    """What is planned: as for rank_plans."""

    model: ModelShape
    hardware: Hardware
    world: int
    global_batch: int
    budget: int | None = None
    space: Space = field(default_factory=Space)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that the model and its hardware know."""
        wanted = self.space.degrees or tuple(2**power for power in range(self.world.bit_length()))
        return tuple(
            tp
            for tp in wanted
            if self.world % tp == 0 and self.model.fits_degree(tp) and self.hardware.has_block(self.model, tp)
        )


def sweep(problem: Problem, on_point: Callable[[int, int], None] | None = None) -> list[Panel]:
    """The three panels. on_point(done, total): called as the work goes on."""
    model, layers = problem.model, sorted({max(1, round(size * problem.model.layers)) for size in SIZES})
    models = [replace(model, layers=count) for count in layers]
    total, done = 3 * (len(SPEEDS) + len(problem.degrees) + len(models)), 0
    known: dict[tuple[int, str], Point] = {}

    def points(problems: list[Problem], series: str) -> Iterator[Point]:
        nonlocal done
        for each in problems:
            if (id(each), series) not in known:
                known[id(each), series] = _best(each, series)
            yield known[id(each), series]
            done += 1
            if on_point is not None:
                on_point(done, total)

    def panel(name: str, label: str, x: list[float], of: dict[str, list[Problem]]) -> Panel:
        return Panel(name, label, tuple(x), {series: tuple(points(of[series], series)) for series in SERIES})

    speeds = [replace(problem, hardware=faster(problem.hardware, speed)) for speed in SPEEDS]
    degrees = [replace(problem, space=replace(problem.space, degrees=(tp,))) for tp in problem.degrees]
    sizes = [replace(problem, model=each) for each in models]
    free = {"planner": [problem] * len(degrees)}  # which degrees it takes is the planner's choice
    return [
        panel("link_speed", "speed of all links, times the cluster's", list(SPEEDS), dict.fromkeys(SERIES, speeds)),
        panel(
            "degree", "tensor-parallel degree of all blocks", [float(tp) for tp in problem.degrees],
            dict.fromkeys(SERIES, degrees) | free,
        ),
        panel(
            "size", "parameters, billions", [each.num_parameters / 1e9 for each in models],
            dict.fromkeys(SERIES, sizes),
        ),
    ]  # fmt: skip


def as_data(problem: Problem, panels: list[Panel]) -> dict[str, Any]:
    """The numbers, as JSON can hold them."""
    return {
        "model": asdict(problem.model), "hardware": problem.hardware.name, "world": problem.world,
        "global_batch": problem.global_batch, "panels": [asdict(panel) for panel in panels],
    }  # fmt: skip


def faster(hardware: Hardware, factor: float) -> Hardware:
    """The same hardware with links `factor` times as fast; what starts a message takes as long as before."""

    def link(model: LinkModel) -> LinkModel:
        samples = tuple(
            replace(each, seconds=least + max(0.0, each.seconds - least) / factor)
            for each in model.samples
            for least in [min(each.seconds, model.startup_seconds)]
        )
        return replace(model, bytes_per_second=factor * model.bytes_per_second, samples=samples)

    return replace(hardware, node=link(hardware.node), cluster=link(hardware.cluster))


def _best(problem: Problem, series: str) -> Point:
    """The best plan of a series. Each other schedule is held against the planner's plans of one degree."""
    space = problem.space if series == "planner" else replace(problem.space, schedules=(series,))
    try:
        plans = rank_plans(
            problem.model, problem.hardware, problem.world, problem.global_batch, budget=problem.budget, space=space
        )
    except UsageError as error:
        return Point(None, str(error))
    found = [plan for plan in plans if series == "planner" or plan.uniform_tp is not None]
    return _point(min(found, key=seconds_of)) if found else Point(None, "no plan of one degree fits")


def _point(plan: Plan) -> Point:
    return Point(seconds_of(plan), plan.text())
