"""Training in bfloat16 with float32 masters: near float32, masters that move, sharded, and bit-equal going on."""

import dataclasses

import pytest
import torch
from torch import nn

import oases
from oases import TrainConfig, Trainer
from oases.core.execution.dtensors import local_of as local
from oases.distributed.optimizer import state_of, weight_of
from oases.plans.gpt import gpt
from oases.plans.plan import Plan
from oases.simulator.hardware import Device, Hardware
from oases.simulator.links import LinkModel
from oases_train.config import config_for
from oases_train.optimizer import adamw

CONFIG = TrainConfig(
    hidden=32, layers=2, heads=4, sequence=16, batch=8, steps=6, warmup=1, validation_batches=1, learning_rate=3e-3,
    precision="bfloat16",
)  # fmt: skip
PLANS = {
    "tp 2": {"degrees": {"tensor": 2}},
    "dp 2 zero": {"degrees": {"data": 2, "tensor": 1}, "zero": True},
    "dp 2 fsdp": {"degrees": {"data": 2, "tensor": 1}, "fsdp": True, "micro_batches": 2},
    "pp 2": {"degrees": {"pipeline": 2, "tensor": 1}, "micro_batches": 4, "pipeline_schedule": "zb_h1"},
}


def trainer_of(corpus, **changes):
    return Trainer(dataclasses.replace(CONFIG, data=corpus, **changes))


def close(trainer):
    trainer.close()


def curve(corpus, **changes):
    trainer = trainer_of(corpus, **changes)
    result = trainer.train()
    masters = [weight_of(trainer.optimizer, parameter) for parameter in trainer.model.parameters()]
    held = sum(local(master).numel() for master in masters if master is not None)
    types = {parameter.dtype for parameter in trainer.model.parameters()}
    close(trainer)
    return result["losses"], result["validation_loss"], held, types


@pytest.fixture(scope="module")
def alone(corpus):
    return curve(corpus, precision="float32")


def check_ranks(corpus, name, alone):
    losses, validation, held, types = curve(corpus, **PLANS[name])
    assert losses == pytest.approx(alone[0], rel=5e-3)
    assert validation == pytest.approx(alone[1], rel=5e-3)
    assert types == {torch.float32 if "dp" in name else torch.bfloat16}  # shards are masters
    if "dp" in name:
        assert 0.4 < held / alone[2] < 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLANS)
def test_losses_are_near_those_of_float32(two_ranks, corpus, alone, name):
    two_ranks.run(check_ranks, corpus, name, alone)


def test_masters_move_where_bfloat16_would_stand_still(corpus):
    trainer = trainer_of(corpus, learning_rate=1e-7)
    weight = trainer.model.stack.blocks[0].qkv.weight
    before, master = weight.detach().clone(), weight_of(trainer.optimizer, weight)
    first = master.detach().clone()
    alone = before.clone()
    for _ in range(3):
        trainer.step()
        alone += (master - first).to(torch.bfloat16) / 3  # what bfloat16 alone would make of such steps
    assert master.dtype == state_of(trainer.optimizer, weight)["exp_avg"].dtype == torch.float32
    assert (master != first).float().mean() > 0.9
    assert (alone == before).float().mean() > 0.95
    torch.testing.assert_close(weight.detach(), master.detach().to(torch.bfloat16), rtol=0, atol=0)


def test_gradients_are_summed_in_float32(corpus):
    trainer = trainer_of(corpus, schedule="oases@4", micro_batches=2)
    trainer.backward(0)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        # A sum of four sub-batches that bfloat16 had held would be one of its numbers.
        rounded = parameter.grad.to(torch.bfloat16).float()
        assert (rounded != parameter.grad).float().mean() > 0.3, name


def save(corpus, name, path):
    trainer = trainer_of(corpus, **PLANS[name])
    for step in range(CONFIG.steps):
        if step == 3:
            trainer.save(path)
        loss = trainer.step()
    close(trainer)
    return loss


def go_on(corpus, changes, path):
    trainer = trainer_of(corpus, resume=path, **changes)
    losses = [trainer.step() for _ in range(3)]
    close(trainer)
    return losses[-1]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dp 2 zero", "dp 2 fsdp", "pp 2"])
def test_a_run_goes_on_equal_to_the_bit(two_ranks, corpus, tmp_path, name):
    path = str(tmp_path / "checkpoint")
    expected = two_ranks.run(save, corpus, name, path)
    assert two_ranks.run(go_on, corpus, PLANS[name], path) == expected
    # The other precision, and another cut, read the same masters.
    assert go_on(corpus, {"precision": "float32"}, path) == pytest.approx(expected[0], rel=5e-3)


def test_a_checkpoint_holds_the_masters(corpus, tmp_path):
    path = str(tmp_path / "checkpoint")
    trainer = trainer_of(corpus)
    trainer.step()
    trainer.save(path)
    read = trainer_of(corpus, resume=path, precision="float32")
    for (name, parameter), (_, other) in zip(
        trainer.model.named_parameters(), read.model.named_parameters(), strict=True
    ):
        assert other.dtype == torch.float32
        assert torch.equal(weight_of(trainer.optimizer, parameter), other), name


# --- a plan that the search found ---

SHAPE = gpt(32, 2, 4, 16, vocabulary=256, dtype="bfloat16")
LINK = LinkModel(1e-4, 1e8)


def found_plan():
    device = Device("any", 8 << 30, {"bfloat16": 1e10}, 1e10)
    return oases.plan(SHAPE, (Hardware("any", device, 2, LINK, LINK), 2), global_batch=8)


def run_found(text, corpus, folder):
    """Losses of four steps; of the last two again, from the checkpoint after the second."""
    plan = Plan.from_json(text)
    values = {"data": corpus, "steps": 4, "warmup": 1, "validation_batches": 1, "checkpoint": folder}
    curves = []
    for given in ({"checkpoint_every": 2}, {"resume": f"{folder}/step-000002", "checkpoint": None}):
        trainer = Trainer(config_for(plan, values | given), plan=plan)
        types = {parameter.dtype for parameter in trainer.model.parameters()}
        assert types == {torch.float32 if plan.zero or plan.fsdp else torch.bfloat16}
        result = trainer.train()
        assert result["prediction"]["step"]["predicted_seconds"] == plan.prediction.step_seconds
        curves.append((result["losses"], result["validation_loss"]))
        trainer.close()
    return curves


@pytest.mark.long
def test_a_plan_in_bfloat16_is_found_run_and_resumed(two_ranks, corpus, tmp_path):
    plan = found_plan()
    assert plan.prediction is not None
    for (whole, validation), (rest, again) in two_ranks.run(run_found, plan.to_json(), corpus, str(tmp_path / "run")):
        assert len(whole) == 4
        assert rest == whole[2:]  # to the bit
        assert again == validation


def test_master_weights_take_the_steps_of_a_float32_run():
    """Steps too small for bfloat16 add up in the masters, which begin with the float32 weights."""
    torch.manual_seed(0)
    models = {precision: nn.Linear(8, 8) for precision in ("float32", "bfloat16")}
    models["bfloat16"].load_state_dict(models["float32"].state_dict())
    optimizers = {precision: adamw(model, precision, learning_rate=1e-5) for precision, model in models.items()}
    for _ in range(4):
        for parameters in zip(*(model.parameters() for model in models.values()), strict=True):
            gradient = torch.randn(parameters[0].shape)
            for parameter in parameters:
                parameter.grad = gradient.clone()
        for optimizer in optimizers.values():
            optimizer.step()
        for whole, rounded in zip(*(model.parameters() for model in models.values()), strict=True):
            assert torch.equal(optimizers["bfloat16"].updated(rounded), whole)
            assert torch.equal(rounded, whole.to(torch.bfloat16))
