"""Trains the built-in GPT over the ranks of one tensor-parallel group, or as a plan says."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from oases.errors import UsageError
from oases.models.gpt import GPT
from oases.parallel.average import GradientAverage
from oases.parallel.collectives import all_reduce
from oases.parallel.fsdp import ShardedAverage
from oases.parallel.gradients import clip_grad_norm
from oases.parallel.group import ProcessGroup, group_rank, group_size, resolve
from oases.parallel.mesh import Mesh
from oases.parallel.statistics import Report, report
from oases.planner.plan import Plan
from oases.train.checkpoint import load, random_streams, save
from oases.train.config import WIRE_DTYPES, TrainConfig, settings, sizes_of
from oases.train.data import TextCorpus
from oases.train.guard import LossGuard, Policy
from oases.train.optimizer import adamw
from oases.train.plan import require_fit
from oases.train.record import Record
from oases.train.resumption import first_checkpoint
from oases.train.stage import TrainedStage
from oases.train.supervision import Supervision


class Trainer:
    """A model, its optimizer and its data, advanced step by step.

    config: the run. process_group: all ranks of the run; None is the default group, or one process. Without a plan
    they are the tensor-parallel group. plan: says degrees, schedules, micro-batches and what is sharded; config must
    be of its sizes (`oases.train.plan.config_for`). mesh: its groups, made here where none are given.
    Two trainers with equal configs walk through the same weights, whatever degree, schedule or plan.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        process_group: ProcessGroup | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.group = resolve(process_group)
        device = torch.device(config.device)
        gpt, wire_dtype = config.gpt(config.seed), WIRE_DTYPES[config.wire_dtype]
        self.mesh: Mesh | None = None
        self.stage: TrainedStage | None = None
        if plan is None:
            config.require_degree(group_size(self.group))
            model = GPT(
                gpt,
                process_group=self.group,
                schedule=config.schedule_or_auto(config.schedule),
                sub_batches="auto",  # a schedule that is resolved brings its own
                recompute=config.recompute,
                wire_dtype=wire_dtype,
                sequence_parallel=config.sequence_parallel,
            )
        else:
            require_fit(config, plan)
            self.mesh = mesh or Mesh.of(plan, process_group=self.group)
            gpt = dataclasses.replace(gpt, vocabulary=plan.model.vocabulary)
            model = GPT(gpt, plan=plan, mesh=self.mesh, wire_dtype=wire_dtype)
        self.corpus = TextCorpus(config.data)
        self.device = device
        self.model = model.to(device)
        if plan is not None and self.mesh is not None and len(plan.stages) > 1:
            self.stage = TrainedStage(self.model, plan, self.mesh, self.group)
        if config.compile != "none":
            self.model.stack.compile_blocks(backend=config.compile, fullgraph=True)  # or an error, not eager blocks
        self.average: GradientAverage | ShardedAverage
        if plan is not None and plan.fsdp:
            self.average = self.model.shard_weights()
        else:
            self.average = GradientAverage(self.model.parts())
        self.optimizer = adamw(
            self.model.parts(),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            sharded=plan is not None and plan.zero,
        )
        self.steps_done = 0
        self.updates = 0
        """Steps that changed the weights: all but those that were skipped."""
        self.guard = LossGuard(cast(Policy, config.bad_loss), config.spike)
        self.resumed = first_checkpoint(config, self.group)
        """The checkpoint that this run began with."""
        if self.resumed is not None:
            self._go_on(self.resumed)

    def _go_on(self, path: Path) -> None:
        record = load(path, self.model, self.optimizer, self.sizes, self.group, verify=False)
        self.steps_done, self.updates = record.step, record.updates
        self.model.stack.calls = record.calls
        self.guard.recent.extend(record.losses)
        other = record.other_data(self._data())
        if other and group_rank(self.group) == 0:
            warnings.warn(f"checkpoint {str(path)!r} goes on with other batches: {other}", stacklevel=3)
        # A run that starts by itself may find that it was done.
        if self.steps_done >= self.config.steps and not self.config.goes_on:
            raise UsageError(
                f"checkpoint {str(path)!r} is at step {self.steps_done} of {self.config.steps}: nothing is "
                "left to do; give more --steps"
            )

    def _data(self) -> dict[str, Any]:
        config = self.config
        return {
            "seed": config.seed, "batch": config.batch, "sequence": config.sequence, "bytes": self.corpus.num_bytes,
        }  # fmt: skip

    def record(self) -> Record:
        """Where the run stands, as a checkpoint says it."""
        return Record(
            step=self.steps_done,
            updates=self.updates,
            sizes=self.sizes,
            learning_rate=self.learning_rate(self.steps_done),
            data=self._data() | {"next_step": self.steps_done},
            ranks=group_size(self.group),
            calls=self.model.stack.calls,
            random=random_streams(self.model),
            losses=list(self.guard.recent),
            config=settings(self.config),
            plan=None if self.plan is None else json.loads(self.plan.to_json()),
        )

    def learning_rate(self, step: int) -> float:
        """Of a step, counted from 0: a function of the step alone, so a resumed run needs no state."""
        return self.config.learning_rate * warmup_then_cosine(step, self.config)

    @property
    def sizes(self) -> dict[str, Any]:
        """What a model must be built with to load this one's weights."""
        return sizes_of(self.config) | {"vocabulary": self.model.config.vocabulary}

    def step(self) -> float:
        """One optimizer step; returns the training loss in nats per byte."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.steps_done)
        loss = self.backward(self.steps_done)
        norm = clip_grad_norm(
            self.model,
            config.clip,
            process_group=self.group,
            stages=1 if self.plan is None else len(self.plan.stages),
            counted_elsewhere=None if self.model.is_first else self.model.tied,
        )
        if self.guard.admits(loss, float(norm), self.steps_done, self.group, self.device):
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad()
        self.steps_done += 1
        return loss

    def backward(self, step: int) -> float:
        """Forward and backward passes of one step's batch; its loss. Gradients are those of the whole batch."""
        batches = self._micro_batches("train", step)
        if self.stage is not None:
            return self.stage.backward(batches, self.average)
        losses: list[Tensor] = []
        for number, (tokens, targets) in enumerate(batches, start=1):
            loss = self.model.loss(tokens, targets) / len(batches)
            with self.average.overlapped() if number == len(batches) else nullcontext():
                loss.backward()
            losses.append(loss.detach())
        return self._mean_over_replicas(torch.stack(losses).sum())

    def _micro_batches(self, split: str, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's inputs and targets of a batch that is the same for every plan, in parts that run one by one."""
        config, count, replica, replicas = self.config, 1, 0, 1
        if self.plan is not None and self.mesh is not None:
            degree, count = self.model.tensor_parallel, self.plan.micro_batches
            replica, replicas = self.mesh.replica(degree), self.mesh.replicas(degree)
        whole = self.corpus.batch(
            split=split, step=step, batch=config.batch, sequence=config.sequence, seed=config.seed
        )
        # Micro-batches of the whole batch first, then shares of each: a plan has equal ones alone.
        tokens, targets = (part.to(self.device).unflatten(0, (count, replicas, -1))[:, replica] for part in whole)
        return list(zip(tokens, targets, strict=True))

    def _mean_over_replicas(self, loss: Tensor) -> float:
        if self.mesh is None:
            return float(loss)
        group = self.mesh.data(self.model.tensor_parallel)
        return float(all_reduce(loss.reshape(1), group, "loss")) / group_size(group)

    def validate(self) -> float:
        """Mean loss over the held-out batches, nats per byte."""
        config = self.config
        batches = [self._micro_batches("validation", index) for index in range(config.validation_batches)]
        if self.stage is not None:
            return sum(map(self.stage.evaluate, batches)) / len(batches)
        losses: list[Tensor] = []
        with torch.no_grad():
            for micro_batches in batches:
                losses += [self.model.loss(*batch) for batch in micro_batches]
        return self._mean_over_replicas(torch.stack(losses).mean())

    def train(self, on_step: Callable[[int, float, float], None] | None = None) -> dict[str, Any]:
        """Run to `config.steps`; return losses, times, throughput and what was hidden.

        on_step(step, loss, seconds) is called after every step. Logs to `config.step_log` and saves to
        `config.checkpoint` as the configuration says, and after the last step. Raises SavedExit, a SystemExit, after
        a step that SIGTERM came in, if there is a checkpoint folder.
        """
        config = self.config
        losses, seconds = [], []
        with Supervision(self) as supervision:
            while self.steps_done < config.steps:
                start = time.perf_counter()
                losses.append(self.step())
                seconds.append(time.perf_counter() - start)
                if on_step is not None:
                    on_step(self.steps_done, losses[-1], seconds[-1])
                supervision.after_step(losses[-1], seconds[-1])
            supervision.finish()
        median = sorted(seconds)[len(seconds) // 2] if seconds else float("nan")
        return {
            "losses": losses,
            "step_seconds": median,
            "tokens_per_second": config.batch * config.sequence / median,
            "validation_loss": self.validate(),
            "overlap": self.overlap(),
            "resumed": None if self.resumed is None else str(self.resumed),
            "skipped_steps": self.guard.skipped,
            "checkpoints": supervision.summary(),
        }

    def save(self, path: str) -> None:
        """Write a checkpoint that any tensor-parallel degree and any plan can load."""
        save(path, self.model, self.optimizer, self.record(), self.group)

    def overlap(self) -> dict[str, Any]:
        """What was hidden so far, as `oases.report()` tells it."""
        groups = [self.group] if self.mesh is None else [self.group, *self.mesh.groups]
        reports = [report(group) for group in groups if group is not None]
        return Report(
            [row for one in reports for row in one.stacks],
            [row for one in reports for row in one.layers],
            [row for one in reports for row in one.others] + ([] if self.stage is None else self.stage.messages.rows),
        ).json()


def warmup_then_cosine(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at `step`: up in a line, down to a tenth in half a cosine."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
