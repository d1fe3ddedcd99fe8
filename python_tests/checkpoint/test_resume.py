"""The choice of the checkpoint to resume from, where ranks see different folders."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from oases import TrainConfig, Trainer
from oases.checkpoint.metadata import Metadata
from oases.checkpoint.resume import valid_checkpoint
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
    """Error of a run whose rank 1 does not see the folder, as without its mount."""
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


def newest_where_a_read_fails(folder):
    """The newest checkpoint, of which rank 1 alone cannot read the record."""
    read = Metadata.read

    def failing(path):
        if dist.get_rank() and Path(path).name == "step-000004":
            raise UsageError("Stale file handle")
        return read(path)

    with mock.patch.object(Metadata, "read", failing):
        found = valid_checkpoint(Path(folder), dist.group.WORLD).name
        everyone = [None, None]
        dist.all_gather_object(everyone, found)  # meets that of the other rank
        return everyone


def test_ranks_agree_on_what_one_cannot_read(two_ranks, saved):
    assert two_ranks.run(newest_where_a_read_fails, str(saved / "run")) == [["step-000002"] * 2] * 2
