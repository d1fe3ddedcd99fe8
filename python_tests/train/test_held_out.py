"""Validation losses in the middle of a run: logged, and the training is the same with and without them."""

import dataclasses
import json

import pytest

from oases import TrainConfig, Trainer

CONFIG = TrainConfig(hidden=16, layers=2, heads=2, sequence=16, batch=8, steps=5, warmup=1, validation_batches=2)


def run(corpus, **changes):
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus, **changes))
    result = trainer.train()
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.close()
    return result, weights


def check_same(corpus, **changes):
    without, weights = run(corpus, **changes)
    evaluated, same = run(corpus, evaluate_every=2, **changes)
    assert evaluated["losses"] == without["losses"]
    assert evaluated["validation_loss"] == without["validation_loss"]
    assert all((weights[name] == same[name]).all() for name in weights)
    assert without["validation_losses"] == {}
    return evaluated["validation_losses"]


def on_ranks(corpus):
    return [
        check_same(corpus),
        check_same(corpus, degrees={"pipeline": 2, "tensor": 1}, micro_batches=2),
        check_same(corpus, degrees={"data": 2, "tensor": 1}),
    ]


@pytest.mark.slow
def test_the_training_is_the_same_with_and_without(two_ranks, corpus):
    alone = check_same(corpus)
    assert list(alone) == [2, 4]
    for found in two_ranks.run(on_ranks, corpus):
        for losses in found:
            assert losses == pytest.approx(alone, rel=1e-4)


def test_they_are_in_the_step_log(corpus, tmp_path):
    result, _ = run(corpus, evaluate_every=5, step_log=str(tmp_path / "steps.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line.get("validation_loss") for line in lines] == [None] * 4 + [result["validation_loss"]]
