"""Saving and loading of checkpoints of models: optimizers, what does not fit, what is written behind the steps."""

import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as saver
from autotp.zoo import batch, build
from torch import nn

import oases
from oases.checkpoint import storage
from oases.checkpoint.lock import LOCK
from oases.errors import UsageError

# --- optimizers ---


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["NAdam", "Adagrad", "RMSprop", "ASGD", "Rprop", "Adadelta"])
def test_optimizers_of_torch_go_on(tmp_path, kind):
    data = batch("llama")

    def started():
        model = build("llama")
        return model, getattr(torch.optim, kind)(model.parameters())

    def steps(model, optimizer):
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**data).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = started()
    steps(model, optimizer)
    oases.save_checkpoint(tmp_path, model, optimizer, step=2)
    expected = steps(model, optimizer)
    model, optimizer = started()
    oases.load_checkpoint(tmp_path, model, optimizer)
    assert steps(model, optimizer) == expected


class Counting(torch.optim.SGD):
    """SGD with a Python number as state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_numbers_stay_numbers(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=1)
    optimizer.step()
    oases.save_checkpoint(tmp_path, model, optimizer, step=1)
    optimizer.step()
    oases.load_checkpoint(tmp_path, model, optimizer)
    assert [each["count"] for each in optimizer.state.values()] == [1, 1]
    assert type(optimizer.state[model.weight]["count"]) is int


def test_values_are_those_of_the_call_and_may_be_infinite(tmp_path):
    """ReduceLROnPlateau keeps an infinity; a loop goes on to change what it gave to a save in the background."""
    gate, save = threading.Event(), saver.save
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def held_up(*arguments, **options):
        assert gate.wait(60)
        return save(*arguments, **options)

    extra = {"plateau": plateau.state_dict(), "losses": [3.0]}
    with mock.patch.object(saver, "save", held_up):
        saved = oases.save_checkpoint(tmp_path, model, optimizer, step=1, extra=extra, asynchronous=True)
        extra["losses"].append(2.0)
        gate.set()
        saved.finish()
    found = oases.load_checkpoint(tmp_path, model, optimizer).extra
    assert found == {"plateau": plateau.state_dict(), "losses": [3.0]}
    assert found["plateau"]["mode_worse"] == float("inf")


# --- refusals ---


def refused(match, function, *args, **options):
    with pytest.raises(UsageError, match=match):
        function(*args, **options)


def check_refusals(folder):
    early = build("llama")
    before = torch.optim.AdamW(early.parameters())
    model = oases.parallelize(early)
    save, load = oases.save_checkpoint, oases.load_checkpoint
    refused(
        "not among those of LlamaForCausalLM: .* make the optimizer after it", save, folder, model, before, step=1
    )
    factored = torch.optim.Adafactor(model.parameters())
    model(**batch("llama")).loss.backward()
    factored.step()
    refused(
        r"Adafactor keeps 'row_var' of shape .* use another optimizer, such as AdamW",
        save,
        folder,
        model,
        factored,
        step=1,
    )
    refused("step is -1; give a whole number", save, folder, model, step=-1)
    refused("step is 0, 1 on the ranks", save, folder, model, step=dist.get_rank())
    some_ranks = None if dist.get_rank() else torch.optim.SGD(model.parameters())
    refused("given on some ranks alone; give it on all", save, folder, model, some_ranks, step=1)
    refused("extra is .* give what JSON can hold", save, folder, model, step=1, extra={"loss": torch.ones(1)})
    assert not Path(folder).exists()
    refused("is no folder; give one that save_checkpoint wrote to", load, folder, model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    save(folder, model, adamw, step=7)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    refused(
        "holds step-000007, which is later than the step 3 .*load_checkpoint, or give a new folder",
        save,
        folder,
        model,
        step=3,
    )
    refused(
        "not of this LlamaForCausalLM: .* has shape", load, folder, oases.parallelize(build("llama", hidden_size=64))
    )
    refused("it lacks 'model.layers.2", load, folder, oases.parallelize(build("llama", num_hidden_layers=3)))
    refused(
        "unexpected tensor 'model.layers.1.*", load, folder, oases.parallelize(build("llama", num_hidden_layers=1))
    )
    refused(
        "holds the state of AdamW, the optimizer here is SGD",
        load,
        folder,
        model,
        torch.optim.SGD(model.parameters()),
    )
    some = torch.optim.AdamW(list(model.parameters())[1:])
    refused(
        "'model.embed_tokens.weight' was among the optimizer's parameters and is not here", load, folder, model, some
    )
    split = torch.optim.AdamW([{"params": [p], "lr": 0.1 * n} for n, p in enumerate(model.parameters(), 1)])
    save(f"{folder}-split", model, split, step=1)
    refused("are in one parameter group here, and had different options", load, f"{folder}-split", model, adamw)
    save(f"{folder}-model", model, step=1)
    refused("holds no optimizer; leave it out", load, f"{folder}-model", model, adamw)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    save(folder, model, adamw, step=9)
    dist.barrier()
    second = "shard-00002-model-00001-of-00001.safetensors"
    if dist.get_rank() == 0:
        (Path(folder) / "step-000009" / second).write_bytes(b"garbage")
    dist.barrier()
    refused(rf"step-000009' is corrupt: {second} is not as it was written", load, f"{folder}/step-000009", model)
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=f"step-000009' is corrupt and skipped: {second} is not as it was"):
            assert load(folder, model, adamw) == 7
    else:
        assert load(folder, model, adamw) == 7
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_all_ranks(two_ranks, tmp_path):
    two_ranks.run(check_refusals, str(tmp_path / "run"))


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    model = nn.Linear(2, 2)
    large = {"text": "x" * 2**25}
    refused("extra has over 16777216 bytes as JSON", oases.save_checkpoint, tmp_path, model, step=1, extra=large)
    assert not [path.name for path in tmp_path.iterdir() if path.name != LOCK]
    assert oases.save_checkpoint(tmp_path, model, step=1).path.is_dir()


def test_hidden_state_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    hiding = mock.Mock(spec=torch.optim.SGD, consolidate_state_dict=None)
    refused(r"use oases.make_optimizer\(..., zero=True\)", oases.save_checkpoint, tmp_path, model, hiding, step=1)
    odd = torch.optim.SGD([{"params": model.parameters(), "made_by": object()}], lr=1)
    refused("parameter groups have made_by of type object", oases.save_checkpoint, tmp_path, model, odd, step=1)
    refused("on meta on every rank", oases.save_checkpoint, tmp_path, nn.Linear(2, 2, device="meta"), step=1)
    (tmp_path / "notes.txt").write_text("mine")
    refused("holds other files", oases.save_checkpoint, tmp_path, model, step=1)


# --- in the background ---


def test_training_goes_on_while_it_is_written(tmp_path):
    """The thread is held up until the weights have changed; what it then writes are those from before."""
    gate, save = threading.Event(), saver.save
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.5)

    def held_up(*arguments, **options):
        assert gate.wait(60)
        return save(*arguments, **options)

    before = model.weight.detach().clone()
    with mock.patch.object(saver, "save", held_up):
        saved = oases.save_checkpoint(tmp_path, model, optimizer, step=1, asynchronous=True, keep=2)
        with torch.no_grad():
            model.weight.add_(1)
        assert not saved.path.exists()
        gate.set()
        assert saved.finish() == tmp_path / "step-000001"
    oases.load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.weight, before)
    for step in (2, 3, 4):
        oases.save_checkpoint(tmp_path, model, optimizer, step=step, asynchronous=True, keep=2)
    assert oases.load_checkpoint(tmp_path, model, optimizer) == 4  # waits for it
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name != LOCK)
    assert kept == ["step-000003", "step-000004"]


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path):
    model = nn.Linear(2, 2)
    with mock.patch.object(storage, "checksums", side_effect=OSError(28, "No space left on device")):
        saved = oases.save_checkpoint(tmp_path, model, step=1, asynchronous=True)
        refused("step-000001' could not be written: rank 0: .*No space left", saved.finish)
        oases.save_checkpoint(tmp_path, model, step=2, asynchronous=True)
        refused("step-000002' could not be written", oases.save_checkpoint, tmp_path, model, step=3)
    # Other ranks hear of any error.
    with mock.patch.object(storage, "checksums", side_effect=MemoryError("no pages")):
        refused("rank 0: MemoryError: no pages", oases.save_checkpoint, tmp_path, model, step=3)
    assert oases.save_checkpoint(tmp_path, model, step=3).path.is_dir()
    with torch.no_grad():
        model.weight.zero_()
    # A run that was killed between the two renames of a checkpoint that replaces one of the same step.
    shutil.move(tmp_path / "step-000003", tmp_path / ".step-000003.old")
    assert oases.load_checkpoint(tmp_path, model) == 3
    assert model.weight.detach().abs().sum() > 0
