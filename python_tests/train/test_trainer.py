"""The same run on 1, 2 and 4 ranks and under every schedule: one loss curve. Checkpoints across degrees."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from auto_choice import measuring

from oases import TrainConfig, Trainer
from oases.checkpoint.contents import set_choices
from oases.errors import UsageError
from oases.models.options import Degrees

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


@pytest.mark.parametrize("schedule", [pytest.param("sync", marks=pytest.mark.long), "oases", "auto"])
def test_two_ranks_train_like_one(two_ranks, corpus, alone, schedule):
    for curve, validation, collectives in two_ranks.run(losses_of, corpus, schedule):
        assert curve == pytest.approx(alone[0], rel=1e-4)
        assert validation == pytest.approx(alone[1], rel=1e-4)
        assert collectives > 0


@pytest.mark.long
def test_four_ranks_train_like_one(four_ranks, corpus, alone):
    for curve, validation, _ in four_ranks.run(losses_of, corpus, "oases"):
        assert curve == pytest.approx(alone[0], rel=1e-4)
        assert validation == pytest.approx(alone[1], rel=1e-4)


def losses_of(data, schedule):
    return losses(CONFIG, data=data, schedule=schedule)


def fails_in_the_last_validation(data):
    trainer = Trainer(dataclasses.replace(CONFIG, data=data, steps=2))
    if dist.get_rank() == 1:
        trainer.stage.evaluate = lambda batches: 1 / 0
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        trainer.train()
    return str(caught.value)


def test_a_last_validation_that_fails_on_one_rank_fails_on_all(two_ranks, corpus):
    told, own = two_ranks.run(fails_in_the_last_validation, corpus)
    assert own == "division by zero"
    assert "rank 1 failed at validation after 2 steps: ZeroDivisionError" in told


def test_it_learns(alone):
    assert alone[0][-1] < alone[0][0] - 0.3


def train_and_save(data, path):
    trainer = Trainer(dataclasses.replace(CONFIG, data=data))
    for _ in range(4):
        trainer.step()
    trainer.save(path)
    return trainer.validate()


def chosen(trainer):
    return {**trainer.model.stack.segments[0].chooser.choices}


def auto_resumed(data, path):
    """Choices of a run of auto when it saved, and after a resumed step beside an empty cache."""
    config = dataclasses.replace(CONFIG, data=data, steps=100, schedule="auto")
    with measuring(Path(path) / "none.json"):
        trainer = Trainer(config)
        trainer.step()
        (tuning,) = trainer.model.stack.segments[0].chooser.tunings.values()
        tuning.keep = False
        while "@" in next(iter(chosen(trainer).values())):
            trainer.step()
        trainer.save(path)
        resumed = Trainer(dataclasses.replace(config, resume=path))
        resumed.step()
    (tuning,) = resumed.model.stack.segments[0].chooser.tunings.values()
    return chosen(trainer), chosen(resumed), tuning.chosen, sum(map(len, tuning.times.values()))


@pytest.mark.long
def test_a_resumed_run_keeps_the_choice_of_auto(two_ranks, corpus, tmp_path):
    for before, after, label, measured in two_ranks.run(auto_resumed, corpus, str(tmp_path / "auto")):
        assert before == after
        assert [*before.values()] == [label]
        assert measured == 0


def measured_losses(data, path, changes):
    """Losses of 12 steps, and of this rank's stacks the choices and the number of measured calls."""
    with measuring(Path(path) / "none.json"):
        trainer = Trainer(dataclasses.replace(CONFIG, data=data, batch=8, steps=12, **changes))
        result = trainer.train()
    stacks = trainer.model.stack.segments
    tunings = [tuning for stack in stacks for tuning in stack.chooser.tunings.values()]
    return (
        result["losses"],
        [each.chooser.choices for each in stacks],
        [sum(map(len, each.times.values())) for each in tunings],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        ({"degrees": Degrees(2, 1, 2)}, 12),
        ({"degrees": Degrees(2, 1, 2), "fsdp": True}, 12),
        ({"degrees": Degrees(1, 1, 4), "micro_batches": 2}, 24),
        ({"degrees": Degrees(1, 2, 2), "micro_batches": 2, "recompute": "full"}, 24),
        ({"degrees": Degrees(1, 2, 2), "micro_batches": 2, "pipeline_schedule": "zb_h1"}, 24),
    ],
)
def test_auto_measures_under_replicas_stages_and_micro_batches(four_ranks, corpus, tmp_path, changes, calls):
    """Each measured call trains; the losses are those of a named schedule."""
    named = {"schedule": "oases", **changes}
    ((expected, *_), *_) = four_ranks.run(measured_losses, corpus, str(tmp_path / "named"), named)
    found = four_ranks.run(measured_losses, corpus, str(tmp_path / "auto"), {"schedule": "auto", **changes})
    for curve, choices, turns in found:
        assert curve == pytest.approx(expected, rel=1e-4)
        assert len(choices) == len(turns) == 1
        assert turns[0] == calls or (choices[0] and 4 <= turns[0] < calls)


def repeated_losses(data, path, cuts):
    """Losses of 40 steps by measured schedules; before each of `cuts` a new trainer goes on from a checkpoint."""
    config = dataclasses.replace(CONFIG, data=data, batch=8, steps=40, schedule="auto", degrees=Degrees(2, 1, 2))
    with measuring(Path(path) / "choices.json"):
        trainer, found = Trainer(config), []
        for step in range(config.steps):
            if step in cuts:
                trainer.save(f"{path}/{step}")
                trainer = Trainer(dataclasses.replace(config, resume=f"{path}/{step}"))
            found.append(trainer.step())
    return found


@pytest.mark.slow
def test_a_run_that_measures_is_repeated_to_the_bit(four_ranks, corpus, tmp_path):
    """Whole, and cut off while it measured or repeated; each replica measures on its own."""
    expected, *again = (
        four_ranks.run(repeated_losses, corpus, str(tmp_path), cuts) for cuts in ((), (), (3, 8), (20,))
    )
    assert again == [expected] * 3


def choices_of_replicas(data, path):
    """Choices of this rank's stack before a checkpoint, which differ between replicas, and after it."""
    config = dataclasses.replace(CONFIG, data=data, degrees=Degrees(2, 1, 2), schedule="auto")
    with measuring(Path(path) / "none.json"):
        trainer, resumed = Trainer(config), Trainer(config)
        (stack,), (other,) = trainer.model.stack.segments, resumed.model.stack.segments
        stack.chooser.choices = {"same": "oases 2", "unlike": f"oases {2 * (1 + dist.get_rank() // 2)}"}
        set_choices(resumed.model, trainer.checkpoint_metadata().choices, resumed.group)
    return stack.chooser.choices, other.chooser.choices


def test_a_resumed_replica_keeps_a_choice_of_its_own(four_ranks, corpus, tmp_path):
    found = four_ranks.run(choices_of_replicas, corpus, str(tmp_path))
    assert all(before == after for before, after in found)
    assert [before["unlike"] for before, _ in found] == ["oases 2", "oases 2", "oases 4", "oases 4"]


def resume(data, path):
    return losses(CONFIG, data=data, resume=path)


@pytest.mark.long
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
