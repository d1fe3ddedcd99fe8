"""One optimizer step in one process: what the optimizer gets, by the options and by the number of the step."""

import dataclasses

import pytest
import torch

from oases import TrainConfig, Trainer

CONFIG = TrainConfig(
    hidden=16, layers=1, heads=2, sequence=16, batch=8, steps=6, warmup=3, validation_batches=1, learning_rate=1e-2,
    schedule="sync",
)  # fmt: skip


def trainer_of(corpus, **changes):
    return Trainer(dataclasses.replace(CONFIG, data=corpus, **changes))


def steps(trainer, number, monkeypatch):
    """Run steps; return for each its loss, the batch's number, the learning rate and the norm of the gradient."""
    seen, batch, update = [], trainer.corpus.batch, trainer.optimizer.step

    def noted_batch(**options):
        seen.append([options["step"]])
        return batch(**options)

    def noted_update():
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        seen[-1] += [trainer.optimizer.param_groups[0]["lr"], torch.nn.utils.get_total_norm(gradients).item()]
        update()

    with monkeypatch.context() as patch:
        patch.setattr(trainer.corpus, "batch", noted_batch)
        patch.setattr(trainer.optimizer, "step", noted_update)
        losses = [trainer.step() for _ in range(number)]
    return [(loss, *each) for loss, each in zip(losses, seen, strict=True)]


def test_micro_batches_change_neither_loss_nor_gradient(corpus, monkeypatch):
    found = [steps(trainer_of(corpus, micro_batches=count, clip=1e6), 2, monkeypatch) for count in (1, 2, 4)]
    for other in found[1:]:
        for one, theirs in zip(found[0], other, strict=True):
            assert theirs == pytest.approx(one, rel=1e-4)


def test_the_gradient_is_clipped_to_the_given_norm(corpus, monkeypatch):
    ((*_, norm),) = steps(trainer_of(corpus, clip=0), 1, monkeypatch)  # no clipping
    assert norm > 0.1
    ((*_, clipped),) = steps(trainer_of(corpus, clip=0.01), 1, monkeypatch)
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_batches_and_learning_rates_follow_the_number_of_the_step(corpus, monkeypatch):
    found = steps(trainer_of(corpus), CONFIG.steps, monkeypatch)
    assert [batch for _, batch, *_ in found] == list(range(CONFIG.steps))
    assert [rate for _, _, rate, _ in found] == [CONFIG.rate(step) for step in range(CONFIG.steps)]
    assert CONFIG.rate(0) == pytest.approx(CONFIG.learning_rate / CONFIG.warmup)
