"""The same run on 1, 2 and 4 ranks and under every schedule: one loss curve. Checkpoints across degrees."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.errors import UsageError

CONFIG = TrainConfig(
    hidden=32,
    layers=2,
    heads=4,
    sequence=32,
    batch=4,
    steps=8,
    warmup=2,
    validation_batches=2,
    learning_rate=3e-3,
)


def losses(config, **changes):
    trainer = Trainer(dataclasses.replace(config, **changes))
    result = trainer.train()
    return result["losses"], result["validation_loss"], sum(row["collectives"] for row in result["overlap"]["stacks"])


@pytest.fixture(scope="module")
def alone(corpus):
    return losses(CONFIG, data=corpus)


@pytest.mark.parametrize("schedule", ["sync", "oases", "auto"])
def test_two_ranks_train_like_one(two_ranks, corpus, alone, schedule):
    for curve, validation, collectives in two_ranks.run(losses_of, corpus, schedule):
        assert curve == pytest.approx(alone[0], rel=1e-4)
        assert validation == pytest.approx(alone[1], rel=1e-4)
        assert collectives > 0


def test_four_ranks_train_like_one(four_ranks, corpus, alone):
    for curve, validation, _ in four_ranks.run(losses_of, corpus, "oases"):
        assert curve == pytest.approx(alone[0], rel=1e-4)
        assert validation == pytest.approx(alone[1], rel=1e-4)


def losses_of(data, schedule):
    return losses(CONFIG, data=data, schedule=schedule)


def test_it_learns(alone):
    assert alone[0][-1] < alone[0][0] - 0.3


def train_and_save(data, path):
    trainer = Trainer(dataclasses.replace(CONFIG, data=data))
    for _ in range(4):
        trainer.step()
    trainer.save(path)
    return trainer.validate()


def resume(data, path):
    return losses(CONFIG, data=data, resume=path)


def test_a_checkpoint_goes_on_at_any_degree(two_ranks, four_ranks, corpus, alone, tmp_path):
    path = str(tmp_path / "checkpoint")
    two_ranks.run(train_and_save, corpus, path)
    assert not (tmp_path / "checkpoint.part").exists()
    for curves in (
        [resume(corpus, path)],
        two_ranks.run(resume, corpus, path),
        four_ranks.run(resume, corpus, path),
    ):
        for curve, validation, _ in curves:
            assert curve == pytest.approx(alone[0][4:], rel=1e-4)
            assert validation == pytest.approx(alone[1], rel=1e-4)


def test_a_checkpoint_of_one_process_holds_equal_weights(two_ranks, corpus, tmp_path):
    path = str(tmp_path / "checkpoint")
    trainer = Trainer(dataclasses.replace(CONFIG, data=corpus))
    trainer.step()
    trainer.save(path)
    trainer.save(path)  # replaces
    whole = trainer.model.state_dict()
    for rank, shards in enumerate(two_ranks.run(loaded_weights, corpus, path)):
        assert shards.keys() == whole.keys()
        for name, part in shards.items():
            cut = [d for d in range(part.dim()) if part.shape[d] != whole[name].shape[d]]
            expected = whole[name].chunk(2, cut[0])[rank] if cut else whole[name]
            assert torch.equal(part, expected), name


def loaded_weights(data, path):
    return Trainer(dataclasses.replace(CONFIG, data=data, resume=path)).model.state_dict()


def test_a_checkpoint_of_other_sizes_is_refused(corpus, tmp_path):
    path = str(tmp_path / "checkpoint")
    Trainer(dataclasses.replace(CONFIG, data=corpus)).save(path)
    with pytest.raises(UsageError, match=r"does not fit: hidden is 32 there and 64 here"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, hidden=64, resume=path))
    with pytest.raises(UsageError, match=r"layers is 2 there and 3 here"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, layers=3, resume=path))
    with pytest.raises(UsageError, match="not a checkpoint folder"):
        Trainer(dataclasses.replace(CONFIG, data=corpus, resume=str(tmp_path / "nowhere")))


def disagree():
    from oases.launch.ranks import require_agreement

    with pytest.raises(UsageError) as caught:
        require_agreement({"hidden": 32, "steps": 8 + dist.get_rank()})
    return str(caught.value)


def test_ranks_that_disagree_are_named(two_ranks):
    for message in two_ranks.run(disagree):
        assert "disagree on 'steps': 8 on rank 0, 9 on rank 1" in message
