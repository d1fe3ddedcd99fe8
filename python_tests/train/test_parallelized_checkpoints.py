"""Checkpoints of parallelized models: any mesh goes on from any other; what does not fit; writing behind steps."""

import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from autotp.zoo import batch, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.errors import UsageError
from oases.parallel.gradient_averaging import GradientAverager
from oases.train.checkpoint.lock import LOCK

DIMENSIONS = ("pp", "dp", "tp")
STEPS = 2
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class Session:
    """A model over a mesh of these degrees, with AdamW of two groups and a learning rate schedule."""

    def __init__(self, name, degrees, seed=0, dtype=torch.float32, dropout=0.0, **options):
        self.degrees, self.name = degrees, name
        model = build(name, seed).to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        self.group = None
        if degrees == (1, 1, 1):
            if dist.is_initialized():  # each rank alone
                self.group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            self.model = oases.parallelize(model, mesh=self.group)
            self.replica, self.average = 0, None
        else:
            mesh = init_device_mesh("cpu", degrees, mesh_dim_names=DIMENSIONS)
            data = mesh.get_group("dp")
            self.replica, self.average = mesh.get_local_rank("dp"), None
            if degrees[0] > 1:
                self.model = oases.parallelize(model, mesh=mesh, micro_batches=2)
            else:
                self.model = oases.parallelize(model, mesh=mesh["dp", "tp"])
                self.average = GradientAverager([(list(self.model.parameters()), data)])
            options |= {"data_parallel": data} if options.get("zero") else {}
        parameters = list(self.model.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1]},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = oases.make_optimizer(self.model, torch.optim.AdamW, params=groups, **options, **ADAMW)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def steps(self, first, number=STEPS):
        losses = []
        for step in range(first, first + number):
            data = batch(self.name, samples=8, seed=step)
            data["labels"] = data["input_ids"]
            data = {key: value.chunk(self.degrees[1])[self.replica] for key, value in data.items()}
            self.optimizer.zero_grad()
            if self.degrees[0] > 1:
                loss = self.model.train_step(**data)
            elif self.average is not None:
                with self.average.overlapped():
                    loss = self.model(**data).loss
                    loss.backward()
            else:
                loss = self.model(**data).loss
                loss.backward()
            oases.clip_grad_norm(self.model, 1.0, process_group=self.group)
            self.optimizer.step()
            self.rates.step()
            losses.append(float(loss.detach()))
        return losses

    def save(self, folder, step, **options):
        rates = {"rates": self.rates.state_dict()}
        return oases.save_checkpoint(
            folder, self.model, self.optimizer, step=step, extra=rates, process_group=self.group, **options
        )

    def load(self, folder):
        step = oases.load_checkpoint(folder, self.model, self.optimizer, process_group=self.group)
        self.rates.load_state_dict(step.extra["rates"])
        return step

    def close(self):
        if self.degrees[0] > 1:
            self.model.oases_pipeline.close()


def first_leg(name, degrees, folder, options):
    """Losses of the steps after the checkpoint."""
    session = Session(name, degrees, **options)
    session.steps(0)
    session.save(folder, STEPS)
    losses = session.steps(STEPS)
    session.close()
    return losses


def next_leg(name, degrees, folder, options):
    session = Session(name, degrees, seed=1, **options)
    step = session.load(folder)
    assert step == STEPS
    assert step.path == Path(folder) / f"step-{STEPS:06d}"
    assert session.optimizer.param_groups[1]["weight_decay"] == 0.0
    losses = session.steps(int(step))
    session.close()
    return losses


def mean(results):
    """Losses, averaged over the ranks, so over the replicas."""
    return [sum(losses) / len(results) for losses in zip(*results, strict=True)]


LEGS = {
    (1, 1, 2): {},
    (1, 2, 1): {"zero": True},
    (2, 1, 1): {},
    (1, 1, 1): {},
}
"""Degrees over two ranks, and options of the optimizer."""


@pytest.mark.parametrize(
    ("name", "degrees"), [("llama", (1, 1, 2)), ("gpt2", (1, 1, 2)), ("gpt2", (2, 1, 1)), ("llama", (1, 2, 1))]
)
def test_any_mesh_goes_on_from_any_other(two_ranks, tmp_path, name, degrees):
    """GPT-2 has queries, keys and values in one tensor, a vocabulary that two do not divide, and a tied head."""
    folder = str(tmp_path / "run")
    expected = two_ranks.run(first_leg, name, degrees, folder, LEGS[degrees])
    for other, options in LEGS.items():
        found = two_ranks.run(next_leg, name, other, folder, options)
        if other == degrees:
            assert found == expected
        assert mean(found) == pytest.approx(mean(expected), rel=1e-4), other


def test_four_ranks_go_on_from_two_and_with_masters(two_ranks, four_ranks, tmp_path):
    folder, masters = str(tmp_path / "run"), {"dtype": torch.bfloat16, "master_weights": True}
    expected = two_ranks.run(first_leg, "llama", (1, 1, 2), folder, masters)
    for degrees, options in {(1, 2, 2): {"zero": True}, (2, 1, 2): {}, (2, 2, 1): {"zero": True}}.items():
        if options and degrees[0] > 1:
            continue
        found = four_ranks.run(next_leg, "llama", degrees, folder, masters | options)
        assert mean(found) == pytest.approx(mean(expected), rel=1e-2), degrees
    assert two_ranks.run(next_leg, "llama", (1, 1, 2), folder, masters) == expected
    # Float32 weights begin with the masters.
    assert mean(two_ranks.run(next_leg, "llama", (1, 1, 1), folder, {})) == pytest.approx(mean(expected), rel=2e-2)


def test_dropout_goes_on(two_ranks, tmp_path):
    folder, options = str(tmp_path / "run"), {"dropout": 0.1}
    expected = two_ranks.run(first_leg, "gpt2", (1, 1, 2), folder, options)
    assert two_ranks.run(next_leg, "gpt2", (1, 1, 2), folder, options) == expected


# --- stages that hold some of the tensors ---


class Staged(nn.Module):
    """A table that both stages have, tied under another name, and a layer of each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(2))


def staged(stage):
    """The model with the other stage's layer on meta."""
    torch.manual_seed(stage * 0)
    model = Staged()
    other = model.layers[1 - stage]
    for name, parameter in list(other.named_parameters()):
        setattr(other, name, nn.Parameter(parameter.detach().to("meta")))
    return model


def save_stages(folder):
    model = staged(dist.get_rank())
    optimizer = torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    oases.save_checkpoint(f"{folder}/run", model, optimizer, step=1)
    oases.save_pretrained(model, f"{folder}/whole")
    back = staged(dist.get_rank())
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.zero_()
    oases.load_checkpoint(f"{folder}/run", back)
    for one, other in zip(model.parameters(), back.parameters(), strict=True):
        assert one.is_meta == other.is_meta
        assert one.is_meta or torch.equal(one, other)
    full = oases.full_state_dict(model)
    assert [*full] == ([] if dist.get_rank() else [*Staged().state_dict()])
    return full


def test_stages_with_parts_on_meta_are_saved_whole(two_ranks, tmp_path):
    full, _ = two_ranks.run(save_stages, str(tmp_path))
    model, loaded = Staged(), Staged()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    assert oases.load_checkpoint(tmp_path / "run", model, optimizer) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 5
    oases.load_weights(loaded, tmp_path / "whole")
    for name, value in model.state_dict().items():
        assert torch.equal(value, full[name]), name
        assert torch.equal(value, loaded.state_dict()[name]), name


# --- optimizers ---


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
        "it holds 'model.layers.1.* besides", load, folder, oases.parallelize(build("llama", num_hidden_layers=1))
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
    if dist.get_rank() == 0:
        (Path(folder) / "step-000009" / "__1_0.distcp").write_bytes(b"garbage")
    dist.barrier()
    refused(r"step-000009' is corrupt: __1_0.distcp is not as it was written", load, f"{folder}/step-000009", model)
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="step-000009' is corrupt and skipped: __1_0.distcp is not as it was"):
            assert load(folder, model, adamw) == 7
    else:
        assert load(folder, model, adamw) == 7
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_does_not_fit_is_refused_on_all_ranks(two_ranks, tmp_path):
    two_ranks.run(check_refusals, str(tmp_path / "run"))


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
    gate, save = threading.Event(), dcp.save
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.5)

    def held_up(*arguments, **options):
        assert gate.wait(60)
        return save(*arguments, **options)

    before = model.weight.detach().clone()
    with mock.patch.object(dcp, "save", held_up):
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
    with mock.patch.object(dcp, "save", side_effect=OSError(28, "No space left on device")):
        saved = oases.save_checkpoint(tmp_path, model, step=1, asynchronous=True)
        refused("step-000001' could not be written: rank 0: .*No space left", saved.finish)
        oases.save_checkpoint(tmp_path, model, step=2, asynchronous=True)
        refused("step-000002' could not be written", oases.save_checkpoint, tmp_path, model, step=3)
    assert oases.save_checkpoint(tmp_path, model, step=3).path.is_dir()
    with torch.no_grad():
        model.weight.zero_()
    # A run that was killed between the two renames of a checkpoint that replaces one of the same step.
    shutil.move(tmp_path / "step-000003", tmp_path / ".step-000003.old")
    assert oases.load_checkpoint(tmp_path, model) == 3
    assert model.weight.detach().abs().sum() > 0
