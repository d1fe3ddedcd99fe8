"""Wrong uses of a parallelized model on two ranks: each raises an error with the remedy on both."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from autotp.zoo import batch, build
from torch.nn.parallel import DistributedDataParallel

import oases
from oases.core.execution.failure import FailedRankError
from oases.errors import UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")

DATA = batch("llama")


def check_wrappers():
    model = oases.parallelize(build("llama"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(
        UsageError, match=r"overwrite model\.\S+, which is sharded over ranks \[0, 1\].*Config\(tp_size=2"
    ):
        DistributedDataParallel(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.long
def test_wrappers_that_take_shards_for_the_whole_are_refused(two_ranks):
    two_ranks.run(check_wrappers)


def check_pickling():
    model = oases.parallelize(build("llama"))
    loss = model(**DATA).loss
    for _ in range(2):
        for pickled in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(UsageError, match=r"cannot be pickled.*save it by oases\.save_checkpoint"):
                pickled(model)
        model = copy.deepcopy(model)
        assert torch.equal(model(**DATA).loss, loss)


@pytest.mark.long
def test_a_model_is_copied_and_not_pickled(two_ranks):
    two_ranks.run(check_pickling)


def check_batches():
    """Give batches of equal shape at the first call, of another length later."""
    model, rank = oases.parallelize(build("llama")), dist.get_rank()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"ranks 0 and 1 were given different inputs, .*give all ranks"):
            model(**batch("llama", seed=1 + rank))
    for _ in range(3):
        model(**DATA)
    if rank:
        with pytest.raises(FailedRankError, match=r"the shape of \w+ differs .*\[4, 10\].* 0, .*\[4, 12\].* 1"):
            model(**batch("llama", length=12))
    else:
        # In a collective outside of a stack, the embedding's.
        with pytest.raises(RuntimeError, match=r"rank 1 failed at LlamaForCausalLM: the shape of \w+ differs"):
            model(**DATA)


@pytest.mark.long
def test_ranks_with_different_batches_are_told(two_ranks):
    two_ranks.run(check_batches)
