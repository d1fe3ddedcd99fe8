"""The choice of the checkpoint to resume from, where ranks see different folders."""

import os

import pytest
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.errors import UsageError

SIZES = {"hidden": 16, "layers": 1, "heads": 2, "sequence": 8, "batch": 4, "steps": 4, "validation_batches": 1}


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """A folder in which "run" has the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    options = {"checkpoint": str(folder / "run"), "checkpoint_every": 2}
    Trainer(TrainConfig(**SIZES, data=corpus, **options)).train()
    return folder


def resumed_elsewhere(corpus, folder, elsewhere, options):
    """What a run says whose rank 1 does not see the folder, as without its mount."""
    before = os.getcwd()
    os.chdir(elsewhere if dist.get_rank() else folder)
    try:
        with pytest.raises(UsageError) as caught:
            Trainer(TrainConfig(**SIZES, data=corpus, **options))
        return str(caught.value)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "run", "resume": "auto"},
        {"checkpoint": "run"},
        {"checkpoint": "new", "resume": "run"},
        {"resume": "run/step-000004"},
    ],
)
def test_a_folder_that_a_rank_does_not_see_is_not_corrupt(two_ranks, corpus, saved, tmp_path, options):
    """Its checkpoints were renamed as corrupt ones, and the run began anew; or one rank failed, and others waited."""
    one, other = two_ranks.run(resumed_elsewhere, corpus, str(saved), str(tmp_path), options)
    assert "is no folder on rank 1" in one
    assert one == other
    assert {"step-000002", "step-000004"} <= set(os.listdir(saved / "run"))
