"""Training loop of a run: model, optimizer, data, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from oases.checkpoint.contents import choices_of, set_choices
from oases.checkpoint.files import load
from oases.checkpoint.lock import lock_folder
from oases.checkpoint.metadata import Metadata
from oases.checkpoint.state import State, random_streams, state
from oases.checkpoint.writer import SaveError, write
from oases.core.execution.communication import WIRE_DTYPES
from oases.core.execution.failure import FailTogether, monitor_of
from oases.core.execution.group import ProcessGroup, group_rank, group_size, resolve
from oases.distributed.gradient_clipping import clip_grad_norm
from oases.distributed.mesh import Mesh
from oases.errors import SavedExit, UsageError
from oases.models.gpt import GPT
from oases.models.moe_gpt import MoEGPT, MoEGPTConfig
from oases.plans.plan import Plan
from oases.reporting import Report, report
from oases_train.callbacks import TrainingCallbacks
from oases_train.config import TrainConfig
from oases_train.data import Corpus
from oases_train.instructions import Instructions
from oases_train.load_balance import LoadBalance
from oases_train.meter import Meter
from oases_train.metrics import Reporter, StepReport
from oases_train.model_stage import ModelStage, build_model
from oases_train.optimizer import PRECISIONS, adamw
from oases_train.pipeline_stage import GPTStage, Samples, Stage
from oases_train.plan import Run
from oases_train.resume import differences, require_sizes, starting_checkpoint
from oases_train.step_check import LossError, Policy, StepCheck


class Trainer:
    """Model, optimizer and data of a training run.

    config: the configuration, or a validated run with its plan. process_group: all ranks; None for the default group,
    or one process. plan: parallel degrees, schedules, micro-batches, sharding and experts; config must have its sizes
    (`oases_train.config.config_for`); None: the plan that the configuration names, or one built from its degrees.
    mesh: process groups of the plan; None: created here. Trainers with equal configs compute the same weights for all
    degrees, schedules and plans.
    """

    def __init__(
        self,
        config: TrainConfig | Run,
        *,
        process_group: ProcessGroup | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.group = resolve(process_group)
        run = config
        if isinstance(run, TrainConfig):
            run = Run.of(run, group_size(self.group)) if plan is None else Run(run, plan)
        self.config, self.plan = config, plan = run.config, run.plan
        self.sizes = run.sizes
        """Model sizes that must match to load this model's weights."""
        self.mesh = mesh or Mesh.of(plan, process_group=self.group)
        self._owns_mesh = mesh is None
        self.corpus = config.corpus()
        self.device = torch.device(config.device)
        self.model: nn.Module
        self.balance: LoadBalance | None = None
        self.stage: Stage
        backend = None if config.compile == "none" else config.compile
        if config.model is not None:
            self.model = build_model(
                config.model, config.seed, plan, self.mesh, lora=config.lora, device=self.device, compile=backend,
                wire_dtype=WIRE_DTYPES.get(config.wire_dtype, config.wire_dtype), dtype=PRECISIONS[config.precision],
                **config.wires, **config.model_experts,
            )  # fmt: skip
            self.stage = ModelStage(self.model, plan)
        else:
            gpt = _model_of(config, plan, self.mesh, self.group).to(self.device)
            self.model, self.stage = gpt, GPTStage(
                gpt, plan, self.mesh, self.group, self._after_forward, **config.wires
            )  # fmt: skip
            if backend is not None:
                gpt.stack.compile_blocks(backend=backend, fullgraph=True)  # an error, not an eager fallback
        self._in_step = False
        """Whether a step has begun and not ended; it stays so where the step failed."""
        self.stage.prepare(PRECISIONS[config.precision])
        packs = isinstance(self.corpus, Instructions) and not config.encoder_decoder
        if packs and isinstance(self.stage, ModelStage):
            self.stage.require_packable(self._samples("train", 0), plan.model.vocabulary)
        self.optimizer = adamw(
            self.model,
            config.precision,
            learning_rate=config.learning_rate,
        )
        self.steps_done = 0
        self.updates = 0
        """Optimizer updates: steps done without those skipped."""
        self.evaluations: dict[int, float] = {}
        """Validation losses of this process by step."""
        self.gradient_norm = math.nan
        """Global norm of the last step's gradient, before clipping."""
        self.meter = Meter(self.group, self._groups(), self.stage.messages, self.device)
        self.step_check = StepCheck(cast(Policy, config.bad_loss))
        # Before anything of another run is read or removed.
        self._lock = None if config.checkpoint is None else lock_folder(config.checkpoint, self.group)
        self.resumed = starting_checkpoint(config.checkpoint, config.resume, config.resumes_newest, self.group)
        """Checkpoint that this run resumed from."""
        if self.resumed is not None:
            self._resume(self.resumed)
        if isinstance(self.model, MoEGPT):
            stages = self.mesh.num_stages
            self.balance = LoadBalance(self.group, stages, config.record_loads, self.steps_done)

    def _resume(self, path: Path) -> None:
        require_sizes(Metadata.read(path), self.sizes, path)
        record = load(path, self.model, self.optimizer, self.group)
        self.steps_done, self.updates = record.step, record.updates
        set_choices(self.model, record.choices, self.group)
        rate = self.learning_rate(record.step)
        for each in differences(record, self._data(), _backend_of(self.group), rate):
            if group_rank(self.group) == 0:
                warnings.warn(f"checkpoint {str(path)!r}{each}", stacklevel=3)
        # A run restarted automatically may find itself complete.
        if self.steps_done >= self.config.steps and not self.config.resumes_newest:
            raise UsageError(
                f"checkpoint {str(path)!r} is at step {self.steps_done} of {self.config.steps}: nothing is "
                "left to do; raise --steps"
            )

    def _data(self) -> dict[str, Any]:
        config = self.config
        return {
            "seed": config.seed, "batch": config.batch, "sequence": config.sequence, **self.corpus.identity,
        }  # fmt: skip

    def checkpoint_metadata(self) -> Metadata:
        """Metadata of a checkpoint of the current state."""
        return Metadata(
            step=self.steps_done,
            updates=self.updates,
            sizes=self.sizes,
            learning_rate=self.learning_rate(self.steps_done),
            data=self._data() | {"next_step": self.steps_done},
            ranks=group_size(self.group),
            random=random_streams(self.model),
            choices=choices_of(self.model, self.group),
            backend=_backend_of(self.group),
            config=dataclasses.asdict(self.config),
            plan=json.loads(self.plan.to_json()),
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0; a function of the step only, so it has no state."""
        return self.config.rate(step)

    def step(self) -> float:
        """Run an optimizer step; returns the training loss in nats per token (per byte without a tokenizer).

        An error on one rank is raised on all ranks. Later steps raise RuntimeError: weights may be of half a step.
        """
        with self._together():
            if self._in_step:
                raise RuntimeError(
                    f"step {self.steps_done} has failed; start all ranks again, with resume='auto' to resume from "
                    "the newest checkpoint"
                )
            self._in_step = True
            loss = self._step()
            self._in_step = False
        return loss

    def _together(self, what: str = "step {}") -> FailTogether:
        """Context in which an error on one rank is raised on all."""
        return FailTogether(
            monitor_of(self.group), lambda: what.format(self.steps_done),
            unanimous=(LossError, SaveError, SavedExit), keeps_type=True,
        )  # fmt: skip

    def _step(self) -> float:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.steps_done)
        loss = self.backward(self.steps_done)
        norm = clip_grad_norm(
            self.model,
            config.clip or math.inf,
            process_group=self.group,
            stages=self.mesh.num_stages,
            counted_elsewhere=self.stage.counted_elsewhere,
        )
        self.gradient_norm = float(norm)
        if self.step_check.accepts(loss, self.gradient_norm, self.steps_done, self.group, self.device):
            with self.meter.optimizing():
                self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.step(self.steps_done)
        self.steps_done += 1
        return loss

    def backward(self, step: int) -> float:
        """Run the forward and backward passes of a step; returns the loss. Gradients are of the whole batch."""
        # Random streams depend on the step only: equal after a restart, a validation or a failure.
        self.stage.begin(step * self.plan.micro_batches)
        return self.stage.backward(self._samples("train", step))

    def _after_forward(self, part: int) -> None:
        if self.balance is not None and isinstance(self.model, MoEGPT):
            self.balance.record_layers(self.model.layers_of(part))

    def _samples(self, split: str, step: int) -> Samples:
        """This rank's samples of a batch that is the same under every plan."""
        config, degree = self.config, self.stage.tensor_parallel
        count, replica, replicas = self.plan.micro_batches, self.mesh.replica(degree), self.mesh.replicas(degree)

        def share(whole: torch.Tensor) -> torch.Tensor:  # first into micro-batches, then over replicas
            mine: torch.Tensor = whole.to(self.device).unflatten(0, (count, replicas, -1))[:, replica]
            return mine

        if config.model is not None:
            found = config.samples(self.corpus, split, step, config.batch)
            return {name: share(whole).flatten(0, 1) for name, whole in found.items()}
        assert isinstance(self.corpus, Corpus)
        draw = {"batch": config.batch, "sequence": config.sequence, "seed": config.seed}
        tokens, targets = map(share, self.corpus.batch(split=split, step=step, **draw))
        return list(zip(tokens, targets, strict=True))

    def validate(self) -> float:
        """Mean loss over the held-out batches, nats per token. Leaves the training state unchanged."""
        with self._together("validation after {} steps"):
            batches = [self._samples("validation", index) for index in range(self.config.validation_batches)]
            self.model.eval()
            try:
                return self.stage.evaluate(batches)
            finally:
                self.model.train()

    def _last_validation(self) -> float:
        known = self.evaluations.get(self.steps_done)  # equal on all ranks
        return self.validate() if known is None else known

    def train(self, on_step: Callable[[StepReport], None] | None = None) -> dict[str, Any]:
        """Train up to `config.steps`; returns losses, times, throughput and overlap.

        on_step(report): called after every step, with the same report on every rank that passes it. Logs to
        `config.step_log` and `config.tensorboard`, and saves to `config.checkpoint` at its interval and after the
        last step. Raises SavedExit, a SystemExit, after the step in which SIGTERM arrived, if there is a checkpoint
        folder.
        """
        losses: list[float] = []
        config, dtype = self.config, next(self.model.parameters()).dtype
        logged = config.step_log is not None or config.tensorboard is not None
        overlap = self.overlap if logged and group_rank(self.group) == 0 else None
        reporter = Reporter(self.plan, self.meter, dtype, wanted=logged or on_step is not None, overlap=overlap)
        saved = self.resumed is not None
        callbacks = TrainingCallbacks(
            config, self.group, self.device, self.steps_done, saved=saved, state=self._state
        )
        with ExitStack() as ends:
            ends.callback(self.unlock)
            ends.enter_context(callbacks)
            while self.steps_done < config.steps:
                with self._together():
                    with self.meter.step():
                        losses.append(self.step())
                    if config.evaluate_every and self.steps_done % config.evaluate_every == 0:
                        self.evaluations[self.steps_done] = self.validate()
                    report = reporter.report(
                        step=self.steps_done,
                        loss=losses[-1],
                        learning_rate=self.learning_rate(self.steps_done - 1),
                        gradient_norm=self.gradient_norm,
                        skipped=self.steps_done - 1 in self.step_check.skipped,
                        validation_loss=self.evaluations.get(self.steps_done),
                        balance=None if self.balance is None else self.balance.last,
                    )
                    if on_step is not None and report is not None:
                        on_step(report)
                    callbacks.after_step(self.steps_done, report)
            callbacks.finish(self.steps_done)
        with self._together("the result after {} steps"):
            return {
                "losses": losses,
                **reporter.summary(),
                "balance": None if self.balance is None else self.balance.summary(),
                "validation_loss": self._last_validation(),
                "validation_losses": self.evaluations,
                "overlap": self.overlap().json(),
                "resumed": None if self.resumed is None else str(self.resumed),
                "skipped_steps": self.step_check.skipped,
                "checkpoints": callbacks.summary(),
            }

    def save(self, path: str) -> None:
        """Write a checkpoint, loadable with any parallel degrees and any plan."""
        write(path, *self._state(), self.group)

    def _state(self) -> tuple[State, Metadata]:
        """Content of a checkpoint of the current state. Collective over all ranks."""
        if isinstance(self.model, MoEGPT):
            self.model.settle()  # pending updates of router biases
        return state(self.model, self.optimizer, self.group), self.checkpoint_metadata()

    def unlock(self) -> None:
        """Let other runs have the checkpoint folder; `train` does so at its end."""
        if self._lock is not None:
            self._lock.release()

    def _groups(self) -> list[ProcessGroup]:
        return [group for group in (self.group, *self.mesh.groups) if group is not None]

    def close(self) -> None:
        """Destroy the process groups created here. Collective over all ranks."""
        self.unlock()
        self.stage.close()
        if self._owns_mesh:
            self.mesh.destroy()

    def overlap(self) -> Report:
        """Overlap so far in the groups of this run, as of `oases.report()`."""
        groups, messages = self._groups(), self.stage.messages
        reports = [report(group) for group in groups]
        # Senders are known by their ranks, which two groups may share.
        sections = {
            tuple(dist.get_process_group_ranks(group)): one.sections
            for group, one in zip(groups, reports, strict=True)
        }
        return Report(
            [row for one in reports for row in one.stacks],
            [row for one in reports for row in one.layers],
            [row for one in reports for row in one.others] + ([] if messages is None else messages.rows),
            [section for each in sections.values() for section in each],
            passes=[row for one in reports for row in one.passes],
            collectives=[row for one in reports for row in one.collectives],
            exempted={where: error for one in reports for where, error in one.exempted.items()},
        )


def _model_of(config: TrainConfig, plan: Plan, mesh: Mesh, group: ProcessGroup | None) -> GPT | MoEGPT:
    """Build this rank's part of the model."""
    sizes = dataclasses.replace(config.gpt(config.seed), vocabulary=plan.model.vocabulary)
    if plan.experts is not None:
        mixture = MoEGPTConfig(
            **vars(sizes), experts=config.experts, top_k=config.top_k, expert_hidden=config.expert_hidden,
            shared_hidden=plan.experts.shared_hidden,
            gate="sigmoid" if plan.experts.gate == "sigmoid" else "softmax",
        )  # fmt: skip
        return MoEGPT(mixture, process_group=group, plan=plan, mesh=mesh, wire_dtype=WIRE_DTYPES[config.wire_dtype])
    wire = plan.wire if config.wire_dtype == "none" else config.wire_dtype
    return GPT(sizes, plan=plan, mesh=mesh, wire_dtype=WIRE_DTYPES.get(wire, wire))


def _backend_of(group: ProcessGroup | None) -> str:
    return "" if group is None else dist.get_backend(group)
