"""Overlap measurement: a schedule's step beside compute alone and communication alone, interleaved in one run.

Ideal = max(compute, communication) of the forward pass + the same of the backward pass: the forward pass ends
before the backward pass begins, so nothing that sends as much can be faster. Share of ideal = ideal / step; hidden
share = (sync - step) / (sync - ideal). Side by side = a step that computes and sends as much, of which neither waits
for the other before the pass ends: what the machine loses as soon as it does both, in whichever order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oases.core.blocks.chooser import Tuning, candidates, joint_blocks, labelled, waves_of
from oases.core.execution.autotune import Turn
from oases.core.execution.communication import NullScheduler, Scheduler
from oases.core.execution.dtensors import local_of
from oases.core.execution.executor import Context
from oases.core.execution.group import ProcessGroup, all_gather_objects, scheduler_of
from oases.core.schedule import Recompute
from oases.distributed.clock import timed
from oases.layers import OverlappedStack
from oases.models.gpt import transformer_blocks
from oases.profile.config import DTYPES, OverlapConfig
from oases.profile.memory import StepMemory, measure_memory
from oases.profile.overlap_result import (
    BESIDE,
    PEER,
    CoreTime,
    Facts,
    Passes,
    core_clock,
    core_seconds,
    summarize,
)
from oases.reporting import names_op
from oases.simulator.timeline import Timeline, from_measurements


class Layers(Protocol):
    """Layers to time. number: of layers. shape: of an activation, [batch, ...]."""

    stack: OverlappedStack
    number: int
    shape: tuple[int, ...]
    description: dict[str, Any] | None

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, context: Context | None = None
    ) -> Tensor:
        """Run all layers on an activation with collectives by `scheduler`; turn: see `OverlappedStack.run`."""


class BuiltInLayers:
    """Layers of the built-in GPT."""

    description: dict[str, Any] | None = None

    def __init__(self, config: OverlapConfig, group: ProcessGroup) -> None:
        blocks = transformer_blocks(config.gpt(config.seed), group)
        self.stack = OverlappedStack(blocks, process_group=group, schedule="oases").to(
            torch.device(config.device), DTYPES[config.dtype]
        )
        self.number = config.layers
        self.shape: tuple[int, ...] = (config.batch, config.sequence, config.hidden)

    def run(
        self, x: Tensor, scheduler: Scheduler, turn: Turn | None = None, context: Context | None = None
    ) -> Tensor:
        """Run all layers on an activation."""
        return self.stack.run(x, scheduler, turn, context=context)


class OverlapBench:
    """Stack, inputs and contestants of one benchmark, on one rank of `group`.

    layers: layers to time; None for the built-in GPT's. peers: modules that do the same work, by name.
    """

    def __init__(
        self,
        config: OverlapConfig,
        group: ProcessGroup,
        layers: Layers | None = None,
        peers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.config = config
        self.group = group
        self.scheduler = scheduler_of(group)
        self.layers: Layers = BuiltInLayers(config, group) if layers is None else layers
        self.stack = self.layers.stack
        layer_of = self.stack.layer_of
        self.communication_cpu: list[float] = []
        """CPU seconds of all threads of this process during each `communicate`."""
        self.tuning: Tuning | None = None
        """Choice of "auto", if it is a contestant."""
        self.facts: dict[str, Facts] = {}
        if "auto" in config.names:
            self.forget_choice()
        named = {name: config.contestant(name, layer_of) for name in config.names if name != "auto"}
        self.schedules = {
            name: self.tuning.current.schedule if self.tuning and name == "auto" else named[name][0]
            for name in config.names
        }
        """Schedules by name. "auto" is a candidate until `choose` has been called."""
        self.wire_dtypes = {name: dtype for name, (_, dtype) in named.items()}
        # The least compute: no matmul is recomputed only for an all-reduce. Whole batch or sub-batches, whichever
        # is faster on this machine; the ideal takes the faster.
        cut = min(config.default_sub_batches, config.batch)
        self.compute_alone = {
            "compute alone": config.resolve_schedule("fine_grained", layer_of),
            "compute alone, cut": config.resolve_schedule(f"oases@{cut}", layer_of),
        }
        self.peers = dict(peers or {})
        torch.manual_seed(config.seed)
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        self.x, self.grad = torch.randn(2, *self.layers.shape, device=device, dtype=dtype)

    def forget_choice(self) -> None:
        """Let "auto" choose anew: over another link another schedule may be the fastest."""
        if "auto" not in self.config.names:
            return
        recompute, joint = cast(Recompute, self.config.recompute), joint_blocks([*self.stack.blocks])
        blocks, layer_of = len(self.stack.blocks), self.stack.layer_of
        among = candidates(blocks, self.config.batch, "auto", "auto", recompute, joint, layer_of)
        # A choice kept from an earlier run would not be a measurement of this one.
        self.tuning = Tuning(labelled(among), self.group, "", has_off=True, keep=False, waves=waves_of(among))

    def choose(self, on_step: Callable[[int], None] | None = None) -> None:
        """Run the candidates of "auto" in turns, as the first steps of a training run would, until one is chosen."""
        if self.tuning is None:
            return
        done = 0
        while self.tuning.choice is None:
            turn = self.tuning.begin_turn()
            self.schedules["auto"] = self.tuning.candidates[turn.label].schedule
            self.step("auto", self.scheduler, turn)
            done += 1
            if on_step is not None:
                on_step(done)
        self.schedules["auto"] = self.tuning.choice.schedule

    def step(
        self,
        name: str,
        scheduler: Scheduler,
        turn: Turn | None = None,
        context: Context | None = None,
        beside: int = 0,
    ) -> Passes:
        """One forward and backward pass under a schedule; leaves the gradients in place.

        beside: all-reduces that are under way during each pass and that nothing waits for but its end.
        """
        self._run_as(name)
        self.stack.zero_grad()
        x = self.x.clone().requires_grad_()
        forward = self._timed(lambda: self.layers.run(x, scheduler, turn, context), self._sums(beside))
        backward = self._timed(lambda: self._output.backward(self.grad), self._sums(beside))
        self._x_grad = x.grad
        return forward, backward

    def _run_as(self, name: str) -> None:
        self.stack.run_as(self.compute_alone[name] if name in self.compute_alone else self.schedules[name])
        self.stack.wire_dtype = self.wire_dtypes.get(name)

    def peer_step(self, name: str) -> Passes:
        """One forward and backward pass of a peer."""
        peer = self.peers[name]
        peer.zero_grad()
        x = self.x.clone().requires_grad_()
        forward = self._timed(lambda: peer(x))
        backward = self._timed(lambda: self._output.backward(self.grad))
        self._x_grad = x.grad
        return forward, backward

    def communicate(self) -> Passes:
        """All-reduces of `sync` without compute, in sequence as a link carries them."""
        forward, backward = (self._sums(len(self.stack.blocks)) for _ in range(2))
        busy = time.process_time()
        passes = self._timed(lambda: None, forward), self._timed(lambda: None, backward)
        self.communication_cpu.append(time.process_time() - busy)
        return passes

    def _sums(self, count: int) -> list[Tensor]:
        return [torch.ones_like(self.x) for _ in range(count)]

    def _timed(self, work: Callable[[], Any], beside: Sequence[Tensor] = ()) -> float:
        def run() -> None:
            tickets = [self.scheduler.all_reduce(tensor, "alone") for tensor in beside]
            self._output = work()
            for ticket in tickets:
                self.scheduler.wait(ticket)

        return timed(run, self.x.device)

    def gradients(self, name: str) -> list[Tensor]:
        """Gradients of the input and of every parameter under a schedule."""
        self.step(name, self.scheduler)
        assert self._x_grad is not None
        return [self._x_grad, *(local_of(p.grad).clone() for p in self.stack.parameters() if p.grad is not None)]

    def gradient_error(self, name: str, reference: list[Tensor]) -> float:
        """Largest difference from `reference`, each tensor relative to its largest entry, over all ranks."""
        pairs = zip(self.gradients(name), reference, strict=True)
        # Gradients of emulated matmuls are zeros.
        least = torch.finfo(self.x.dtype).tiny
        error = torch.stack([(a - b).abs().max() / b.abs().max().clamp_min(least) for a, b in pairs]).max().cpu()
        dist.all_reduce(error, dist.ReduceOp.MAX, group=self.group)
        return float(error)

    def require_equal(self, peer: str, x_grad: Tensor) -> None:
        """Raise RuntimeError if a peer's gradient of the input is not `x_grad`: it then did other work."""
        self.peer_step(peer)
        assert self._x_grad is not None
        error = float((self._x_grad - x_grad).abs().max() / x_grad.abs().max())
        if not error < max(1e-3, 16 * torch.finfo(x_grad.dtype).eps):
            raise RuntimeError(
                f"the peer {peer!r} computes something else: its gradient of the input differs by {error:.1e}; leave "
                "it out of --peers, or install the versions that are tested: pip install --group peers"
            )

    def wire_all_reduces_per_layer(self, name: str) -> float:
        """All-reduces per layer and sub-batch, counted during one step."""
        self.scheduler.reset_totals()
        self.step(name, self.scheduler)
        count = sum(t.count for label, t in self.scheduler.totals().items() if names_op(label))
        schedule = self.schedules[name]
        halves = 2 if schedule.sequence_parallel else 1  # a reduce-scatter and an all-gather count as one all-reduce
        return count / (halves * self.layers.number * schedule.num_sub_batches)

    def memory(self, name: str) -> StepMemory:
        """Memory of one step under a schedule, on the rank with the most."""
        self._run_as(name)
        self.stack.zero_grad()
        mine = measure_memory(
            # The input is created here so that it counts: the first block keeps it, like every other its own.
            lambda: self.layers.run(self.x.clone().requires_grad_(), NullScheduler(allocate_buffers=True)),
            lambda output: output.backward(self.grad),
            self.x.device,
        )
        most = torch.tensor([mine.kept, mine.peak])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return StepMemory(int(most[0]), int(most[1]))

    def timeline(self, name: str) -> Timeline:
        """One measured step under a schedule, over all ranks."""
        spans: list[tuple[str, float, float]] = []
        self.scheduler.take_records()
        self.scheduler.set_recording(True)
        dist.barrier(group=self.group)
        self.step(name, self.scheduler, context=Context(spans))
        self.scheduler.set_recording(False)
        records = [
            (record.label.split(" (")[0], record.issued, record.finished)
            for record in self.scheduler.take_records()
            if names_op(record.label)
        ]
        return from_measurements(name, all_gather_objects((spans, records), self.group))

    def steps(self) -> dict[str, Callable[[], Passes]]:
        """Steps of the contestants by name, to run in turns. "auto" runs a candidate until `choose` was called."""
        found: dict[str, Callable[[], Passes]] = {"communication alone": self.communicate}
        for prefix, beside in (("", 0), (BESIDE, len(self.stack.blocks))):
            for name in self.compute_alone:
                found[prefix + name] = lambda name=name, beside=beside: self.step(  # type: ignore[misc]
                    name, NullScheduler(), beside=beside
                )
        for name in self.schedules:
            found[name] = lambda name=name: self.step(name, self.scheduler)  # type: ignore[misc]
        for name in self.peers:
            found[PEER + name] = lambda name=name: self.peer_step(name)  # type: ignore[misc]
        return found

    def contestants(self) -> dict[str, Callable[[], Passes]]:
        """The `steps`, after the choice of "auto", which is made here, and with the `facts` determined."""
        self.choose()
        reference = self.gradients("sync")
        errors = {name: self.gradient_error(name, reference) for name in self.schedules}
        counts = {name: self.wire_all_reduces_per_layer(name) for name in self.schedules}
        memory = {name: self.memory(name) for name in self.schedules}
        self.facts = {
            name: Facts(schedule, errors[name], counts[name], memory[name], self.x.nbytes)
            for name, schedule in self.schedules.items()
        }
        for name in self.peers:
            self.require_equal(name, reference[0])
        self.communication_cpu.clear()
        return self.steps()

    def result(self, times: dict[str, list[Passes]], cores: dict[str, list[CoreTime]]) -> dict[str, Any]:
        """Result of the benchmark from its contestants' times; see `summarize`."""
        found = summarize(self.config, self.scheduler.size, times, self.facts)
        found["core_seconds"] = core_seconds(cores, times)
        found["communication_cpu_seconds"] = statistics.median(self.communication_cpu)
        return found if self.layers.description is None else found | {"model": self.layers.description}

    def measure(self, on_iteration: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Run all contestants interleaved; return the result as described in `summarize`."""
        return measure_together([self], on_iteration)[0]


def measure_together(
    benches: Sequence[OverlapBench], on_iteration: Callable[[int], None] | None = None
) -> list[dict[str, Any]]:
    """Run the contestants of benchmarks of one group interleaved; return the result of each."""
    contestants = [bench.contestants() for bench in benches]
    times: list[dict[str, list[Passes]]] = [{name: [] for name in each} for each in contestants]
    cores: list[dict[str, list[CoreTime]]] = [{name: [] for name in each} for each in contestants]
    for iteration in range(benches[0].config.iterations):
        for bench, named, taken, spent in zip(benches, contestants, times, cores, strict=True):
            run_round(bench.group, named, taken, spent)
        if on_iteration is not None:
            on_iteration(iteration + 1)
    return [bench.result(taken, spent) for bench, taken, spent in zip(benches, times, cores, strict=True)]


def run_round(
    group: ProcessGroup,
    contestants: Mapping[str, Callable[[], Passes]],
    times: Mapping[str, list[Passes]],
    cores: Mapping[str, list[CoreTime]] | None = None,
) -> None:
    """Run every contestant once; append the slowest rank's seconds to `times`, and the ranks' mean to `cores`."""
    for name, run in contestants.items():
        dist.barrier(group=group)
        before = core_clock()
        passes = torch.tensor(run(), dtype=torch.float64)
        spent = torch.tensor(core_clock(), dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
        dist.all_reduce(passes, dist.ReduceOp.MAX, group=group)
        times[name].append((float(passes[0]), float(passes[1])))
        if cores is not None:
            dist.all_reduce(spent, group=group)
            wall, on_core, displaced = (spent / dist.get_world_size(group)).tolist()
            cores[name].append(CoreTime(on_core, displaced, wall - on_core - displaced))
