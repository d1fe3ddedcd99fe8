"""Trains the built-in GPT over the ranks of one tensor-parallel group."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oases.errors import UsageError
from oases.models.gpt import GPT
from oases.parallel.gradients import clip_grad_norm
from oases.parallel.group import ProcessGroup, group_size, resolve
from oases.parallel.statistics import Report, report
from oases.train.checkpoint import load, save
from oases.train.config import WIRE_DTYPES, TrainConfig, sizes_of
from oases.train.data import TextCorpus


class Trainer:
    """A model, its optimizer and its data, advanced step by step.

    config: the run. process_group: the tensor-parallel group; None is the default group, or one process.
    Two trainers with equal configs walk through the same weights, whatever the degree or the schedule.
    """

    def __init__(self, config: TrainConfig, *, process_group: ProcessGroup | None = None) -> None:
        self.config = config
        self.group = resolve(process_group)
        config.require_degree(group_size(self.group))
        self.corpus = TextCorpus(config.data)
        device = torch.device(config.device)
        self.model = GPT(
            config.gpt(config.seed),
            process_group=self.group,
            schedule=config.schedule_or_auto(config.schedule),
            sub_batches="auto",  # a schedule that is resolved brings its own
            recompute=config.recompute,
            wire_dtype=WIRE_DTYPES[config.wire_dtype],
        ).to(device)
        self.device = device
        self.optimizer = _adamw(self.model, config)
        self.steps_done = 0
        if config.resume is not None:
            self.steps_done = load(config.resume, self.model, self.optimizer, self.sizes, self.group)
            if self.steps_done >= config.steps:
                raise UsageError(
                    f"checkpoint {config.resume!r} is at step {self.steps_done} of {config.steps}: nothing is "
                    "left to do; give more --steps"
                )

    @property
    def sizes(self) -> dict[str, Any]:
        """What a model must be built with to load this one's weights."""
        return sizes_of(self.config)

    def step(self) -> float:
        """One optimizer step; returns the training loss in nats per byte."""
        config = self.config
        for group in self.optimizer.param_groups:  # a function of the step alone, so a resumed run needs no state
            group["lr"] = config.learning_rate * warmup_then_cosine(self.steps_done, config)
        tokens, targets = self.corpus.batch(
            split="train",
            step=self.steps_done,
            batch=config.batch,
            sequence=config.sequence,
            seed=config.seed,
        )
        loss = self.model.loss(tokens.to(self.device), targets.to(self.device))
        loss.backward()
        clip_grad_norm(self.model, config.clip, process_group=self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return float(loss.detach())

    def validate(self) -> float:
        """Mean loss over the held-out batches, nats per byte."""
        config = self.config
        total = 0.0
        with torch.no_grad():
            for index in range(config.validation_batches):
                tokens, targets = self.corpus.batch(
                    split="validation",
                    step=index,
                    batch=config.batch,
                    sequence=config.sequence,
                    seed=config.seed,
                )
                total += float(self.model.loss(tokens.to(self.device), targets.to(self.device)))
        return total / config.validation_batches

    def train(self, on_step: Callable[[int, float, float], None] | None = None) -> dict[str, Any]:
        """Run to `config.steps`; return losses, times, throughput and what was hidden.

        on_step(step, loss, seconds) is called after every step. Saves to `config.checkpoint` at the end.
        """
        config = self.config
        losses, seconds = [], []
        while self.steps_done < config.steps:
            start = time.perf_counter()
            losses.append(self.step())
            seconds.append(time.perf_counter() - start)
            if on_step is not None:
                on_step(self.steps_done, losses[-1], seconds[-1])
        if config.checkpoint is not None:
            self.save(config.checkpoint)
        median = sorted(seconds)[len(seconds) // 2] if seconds else float("nan")
        return {
            "losses": losses,
            "step_seconds": median,
            "tokens_per_second": config.batch * config.sequence / median,
            "validation_loss": self.validate(),
            "overlap": self.overlap(),
        }

    def save(self, path: str) -> None:
        """Write a checkpoint that any tensor-parallel degree can load."""
        save(path, self.model, self.optimizer, self.steps_done, self.sizes, self.group)

    def overlap(self) -> dict[str, Any]:
        """What was hidden so far, as `oases.report()` tells it."""
        return report(self.group).json() if self.group is not None else Report([], [], []).json()


def _adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def warmup_then_cosine(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at `step`: up in a line, down to a tenth in half a cosine."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
