"""Unedited models whose schedules are measured: the results stay those of one process."""

import pytest
from auto_choice import measuring
from autotp.balanced_runs import loss_of, mesh_of, pair
from autotp.staged import apart, trained_in_stages
from autotp.zoo import batch

import oases

FLOAT32_LOSS = 2e-6
"""Difference of losses, which the models compute in float32."""
pytestmark = pytest.mark.usefixtures("shared_traces")


def in_stages(path, shape, options):
    with measuring(path):
        return trained_in_stages("llama", shape, {"schedule": "auto", **options}, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1, 2), {}),
        ((1, 2, 2), {"fsdp": True}),
        ((2, 1, 2), {"pipeline": "zb_h1"}),
    ],
)
def test_stages_and_replicas_train_as_one_process(four_ranks, tmp_path, shape, options):
    """Five steps of two micro-batches, in which the first candidates have their turns."""
    found = four_ranks.run(in_stages, tmp_path / "s.json", shape, options)
    assert apart(found) < FLOAT32_LOSS
    assert all(schedule == "auto" for *_, runs in found for _, schedule, _ in runs)


class OfReplica:
    """Notes of times that a replica sets: the first is faster by names that are short, the second by long ones."""

    def __init__(self, tuning, replica):
        self.note, self.replica = tuning.note, replica

    def __call__(self, label, seconds):
        self.note(label, 1.0 + abs(20 * self.replica - len(label)) / 20)


def balanced(path):
    """Largest difference of a loss in 15 steps on the tokens of this rank's replica, and turns by candidate."""
    model, parallel = pair("mixtral")
    worst = 0.0
    with measuring(path):
        oases.parallelize(parallel, mesh=mesh_of({"dp": 2, "tp": 2}), experts="balanced", schedule="auto")
        (stack,) = (each.runner.stack for each in parallel.oases_partition.layers)
        replica = parallel.oases_mesh.get_local_rank("dp")
        for step in range(15):
            data = {key: value.chunk(2)[replica] for key, value in batch("mixtral", samples=8, seed=step).items()}
            losses = [loss_of(each(**data), data) for each in (model, parallel)]
            losses[1].backward()
            parallel.zero_grad()
            worst = max(worst, abs(float((losses[1] - losses[0]).detach() / losses[0].detach())))
            (tuning,) = stack.chooser.tunings.values()
            if not isinstance(tuning.note, OfReplica):
                tuning.note = OfReplica(tuning, replica)
    return worst, {label: len(times) for label, times in tuning.times.items()}


def of_several_lengths(path, lengths):
    """Turns of steps in which the replicas' samples have other lengths, so other ones are new to each."""
    _, model = pair("mixtral")
    with measuring(path):
        oases.parallelize(model, mesh=mesh_of({"dp": 2, "tp": 2}), experts="balanced", schedule="auto")
        replica = model.oases_mesh.get_local_rank("dp")
        for step, length in enumerate(lengths[replica]):
            data = batch("mixtral", samples=4, length=length, seed=step)
            loss_of(model(**data), data).backward()
    (stack,) = (each.runner.stack for each in model.oases_partition.layers)
    (tuning,) = stack.chooser.tunings.values()
    return tuning.turns


@pytest.mark.slow
def test_replicas_that_share_experts_may_have_other_lengths(four_ranks, tmp_path):
    """Messages to agree on a choice must not depend on a replica's own shapes: the other one would not send any."""
    found = four_ranks.run(of_several_lengths, tmp_path / "s.json", [[8, 8, 40], [8, 40, 8]])
    assert found == [found[0]] * 4
    assert len(found[0]) == 3


@pytest.mark.slow
def test_replicas_that_share_experts_choose_together(four_ranks, tmp_path):
    """Their messages to experts go in the order of the schedule; other replicas may choose each on its own."""
    found = four_ranks.run(balanced, tmp_path / "s.json")
    assert max(worst for worst, _ in found) < 1e-10
    assert [turns for _, turns in found] == [found[0][1]] * 4
    assert min(found[0][1].values()) >= 2
