"""Every feasible plan of a small model measured, and the planner's choice among them.

More ranks than cores, so compute is emulated: blocks take set times (`TimedBlock`), as an imaginary device would, and
what is sent between the ranks is sent. Links are measured first; the planner knows nothing else of this machine.

    python benchmarks/plans.py --link 500mbit --nodes 2
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from rich.console import RenderableType

from oases.core.execution.group import ProcessGroup
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.mesh import Mesh
from oases.distributed.planned_stack import PlannedStack
from oases.errors import UsageError
from oases.planner.choose import rank_plans, seconds_of
from oases.planner.predict import Predictor
from oases.planner.space import Space, settings
from oases.plans.layered import Model
from oases.plans.plan import Plan, Segment, Stage
from oases.profile.config import ProfileConfig
from oases.profile.links import LinkBench, collectives_of, fitted_link, probes, ranks_per_node, sizes, slowest
from oases.simulator.hardware import Hardware
from oases.simulator.links import LinkModel, Sample
from oases.terminal import percent, progress
from oases_bench.command_line import script
from oases_bench.harness import Benchmark, Ranks, Result, checked_settings, first_rank
from oases_bench.stage_steps import EmulatedConfig, timed_block
from oases_bench.timed_block import TimedBlock
from oases_train.config import option

FINALISTS = 6
"""The fastest plans of the first round, which are measured again in turns with the planner's choice."""


@dataclass(frozen=True)
class PlansBenchConfig(EmulatedConfig):
    """The model, and the device that its compute is emulated for."""

    layers: int = option(2, "transformer layers; every block may have any degree, so plans grow as 3 ** (2 layers)")
    global_batch: int = option(16, "samples of one optimizer step")
    memory_share: float = option(
        0.8, "memory of the emulated device, as a share of what the plan that holds most would need"
    )
    iterations: int = option(7, "interleaved repetitions of the finalists; the first round takes two")

    def prepared(self, ranks: Ranks) -> PlansBenchConfig:
        """See `BenchConfig`."""
        self.model()
        return self

    def described(self) -> str:
        """See `BenchConfig`."""
        return "{} ranks {}; compute is emulated, communication is real"

    def model(self) -> Model:
        """Its shape. UsageError for one that cannot be."""
        if not 0 < self.memory_share <= 1:
            raise UsageError(f"--memory-share must be above 0 and at most 1, got {self.memory_share}")
        return super().model()


def emulated(config: PlansBenchConfig, links: dict[str, LinkModel], per_node: int) -> Hardware:
    """The emulated device behind the measured links. Sleeping compute and a link do not slow each other down."""
    cluster = links.get("cluster") or links["node"]
    return config.hardware(per_node, links.get("node", cluster), cluster)


def space() -> Space:
    """Search space, for the measurement and the planner."""
    return Space(
        schedules=("oases", "fine_grained"), sub_batches=(2,), micro_batches=(1, 2), zero=(False,), max_stages=1
    )  # fmt: skip


def every_plan(hardware: Hardware, model: Model, world: int, global_batch: int) -> Iterator[Plan]:
    """All mixes of degrees, overlapped and not, everything computed again and nothing, in each setting."""
    listed: set[Plan] = set()
    for setting in settings(model, hardware, world, global_batch, space()):
        degrees = setting.degrees(model, hardware, space())
        for mix in itertools.product(degrees, repeat=model.num_blocks):
            runs = [(tp, len(list(run))) for tp, run in itertools.groupby(mix)]
            for (name, subs), again in itertools.product((("oases", 2), ("fine_grained", 1)), (False, True)):
                segments = tuple(
                    Segment(
                        count, tp, *((name, subs) if tp > 1 and setting.samples(tp) >= subs else ("fine_grained", 1)),
                        recomputed_layers=(count + 1) // 2 if again else 0,
                    )
                    for tp, count in runs
                )  # fmt: skip
                plan = Plan(
                    model, world, hardware.ranks_per_node, global_batch, setting.micro_batches, (Stage(segments),)
                )
                if plan not in listed:  # of degree 1, overlapped or not is the same
                    listed.add(plan)
                    yield plan


class PlansBench:
    """Measures plans on the ranks of the default group."""

    def __init__(self, config: PlansBenchConfig, hardware: Hardware, mesh: Mesh) -> None:
        self.hardware = hardware
        self.model = config.model()
        self.mesh = mesh

    def runner(self, plan: Plan) -> tuple[Callable[[], None], GradientAverager]:
        """One optimizer step's forward and backward passes and sums of gradients, as a function, and the sums."""
        stack = PlannedStack(plan, self._block, self.mesh)
        average = GradientAverager(stack.parts())
        samples = int(plan.samples(stack.first_degree))
        x = torch.ones(samples, self.model.sequence, self.model.hidden)

        def step() -> None:
            for _ in range(plan.micro_batches - 1):
                stack(x.clone().requires_grad_()).sum().backward()
            with average.overlapped():
                stack(x.clone().requires_grad_()).sum().backward()
            stack.zero_grad()

        return step, average

    def _block(self, number: int, group: ProcessGroup | None) -> TimedBlock:
        return timed_block(self.hardware, self.model, number, group)

    def seconds(self, step: Callable[[], None]) -> float:
        """Seconds of a step on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        step()
        return slowest(time.perf_counter() - start)

    def median(self, plan: Plan, times: int) -> float:
        """Median of some steps, after one that warms up."""
        step, average = self.runner(plan)
        self.seconds(step)
        median = statistics.median(self.seconds(step) for _ in range(times))
        average.remove()  # its hooks hold the parameters
        return median


def run_plans_bench(config: PlansBenchConfig, ranks: Ranks, shows: bool) -> Result:
    """Measure on the default group. Called on every rank."""
    named, world, visible = checked_settings(config), dist.get_world_size(), shows and first_rank()
    shaped = ranks.link is not None or ranks.backend.startswith("sim")
    model, per_node = config.model(), ranks_per_node(world, shaped=shaped)
    hardware = emulated(config, _links(config, per_node, visible), per_node)
    predictor = Predictor(hardware, stack_only=True)
    plans = [predictor.with_prediction(p) for p in every_plan(hardware, model, world, config.global_batch)]
    budget = int(config.memory_share * max(_bytes(plan) for plan in plans))
    feasible = [plan for plan in plans if _bytes(plan) <= budget]
    ranked = rank_plans(
        model, hardware, world, config.global_batch, budget=budget, space=space(), predictor=predictor
    )
    bench = PlansBench(config, hardware, Mesh({s.tp for p in plans for s in p.stages[0].segments}))
    measured: list[tuple[float, Plan]] = []
    with progress("plans", len(feasible), visible) as advance:
        for done, plan in enumerate(feasible, start=1):
            measured.append((bench.median(plan, 2), plan))
            advance(done)
    measured.sort(key=lambda pair: pair[0])
    final = _finals(bench, [ranked[0], *(plan for _, plan in measured[:FINALISTS])], config.iterations)
    best = min(range(len(final)), key=final.__getitem__)
    uniform = {plan.uniform_tp: seconds for seconds, plan in reversed(measured) if plan.uniform_tp is not None}
    errors = [abs(seconds_of(plan) / seconds - 1) for seconds, plan in measured]
    return {
        "config": named | {"world": world},
        "budget_bytes": budget, "num_plans": len(plans), "num_feasible": len(feasible),
        "choice": {"plan": ranked[0].text(), "seconds": final[0], "predicted_seconds": seconds_of(ranked[0])},
        "best": {"plan": ([ranked[0]] + [p for _, p in measured[:FINALISTS]])[best].text(), "seconds": final[best]},
        "choice_over_best": final[0] / final[best],
        "best_uniform_seconds": {str(tp): seconds for tp, seconds in sorted(uniform.items())},
        "median_error": statistics.median(errors), "worst_error": max(errors),
        "plans": [
            {"plan": plan.text(), "seconds": seconds, "predicted_seconds": seconds_of(plan)}
            for seconds, plan in measured
        ],
    }  # fmt: skip


def _bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(plan.prediction.memory_bytes)


def _finals(bench: PlansBench, plans: list[Plan], iterations: int) -> list[float]:
    """Medians of interleaved steps: what disturbs the machine disturbs all alike."""
    steps = [bench.runner(plan)[0] for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for iteration in range(iterations + 1):
        for step, found in zip(steps, times, strict=True):
            seconds = bench.seconds(step)
            if iteration > 0:
                found.append(seconds)
    return [statistics.median(found) for found in times]


def _links(config: PlansBenchConfig, per_node: int, visible: bool) -> dict[str, LinkModel]:
    profile = ProfileConfig(hidden=config.hidden, heads=1, sequence=config.sequence, batch=config.global_batch)
    bench, groups = LinkBench(profile), probes(per_node)
    jobs = [
        (probe, name) for probe in groups for name in collectives_of(probe) if name in ("all_reduce", "all_gather")
    ]
    done = 0
    with progress("links", len(jobs) * len(sizes(profile)), visible) as advance:

        def measure(scope: str, attempt: int) -> list[Sample]:
            nonlocal done
            found = []
            for probe, collective in jobs:
                for size in sizes(profile, attempt) if probe.scope == scope else ():
                    found.append(bench.sample(probe, collective, size, attempt))
                    if not attempt:
                        advance(done := done + 1)
            return found

        scopes = dict.fromkeys(probe.scope for probe in groups)
        return {scope: fitted_link(partial(measure, scope), "--global-batch") for scope in scopes}


def shown(result: Result) -> Iterator[RenderableType]:
    """The choice, the best and the best uniform plans."""
    choice, best = result["choice"], result["best"]
    uniform = ", ".join(f"tp {tp} {1e3 * s:.0f} ms" for tp, s in result["best_uniform_seconds"].items())
    yield f"{result['num_feasible']} of {result['num_plans']} plans fit {result['budget_bytes'] / 2**20:.0f} MiB"
    yield (
        f"choice  {1e3 * choice['seconds']:.0f} ms (predicted {1e3 * choice['predicted_seconds']:.0f}): "
        f"{choice['plan']}"
    )
    yield f"best    {1e3 * best['seconds']:.0f} ms: {best['plan']}"
    yield (
        f"the choice takes {result['choice_over_best']:.3f} of the best; best uniform plans: {uniform}; predictions "
        f"are off by {percent(result['median_error'])} (median)"
    )


BENCHMARK = Benchmark(
    "plans",
    "every feasible plan of a small model measured, beside the planner's choice",
    PlansBenchConfig(),
    run_plans_bench,
    shown,
    size=4,
)

if __name__ == "__main__":
    script(BENCHMARK, __file__)
