"""Checkpoints of parallelized models: any mesh goes on from any other, and stages are saved whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from autotp.zoo import build
from model_sessions import STEPS, Session
from torch import nn

import oases


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
    "tp": ((1, 1, 2), {}),
    "zero": ((1, 2, 1), {"zero": True}),
    "fsdp": ((1, 2, 1), {"fsdp": True}),
    "pp": ((2, 1, 1), {}),
    "alone": ((1, 1, 1), {}),
}
"""Degrees over two ranks, and options of a session."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "tp"),
        ("gpt2", "pp"),
        ("llama", "zero"),
        ("gpt2", "fsdp"),
    ],
)
def test_any_mesh_goes_on_from_any_other(two_ranks, tmp_path, name, kind):
    """GPT-2 has queries, keys and values in one tensor, a vocabulary that two do not divide, and a tied head."""
    folder = str(tmp_path / "run")
    expected = two_ranks.run(first_leg, name, LEGS[kind][0], folder, LEGS[kind][1])
    for other, (degrees, options) in LEGS.items():
        found = two_ranks.run(next_leg, name, degrees, folder, options)
        if other == kind:
            assert found == expected
        assert mean(found) == pytest.approx(mean(expected), rel=1e-4), other


@pytest.mark.slow
def test_any_mesh_goes_on_from_the_parts_of_a_v(two_ranks, tmp_path):
    """One stage has the first and the last part, and the tied table alone."""
    folder, four = str(tmp_path / "run"), {"layers": 4}
    expected = two_ranks.run(first_leg, "gpt2", (2, 1, 1), folder, four | {"pipeline": "zb_v"})
    for degrees, options in (
        ((2, 1, 1), {"pipeline": "zb_v"}), ((2, 1, 1), {}), ((1, 1, 2), {}), ((1, 2, 1), {"fsdp": True})
    ):  # fmt: skip
        found = two_ranks.run(next_leg, "gpt2", degrees, folder, four | options)
        if options.get("pipeline"):
            assert found == expected
        assert mean(found) == pytest.approx(mean(expected), rel=1e-4), (degrees, options)


@pytest.mark.slow
def test_four_ranks_go_on_from_two_and_with_masters(two_ranks, four_ranks, tmp_path):
    folder, masters = str(tmp_path / "run"), {"dtype": torch.bfloat16, "master_weights": True}
    expected = two_ranks.run(first_leg, "llama", (1, 1, 2), folder, masters)
    for degrees, options in {(1, 2, 2): {"zero": True}, (2, 2, 1): {"zero": True}}.items():
        found = four_ranks.run(next_leg, "llama", degrees, folder, masters | options)
        assert mean(found) == pytest.approx(mean(expected), rel=1e-2), degrees
    assert two_ranks.run(next_leg, "llama", (1, 1, 2), folder, masters) == expected
    # Float32 weights begin with the masters.
    assert mean(two_ranks.run(next_leg, "llama", (1, 1, 1), folder, {})) == pytest.approx(mean(expected), rel=2e-2)


@pytest.mark.slow
def test_shards_go_on_in_bfloat16_at_other_degrees(two_ranks, four_ranks, tmp_path):
    """Shards of FSDP and ZeRO are masters: any of them goes on from any other, and from whole masters."""
    folder, low = str(tmp_path / "run"), {"computed_in": torch.bfloat16}
    legs = {(2, 2, 1): low | {"fsdp": True}, (1, 2, 2): low | {"share": True}, (2, 1, 2): low}
    expected = four_ranks.run(first_leg, "llama", (2, 2, 1), folder, legs[2, 2, 1])
    for degrees, options in legs.items():
        found = four_ranks.run(next_leg, "llama", degrees, folder, options)
        if degrees == (2, 2, 1):
            assert found == expected
        assert mean(found) == pytest.approx(mean(expected), rel=1e-2), degrees
    assert mean(two_ranks.run(next_leg, "llama", (1, 2, 1), folder, {"fsdp": True})) == pytest.approx(
        mean(expected), rel=2e-2
    )


@pytest.mark.slow
def test_dropout_goes_on(two_ranks, tmp_path):
    folder, options = str(tmp_path / "run"), {"dropout": 0.1}
    expected = two_ranks.run(first_leg, "gpt2", (1, 1, 2), folder, options)
    assert two_ranks.run(next_leg, "gpt2", (1, 1, 2), folder, options) == expected


# --- stages that hold some of the tensors ---


def save_whole(name, folder, options):
    session = Session(name, (2, 1, 2), **options)
    full = oases.full_state_dict(session.model)
    session.model.save_pretrained(folder)
    session.close()
    return full


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_model_in_stages_is_saved_for_transformers(four_ranks, tmp_path, name):
    """T5's table is on both stages."""
    full, *others = four_ranks.run(save_whole, name, str(tmp_path / "whole"), {})
    model, loaded = build(name), build(name, 1)
    missing = oases.load_weights(loaded, tmp_path / "whole")
    assert missing == []
    assert not any(others)
    for key, value in model.state_dict().items():
        assert torch.equal(value, full[key]), key
        assert torch.equal(value, loaded.state_dict()[key]), key


@pytest.mark.slow
def test_the_parts_of_a_v_are_saved_for_transformers(four_ranks, tmp_path):
    options = {"layers": 4, "pipeline": "zb_v"}
    full, *_ = four_ranks.run(save_whole, "gpt2", str(tmp_path / "whole"), options)
    for key, value in build("gpt2", n_layer=4).state_dict().items():
        assert torch.equal(value, full[key]), key


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
    """The model with the other stage's layer on meta. The second has the table by its other name alone."""
    torch.manual_seed(0)
    model = Staged()
    other = model.layers[1 - stage]
    for name, parameter in list(other.named_parameters()):
        setattr(other, name, nn.Parameter(parameter.detach().to("meta")))
    if stage:
        model.table.weight = nn.Parameter(model.table.weight.detach().to("meta"))
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
