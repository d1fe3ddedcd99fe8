"""Learning-rate schedules against torch's own and plain formulas, step by step."""

import dataclasses
import math

import pytest
import torch
from torch.optim import lr_scheduler

from oases import TrainConfig, Trainer
from oases.errors import UsageError
from oases_train.learning_rate import SCHEDULES, rate_factor

PEAK = 3e-3


def curve(name, steps=50, warmup=5):
    return [PEAK * rate_factor(name, steps, warmup, step) for step in range(steps)]


def torch_curve(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def after_warmup(warmup, then):
    """Up in a line from a share of 1 / warmup to 1 in the last step of the warm-up, then `then`."""
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / warmup), then(optimizer)],
        milestones=[warmup],
    )


def test_cosine_is_that_of_torch():
    expected = torch_curve(
        after_warmup(5, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=45, eta_min=0.1 * PEAK)), 50
    )
    assert curve("cosine") == pytest.approx(expected, rel=1e-9)


def test_linear_is_that_of_torch():
    line = lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=45)  # noqa: E731
    assert curve("linear") == pytest.approx(torch_curve(after_warmup(5, line), 50), rel=1e-9)


def test_constant_and_wsd_are_their_formulas():
    up = [PEAK * ((step + 1) / 5) for step in range(5)]
    assert curve("constant") == up + [PEAK] * 45
    down = [PEAK * (1 - 0.9 * done / 5) for done in range(5)]
    assert curve("wsd") == pytest.approx(up + [PEAK] * 40 + down)


def test_the_cosine_of_before_is_the_same_to_the_bit():
    config = TrainConfig(steps=37, warmup=4)
    for step in range(4, 37):
        progress = min(1.0, (step - 4) / 33)
        assert config.rate(step) == 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def test_every_schedule_is_finite_at_the_edges():
    for name in SCHEDULES:
        for steps, warmup in ((1, 0), (1, 9), (3, 3), (5, 2)):
            assert all(0 < rate_factor(name, steps, warmup, step) <= 1 for step in range(12))
    with pytest.raises(UsageError, match="unknown learning_rate_schedule 'cosinus'; known are cosine, linear"):
        TrainConfig(learning_rate_schedule="cosinus")


def test_another_learning_rate_at_resumption_is_told(corpus, tmp_path):
    config = TrainConfig(data=str(corpus), hidden=16, layers=1, heads=2, sequence=8, batch=2, steps=4, warmup=0)
    trainer = Trainer(config)
    trainer.step()
    trainer.save(str(tmp_path / "c"))
    with pytest.warns(
        UserWarning, match=r"its next step had the learning rate \S+, this run's has .* of the saved run"
    ):
        Trainer(dataclasses.replace(config, resume=str(tmp_path / "c"), steps=50))
