"""Checkpoints of parallelized models: any mesh goes on from any other, and stages are saved whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from autotp.zoo import batch, build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases

STEPS = 2


class Session:
    """A model over a mesh of these degrees, with AdamW of two groups and a learning rate schedule."""

    def __init__(self, name, degrees, seed=0, dtype=torch.float32, dropout=0.0, **options):
        self.degrees, self.name, self.group, self.replica = degrees, name, None, 0
        model = build(name, seed).to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        if degrees == (1, 1, 1):  # each rank alone
            self.group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            self.model = oases.parallelize(model, mesh=self.group)
        else:
            mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("pp", "dp", "tp"))
            self.replica = mesh.get_local_rank("dp")
            staged = {"mesh": mesh, "micro_batches": 2}
            self.model = oases.parallelize(model, **(staged if degrees[0] > 1 else {"mesh": mesh["dp", "tp"]}))
        parameters = list(self.model.parameters())
        groups = [
            {"params": [each for each in parameters if each.dim() > 1]},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = oases.make_optimizer(
            self.model, torch.optim.AdamW, params=groups, lr=1e-2, weight_decay=0.1, **options
        )
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


@pytest.mark.parametrize(("name", "degrees"), [("gpt2", (1, 1, 2)), ("gpt2", (2, 1, 1)), ("llama", (1, 2, 1))])
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
    for degrees, options in {(1, 2, 2): {"zero": True}, (2, 2, 1): {"zero": True}}.items():
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


def save_whole(name, folder):
    session = Session(name, (2, 1, 2))
    full = oases.full_state_dict(session.model)
    session.model.save_pretrained(folder)
    session.close()
    return full


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_model_in_stages_is_saved_for_transformers(four_ranks, tmp_path, name):
    """T5's table is on both stages."""
    full, *others = four_ranks.run(save_whole, name, str(tmp_path / "whole"))
    model, loaded = build(name), build(name, 1)
    missing = oases.load_weights(loaded, tmp_path / "whole")
    assert missing == []
    assert not any(others)
    for key, value in model.state_dict().items():
        assert torch.equal(value, full[key]), key
        assert torch.equal(value, loaded.state_dict()[key]), key


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
    torch.manual_seed(0)
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
